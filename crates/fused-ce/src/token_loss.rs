//! A token's loss and the numbers of its gradient, from the statistics of its logits.
//!
//! With l = log Σ eᶻ, the target t of class y (or the distribution q), class weights w, smoothing ε over v classes:
//!
//! - t = (1 − ε)·w_y at y (or (1 − ε)·w ⊙ q), plus (ε/v)·w everywhere; T = Σ t
//! - ℓ = Σ t·(l − z) + ζ·l²
//! - for upstream gradients u of ℓ and u′ of l: ∂L/∂z = (u·(T + 2ζ·l) + u′)·softmax(z) − u·t
//!
//! which are α, β, γ of [`runtime::fused::cross_entropy`]. l is kept as m + ln Σ e^(z − m), and m − z_y subtracted first, so that
//! logits far from 0 cost no digits.

use runtime::Result;
use runtime::fused::cross_entropy::Statistics;
use tch::Tensor;

use crate::options::LinearCrossEntropy;

/// What a chunk's tokens are to be predicted as, as far as their losses need it: `[n]` each.
#[derive(Debug, Default)]
pub(crate) struct TargetMass {
    /// w_y, or Σ w ⊙ q; `None` for 1.
    pub(crate) mass: Option<Tensor>,
    /// Whether the statistics' `target` has the class weights in it.
    pub(crate) weighted: bool,
}

/// The definition, with what all tokens share.
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

    /// x·Σw, where w is 1 for every class unless given, times ε/v.
    fn smoothed(&self, x: &Tensor) -> Result<Tensor> {
        let share = self.smoothing / self.vocabulary;
        Ok(match &self.class_weight_sum {
            Some(sum) => x.f_mul(sum)?.f_mul_scalar(share)?,
            None => x.f_mul_scalar(share * self.vocabulary)?,
        })
    }

    /// ℓ of each token.
    pub(crate) fn losses(&self, known: &Statistics, target: &TargetMass) -> Result<Tensor> {
        let powers = known.sum.f_log()?;
        let times = |x: Tensor, mass: &Option<Tensor>| {
            mass.as_ref().map_or(Ok(x.shallow_clone()), |mass| x.f_mul(mass))
        };
        let likely = if target.weighted {
            times(known.maximum.f_add(&powers)?, &target.mass)?.f_sub(&known.target)?
        } else {
            times(known.maximum.f_sub(&known.target)?.f_add(&powers)?, &target.mass)?
        };
        let mut losses =
            if self.smoothing == 0.0 { likely } else { likely.f_mul_scalar(1.0 - self.smoothing)? };
        if let Some(total) = &known.total {
            let log_sum_exp = known.maximum.f_add(&powers)?;
            let share = self.smoothing / self.vocabulary;
            let _ = losses.f_add_(&self.smoothed(&log_sum_exp)?.f_sub(&total.f_mul_scalar(share)?)?)?;
        }
        if self.z_loss > 0.0 {
            let _ = losses.f_add_(&known.maximum.f_add(&powers)?.f_square()?.f_mul_scalar(self.z_loss)?)?;
        }
        Ok(losses)
    }

    /// α over Σ e^(z − m), β and γ, for the upstream gradients `of_loss` and `of_log_sum_exp`.
    pub(crate) fn coefficients(
        &self,
        maximum: &Tensor,
        sum: &Tensor,
        target: &TargetMass,
        of_loss: &Tensor,
        of_log_sum_exp: Option<&Tensor>,
    ) -> Result<Numbers> {
        let mass = match &target.mass {
            Some(mass) => of_loss.f_mul(mass)?,
            None => of_loss.shallow_clone(),
        };
        let mass = mass.f_mul_scalar(1.0 - self.smoothing)?;
        let mut softmax = mass.shallow_clone();
        let constant = if self.smoothing > 0.0 {
            softmax = softmax.f_add(&self.smoothed(of_loss)?)?;
            Some(of_loss.f_mul_scalar(self.smoothing / self.vocabulary)?)
        } else {
            None
        };
        if self.z_loss > 0.0 {
            let slope = sum.f_log()?.f_add(maximum)?.f_mul_scalar(2.0 * self.z_loss)?;
            softmax = softmax.f_add(&slope.f_mul(of_loss)?)?;
        }
        if let Some(upstream) = of_log_sum_exp {
            softmax = softmax.f_add(upstream)?;
        }
        let target = if target.weighted { of_loss.f_mul_scalar(1.0 - self.smoothing)? } else { mass };
        Ok(Numbers { powers: softmax.f_div(sum)?, target, constant })
    }
}

/// α over Σ e^(z − m), β, γ.
#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) powers: Tensor,
    pub(crate) target: Tensor,
    pub(crate) constant: Option<Tensor>,
}
