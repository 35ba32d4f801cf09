//! Adafactor: second moments of a matrix by its rows and columns. For a gradient g `[…, rows, columns]`, at step t:
//!
//! - β ← 1 − t^−0.8, g² with ε₁ added to each element
//! - R ← β·R + (1−β)·(means of the rows of g²), C ← β·C + (1−β)·(means of its columns)
//! - u ← g / (√(R / mean(R)) · √C), u ← u / max(1, rms(u) / d), with the root mean square rms and the threshold d
//! - θ ← (1 − α·λ)·θ − α·u, where α = η, or η·max(ε₂, rms(θ)) with `scale_parameter`
//!
//! A vector has the second moments of its elements instead: v ← β·v + (1−β)·g², u ← g / √v. There is no first moment. As u has a root mean square of
//! at most d = 1, a step with `scale_parameter` off is as large as AdamW's, and so is a suitable learning rate.
//!
//! Slots `[…, rows]` and `[…, columns]` for a matrix of r × c: 4·(1/r + 1/c) bytes per parameter. A step has a temporary of the size of the
//! parameter. An element's update depends on all others of its tensor, so ranks cannot divide a tensor. As in transformers, with
//! `scale_parameter` and `relative_step` off where it has them on: the learning rate is the schedule's.

use runtime::ops::{TryScalar, foreach};
use tch::{Kind, Tensor};

use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors, not_negative};
use crate::error::{Error, Result};

/// Adafactor (Shazeer & Stern, arXiv:1804.04235). λ is the group's weight decay, which is decoupled. See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adafactor {
    /// ε₁, added to each squared gradient, and ε₂, the least scale of a parameter.
    pub eps: [f64; 2],
    /// d, the largest root mean square of an update, above 0.
    pub clip_threshold: f64,
    /// The exponent of t in β, below 0.
    pub decay_rate: f64,
    /// Whether the learning rate is relative to the parameter's root mean square.
    pub scale_parameter: bool,
    /// Whether the learning rate is min(0.01, 1/√t) instead of the group's.
    pub relative_step: bool,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self {
            eps: [1e-30, 1e-3],
            clip_threshold: 1.0,
            decay_rate: -0.8,
            scale_parameter: false,
            relative_step: false,
        }
    }
}

impl Rule for Adafactor {
    fn name(&self) -> &'static str {
        "adafactor"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        match parameter.shape {
            [others @ .., rows, columns] => {
                let of = |last: &i64| [others, &[*last][..]].concat();
                vec![Slot::of("exp_avg_sq_row", of(rows)), Slot::of("exp_avg_sq_col", of(columns))]
            }
            _ => Slot::like(parameter, &["exp_avg_sq"]),
        }
    }

    fn check(&self) -> Result<()> {
        let [first, second] = self.eps;
        not_negative("adafactor", "the first of eps", first)?;
        not_negative("adafactor", "the second of eps", second)?;
        if !(self.clip_threshold.is_finite() && self.clip_threshold > 0.0) {
            let reason = format!("clip_threshold is {}; expected a number above 0", self.clip_threshold);
            return Err(Error::config("adafactor", reason));
        }
        if !(self.decay_rate.is_finite() && self.decay_rate < 0.0) {
            let reason = format!("decay_rate is {}; expected a number below 0", self.decay_rate);
            return Err(Error::config("adafactor", reason));
        }
        Ok(())
    }

    fn granularity(&self) -> Option<i64> {
        None
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let rate = match self.relative_step {
            true => (hyperparameters.step as f64).powf(-0.5).min(1e-2),
            false => hyperparameters.lr,
        };
        let beta = 1.0 - (hyperparameters.step as f64).powf(self.decay_rate);
        for (index, (param, grad)) in tensors.params.iter().zip(tensors.grads).enumerate() {
            let update = match tensors.slots {
                [rows, columns] => self.factored(grad, rows[index], columns[index], beta)?,
                [squares] => self.whole(grad, squares[index], beta)?,
                _ => return Err(Error::config("adafactor", "slots of another rule; expected its own")),
            };
            // α/max(1, rms(u)/d), on the device.
            let mut factor = rms(&update)?.try_div_scalar(self.clip_threshold)?.try_clamp_min_(1.0)?;
            factor = factor.f_reciprocal_()?;
            let mut rate = factor.try_full_like(rate)?;
            if self.scale_parameter {
                rate = rms(param)?.try_clamp_min_(self.eps[1])?.f_mul_(&rate)?;
            }
            factor = factor.f_mul_(&rate)?;
            if hyperparameters.weight_decay > 0.0 {
                let decay = rate.try_mul_scalar_(-hyperparameters.weight_decay)?.try_add_scalar_(1.0)?;
                foreach::mul_tensor_(&[*param], &decay)?;
            }
            foreach::mul_tensor_(&[&update], &factor)?;
            foreach::sub_(&[*param], &[&update])?;
        }
        Ok(())
    }
}

impl Adafactor {
    /// Updates the moments of a matrix's rows and columns, and returns the update, before it is clipped.
    fn factored(&self, grad: &Tensor, rows: &Tensor, columns: &Tensor, beta: f64) -> Result<Tensor> {
        let squares = self.squares(grad)?;
        for (means, dimension) in [(rows, -1i64), (columns, -2)] {
            let new = squares.f_mean_dim(&[dimension][..], false, None::<Kind>)?;
            let _ = means.try_mul_scalar_(beta)?;
            foreach::add_scaled_(&[means], &[&new], 1.0 - beta)?;
        }
        let of_rows = rows.f_div(&rows.f_mean_dim(&[-1i64][..], true, None::<Kind>)?)?.f_rsqrt_()?;
        let update = of_rows.f_unsqueeze(-1)?.f_mul_out(&squares, &columns.f_rsqrt()?.f_unsqueeze(-2)?)?;
        foreach::mul_(&[&update], &[grad])?;
        Ok(update)
    }

    /// Updates the moments of all elements, and returns the update, before it is clipped.
    fn whole(&self, grad: &Tensor, moments: &Tensor, beta: f64) -> Result<Tensor> {
        let squares = self.squares(grad)?;
        let _ = moments.try_mul_scalar_(beta)?;
        foreach::add_scaled_(&[moments], &[&squares], 1.0 - beta)?;
        let update = moments.f_rsqrt()?;
        foreach::mul_(&[&update], &[grad])?;
        Ok(update)
    }

    fn squares(&self, grad: &Tensor) -> Result<Tensor> {
        Ok(grad.f_square()?.try_add_scalar_(self.eps[0])?)
    }
}

/// Returns the root mean square of a tensor's elements, of no dimension.
fn rms(tensor: &Tensor) -> Result<Tensor> {
    let root = (tensor.numel() as f64).sqrt();
    let norm = foreach::norm(&[tensor], 2.0)?.pop();
    let norm = norm.ok_or_else(|| Error::config("adafactor", "libtorch returned no norm"))?;
    Ok(norm.try_div_scalar(root)?)
}
