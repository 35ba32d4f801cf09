//! Weight initialisation.
//!
//! For y = x·Wᵀ with x of unit variance and W `[out, in]` of variance σ², y has variance in·σ². So σ = 1/√in keeps the variance
//! at any width ([`Init::lecun`], CS336's `1/√d`). Xavier's σ² = 2/(in + out) also balances the variance of gradients (Glorot &
//! Bengio 2010). PyTorch's `nn.Linear` draws uniformly from ±1/√in, with a third of that variance.

use runtime::ops::TryScalar;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// A distribution of initial values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// The same value for all elements.
    Constant(f64),
    /// Normal, mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Normal with mean 0, redrawn beyond `±cut·std`. The resulting deviation is slightly below `std` (by 1.3 % for a cut at
    /// 3).
    TruncatedNormal {
        /// Standard deviation before the cut.
        std: f64,
        /// The cut, in standard deviations.
        cut: f64,
    },
    /// Uniform in `±bound`.
    Uniform {
        /// The bound.
        bound: f64,
    },
    /// Uninitialised memory: for tensors that are overwritten completely, such as those of a model that is loaded from a file.
    Uninitialised,
}

impl Init {
    /// Returns the normal distribution with σ = 1/√in, cut at three standard deviations.
    pub fn lecun(in_features: i64) -> Self {
        Self::TruncatedNormal { std: 1.0 / (in_features as f64).sqrt(), cut: 3.0 }
    }

    /// Returns the uniform distribution with variance 2/(in + out).
    pub fn xavier_uniform(in_features: i64, out_features: i64) -> Self {
        Self::Uniform { bound: (6.0 / (in_features + out_features) as f64).sqrt() }
    }

    /// Returns the uniform distribution over ±1/√in, as in PyTorch's `nn.Linear`.
    pub fn torch_linear(in_features: i64) -> Self {
        Self::Uniform { bound: 1.0 / (in_features as f64).sqrt() }
    }

    /// Creates a parameter of this shape with values from libtorch's default generator ([`runtime::random::seed`]).
    ///
    /// # Errors
    /// A deviation, bound or cut that is negative or not finite; too little memory.
    pub fn parameter(self, shape: &[i64], options: (Kind, Device)) -> Result<Tensor> {
        let mut tensor = Tensor::f_empty(shape, options)?;
        self.fill(&mut tensor)?;
        Ok(tensor.f_set_requires_grad(true)?)
    }

    /// Overwrites a tensor with new random values.
    ///
    /// # Errors
    /// As [`Init::parameter`].
    pub fn fill(self, tensor: &mut Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value >= 0.0 {
                return Ok(());
            }
            let reason = format!("{name} is {value}; expected a finite number from 0 on");
            Err(Error::invalid("initialisation", reason))
        };
        match self {
            Self::Uninitialised => {}
            Self::Constant(value) => {
                let _ = tensor.try_fill_(value)?;
            }
            Self::Normal { std } => {
                positive("std", std)?;
                let _ = tensor.f_normal_(0.0, std)?;
            }
            Self::Uniform { bound } => {
                positive("bound", bound)?;
                let _ = tensor.f_uniform_(-bound, bound)?;
            }
            Self::TruncatedNormal { std, cut } => {
                positive("std", std)?;
                positive("cut", cut)?;
                truncated_normal(tensor, std, cut)?;
            }
        }
        Ok(())
    }
}

/// By the inverse distribution function: Φ⁻¹ of a uniform draw from (Φ(−cut), Φ(cut)), as √2·erfinv.
fn truncated_normal(tensor: &mut Tensor, std: f64, cut: f64) -> Result<()> {
    // erf(cut/√2) is the probability within the cut; in f64 it stays below 1 up to a cut of 8.
    let cut = cut.min(8.0);
    let within = Tensor::from(cut / std::f64::consts::SQRT_2).f_erf()?.f_double_value(&[])?;
    let draw = Tensor::f_empty(tensor.size(), (Kind::Float, tensor.device()))?.f_uniform_(-within, within)?;
    let values = draw.f_erfinv()?.try_mul_scalar(std * std::f64::consts::SQRT_2)?;
    // Rounding in f32 may exceed the cut slightly.
    tensor.f_copy_(&values.try_clamp(-cut * std, cut * std)?)?;
    Ok(())
}
