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
//! | Muon | of matrices between embedding and head the mean of g; of others AdamW's | 4 B, 8 B |
//! | Adafactor | of a matrix means of g² by rows and by columns; of others of each element | nearly 0, 4 B |
//!
//! The 8-bit Adam is that of bitsandbytes (Dettmers et al., arXiv:2110.02861): block-wise with 256 elements to a block,
//! and tensors of fewer than 4096 elements stay in fp32. Step counters, a scalar per tensor, are not counted.

use std::str::FromStr;

use crate::model::Decoder;
use crate::parameters::ParameterTensor;
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
    /// Muon for matrices between the embedding and the head, AdamW for the others.
    Muon,
    /// Adafactor without a first moment.
    Adafactor,
}

/// A tensor, as far as its state and its update depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent<'a> {
    pub(crate) shape: &'a [u64],
    /// [`is_hidden`].
    pub(crate) is_hidden: bool,
}

impl<'a> Extent<'a> {
    /// A tensor of an adapter within a layer.
    pub(crate) fn of_adapter(shape: &'a [u64]) -> Self {
        Self { shape, is_hidden: shape.len() == 2 }
    }

    fn elements(self) -> Result<u64, Error> {
        exact::product("elements of a tensor", self.shape)
    }
}

impl<'a> From<&'a ParameterTensor> for Extent<'a> {
    fn from(tensor: &'a ParameterTensor) -> Self {
        Self { shape: &tensor.shape, is_hidden: is_hidden(&tensor.name, tensor.shape.len()) }
    }
}

/// Returns whether Muon makes the update of a tensor orthogonal, by the tensor's name and its number of dimensions: of a matrix between a
/// model's embedding and head; no embedding, no output head, no rows of tokens.
pub fn is_hidden(name: &str, dimensions: usize) -> bool {
    let is_outer = |part: &str| {
        part.starts_with("embed")
            || part.starts_with("lora_embedding")
            || part.starts_with("trainable_tokens")
            || ["lm_head", "output_linear", "wte", "wpe"].contains(&part)
    };
    dimensions == 2 && !name.split('.').any(is_outer)
}

impl Optimizer {
    /// All optimizers.
    pub const ALL: [Self; 10] = [
        Self::Sgd,
        Self::Momentum,
        Self::AdaGrad,
        Self::RmsProp,
        Self::Adam,
        Self::AdamW,
        Self::Lion,
        Self::Adam8bit,
        Self::Muon,
        Self::Adafactor,
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
            Self::Muon => "muon",
            Self::Adafactor => "adafactor",
        }
    }

    /// Returns the number of state values per parameter; of a large matrix, where it depends on the tensor.
    pub const fn state_tensors(self) -> u64 {
        match self {
            Self::Sgd | Self::Adafactor => 0,
            Self::Momentum | Self::AdaGrad | Self::RmsProp | Self::Lion | Self::Muon => 1,
            Self::Adam | Self::AdamW | Self::Adam8bit => 2,
        }
    }

    /// Returns whether the update of an element depends on all others of its tensor, so that ranks cannot divide a tensor.
    pub(crate) const fn updates_whole_tensors(self) -> bool {
        matches!(self, Self::Muon | Self::Adafactor)
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
        let bytes = groups.iter().map(|(count, tensor)| {
            exact::product(WHAT, &[*count, self.state_bytes_of(std::iter::once(tensor.into()), state)?])
        });
        exact::sum(WHAT, bytes.collect::<Result<Vec<_>, _>>()?)
    }

    /// Returns the bytes of state for tensors.
    pub(crate) fn state_bytes_of<'a>(
        self,
        tensors: impl IntoIterator<Item = Extent<'a>>,
        state: Dtype,
    ) -> Result<u64, Error> {
        let bytes = tensors.into_iter().map(|tensor| {
            let elements = tensor.elements()?;
            match (self, tensor.shape) {
                (Self::Adafactor, [others @ .., rows, columns]) => {
                    let sides = exact::sum(WHAT, [*rows, *columns])?;
                    let of_others = exact::product(WHAT, others)?;
                    state.bytes(exact::product(WHAT, &[of_others, sides])?)
                }
                (Self::Adafactor, _) => state.bytes(elements),
                (Self::Muon, _) if tensor.is_hidden => state.bytes(elements),
                (Self::Muon, _) => Self::AdamW.state_bytes_of_part(elements, elements, state),
                _ => self.state_bytes_of_part(elements, elements, state),
            }
        });
        exact::sum(WHAT, bytes.collect::<Result<Vec<_>, Error>>()?)
    }

    /// Returns the bytes that an update of one tensor after the other allocates beside its operands in the state's dtype, on a CPU.
    ///
    /// Muon holds the update, the matrix of r rows and c columns (r ≤ c) before and after an iteration, and two of r × r; Adafactor the update.
    pub(crate) fn update_bytes_of<'a>(
        self,
        tensors: impl IntoIterator<Item = Extent<'a>>,
        state: Dtype,
    ) -> Result<u64, Error> {
        let mut most = 0;
        for tensor in tensors {
            let elements = tensor.elements()?;
            let numbers = match (self, tensor.shape) {
                (Self::Adafactor, _) => elements,
                (Self::Muon, &[rows, columns]) if tensor.is_hidden => {
                    let side = rows.min(columns);
                    exact::sum(
                        WHAT,
                        [exact::product(WHAT, &[3, elements])?, exact::product(WHAT, &[2, side, side])?],
                    )?
                }
                _ => 0,
            };
            most = most.max(state.bytes(numbers)?);
        }
        Ok(most)
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
