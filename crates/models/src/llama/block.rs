//! A block: attention and the MLP, with norms where the family has them.
//!
//! ```text
//! x = x + m·post(attention(pre(x)))
//! x = x + m·post(mlp(pre(x)))         each pre and post is an RMS norm or nothing, m the residual multiplier
//! ```
//!
//! A block of Gemma 4 then adds its [layer's input](super::per_layer_input) and multiplies by `layer_scalar`. Its values
//! ([`Block::forward_with`]) are x, that input, and the keys and values of another layer that it attends to; its results are x, and its
//! own keys and values where later layers attend to them.

use decoder::{BiasOption, LAYER_SCALAR, LINEAR_ATTENTION, NormPlacement};
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::attention::SelfAttention;
use super::delta_net::GatedDeltaNet;
use super::gemma4_attention::Gemma4Attention;
use super::per_layer_input::PerLayerInput;
use super::{DecoderConfig, rotary::Rotary};
use crate::error::{Error, Result};
use crate::init::Init;
use crate::linear::dense_kind;
use crate::mixture::SparseMlp;
use crate::module::{Attention, Block, Context, Mlp, Module, Visitor, VisitorMut, one};
use crate::norm::RmsNorm;
use crate::swiglu::{Geglu, JointSwiglu, Swiglu};

#[derive(Debug)]
pub(super) struct LlamaBlock {
    attention: Box<dyn Attention>,
    /// The name of the attention.
    attention_name: &'static str,
    mlp: Box<dyn Mlp>,
    /// By name, in the order of their use.
    norms: Vec<(&'static str, RmsNorm)>,
    placement: NormPlacement,
    residual_multiplier: f64,
    per_layer: Option<PerLayerInput>,
    /// `[1]`, the factor of the result.
    layer_scalar: Option<Tensor>,
}

impl LlamaBlock {
    pub(super) fn new(
        config: &DecoderConfig,
        rope: Option<Rotary>,
        layer: usize,
        init: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        let &DecoderConfig { family, hidden_size, .. } = config;
        let intermediate_size = config.layer_intermediate_size(layer);
        // The layer's number among those of its kind, by which it finds its part of a cache.
        let linear = (0..layer).filter(|&layer| config.is_linear(layer)).count();
        let (attention_name, attention): (_, Box<dyn Attention>) = match config.linear_attention {
            Some(sizes) if config.is_linear(layer) => {
                (LINEAR_ATTENTION, Box::new(GatedDeltaNet::new(config, sizes, linear, init, options)?))
            }
            _ if config.gemma4.is_some() => {
                ("self_attn", Box::new(Gemma4Attention::new(config, rope, layer, init, options)?))
            }
            _ => {
                let index = layer - linear;
                ("self_attn", Box::new(SelfAttention::new(config, rope, (layer, index), init, options)?))
            }
        };
        let mlp: Box<dyn Mlp> = if let Some(mixture) = config.layer_mixture(layer) {
            Box::new(SparseMlp::new(hidden_size, mixture, init, options)?)
        } else if family.is_gemma() {
            Box::new(Geglu::new(hidden_size, intermediate_size, init, options)?)
        } else if family.facts().has_joint_projections {
            Box::new(JointSwiglu::new(hidden_size, intermediate_size, init, options)?)
        } else {
            let bias = config.has_bias(BiasOption::Mlp);
            Box::new(Swiglu::new(hidden_size, intermediate_size, bias, init, options)?)
        };
        let norm = |&name| Ok((name, super::norm(config, hidden_size, options)?));
        let scalar = config.gemma4.map(|_| Tensor::f_ones([1], (dense_kind(options.0), options.1)));
        Ok(Self {
            attention,
            attention_name,
            mlp,
            norms: family.norm_names().iter().map(norm).collect::<Result<_>>()?,
            placement: family.facts().norms,
            residual_multiplier: config.residual_multiplier,
            per_layer: PerLayerInput::new(config, init, options)?,
            layer_scalar: scalar.transpose()?,
        })
    }

