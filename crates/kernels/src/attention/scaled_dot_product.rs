//! Attention with a result that a segment may keep.

use runtime::autograd::retain::{active, kept};
use runtime::autograd::{Backward, Forward, Function, apply};
use runtime::ops::TryScalar;
use runtime::ops::attention::backend::{Backend, Call, chosen};
use runtime::ops::{Value, call, tensors};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use super::backend;
use crate::attention as fused;

/// Options of [`scaled_dot_product`].
#[derive(Debug, Clone, Copy, Default)]
pub struct ScaledDotProductOptions<'a> {
    /// Which keys each query attends to, bool, broadcast to `[batch, heads, sequence, keys]`; `None` for a causal mask.
    pub mask: Option<&'a Tensor>,
    /// Probability that a weight is dropped.
    pub dropout: f64,
    /// Factor of the scores; 1/√head if absent.
    pub scale: Option<f64>,
}

/// Computes libtorch's `scaled_dot_product_attention`: q `[batch, heads, sequence, head]`, k and v `[batch, kv_heads, keys, head]` to
/// the shape of q; fewer heads of k and v are each shared by a group of query heads.
///
/// Inside a segment that keeps its products, the result and each row's log-sum-exp are kept if libtorch uses its flash kernel for
/// the CPU, whose backward needs no more. Otherwise (with dropout, on CUDA) the attention is recomputed.
///
/// On a GPU the fastest of libtorch's kernels is chosen: see [`backend`].
///
/// # Errors
/// Errors of libtorch.
pub fn scaled_dot_product(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: ScaledDotProductOptions<'_>,
) -> Result<Tensor> {
    let ScaledDotProductOptions { mask, dropout, scale } = options;
    let is_square = q.size().get(2) == k.size().get(2);
    if mask.is_none() && dropout == 0.0 && is_square && fused::takes(q.device(), q.kind()) {
        return fused::causal_attention(q, k, v, fused::CausalOptions { scale, ..Default::default() });
    }
    let call = Call { mask, dropout, scale };
    if active()
        && q.device() == Device::Cpu
        && dropout == 0.0
        && chosen(q, k, v, call)? == Some(Backend::Flash)
    {
        // The kernel takes a mask that is added to the scores.
        let mask = mask.map(|mask| added(mask, q.kind())).transpose()?;
        let [y] = apply(FlashOnCpu { mask, scale }, &[q, k, v])?;
        return Ok(y);
    }
    backend::with_fastest([q, k, v], call, |q, k, v| {
        let causal = mask.is_none();
        Ok(Tensor::f_scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, grouped(q, k))?)
    })
}

/// Returns whether a kernel of libtorch takes fewer heads of k and v, both `[batch, kv_heads, keys, head]`, than of q without copies of them
/// and without the matrix of scores.
///
/// # Errors
/// Errors of libtorch.
pub fn takes_groups(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: ScaledDotProductOptions<'_>,
) -> Result<bool> {
    let ScaledDotProductOptions { mask, dropout, scale } = options;
    let backend = chosen(q, k, v, Call { mask, dropout, scale })?;
    Ok(backend.is_some_and(|backend| backend != Backend::Math))
}

fn grouped(q: &Tensor, k: &Tensor) -> bool {
    q.size().get(1) != k.size().get(1)
}

/// 0 where the mask is true, −∞ elsewhere.
fn added(mask: &Tensor, kind: Kind) -> Result<Tensor> {
    let zeros = Tensor::f_zeros(mask.size(), (kind, mask.device()))?;
    Ok(zeros.try_masked_fill(&mask.f_logical_not()?, f64::NEG_INFINITY)?)
}

struct FlashOnCpu {
    mask: Option<Tensor>,
    scale: Option<f64>,
}

impl FlashOnCpu {
    fn named(&self) -> [(&'static str, Value); 2] {
        [("attn_mask", self.mask.as_ref().into()), ("scale", self.scale.into())]
    }
}

impl Function for FlashOnCpu {
    fn name(&self) -> &'static str {
        "kept attention"
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let results = kept(|| {
            let [q, k, v] = [inputs[0].into(), inputs[1].into(), inputs[2].into()];
            let arguments = [q, k, v, 0.0.into(), self.mask.is_none().into()];
            let name = "aten::_scaled_dot_product_flash_attention_for_cpu";
            Ok(tensors::<2>(call(name, "", &arguments, &self.named())?)?.into())
        })?;
        let [output, sums] = <[Tensor; 2]>::try_from(results).map_err(|_| {
            Error::invalid("kept attention", "the retained tensors are not an attention's result")
        })?;
        for tensor in [inputs[0], inputs[1], inputs[2], &output, &sums] {
            ctx.save(tensor);
        }
        Ok(vec![output])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(vec![None, None, None]) };
        let mut arguments = vec![Value::Tensor(grad)];
        arguments.extend(ctx.take_saved().into_iter().map(Value::Tensor));
        arguments.extend([0.0.into(), self.mask.is_none().into()]);
        let name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
        let results = call(name, "", &arguments, &self.named())?;
        Ok(tensors::<3>(results)?.into_iter().map(Some).collect())
    }
}
