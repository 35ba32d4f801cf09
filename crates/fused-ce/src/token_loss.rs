//! The loss of a token and the coefficients of its gradient, from the statistics of its logits.
//!
//! With l = log Σ eᶻ, the target t of class y (or the distribution q), class weights w, smoothing ε over v classes:
//!
//! - t = (1 − ε)·w_y at y (or (1 − ε)·w ⊙ q), plus (ε/v)·w everywhere; T = Σ t
//! - ℓ = Σ t·(l − z) + ζ·l²
//! - for upstream gradients u of ℓ and u′ of l: ∂L/∂z = (u·(T + 2ζ·l) + u′)·softmax(z) − u·t
//!
//! which are α, β, γ of [`kernels::cross_entropy`]. l is kept as m + ln Σ e^(z − m), and m − z_y is computed first, so
//! that logits far from 0 lose no precision.

use kernels::cross_entropy::Statistics;
use runtime::Result;
use runtime::ops::TryScalar;
use tch::Tensor;

use crate::options::LinearCrossEntropy;

/// The total target weight of each token of a chunk, `[n]`.
#[derive(Debug, Default)]
pub(crate) struct TargetMass {
    /// w_y, or Σ w ⊙ q; `None` for 1.
    pub(crate) mass: Option<Tensor>,
    /// Whether `target` of the statistics includes the class weights.
    pub(crate) weighted: bool,
}

/// The definition of the loss and the numbers shared by all tokens.
#[derive(Debug)]
pub(crate) struct Formula {
    pub(crate) smoothing: f64,
    pub(crate) z_loss: f64,
    pub(crate) vocabulary: f64,
    /// Σ w over all classes; `None` for their number.
    pub(crate) class_weight_sum: Option<Tensor>,
}

impl Formula {
    pub(crate) fn new(
        options: &LinearCrossEntropy,
        vocabulary: i64,
        class_weights: Option<&Tensor>,
    ) -> Result<Self> {
        let kind = class_weights.map(Tensor::kind);
        let sum = class_weights.map(|weights| weights.f_sum(kind)).transpose()?;
        Ok(Self {
            smoothing: options.label_smoothing,
            z_loss: options.z_loss,
            vocabulary: vocabulary as f64,
            class_weight_sum: sum,
        })
    }

    /// Returns x·Σw·ε/v, with w = 1 for every class by default.
    fn smoothed(&self, x: &Tensor) -> Result<Tensor> {
        let share = self.smoothing / self.vocabulary;
        Ok(match &self.class_weight_sum {
            Some(sum) => x.f_mul(sum)?.try_mul_scalar(share)?,
            None => x.try_mul_scalar(share * self.vocabulary)?,
        })
    }

    /// Returns ℓ of each token.
    pub(crate) fn losses(&self, row: &Statistics, target: &TargetMass) -> Result<Tensor> {
        let log_sum = row.sum.f_log()?;
        let times = |x: Tensor, mass: &Option<Tensor>| {
            mass.as_ref().map_or(Ok(x.shallow_clone()), |mass| x.f_mul(mass))
        };
        let nll = if target.weighted {
            times(row.maximum.f_add(&log_sum)?, &target.mass)?.f_sub(&row.target)?
        } else {
            times(row.maximum.f_sub(&row.target)?.f_add(&log_sum)?, &target.mass)?
        };
        let mut losses = if self.smoothing == 0.0 { nll } else { nll.try_mul_scalar(1.0 - self.smoothing)? };
        if let Some(total) = &row.total {
            let log_sum_exp = row.maximum.f_add(&log_sum)?;
            let share = self.smoothing / self.vocabulary;
            let _ = losses.f_add_(&self.smoothed(&log_sum_exp)?.f_sub(&total.try_mul_scalar(share)?)?)?;
        }
        if self.z_loss > 0.0 {
            let _ = losses.f_add_(&row.maximum.f_add(&log_sum)?.f_square()?.try_mul_scalar(self.z_loss)?)?;
        }
        Ok(losses)
    }

    /// Returns α/Σ e^(z − m), β and γ for the upstream gradients of the loss and of log Σ eᶻ.
    pub(crate) fn coefficients(
        &self,
        maximum: &Tensor,
        sum: &Tensor,
        target: &TargetMass,
        loss_grad: &Tensor,
        log_sum_exp_grad: Option<&Tensor>,
    ) -> Result<GradientTerms> {
        let mass = match &target.mass {
            Some(mass) => loss_grad.f_mul(mass)?,
            None => loss_grad.shallow_clone(),
        };
        let mass = mass.try_mul_scalar(1.0 - self.smoothing)?;
        let mut softmax = mass.shallow_clone();
        let constant = if self.smoothing > 0.0 {
            softmax = softmax.f_add(&self.smoothed(loss_grad)?)?;
            Some(loss_grad.try_mul_scalar(self.smoothing / self.vocabulary)?)
        } else {
            None
        };
        if self.z_loss > 0.0 {
            let slope = sum.f_log()?.f_add(maximum)?.try_mul_scalar(2.0 * self.z_loss)?;
            softmax = softmax.f_add(&slope.f_mul(loss_grad)?)?;
        }
        if let Some(upstream) = log_sum_exp_grad {
            softmax = softmax.f_add(upstream)?;
        }
        let target = if target.weighted { loss_grad.try_mul_scalar(1.0 - self.smoothing)? } else { mass };
        Ok(GradientTerms { powers: softmax.f_div(sum)?, target, constant })
    }
}

/// α/Σ e^(z − m), β and γ.
#[derive(Debug)]
pub(crate) struct GradientTerms {
    pub(crate) powers: Tensor,
    pub(crate) target: Tensor,
    pub(crate) constant: Option<Tensor>,
}
