//! Chunk after chunk under [`checkpoint`]: ordinary autograd, which sums the gradient of W in W's own dtype.

use fused_ce::Result;
use runtime::autograd::checkpoint;
use tch::{Kind, Tensor};

use super::IGNORE_INDEX;
use super::naive::logits;

pub(super) fn loss(x: &Tensor, w: &Tensor, targets: &Tensor, mean: bool, chunk: i64) -> Result<Tensor> {
    let x = x.f_reshape([-1, w.size()[1]])?;
    let (tokens, targets) = (x.size()[0], targets.f_reshape([-1])?);
    let mut losses = Vec::new();
    let mut start = 0;
    while start < tokens || losses.is_empty() {
        let count = chunk.min(tokens - start);
        let labels = targets.f_narrow(0, start, count)?;
        let segment = move |[x, w]: [&Tensor; 2]| -> runtime::Result<[Tensor; 1]> {
            Ok([losses_of(&logits(x, w)?, &labels)?])
        };
        let [loss] = checkpoint(segment, [&x.f_narrow(0, start, count)?, w])?;
        losses.push(loss);
        start += count;
    }
    let losses = Tensor::f_cat(&losses, 0)?;
    let kind = losses.kind();
    let sum = losses.f_sum(kind)?;
    if !mean {
        return Ok(sum);
    }
    Ok(sum.f_div(&targets.f_ne(IGNORE_INDEX)?.f_sum(kind)?.f_clamp_min(1.0)?)?)
}

/// The loss of each token: 0 for one without a label.
fn losses_of(z: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let labelled = labels.f_ne(IGNORE_INDEX)?;
    let labels = labels.f_where_self(&labelled, &labels.f_zeros_like()?)?.f_unsqueeze(1)?;
    let likely = z.f_log_softmax(-1, None::<Kind>)?.f_gather(1, &labels, false)?.f_squeeze_dim(1)?;
    let zero = Tensor::f_zeros([0i64; 0], (z.kind(), z.device()))?;
    Ok(likely.f_neg()?.f_where_self(&labelled, &zero)?)
}