    /// Divides the block's values into x, the layer's input, and the keys and values of another layer.
    fn divide<'a, 'v>(
        &self,
        values: &'v [&'a Tensor],
    ) -> Result<(&'a Tensor, Option<&'a Tensor>, &'v [&'a Tensor])> {
        match (values, &self.per_layer) {
            ([x, keys @ ..], None) => Ok((x, None, keys)),
            ([x, input, keys @ ..], Some(_)) => Ok((x, Some(input), keys)),
            _ => {
                let expected = if self.per_layer.is_some() { "x and the layer's input" } else { "x" };
                Err(Error::invalid("block", format!("{} values; expected {expected} at least", values.len())))
            }
        }
    }

    /// Returns the norms before and after the first (0) or second (1) branch.
    fn around(&self, branch: usize) -> [Option<&RmsNorm>; 2] {
        let norm = |index: usize| self.norms.get(index).map(|(_, norm)| norm);
        match self.placement {
            NormPlacement::Pre => [norm(branch), None],
            NormPlacement::Post => [None, norm(branch)],
            NormPlacement::Both => [norm(2 * branch), norm(2 * branch + 1)],
        }
    }

    /// m·post(update) of a branch.
    fn after(&self, number: usize, mut update: Tensor) -> Result<Tensor> {
        if let [_, Some(norm)] = self.around(number) {
            update = norm.forward(&update)?;
        }
        if self.residual_multiplier != 1.0 {
            update = update.try_mul_scalar(self.residual_multiplier)?;
        }
        Ok(update)
    }
}

impl Module for LlamaBlock {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part(self.attention_name, &*self.attention);
        visitor.part("mlp", &*self.mlp);
        for (name, norm) in &self.norms {
            visitor.part(name, norm);
        }
        if let Some(per_layer) = &self.per_layer {
            visitor.part("", per_layer);
        }
        if let Some(scalar) = &self.layer_scalar {
            visitor.buffer(LAYER_SCALAR, scalar);
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.attention(self.attention_name, &mut self.attention)?;
        visitor.mlp("mlp", &mut self.mlp)?;
        self.norms.iter_mut().try_for_each(|(name, norm)| visitor.part(name, norm))?;
        self.per_layer.as_mut().map_or(Ok(()), |per_layer| visitor.part("", per_layer))?;
        self.layer_scalar.as_mut().map_or(Ok(()), |scalar| visitor.buffer(LAYER_SCALAR, scalar))
    }
}

impl Block for LlamaBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        one(self.forward_with(&[x_btd], context)?)
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        let (x_btd, input, keys) = self.divide(values)?;
        // Without a norm, a node of its own adds up a branch's gradients before the residual's, as a norm does: sums have one order,
        // whether the branch is recomputed or not.
        let normed = match self.around(0) {
            [Some(norm), _] => norm.forward(x_btd)?,
            [None, _] => x_btd.f_alias()?,
        };
        let of_attention: Vec<&Tensor> = std::iter::once(&normed).chain(keys.iter().copied()).collect();
        let mut attended = self.attention.forward_with(&of_attention, context)?.into_iter();
        drop(of_attention);
        let update = attended.next().ok_or_else(|| Error::invalid("block", "attention has no result"))?;
        let update = self.after(0, update)?;
        drop(normed);
        let (x, normed) = match self.around(1) {
            [Some(norm), _] => norm.add(x_btd, &update)?,
            [None, _] => {
                let x = x_btd.f_add(&update)?;
                let alias = x.f_alias()?;
                (x, alias)
            }
        };
        drop(update);
        let update = self.after(1, self.mlp.forward(&normed, context)?)?;
        drop(normed);
        let mut x = x.f_add(&update)?;
        drop(update);
        if let (Some(per_layer), Some(input)) = (&self.per_layer, input) {
            x = per_layer.add(&x, input, context)?;
        }
        if let Some(scalar) = &self.layer_scalar {
            x = x.f_mul(&scalar.f_to_kind(x.kind())?)?;
        }
        Ok(std::iter::once(x).chain(attended).collect())
    }
}
