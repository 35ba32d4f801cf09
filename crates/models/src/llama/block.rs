//! A block: attention and the MLP, with norms where the family has them.
//!
//! ```text
//! x = x + m·post(attention(pre(x)))
//! x = x + m·post(mlp(pre(x)))         each pre and post is an RMS norm or nothing, m the residual multiplier
//! ```

use decoder::{BiasOption, LINEAR_ATTENTION, NormPlacement};
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::attention::SelfAttention;
use super::delta_net::GatedDeltaNet;
use super::{DecoderConfig, rotary::Rotary};
use crate::error::Result;
use crate::init::Init;
use crate::mixture::SparseMlp;
use crate::module::{Attention, Block, Context, Mlp, Module, Visitor, VisitorMut};
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
}

impl LlamaBlock {
    pub(super) fn new(
        config: &DecoderConfig,
        rope: Option<Rotary>,
        layer: usize,
        init: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        let &DecoderConfig { family, hidden_size, intermediate_size, .. } = config;
        // The layer's number among those of its kind, by which it finds its part of a cache.
        let linear = (0..layer).filter(|&layer| config.is_linear(layer)).count();
        let (attention_name, attention): (_, Box<dyn Attention>) = match config.linear_attention {
            Some(sizes) if config.is_linear(layer) => {
                (LINEAR_ATTENTION, Box::new(GatedDeltaNet::new(config, sizes, linear, init, options)?))
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
        Ok(Self {
            attention,
            attention_name,
            mlp,
            norms: family.norm_names().iter().map(norm).collect::<Result<_>>()?,
            placement: family.facts().norms,
            residual_multiplier: config.residual_multiplier,
        })
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
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.attention(self.attention_name, &mut self.attention)?;
        visitor.mlp("mlp", &mut self.mlp)?;
        self.norms.iter_mut().try_for_each(|(name, norm)| visitor.part(name, norm))
    }
}

impl Block for LlamaBlock {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        // Without a norm, a node of its own adds up a branch's gradients before the residual's, as a norm does: sums have one order,
        // whether the branch is recomputed or not.
        let normed = match self.around(0) {
            [Some(norm), _] => norm.forward(x_btd)?,
            [None, _] => x_btd.f_alias()?,
        };
        let update = self.after(0, self.attention.forward(&normed, context)?)?;
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
        Ok(x.f_add(&update)?)
    }
}
