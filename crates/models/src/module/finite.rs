//! Finds numbers that are not finite among the tensors of a module.

use kernels::gradients::found_non_finite;
use kernels::quantized::{dequantize_rows, is_quantized, matrix_shape, tile_bytes};
use tch::{Kind, Tensor};

use super::{Module, tensors};
use crate::error::Result;

/// Returns the name of the first tensor of the state that has an infinity or a NaN, from one read of each; quantized weights are
/// dequantized by tiles of rows.
///
/// # Errors
/// Errors of libtorch.
pub fn first_non_finite(module: &(impl Module + ?Sized)) -> Result<Option<String>> {
    first_non_finite_of(module, |tensor| Ok(Some(tensor.shallow_clone())))
}

/// [`first_non_finite`] of what `values` returns for each tensor, for values that are elsewhere; `None` leaves a tensor out.
///
/// # Errors
/// Errors of `values` and of libtorch.
pub fn first_non_finite_of<E: From<crate::Error>>(
    module: &(impl Module + ?Sized),
    values: impl Fn(&Tensor) -> std::result::Result<Option<Tensor>, E>,
) -> std::result::Result<Option<String>, E> {
    for named in tensors(module) {
        if let Some(values) = values(named.tensor)?
            && !is_finite(&values)?
        {
            return Ok(Some(named.name));
        }
    }
    Ok(None)
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    let _no_grad = tch::no_grad_guard();
    if !is_quantized(tensor) {
        return Ok(found_non_finite(&[tensor])?.f_double_value(&[0])? == 0.0);
    }
    // A tile of rows at a time.
    let [out, inner] = matrix_shape(tensor).unwrap_or_default();
    let step = (tile_bytes(tensor.device()) / 4 / inner.max(1)).max(1);
    for start in (0..out).step_by(step as usize) {
        let rows = dequantize_rows(tensor, start..out.min(start + step), Kind::Float)?;
        if found_non_finite(&[rows])?.f_double_value(&[0])? != 0.0 {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use kernels::nf4::{Scales, quantize};
    use tch::kind;

    use super::*;

    #[test]
    fn a_weight_that_is_not_finite_is_found_in_any_dtype() {
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let tensor = Tensor::zeros([5, 7], (kind, tch::Device::Cpu));
                assert!(is_finite(&tensor).unwrap());
                let _ = tensor.get(3).get(2).fill_(bad);
                assert!(!is_finite(&tensor).unwrap(), "{kind:?} {bad}");
            }
        }
        let stored = quantize(&Tensor::ones([4, 64], kind::FLOAT_CPU), Scales::Float).unwrap();
        assert!(is_finite(&stored).unwrap());
    }
}
