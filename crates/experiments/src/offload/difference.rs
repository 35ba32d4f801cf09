//! The largest difference of tensors.

use tch::{Device, Tensor};

/// The largest difference of any number, infinite where one has what the other lacks.
///
/// # Errors
/// Shapes that differ.
pub(crate) fn largest(expected: &[Tensor], actual: &[Tensor]) -> anyhow::Result<f64> {
    if expected.len() != actual.len() {
        return Ok(f64::INFINITY);
    }
    let mut most: f64 = 0.0;
    for (expected, actual) in expected.iter().zip(actual) {
        if expected.defined() != actual.defined() {
            return Ok(f64::INFINITY);
        }
        if !expected.defined() {
            continue;
        }
        let difference =
            (expected - actual.f_to_device(Device::Cpu)?).f_abs()?.f_max()?.f_double_value(&[])?;
        // NaN differs from everything.
        most = if difference.is_nan() { f64::INFINITY } else { most.max(difference) };
    }
    Ok(most)
}
