//! Gradients in the forward pass, chunk by chunk, as Malek and Liger compute them: logits in the operands' dtype with a copy in
//! fp32, the gradient of W summed in W's dtype, every row through every product.

use fused_ce::Result;
use runtime::autograd::{Backward, Forward, Function, apply};
use tch::Tensor;

use super::{IGNORE_INDEX, Implementation, tile_kind};

pub(super) fn loss(x: &Tensor, w: &Tensor, targets: &Tensor, mean: bool, chunk: i64) -> Result<Tensor> {
    let function = GradInForward {
        chunk,
        targets: targets.f_reshape([-1])?,
        mean,
        shape: x.size(),
        computed: [false; 2],
    };
    let [y] = apply(function, &[x, w])?;
    Ok(y)
}

struct GradInForward {
    chunk: i64,
    targets: Tensor,
    mean: bool,
    shape: Vec<i64>,
    computed: [bool; 2],
}

impl Function for GradInForward {
    fn name(&self) -> &'static str {
        Implementation::GradInForward.name()
    }

    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        let weight = inputs[1];
        let (kind, device) = (weight.kind(), weight.device());
        let tile = tile_kind(kind);
        let x = inputs[0].f_reshape([-1, weight.size()[1]])?;
        let tokens = x.size()[0];
        self.computed = [ctx.needs_input_grad(0), ctx.needs_input_grad(1)];
        let labelled = self.targets.f_ne(IGNORE_INDEX)?;
        let divisor = match self.mean {
            true => labelled.f_sum(tile)?.f_clamp_min(1.0)?,
            false => Tensor::f_ones([0i64; 0], (tile, device))?,
        };
        let of_x = self.computed[0].then(|| x.f_zeros_like()).transpose()?;
        let mut of_weight = self.computed[1].then(|| weight.f_zeros_like()).transpose()?;
        let mut loss = Tensor::f_zeros([0i64; 0], (tile, device))?;
        for start in (0..tokens).step_by(self.chunk as usize) {
            let count = self.chunk.min(tokens - start);
            let (x, labelled) = (x.f_narrow(0, start, count)?, labelled.f_narrow(0, start, count)?);
            let labels = self.targets.f_narrow(0, start, count)?;
            let labels = labels.f_where_self(&labelled, &labels.f_zeros_like()?)?.f_unsqueeze(1)?;
            // Everything is in place: no more than the logits, and their gradient in the operands' dtype, exist at once.
            let mut tile = x.f_matmul(&weight.f_tr()?)?.f_to_kind(tile)?;
            let _ = tile.f_sub_(&tile.f_amax(-1, true)?)?;
            let of_label = tile.f_gather(1, &labels, false)?;
            let sum = tile.f_exp_()?.f_sum_dim_intlist(-1, true, None::<tch::Kind>)?;
            let factor = labelled.f_to_kind(tile.kind())?.f_div(&divisor)?.f_unsqueeze(1)?;
            loss = loss.f_add(&sum.f_log()?.f_sub(&of_label)?.f_mul(&factor)?.f_sum(tile.kind())?)?;
            if of_x.is_none() && of_weight.is_none() {
                continue;
            }
            let _ = tile.f_mul_(&factor.f_div(&sum)?)?;
            let _ = tile.f_scatter_add_(1, &labels, &factor.f_neg()?)?;
            let gradient = tile.f_to_kind(kind)?;
            drop(tile);
            if let Some(all) = &of_x {
                all.f_narrow(0, start, count)?.f_copy_(&gradient.f_matmul(weight)?)?;
            }
            if let Some(sum) = &mut of_weight {
                let _ = sum.f_addmm_(&gradient.f_tr()?, &x)?;
            }
        }
        for gradient in [of_x, of_weight].iter().flatten() {
            ctx.save(gradient);
        }
        Ok(vec![loss])
    }

    fn backward(
        &self,
        ctx: &mut Backward,
        grads: Vec<Option<Tensor>>,
    ) -> runtime::Result<Vec<Option<Tensor>>> {
        let mut result = vec![None, None];
        let Some(upstream) = grads.into_iter().next().flatten() else { return Ok(result) };
        let mut saved = ctx.take_saved().into_iter();
        for (index, slot) in result.iter_mut().enumerate() {
            if self.computed[index]
                && let Some(mut gradient) = saved.next()
            {
                // In place, as Liger does, unless another backward follows.
                let scaled = if ctx.may_overwrite_saved() {
                    gradient.f_mul_(&upstream)?
                } else {
                    gradient.f_mul(&upstream)?.f_to_kind(gradient.kind())?
                };
                *slot = Some(if index == 0 { scaled.f_reshape(self.shape.as_slice())? } else { scaled });
            }
        }
        Ok(result)
    }
}
