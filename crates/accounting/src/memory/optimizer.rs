//! The state of optimizers.
//!
//! | optimizer | per parameter | with fp32 state |
//! |---|---|---|
//! | SGD | nothing | 0 B |
//! | momentum | velocity | 4 B |
//! | AdaGrad | sum of g² | 4 B |
//! | RMSProp | mean of g² | 4 B |
//! | Lion | mean of g | 4 B |
//! | Adam, AdamW | mean of g, mean of g² | 8 B |
//! | 8-bit Adam, AdamW | both in 8 bits, and an fp32 scale per 256 | 2 B + 1/32 B |
//!
//! The 8-bit Adam is that of bitsandbytes (Dettmers et al., arXiv:2110.02861): block-wise with 256 elements to a block,
//! and tensors of fewer than 4096 elements stay in fp32. Step counters, a scalar per tensor, are not counted.

use std::str::FromStr;

use crate::model::Decoder;
use crate::{Dtype, Error, exact};

const WHAT: &str = "bytes of the optimizer's state";
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
    /// Lion.
    Lion,
    /// Adam or AdamW with block-wise 8-bit state.
    Adam8bit,
}

impl Optimizer {
    /// All optimizers.
    pub const ALL: [Self; 8] = [
        Self::Sgd,
        Self::Momentum,
        Self::AdaGrad,
        Self::RmsProp,
        Self::Adam,
        Self::AdamW,
        Self::Lion,
        Self::Adam8bit,
    ];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::AdaGrad => "adagrad",
            Self::RmsProp => "rmsprop",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::Lion => "lion",
            Self::Adam8bit => "adam-8bit",
        }
    }

    /// Returns the number of state values per parameter.
    pub const fn state_tensors(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum | Self::AdaGrad | Self::RmsProp | Self::Lion => 1,
            Self::Adam | Self::AdamW | Self::Adam8bit => 2,
        }
    }

    /// Returns the elements that share a scale, at whose multiples ranks divide a parameter.
    pub(crate) const fn block_elements(self) -> u64 {
        match self {
            Self::Adam8bit => BLOCK,
            _ => 1,
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
        let mut bytes = Vec::new();
        for (count, elements) in tensors {
            bytes.push(exact::product(WHAT, &[count, self.state_bytes_of_part(elements, elements, state)?])?);
        }
        exact::sum(WHAT, bytes)
    }

    /// Returns the bytes of state for some elements of a tensor of `whole` elements, in whole blocks.
    pub(crate) fn state_bytes_of_part(self, elements: u64, whole: u64, state: Dtype) -> Result<u64, Error> {
        let one = if self != Self::Adam8bit {
            state.bytes(elements)?
        } else if whole < SMALLEST_8BIT {
            Dtype::Fp32.bytes(elements)?
        } else {
            exact::sum(WHAT, [elements, Dtype::Fp32.bytes(elements.div_ceil(BLOCK))?])?
        };
        exact::product(WHAT, &[self.state_tensors(), one])
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
        for one in [Optimizer::Momentum, Optimizer::AdaGrad, Optimizer::RmsProp, Optimizer::Lion] {
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
}
