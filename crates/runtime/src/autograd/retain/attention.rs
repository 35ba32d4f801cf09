//! Causal attention with a result that a segment may keep.

use tch::{Device, Tensor};

use super::{active, kept};
use crate::autograd::function::{Backward, Forward, Function, apply};
use crate::error::{Error, Result};
use crate::ops::{Value, call, tensors};

/// Computes libtorch's `scaled_dot_product_attention` with a causal mask: q, k, v `[batch, heads, sequence, head]` to the shape of
/// q; k and v may have fewer heads, each shared by a group of query heads. `dropout` is the probability that a weight is dropped.
///
/// Inside a segment that keeps its products, the result and each row's log-sum-exp are kept if libtorch uses its flash kernel for
/// the CPU, whose backward needs no more. Otherwise (with dropout, on CUDA) the attention is recomputed.
///
/// # Errors
/// Those of libtorch.
pub fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor, dropout: f64) -> Result<Tensor> {
    if active() && q.device() == Device::Cpu && dropout == 0.0 && takes_flash(q, k, v)? {
        return Ok(apply(FlashOnCpu, &[q, k, v])?.remove(0));
    }
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, None::<&Tensor>, dropout, true, None, grouped(q, k))?)
}

fn grouped(q: &Tensor, k: &Tensor) -> bool {
    q.size().get(1) != k.size().get(1)
}

/// Returns whether libtorch would use its CPU flash kernel.
fn takes_flash(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<bool> {
    const FLASH: i64 = 1;
    let arguments = [q.into(), k.into(), v.into(), Value::None, 0.0.into(), true.into()];
    let named = [("enable_gqa", grouped(q, k).into())];
    let chosen = call("aten::_fused_sdp_choice", "", &arguments, &named)?;
    Ok(matches!(chosen.first(), Some(Value::Int(FLASH))))
}

struct FlashOnCpu;

impl Function for FlashOnCpu {
    fn name(&self) -> String {
        "kept attention".to_owned()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let results = kept(|| {
            let [q, k, v] = [inputs[0].into(), inputs[1].into(), inputs[2].into()];
            let arguments = [q, k, v, 0.0.into(), true.into()];
            let results = call("aten::_scaled_dot_product_flash_attention_for_cpu", "", &arguments, &[])?;
            Ok(tensors::<2>(results)?.into())
        })?;
        let [output, sums] = <[Tensor; 2]>::try_from(results)
            .map_err(|_| Error::invalid("kept attention", "what was kept is not an attention's result"))?;
        for tensor in [inputs[0], inputs[1], inputs[2], &output, &sums] {
            ctx.save(tensor);
        }
        Ok(vec![output])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let Some(grad) = grads.into_iter().next().flatten() else { return Ok(vec![None, None, None]) };
        let mut arguments = vec![Value::Tensor(grad)];
        arguments.extend(ctx.take_saved().into_iter().map(Value::Tensor));
        arguments.extend([0.0.into(), true.into()]);
        let results =
            call("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "", &arguments, &[])?;
        Ok(tensors::<3>(results)?.into_iter().map(Some).collect())
    }
}
