//! Gated DeltaNet (Yang, Kautz & Hatamizadeh, arXiv:2412.06464): linear attention as Qwen3.5 has it, in place of a block's attention.
//!
//! For hidden states x, key heads of width K, value heads of width V, and a convolution over the channels of q, k and v:
//!
//! ```text
//! q, k, v = conv(in_proj_qkv(x));   z = in_proj_z(x);   β = σ(in_proj_b(x));   g = −e^A_log·softplus(in_proj_a(x) + dt_bias)
//! o = delta rule(q, k, v, g, β);    y = out_proj(rms(o)·w ⊙ SiLU(z))                            rms by value head
//! ```
//!
//! [`kernels::causal_conv`] and [`kernels::delta_rule`] have the mathematics of both. `A_log`, `dt_bias`, g, β and the state are in fp32 (f64
//! in a model in f64). There are no positions. A document of a packed row starts with an empty state and window.
//!
//! Between forward and backward a token keeps, of C = 2·key heads·K + value heads·V channels and E = value heads·V: x, the convolution's input
//! and output 2C, z, o, its norm and the gated product 4E, and some numbers for each head.
//!
//! In generation a layer keeps the state `[value heads, K, V]` and the last inputs of the convolution `[w − 1, C]` of each row, however long it
//! is. Padding before the tokens of a row changes neither: its decay is 1 and its rate 0, and the window skips it.

use decoder::LinearAttention;
use kernels::causal_conv::causal_conv;
use kernels::delta_rule::{DeltaInputs, gated_delta_rule, gated_delta_step};
use kernels::matmul::wide_kind;
use kernels::swiglu::silu_mul;
use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use super::DecoderConfig;
use crate::error::{Error, Result, wrong_shape};
use crate::init::Init;
use crate::key_value_cache::{Extension, Recurrent};
use crate::linear::{Linear, dense_kind, project_all};
use crate::module::{Attention, Context, Module, Projection, Visitor, VisitorMut};
use crate::norm::RmsNorm;

#[derive(Debug)]
pub(super) struct GatedDeltaNet {
    in_proj_qkv: Box<dyn Projection>,
    in_proj_z: Box<dyn Projection>,
    in_proj_b: Box<dyn Projection>,
    in_proj_a: Box<dyn Projection>,
    out_proj: Box<dyn Projection>,
    /// `[channels, 1, window]`.
    conv1d: Tensor,
    /// `[value heads]`, both.
    a_log: Tensor,
    dt_bias: Tensor,
    norm: RmsNorm,
    sizes: LinearAttention,
    /// The layer's index among the recurrent ones of the cache.
    layer: usize,
}

impl GatedDeltaNet {
    pub(super) fn new(
        config: &DecoderConfig,
        sizes: LinearAttention,
        layer: usize,
        init: Init,
        options: (Kind, Device),
    ) -> Result<Self> {
        let linear = |from, to| -> Result<Box<dyn Projection>> {
            Ok(Box::new(Linear::with_init(from, to, None, init, options)?))
        };
        let hidden = config.hidden_size;
        let dense = (dense_kind(options.0), options.1);
        let wide = (wide_kind(dense.0), options.1);
        let of_heads = |init: Init| init.parameter(&[sizes.value_heads], wide);
        let is_read = init == Init::Uninitialised;
        Ok(Self {
            in_proj_qkv: linear(hidden, sizes.channels())?,
            in_proj_z: linear(hidden, sizes.values())?,
            in_proj_b: linear(hidden, sizes.value_heads)?,
            in_proj_a: linear(hidden, sizes.value_heads)?,
            out_proj: linear(sizes.values(), hidden)?,
            conv1d: init.parameter(&[sizes.channels(), 1, sizes.window], dense)?,
            a_log: if is_read { of_heads(init)? } else { decays(of_heads(Init::Uniform { bound: 1.0 })?)? },
            dt_bias: of_heads(if is_read { init } else { Init::Constant(1.0) })?,
            norm: RmsNorm::new(sizes.value_dim, config.rms_norm_eps, dense)?,
            sizes,
            layer,
        })
    }

    /// The convolved queries, keys and values, and what generation reads next.
    fn convolve(&self, qkv: &Tensor, context: &Context<'_>) -> Result<(Tensor, Option<Tensor>)> {
        let Some(extension) = context.extension else {
            let documents = context.documents.map(crate::Documents::ids);
            return Ok((causal_conv(qkv, &self.conv1d, documents, None)?, None));
        };
        let (new, before) = (qkv.size()[1], self.sizes.window - 1);
        let window = extension.recurrent(self.layer)?.window.f_to_kind(qkv.kind())?;
        let mut row = Tensor::f_cat(&[&window, qkv], 1)?;
        if let Some(real) = extension.real() {
            row = padding_first(&row, real, before)?;
        }
        let (previous, tokens) = (row.f_narrow(1, 0, before)?, row.f_narrow(1, before, new)?);
        let convolved = causal_conv(&tokens, &self.conv1d, None, Some(&previous))?;
        Ok((convolved, Some(row.f_narrow(1, new, before)?)))
    }

    /// The rule's result `[b, t, value heads, value]`.
    fn attend(
        &self,
        inputs: &DeltaInputs<'_>,
        context: &Context<'_>,
        window: Option<Tensor>,
    ) -> Result<Tensor> {
        let (Some(extension), Some(window)) = (context.extension, window) else {
            let documents = context.documents.map(crate::Documents::ids);
            return Ok(gated_delta_rule(inputs, documents, None)?.0);
        };
        let state = &extension.recurrent(self.layer)?.state;
        let is_step = inputs.v.size()[1] == 1;
        let (o, state) = if is_step {
            gated_delta_step(inputs, state)?
        } else {
            gated_delta_rule(inputs, None, Some(state))?
        };
        extension.write_recurrent(self.layer, Recurrent { window, state })?;
        Ok(o)
    }

