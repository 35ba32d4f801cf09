//! Dropout.

use tch::Tensor;

use crate::error::{Error, Result};

/// Sets each value to 0 with probability `rate` and scales the rest by 1/(1 − rate) in training; otherwise returns `x`.
pub(crate) fn dropout(x: Tensor, rate: f64, training: bool) -> Result<Tensor> {
    if !training || rate == 0.0 {
        return Ok(x);
    }
    Ok(x.f_dropout(rate, true)?)
}

/// Refuses a rate outside [0, 1).
pub(crate) fn check_rate(what: &'static str, rate: f64) -> Result<()> {
    if (0.0..1.0).contains(&rate) {
        return Ok(());
    }
    Err(Error::invalid(what, format!("`dropout` is {rate}; expected a probability in [0, 1)")))
}
