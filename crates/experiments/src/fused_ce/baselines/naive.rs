//! All logits as one tensor, and libtorch's graph.

use fused_ce::Result;
use tch::{Kind, Reduction, Tensor};

use super::{IGNORE_INDEX, tile_kind};

pub(super) fn loss(x: &Tensor, w: &Tensor, targets: &Tensor, mean: bool) -> Result<Tensor> {
    let z = logits(&x.f_reshape([-1, w.size()[1]])?, w)?;
    let labels = targets.f_reshape([-1])?;
    let reduction = if mean { Reduction::Mean } else { Reduction::Sum };
    let loss = z.f_cross_entropy_loss(&labels, None::<&Tensor>, reduction, IGNORE_INDEX, 0.0)?;
    if !mean {
        return Ok(loss);
    }
    // libtorch's mean over nothing is NaN.
    let none = labels.f_ne(IGNORE_INDEX)?.f_sum(Kind::Int64)?.f_eq(0)?;
    Ok(z.f_sum(z.kind())?.f_mul_scalar(0.0)?.f_where_self(&none, &loss)?)
}

/// The logits of rows of x `[n, h]`, in fp32 for low precision.
pub(super) fn logits(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let z = x.f_linear(w, None::<&Tensor>)?;
    Ok(z.f_to_kind(tile_kind(z.kind()))?)
}