    /// g and β, `[b, t, value heads]`; those of padding leave the state as it is.
    fn decay_and_rate(
        &self,
        a: &Tensor,
        b: &Tensor,
        extension: Option<&Extension<'_>>,
    ) -> Result<[Tensor; 2]> {
        let kind = wide_kind(a.kind());
        let step = a.f_to_kind(kind)?.f_add(&self.dt_bias.f_to_kind(kind)?)?.f_softplus()?;
        let g = step.f_mul(&self.a_log.f_to_kind(kind)?.f_exp()?.f_neg()?)?;
        let beta = b.f_to_kind(kind)?.f_sigmoid()?;
        let Some(real) = extension.and_then(Extension::real) else { return Ok([g, beta]) };
        let real = real.f_unsqueeze(-1)?;
        Ok([g.f_mul(&real)?, beta.f_mul(&real)?])
    }
}

/// A_log of decays that are uniform in 0.01 to 16, as transformers has them, from numbers that are uniform in ±1.
fn decays(uniform: Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let logarithm = uniform.try_mul_scalar(7.995)?.try_add_scalar(8.005)?.f_log()?;
    Ok(logarithm.f_set_requires_grad(true)?)
}

/// Moves the `before` inputs that precede a row (`[b, before + t, channels]`) to its first token, past the padding on its left.
fn padding_first(row: &Tensor, real: &Tensor, before: i64) -> Result<Tensor> {
    let (rows, length, channels) = row.size3()?;
    let padding = real.f_logical_not()?.f_sum_dim_intlist([1].as_slice(), true, Kind::Int64)?;
    let place = Tensor::try_arange(length, (Kind::Int64, row.device()))?.f_unsqueeze(0)?;
    let moved = place.f_sub(&padding)?;
    let is_token = moved.try_ge(before)?;
    let from = place.f_expand([rows, length], false)?.f_where_self(&is_token, &moved.try_clamp_min(0i64)?)?;
    Ok(row.f_gather(1, &from.f_unsqueeze(-1)?.f_expand([rows, length, channels], false)?, false)?)
}

impl Attention for GatedDeltaNet {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        if context.sequence.is_some() {
            let reason = "the ranks divide each row, and its tokens are read one after the other; give each rank whole rows";
            return Err(Error::invalid("gated DeltaNet", reason));
        }
        let &[batch, sequence, _] = x_btd.size().as_slice() else {
            let expected = "[batch, sequence, hidden]".to_owned();
            return Err(wrong_shape("gated DeltaNet", "x", x_btd.size(), expected));
        };
        let LinearAttention { key_heads, value_heads, key_dim, value_dim, .. } = self.sizes;
        let projections = [&*self.in_proj_qkv, &*self.in_proj_z, &*self.in_proj_b, &*self.in_proj_a];
        let [qkv, z, b, a] = project_all(projections, x_btd, context)?;
        let [g, beta] = self.decay_and_rate(&a, &b, context.extension)?;
        drop((a, b));

        let (convolved, window) = self.convolve(&qkv, context)?;
        drop(qkv);
        let widths = [key_heads * key_dim, key_heads * key_dim, self.sizes.values()];
        let parts = convolved.f_split_with_sizes(widths, -1)?;
        drop(convolved);
        let heads = |part: &Tensor, heads, width| part.f_view([batch, sequence, heads, width]);
        let (q, k) = (heads(&parts[0], key_heads, key_dim)?, heads(&parts[1], key_heads, key_dim)?);
        let v = heads(&parts[2], value_heads, value_dim)?;
        drop(parts);
        let o = self.attend(&DeltaInputs { q: &q, k: &k, v: &v, g: &g, beta: &beta }, context, window)?;
        drop((q, k, v, g, beta));

        let normed = self.norm.forward(&o)?;
        let gated = silu_mul(&heads(&z, value_heads, value_dim)?, &normed)?;
        drop((o, normed, z));
        self.out_proj.forward(&gated.f_view([batch, sequence, value_heads * value_dim])?, context)
    }
}

impl Module for GatedDeltaNet {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.part("in_proj_qkv", &*self.in_proj_qkv);
        visitor.part("in_proj_z", &*self.in_proj_z);
        visitor.part("in_proj_b", &*self.in_proj_b);
        visitor.part("in_proj_a", &*self.in_proj_a);
        visitor.parameter("conv1d.weight", &self.conv1d);
        visitor.parameter("A_log", &self.a_log);
        visitor.parameter("dt_bias", &self.dt_bias);
        visitor.part("norm", &self.norm);
        visitor.part("out_proj", &*self.out_proj);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.projection("in_proj_qkv", &mut self.in_proj_qkv)?;
        visitor.projection("in_proj_z", &mut self.in_proj_z)?;
        visitor.projection("in_proj_b", &mut self.in_proj_b)?;
        visitor.projection("in_proj_a", &mut self.in_proj_a)?;
        visitor.parameter("conv1d.weight", &mut self.conv1d)?;
        visitor.parameter("A_log", &mut self.a_log)?;
        visitor.parameter("dt_bias", &mut self.dt_bias)?;
        visitor.part("norm", &mut self.norm)?;
        visitor.projection("out_proj", &mut self.out_proj)
    }
}
