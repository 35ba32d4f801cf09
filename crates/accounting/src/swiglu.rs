//! Peak memory of a training step of a stack of SwiGLU MLPs, on paper.
//!
//! The step is walked through as it runs: every tensor is put on a [`Ledger`] when it is made and taken off when its
//! last user lets go; the peak is what the allocator's must be. n tokens, h hidden, f feed-forward, one element of e
//! bytes. For each layer the forward keeps its share (`H + 4F` with plain operators down to `H` with recomputation) and
//! the backward returns it; gradients of the weights stay.
//!
//! The forms differ in what else is alive at the worst moment: plain operators hold two or three `[n, f]` temporaries in
//! backward and copy an upstream gradient that is one number in disguise (the gradient of a sum); the hand-written
//! backward works in place.
//!
//! ```
//! use accounting::swiglu::{Form, Stack, peak};
//!
//! // The assignment's middle configuration: 8 × 512 tokens, H = 1024, F = 4096, 3 layers, fp32.
//! let stack = Stack { tokens: 8 * 512, hidden: 1024, features: 4096, layers: 3, element_bytes: 4 };
//! let all = peak(&stack, Form::SaveAll)?;
//! let input = peak(&stack, Form::InputOnly)?;
//! assert!(input.above_weights() < all.above_weights() * 2 / 3);
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::error::Error;
use crate::exact::{positive, product};

/// A stack of equal SwiGLU layers in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Tokens in the batch, all sequences together.
    pub tokens: u64,
    /// Size of the residual stream.
    pub hidden: u64,
    /// Size between the projections.
    pub features: u64,
    /// Number of layers.
    pub layers: u64,
    /// Bytes of one element.
    pub element_bytes: u64,
}

/// How a layer is computed, and so what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A composition of libtorch's operators: each keeps what its own backward needs.
    Operators,
    /// x, x·W, SiLU(x·W), x·V.
    SaveAll,
    /// x, x·W, x·V.
    SaveGateUp,
    /// x, x·W.
    SaveOne,
    /// x.
    InputOnly,
    /// x, computed over tiles whose temporaries take at most so many bytes.
    InputOnlyTiled {
        /// Bound of the temporaries.
        bytes: u64,
    },
}

/// The largest number of bytes that are alive at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// All of it.
    pub bytes: u64,
    /// The weights' share.
    pub weights: u64,
    /// Kept between the forward and the backward, inputs of layers included, the stack's own input and output not.
    pub kept: u64,
}

impl Peak {
    /// The peak without the weights: input, activations, temporaries, gradients.
    pub fn above_weights(&self) -> u64 {
        self.bytes - self.weights
    }
}

/// Peak of one step: forward, the gradient of the output's sum, backward to the input and all weights.
///
/// # Errors
/// Sizes of zero, a tile below one token, or bytes beyond 64 bits.
pub fn peak(stack: &Stack, form: Form) -> Result<Peak, Error> {
    let bytes = Bytes::new(stack, form)?;
    let weights = checked(3 * u128::from(bytes.weight) * u128::from(stack.layers))?;
    // The largest sum that can stand on the ledger: everything of every layer at once.
    checked(
        (u128::from(bytes.wide) * 10 + u128::from(bytes.narrow) * 4 + u128::from(weights))
            * u128::from(stack.layers),
    )?;
    let mut ledger = Ledger::default();
    ledger.make(weights);
    ledger.make(bytes.narrow);
    for _ in 0..stack.layers {
        bytes.forward(form, &mut ledger);
    }
    let kept = ledger.live - weights - 2 * bytes.narrow;
    for layer in (0..stack.layers).rev() {
        let last = layer + 1 == stack.layers;
        bytes.backward(form, last, &mut ledger);
        // The upstream gradient, and the input of this layer unless it is the stack's own.
        ledger.free(if last { 0 } else { bytes.narrow });
        ledger.free(if layer == 0 { 0 } else { bytes.narrow });
    }
    Ok(Peak { bytes: ledger.peak, weights, kept })
}

/// Bytes that are alive, and the most there were.
#[derive(Clone, Copy, Debug, Default)]
struct Ledger {
    live: u64,
    peak: u64,
}

impl Ledger {
    fn make(&mut self, bytes: u64) {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
    }

    fn free(&mut self, bytes: u64) {
        self.live -= bytes;
    }
}

/// Sizes of the tensors.
struct Bytes {
    /// `[n, h]`
    narrow: u64,
    /// `[n, f]`
    wide: u64,
    /// `[tile, f]`; as `wide` where there is one tile
    tile: u64,
    /// `[h, f]`
    weight: u64,
}

impl Bytes {
    fn new(stack: &Stack, form: Form) -> Result<Self, Error> {
        let &Stack { tokens, hidden, features, layers, element_bytes } = stack;
        let sizes = [("tokens", tokens), ("hidden", hidden), ("features", features), ("layers", layers)];
        for (name, value) in sizes {
            positive(name, value)?;
        }
        let tile_tokens = match form {
            Form::InputOnlyTiled { bytes } => {
                let token = product("bytes of one token's temporaries", &[3, features, element_bytes])?;
                if bytes < token {
                    return Err(Error::Shape {
                        what: format!(
                            "a tile of {bytes} bytes is below the {token} of one token's temporaries"
                        ),
                        remedy: "give at least that".to_owned(),
                    });
                }
                tokens.div_ceil(tokens.div_ceil((bytes / token).min(tokens)))
            }
            _ => tokens,
        };
        Ok(Self {
            narrow: product("bytes of the hidden state", &[tokens, hidden, element_bytes])?,
            wide: product("bytes of an activation", &[tokens, features, element_bytes])?,
            tile: product("bytes of a tile", &[tile_tokens, features, element_bytes])?,
            weight: product("bytes of a weight", &[hidden, features, element_bytes])?,
        })
    }

