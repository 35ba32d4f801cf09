//! Adam: with g ← g + λ·θ,
//!
//! m ← β₁·m + (1−β₁)·g, v ← β₂·v + (1−β₂)·g², θ ← θ − η / (1−β₁ᵗ) · m / (√v / √(1−β₂ᵗ) + ε).
//!
//! The divisors correct the bias of m and v towards their initial zeros. Two slots.

use std::borrow::Borrow;

use kernels::adam::{AdamTensors, adam_many};
use runtime::ops::{foreach, optimizer};
use tch::{Kind, Tensor};

use super::rule::{
    Extent, FusedStep, Hyperparameters, Rule, Slot, Tensors, cast_gradients, fraction, not_negative,
    write_weights,
};
use crate::error::Result;

/// Adam (Kingma & Ba, arXiv:1412.6980). See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// β₁, in [0, 1).
    pub beta1: f64,
    /// β₂, in [0, 1).
    pub beta2: f64,
    /// ε, added to the root.
    pub eps: f64,
}

impl Default for Adam {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    }
}

impl Rule for Adam {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        Slot::like(parameter, &["exp_avg", "exp_avg_sq"])
    }

    fn check(&self) -> Result<()> {
        self.check_as("adam")
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        self.follow(tensors, &tensors.decayed(hyperparameters.weight_decay)?, hyperparameters)
    }

    fn fused(&self, step: &FusedStep<'_>) -> Option<Result<()>> {
        Some(self.run_fused(step, false))
    }

    fn has_fused(&self) -> bool {
        true
    }
}

impl Adam {
    pub(super) fn check_as(&self, what: &'static str) -> Result<()> {
        fraction(what, "beta1", self.beta1)?;
        fraction(what, "beta2", self.beta2)?;
        not_negative(what, "eps", self.eps)
    }

    /// Updates the moments with `grads`, then the parameters.
    pub(super) fn follow(
        &self,
        tensors: &Tensors<'_>,
        grads: &[impl Borrow<Tensor>],
        hyperparameters: Hyperparameters,
    ) -> Result<()> {
        let (means, squares) = (&tensors.slots[0], &tensors.slots[1]);
        foreach::lerp_(means, grads, 1.0 - self.beta1)?;
        foreach::mul_scalar_(squares, self.beta2)?;
        foreach::addcmul_(squares, grads, grads, 1.0 - self.beta2)?;
        let bias = |beta: f64| 1.0 - beta.powf(hyperparameters.step as f64);
        let divisors = foreach::sqrt(squares)?;
        foreach::mul_scalar_(&divisors, 1.0 / bias(self.beta2).sqrt())?;
        foreach::add_scalar_(&divisors, self.eps)?;
        Ok(foreach::addcdiv_(tensors.params, means, &divisors, -hyperparameters.lr / bias(self.beta1))?)
    }

    /// Runs [`Rule::fused`], with decoupled weight decay or an L2 penalty: with this workspace's kernel, which takes mixed
    /// dtypes, or with libtorch's.
    pub(super) fn run_fused(&self, step: &FusedStep<'_>, decoupled: bool) -> Result<()> {
        let &FusedStep {
            tensors: Tensors { params, grads, slots },
            weights,
            steps,
            hyperparameters,
            rate,
            skip,
        } = step;
        let Hyperparameters { lr, weight_decay, .. } = hyperparameters;
        let &Self { beta1, beta2, eps } = self;
        let options = optimizer::AdamW { lr, beta1, beta2, weight_decay, eps, maximize: false };
        let all: Vec<AdamTensors<'_>> = (0..params.len())
            .map(|index| AdamTensors {
                gradient: grads[index],
                master: params[index],
                exp_avg: slots[0][index],
                exp_avg_sq: slots[1][index],
                weight: weights[index].as_ref(),
            })
            .collect();
        let fits = all.iter().all(|one| {
            one.master.device().is_cuda()
                && one.master.kind() == Kind::Float
                && one.gradient.kind() != Kind::Double
                && one.weight.is_none_or(|weight| weight.kind() != Kind::Float && weight.is_contiguous())
        });
        if fits && adam_many(&all, steps, options, decoupled, rate, skip)? {
            return Ok(());
        }
        let casts = cast_gradients(params, grads)?;
        let casts: Option<Vec<&Tensor>> = casts.as_ref().map(|casts| casts.iter().collect());
        let grads = casts.as_deref().unwrap_or(grads);
        let tensors =
            optimizer::AdamWTensors { params, grads, exp_avgs: &slots[0], exp_avg_sqs: &slots[1], steps };
        let skip = skip.map(|found_inf| optimizer::Unscale { scale: None, found_inf });
        match (rate, decoupled) {
            (Some(rate), _) => {
                let kind = if rate.device().is_cuda() { Kind::Float } else { Kind::Double };
                let rate = rate.f_to_kind(kind)?;
                optimizer::fused_adam_at_rate_(&tensors, options, decoupled, &rate, skip)?;
            }
            (None, true) => optimizer::fused_adamw_(&tensors, options, skip)?,
            (None, false) => optimizer::fused_adam_(&tensors, options, skip)?,
        }
        write_weights(weights, params)
    }
}
