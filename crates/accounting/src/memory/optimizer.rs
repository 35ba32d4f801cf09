//! The state of optimizers.
//!
//! | optimizer | per parameter | with fp32 state |
//! |---|---|---|
//! | SGD | nothing | 0 B |
//! | momentum | velocity | 4 B |
//! | AdaGrad | sum of g² | 4 B |
//! | RMSProp | mean of g² | 4 B |
//! | Adam, AdamW | mean of g, mean of g² | 8 B |
//! | 8-bit Adam | both in 8 bits, and an fp32 scale per 256 | 2 B + 1/32 B |
//!
//! The 8-bit Adam is that of bitsandbytes (Dettmers et al., arXiv:2110.02861): block-wise with 256 elements to a block,
//! and tensors of fewer than 4096 elements stay in fp32. Step counters, a scalar per tensor, are not counted.

use std::str::FromStr;

use crate::model::Decoder;
use crate::{Dtype, Error, exact};

/// Elements that share a scale in 8-bit state.
const BLOCK: u64 = 256;
/// Smaller tensors keep fp32 state in an 8-bit optimizer.
const SMALLEST_8BIT: u64 = 4096;

/// An optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Optimizer {
    /// Stochastic gradient descent without state.
    Sgd,
    /// SGD with momentum.
    Momentum,
    /// AdaGrad.
    AdaGrad,
    /// RMSProp.
    RmsProp,
    /// Adam.
    Adam,
    /// AdamW.
    #[default]
    AdamW,
    /// Adam with block-wise 8-bit state.
    Adam8bit,
}

/// The kernels of an optimizer's step. (Temporaries as in torch 2.11's `torch.optim`.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepKernel {
    /// One kernel, in place.
    Fused,
    /// Operations over lists of all tensors (torch's default on a GPU): temporaries are as large as the model.
    #[default]
    Foreach,
    /// Tensor by tensor: temporaries are as large as the largest tensor.
    Loop,
}

impl Optimizer {
    /// All optimizers.
    pub const ALL: [Self; 7] =
        [Self::Sgd, Self::Momentum, Self::AdaGrad, Self::RmsProp, Self::Adam, Self::AdamW, Self::Adam8bit];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::AdaGrad => "adagrad",
            Self::RmsProp => "rmsprop",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::Adam8bit => "adam-8bit",
        }
    }

    /// Returns the number of state values per parameter.
    pub const fn state_tensors(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum | Self::AdaGrad | Self::RmsProp => 1,
            Self::Adam | Self::AdamW | Self::Adam8bit => 2,
        }
    }

    /// Returns the bytes of state per parameter, where `state` is its format. An 8-bit optimizer has its own: the figure is
    /// that of a large tensor.
    pub fn state_bytes_per_parameter(self, state: Dtype) -> f64 {
        match self {
            Self::Adam8bit => self.state_tensors() as f64 * (1.0 + 4.0 / BLOCK as f64),
            _ => self.state_tensors() as f64 * state.storage_bits() as f64 / 8.0,
        }
    }

    /// Returns the bytes of state for the whole `model`.
    pub fn state_bytes(self, model: &Decoder, state: Dtype) -> Result<u64, Error> {
        let groups = model.tensor_groups()?;
        let sizes: Result<Vec<_>, Error> =
            groups.iter().map(|(n, tensor)| Ok((*n, tensor.elements()?))).collect();
        self.state_bytes_of(sizes?, state)
    }

    /// Returns the bytes of state for tensors, given as pairs of count and elements.
    pub(crate) fn state_bytes_of(
        self,
        tensors: impl IntoIterator<Item = (u64, u64)>,
        state: Dtype,
    ) -> Result<u64, Error> {
        const WHAT: &str = "bytes of the optimizer's state";
        let mut bytes = Vec::new();
        for (count, elements) in tensors {
            let one = if self != Self::Adam8bit {
                state.bytes(elements)?
            } else if elements < SMALLEST_8BIT {
                Dtype::Fp32.bytes(elements)?
            } else {
                exact::sum(WHAT, [elements, Dtype::Fp32.bytes(elements.div_ceil(BLOCK))?])?
            };
            bytes.push(exact::product(WHAT, &[count, self.state_tensors(), one])?);
        }
        exact::sum(WHAT, bytes)
    }

    /// Temporaries of a step, in copies of its tensors.
    const fn step_copies(self) -> u64 {
        match self {
            Self::Sgd | Self::Momentum | Self::Adam8bit => 0,
            // The square root of the second moment; AdaGrad's list form also allocates the scaled gradients.
            Self::RmsProp | Self::Adam | Self::AdamW => 1,
            Self::AdaGrad => 2,
        }
    }

    /// Returns the temporary bytes of a step over `model`, with the state divided by `devices`.
    pub fn step_bytes(
        self,
        model: &Decoder,
        state: Dtype,
        kernel: StepKernel,
        devices: u64,
    ) -> Result<u64, Error> {
        let elements = match kernel {
            StepKernel::Fused => 0,
            StepKernel::Foreach => model.parameters()?.div_ceil(devices.max(1)),
            StepKernel::Loop => {
                let groups = model.tensor_groups()?;
                let sizes: Result<Vec<u64>, Error> = groups.iter().map(|(_, t)| t.elements()).collect();
                let share = model.parameters()?.div_ceil(devices.max(1));
                sizes?.into_iter().max().unwrap_or(0).min(share)
            }
        };
        self.step_bytes_of(elements, state)
    }

    /// Returns the temporary bytes of a step whose kernel works on `elements` elements at a time.
    pub(crate) fn step_bytes_of(self, elements: u64, state: Dtype) -> Result<u64, Error> {
        exact::product("bytes of the optimizer's step", &[self.step_copies(), state.bytes(elements)?])
    }
}

