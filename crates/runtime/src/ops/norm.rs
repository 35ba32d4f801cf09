//! Normalisations with a fused kernel.

use tch::Tensor;

use super::{call, tensors};
use crate::error::Result;

/// Root mean square normalisation over the last `shape.len()` dimensions (Zhang & Sennrich, arXiv:1910.07467):
/// y = x / √(mean(x²) + eps) · weight.
///
/// Returns y and 1/√(mean(x²) + eps), which has the normalised dimensions at size 1. On CUDA it is one kernel with its
/// own derivative; on the CPU it is decomposed. `eps` defaults to the kind's machine epsilon.
///
/// # Errors
/// Errors of [`call`].
pub fn fused_rms_norm(
    x: &Tensor,
    shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
) -> Result<(Tensor, Tensor)> {
    let arguments = [x.into(), shape.into(), weight.into(), eps.into()];
    let [y, rstd] = tensors(call("aten::_fused_rms_norm", "", &arguments, &[])?)?;
    Ok((y, rstd))
}
