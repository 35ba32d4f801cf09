//! The operator of a gradient scaler.

use std::borrow::Borrow;

use tch::Tensor;

use super::{call, list};
use crate::error::Result;

/// Multiplies every gradient by `inverse_scale` in place, and sets `found_inf` to 1 if one of them has an infinity or a NaN;
/// otherwise it is unchanged. Both are float tensors of one element on the gradients' device, so nothing is synchronised.
///
/// # Errors
/// Errors of [`call`].
pub fn non_finite_check_and_unscale_(
    grads: &[impl Borrow<Tensor>],
    found_inf: &Tensor,
    inverse_scale: &Tensor,
) -> Result<()> {
    if grads.is_empty() {
        return Ok(());
    }
    let arguments = [list(grads), found_inf.into(), inverse_scale.into()];
    call("aten::_amp_foreach_non_finite_check_and_unscale_", "", &arguments, &[]).map(drop)
}