    /// Makes the layer's output and leaves what the layer keeps beside its input.
    fn forward(&self, form: Form, ledger: &mut Ledger) {
        let (temporaries, kept) = match form {
            // Gate, SiLU, up and product are each kept by the operator that follows; then the output is made.
            Form::Operators => (4 * self.wide, 4 * self.wide),
            Form::SaveAll => (4 * self.wide, 3 * self.wide),
            Form::SaveGateUp => (3 * self.wide, 2 * self.wide),
            // The product is written over the up-projection.
            Form::SaveOne => (2 * self.wide, self.wide),
            Form::InputOnly | Form::InputOnlyTiled { .. } => (2 * self.tile, 0),
        };
        ledger.make(self.narrow);
        ledger.make(temporaries);
        ledger.free(temporaries - kept);
    }

    /// Consumes what the layer kept, and leaves the gradients of its input and weights.
    fn backward(&self, form: Form, last: bool, ledger: &mut Ledger) {
        if form == Form::Operators {
            return self.backward_of_operators(last, ledger);
        }
        ledger.make(self.narrow);
        if self.tile < self.wide {
            ledger.make(3 * self.tile + 3 * self.weight);
            return ledger.free(3 * self.tile);
        }
        let (recomputed, silu) = match form {
            Form::SaveAll => (0, self.wide),
            Form::SaveGateUp => (0, 0),
            Form::SaveOne => (self.wide, 0),
            _ => (2 * self.wide, 0),
        };
        ledger.make(recomputed);
        // The gradient of the product; then the elementwise pass, in place, after which SiLU is done with.
        ledger.make(self.wide);
        ledger.free(silu);
        ledger.make(self.weight);
        ledger.free(self.wide);
        ledger.make(2 * self.weight);
        // Gate and up, recomputed or kept.
        ledger.free(2 * self.wide);
    }

    fn backward_of_operators(&self, last: bool, ledger: &mut Ledger) {
        // The gradient of a sum is one number, strided; each product makes it dense for itself.
        let dense = if last { self.narrow } else { 0 };
        // Down-projection: the product's gradient and U's. Then the product goes.
        ledger.make(self.wide + dense);
        ledger.free(dense);
        ledger.make(self.weight + dense);
        ledger.free(dense + self.wide);
        // ⊙: the gradients of SiLU and up. Then the product's gradient, SiLU and up go.
        ledger.make(2 * self.wide);
        ledger.free(3 * self.wide);
        // Up-projection: gradients of x and V. Then up's gradient goes.
        ledger.make(self.narrow + self.weight);
        ledger.free(self.wide);
        // SiLU: the gate's gradient. Then SiLU's gradient and the gate go.
        ledger.make(self.wide);
        ledger.free(2 * self.wide);
        // Gate-projection: gradients of x and W; the two of x are added into one.
        ledger.make(self.narrow + self.weight);
        ledger.free(self.wide + self.narrow);
    }
}

fn checked(bytes: u128) -> Result<u64, Error> {
    u64::try_from(bytes).map_err(|_| Error::Overflow {
        what: "peak bytes of a SwiGLU stack",
        bits: 64,
        terms: bytes.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [Form; 6] = [
        Form::Operators,
        Form::SaveAll,
        Form::SaveGateUp,
        Form::SaveOne,
        Form::InputOnly,
        Form::InputOnlyTiled { bytes: 1 << 20 },
    ];

    fn stack() -> Stack {
        Stack { tokens: 2048, hidden: 512, features: 2048, layers: 2, element_bytes: 4 }
    }

    #[test]
    fn what_is_kept_is_the_table_of_levels() {
        let Stack { tokens, hidden, features, layers, element_bytes } = stack();
        for (form, wide) in FORMS.into_iter().zip([4, 3, 2, 1, 0, 0]) {
            // The stack's own input and the output of the last layer are not counted, inputs of the others are.
            let kept = layers * wide * features + (layers - 1) * hidden;
            assert_eq!(peak(&stack(), form).unwrap().kept, kept * tokens * element_bytes, "{form:?}");
        }
    }

    #[test]
    fn every_tensor_that_is_made_is_freed_but_gradients() {
        for form in FORMS {
            let bytes = Bytes::new(&stack(), form).unwrap();
            let mut ledger = Ledger::default();
            bytes.forward(form, &mut ledger);
            bytes.backward(form, true, &mut ledger);
            // Output, gradient of the input, gradients of the weights.
            assert_eq!(ledger.live, 2 * bytes.narrow + 3 * bytes.weight, "{form:?}");
        }
    }

    #[test]
    fn less_kept_is_a_lower_peak() {
        let deep = Stack { layers: 8, ..stack() };
        let peaks = FORMS.map(|form| peak(&deep, form).unwrap().bytes);
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
    }

    #[test]
    fn nonsense_is_refused() {
        let message = |stack, form| peak(&stack, form).unwrap_err().to_string();
        assert!(message(Stack { layers: 0, ..stack() }, Form::SaveAll).contains("layers"));
        assert!(message(stack(), Form::InputOnlyTiled { bytes: 10 }).contains("24576"));
        message(Stack { tokens: u64::MAX / 4, ..stack() }, Form::SaveAll);
        message(Stack { tokens: 1 << 50, ..stack() }, Form::SaveAll);
    }
}
