//! AdamW with moments in 8 bits: AdamW's update from moments in fp32, which are then rounded to 8 bits (`kernels::adam_8bit`).
//!
//! Each moment is a byte per element, and an fp32 scale per 256: four slots of 2 + 8/256 bytes per parameter instead of AdamW's 8. Tensors of
//! fewer than 4096 elements, such as norms and biases, have AdamW's state in fp32. A step differs from AdamW's by the rounding of the moments
//! before it: 1.1 % of m and 0.9 % of √v, root mean square, for Gaussian gradients; more where the gradients of one block have very different sizes.
//! Unlike bitsandbytes, v > 0 is never rounded to 0 (see `kernels::adam_8bit`), and the decay comes before the update, as in PyTorch.

use kernels::adam::AdamStep;
use kernels::adam_8bit::{Adam8bitTensors, BLOCK, Moment, adam_8bit, scales};
use tch::{Kind, Tensor};

use super::AdamW;
use super::rule::{Extent, Hyperparameters, Rule, Slot, Tensors};
use crate::error::{Error, Result};

/// Elements from which on a parameter's state has 8 bits.
const SMALLEST: i64 = 4096;

const NAMES: [&str; 4] = ["exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"];

/// AdamW with block-wise 8-bit moments (Dettmers et al., arXiv:2110.02861). λ is the group's weight decay. See the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW8bit {
    /// β₁, in [0, 1).
    pub beta1: f64,
    /// β₂, in [0, 1).
    pub beta2: f64,
    /// ε, added to the root.
    pub eps: f64,
}

impl Default for AdamW8bit {
    fn default() -> Self {
        let AdamW { beta1, beta2, eps } = AdamW::default();
        Self { beta1, beta2, eps }
    }
}

impl AdamW8bit {
    /// The rule of small tensors.
    fn in_fp32(&self) -> AdamW {
        AdamW { beta1: self.beta1, beta2: self.beta2, eps: self.eps }
    }
}

impl Rule for AdamW8bit {
    fn name(&self) -> &'static str {
        "adam_w_8bit"
    }

    fn slots(&self, parameter: Extent<'_>) -> Vec<Slot> {
        if parameter.whole < SMALLEST {
            return self.in_fp32().slots(parameter);
        }
        let codes = |name| Slot { kind: Some(Kind::Uint8), ..Slot::of(name, parameter.shape) };
        let scales = |name| Slot {
            kind: Some(Kind::Float),
            elements_per_value: BLOCK,
            ..Slot::of(name, [scales(parameter.elements())])
        };
        let [m, scale_of_m, v, scale_of_v] = NAMES;
        vec![codes(m), scales(scale_of_m), codes(v), scales(scale_of_v)]
    }

    fn check(&self) -> Result<()> {
        self.in_fp32().moments().check_as("adam_w_8bit")
    }

    fn check_parameter(&self, name: &str, parameter: &Tensor) -> Result<()> {
        if parameter.kind() != Kind::Double {
            return Ok(());
        }
        Err(Error::tensor(
            "adam_w_8bit",
            name,
            "is Double, and the moments are computed in fp32; use AdamW, or a parameter of 16 or 32 bits",
        ))
    }

    fn granularity(&self) -> Option<i64> {
        Some(BLOCK)
    }

    fn update(&self, tensors: &Tensors<'_>, hyperparameters: Hyperparameters) -> Result<()> {
        let [m, of_m, v, of_v] = tensors.slots else {
            return self.in_fp32().update(tensors, hyperparameters);
        };
        let Hyperparameters { lr, weight_decay, step } = hyperparameters;
        let &Self { beta1, beta2, eps } = self;
        let step =
            AdamStep { lr, beta1, beta2, eps, weight_decay, decoupled: true, step, gradient_factor: None };
        for (index, (parameter, gradient)) in tensors.params.iter().zip(tensors.grads).enumerate() {
            let tensors = Adam8bitTensors {
                parameter,
                gradient,
                exp_avg: Moment { codes: m[index], scales: of_m[index] },
                exp_avg_sq: Moment { codes: v[index], scales: of_v[index] },
            };
            adam_8bit(&tensors, &step)?;
        }
        Ok(())
    }
}