impl FromStr for Optimizer {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|optimizer| optimizer.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| Error::unknown("optimizer", text, Self::ALL.map(Self::name)))
    }
}

impl StepKernel {
    /// All kernels.
    pub const ALL: [Self; 3] = [Self::Fused, Self::Foreach, Self::Loop];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::Foreach => "foreach",
            Self::Loop => "loop",
        }
    }
}

impl FromStr for StepKernel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|kernel| kernel.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| Error::unknown("step kernel", text, Self::ALL.map(Self::name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn optimizer_state_of_gpt2() {
        let model = presets::find("gpt2").unwrap();
        let state = |optimizer: Optimizer| optimizer.state_bytes(&model, Dtype::Fp32).unwrap();
        let n = 124_439_808;
        assert_eq!(state(Optimizer::Sgd), 0);
        for one in [Optimizer::Momentum, Optimizer::AdaGrad, Optimizer::RmsProp] {
            assert_eq!(state(one), 4 * n);
        }
        assert_eq!((state(Optimizer::Adam), state(Optimizer::AdamW)), (8 * n, 8 * n));
        // All vectors of GPT-2 small have fewer than 4096 elements: per block 4 norm vectors (768), and biases of 2304,
        // 768, 3072 and 768; and the two vectors of the final norm.
        let small = 12 * (4 * 768 + 2304 + 768 + 3072 + 768) + 2 * 768;
        let large = n - small;
        // Every matrix is a multiple of 256 elements, the embedding's 50257 × 768 too.
        assert_eq!(state(Optimizer::Adam8bit), 2 * (large + large / 256 * 4) + 8 * small);
    }

    #[test]
    fn temporaries_of_a_step() {
        let model = presets::find("gpt2").unwrap();
        let step = |optimizer: Optimizer, kernel, devices| {
            optimizer.step_bytes(&model, Dtype::Fp32, kernel, devices).unwrap()
        };
        assert_eq!(step(Optimizer::AdamW, StepKernel::Fused, 1), 0);
        assert_eq!(step(Optimizer::AdamW, StepKernel::Foreach, 1), 4 * 124_439_808);
        assert_eq!(step(Optimizer::AdamW, StepKernel::Foreach, 8), 4 * 15_554_976);
        assert_eq!(step(Optimizer::AdamW, StepKernel::Loop, 1), 4 * 50257 * 768);
        assert_eq!(step(Optimizer::Sgd, StepKernel::Foreach, 1), 0);
    }
}
