//! Peak memory of a training step of a stack of SwiGLU MLPs.
//!
//! The step's allocations and frees are followed in order; their peak must be the allocator's. With n tokens, h hidden, f
//! feed-forward and e bytes per element, the forward keeps `H + 4F` (operators) to `H` (recomputation) elements of each layer, and
//! the backward frees them; gradients of weights stay.
//!
//! The levels differ in what else is live at the peak: plain operators hold two or three `[n, f]` temporaries in backward and make
//! the upstream gradient of a sum, an expanded scalar, dense; the hand-written backward works in place.
//!
//! ```
//! use accounting::recompute::SwigluLevel;
//! use accounting::swiglu::{SwigluStack, peak};
//!
//! // The assignment's middle configuration: 8 × 512 tokens, H = 1024, F = 4096, 3 layers, fp32.
//! let stack =
//!     SwigluStack { tokens: 8 * 512, hidden: 1024, features: 4096, layers: 3, element_bytes: 4, tile_bytes: None };
//! let all = peak(&stack, SwigluLevel::SaveAll)?;
//! let input = peak(&stack, SwigluLevel::InputOnly)?;
//! assert!(input.bytes - input.weights < (all.bytes - all.weights) * 2 / 3);
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::error::Error;
use crate::exact::{positive, product};
use crate::passes::PeakTracker;
use crate::recompute::SwigluLevel;

/// A stack of equal SwiGLU layers in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwigluStack {
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
    /// Maximum bytes of the temporaries of [`SwigluLevel::InputOnly`], which is then computed over tiles of tokens.
    pub tile_bytes: Option<u64>,
}

/// The maximum of live bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// All live bytes.
    pub bytes: u64,
    /// The bytes of the weights.
    pub weights: u64,
    /// Bytes kept between the forward and the backward, including inputs of layers, without the stack's own input and output.
    pub kept: u64,
}

/// Returns the peak of one step: forward, the gradient of the output's sum, backward to the input and all weights. No gradients
/// exist before it.
///
/// # Errors
/// Sizes of zero, a tile below one token, or bytes beyond 64 bits.
pub fn peak(stack: &SwigluStack, level: SwigluLevel) -> Result<Peak, Error> {
    peak_of_step(stack, level, Gradients::Cleared)
}

/// Returns the peak of a step whose gradients are added to those of earlier steps, as in a training loop that never clears them.
///
/// # Errors
/// As [`peak`].
pub fn accumulating_peak(stack: &SwigluStack, level: SwigluLevel) -> Result<Peak, Error> {
    peak_of_step(stack, level, Gradients::Accumulated)
}

/// Whether gradients of earlier steps exist.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gradients {
    Cleared,
    Accumulated,
}

fn peak_of_step(stack: &SwigluStack, level: SwigluLevel, gradients: Gradients) -> Result<Peak, Error> {
    let bytes = Bytes::new(stack, level)?;
    let weights = product("bytes of all weights", &[3, bytes.weight, stack.layers])?;
    // The largest sums below.
    product("bytes of a layer's activations", &[10, bytes.wide])?;
    product("bytes of hidden states", &[4, bytes.narrow])?;
    let mut tracker = PeakTracker::default();
    tracker.make(weights);
    tracker.make(bytes.narrow);
    let earlier = if gradients == Gradients::Accumulated { [weights, bytes.narrow] } else { [0, 0] };
    earlier.into_iter().for_each(|bytes| tracker.make(bytes));
    for _ in 0..stack.layers {
        bytes.forward(level, &mut tracker);
    }
    let earlier: u128 = earlier.into_iter().map(u128::from).sum();
    let kept = tracker.live() - u128::from(weights) - 2 * u128::from(bytes.narrow) - earlier;
    for layer in (0..stack.layers).rev() {
        let last = layer + 1 == stack.layers;
        bytes.backward(level, last, gradients, &mut tracker);
        // The upstream gradient, and the layer's input unless it is the stack's own.
        tracker.free(if last { 0 } else { bytes.narrow });
        tracker.free(if layer == 0 { 0 } else { bytes.narrow });
    }
    let peak = tracker.peak()?;
    // The peak includes the kept bytes, so they fit 64 bits too.
    Ok(Peak { bytes: peak, weights, kept: kept as u64 })
}

/// Sizes of the tensors.
struct Bytes {
    /// `[n, h]`
    narrow: u64,
    /// `[n, f]`
    wide: u64,
    /// `[tile, f]`; equals `wide` without tiles
    tile: u64,
    /// `[h, f]`
    weight: u64,
}

impl Bytes {
    fn new(stack: &SwigluStack, level: SwigluLevel) -> Result<Self, Error> {
        let &SwigluStack { tokens, hidden, features, layers, element_bytes, tile_bytes } = stack;
        let sizes = [("tokens", tokens), ("hidden", hidden), ("features", features), ("layers", layers)];
        for (name, value) in sizes {
            positive(name, value)?;
        }
        let tile_tokens = match tile_bytes {
            Some(bytes) if level == SwigluLevel::InputOnly => {
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

    /// Allocates the layer's output and the tensors that the layer keeps besides its input.
    fn forward(&self, level: SwigluLevel, tracker: &mut PeakTracker) {
        let kept = level.kept_feed_forward_tensors() * self.wide;
        let temporaries = match level {
            // Gate, SiLU, up and product; each is kept by the operator that follows.
            SwigluLevel::Eager => 4 * self.wide,
            SwigluLevel::SaveAll => 4 * self.wide,
            SwigluLevel::SaveGateUp => 3 * self.wide,
            // The product overwrites the up-projection.
            SwigluLevel::SaveOne => 2 * self.wide,
            SwigluLevel::InputOnly => 2 * self.tile,
        };
        tracker.make(self.narrow);
        tracker.make(temporaries);
        tracker.free(temporaries - kept);
    }

    /// Frees the tensors that the layer kept, and leaves the gradients of its input and, unless they are added to earlier ones, of its
    /// weights.
    fn backward(&self, level: SwigluLevel, last: bool, gradients: Gradients, tracker: &mut PeakTracker) {
        // A gradient that is added to an earlier one is freed: the function's three at its end, an operator's at once.
        let added = if gradients == Gradients::Accumulated { self.weight } else { 0 };
        if level == SwigluLevel::Eager {
            return self.backward_of_operators(last, added, tracker);
        }
        tracker.make(self.narrow);
        if self.tile < self.wide {
            tracker.make(3 * self.tile + 3 * self.weight);
            return tracker.free(3 * self.tile + 3 * added);
        }
        let silu = if level == SwigluLevel::SaveAll { self.wide } else { 0 };
        tracker.make(level.recomputed_products() * self.wide);
        // The gradient of the product; then the elementwise pass, in place, which frees SiLU.
        tracker.make(self.wide);
        tracker.free(silu);
        tracker.make(self.weight);
        tracker.free(self.wide);
        tracker.make(2 * self.weight);
        // Gate and up, recomputed or kept.
        tracker.free(2 * self.wide + 3 * added);
    }

    fn backward_of_operators(&self, last: bool, added: u64, tracker: &mut PeakTracker) {
        // The gradient of a sum is an expanded scalar; each product makes its own dense copy.
        let dense = if last { self.narrow } else { 0 };
        // Down-projection: the product's gradient and U's. Then the product is freed.
        tracker.make(self.wide + dense);
        tracker.free(dense);
        tracker.make(self.weight + dense);
        tracker.free(dense + self.wide + added);
        // ⊙: the gradients of SiLU and up. Then the product's gradient, SiLU and up are freed.
        tracker.make(2 * self.wide);
        tracker.free(3 * self.wide);
        // Up-projection: gradients of x and V. Then up's gradient is freed.
        tracker.make(self.narrow + self.weight);
        tracker.free(self.wide + added);
        // SiLU: the gate's gradient. Then SiLU's gradient and the gate are freed.
        tracker.make(self.wide);
        tracker.free(2 * self.wide);
        // Gate-projection: gradients of x and W; the two of x are added into one.
        tracker.make(self.narrow + self.weight);
        tracker.free(self.wide + self.narrow + added);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TILED: (SwigluLevel, Option<u64>) = (SwigluLevel::InputOnly, Some(1 << 20));

    fn stack(tile_bytes: Option<u64>) -> SwigluStack {
        SwigluStack { tokens: 2048, hidden: 512, features: 2048, layers: 2, element_bytes: 4, tile_bytes }
    }

    fn levels() -> impl Iterator<Item = (SwigluLevel, Option<u64>)> {
        SwigluLevel::ALL.map(|level| (level, None)).into_iter().chain([TILED])
    }

    #[test]
    fn kept_bytes_are_those_of_the_level() {
        for (level, tile) in levels() {
            let SwigluStack { tokens, hidden, features, layers, element_bytes, .. } = stack(tile);
            // The inputs of all layers count, except the stack's own.
            let kept = layers * level.kept_feed_forward_tensors() * features + (layers - 1) * hidden;
            assert_eq!(peak(&stack(tile), level).unwrap().kept, kept * tokens * element_bytes, "{level:?}");
        }
    }

    #[test]
    fn only_the_output_and_gradients_remain() {
        for (level, tile) in levels() {
            let bytes = Bytes::new(&stack(tile), level).unwrap();
            let mut tracker = PeakTracker::default();
            bytes.forward(level, &mut tracker);
            bytes.backward(level, true, Gradients::Cleared, &mut tracker);
            // Output, gradient of the input, gradients of the weights.
            let expected = 2 * bytes.narrow + 3 * bytes.weight;
            assert_eq!(tracker.live(), u128::from(expected), "{level:?}");
        }
    }

    #[test]
    fn keeping_less_lowers_the_peak() {
        let deep = |tile| SwigluStack { layers: 8, ..stack(tile) };
        let peaks: Vec<u64> = levels().map(|(level, tile)| peak(&deep(tile), level).unwrap().bytes).collect();
        assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
    }

    #[test]
    fn invalid_sizes_are_refused() {
        let message = |stack, level| peak(&stack, level).unwrap_err().to_string();
        assert!(message(SwigluStack { layers: 0, ..stack(None) }, SwigluLevel::SaveAll).contains("layers"));
        assert!(message(stack(Some(10)), SwigluLevel::InputOnly).contains("24576"));
        message(SwigluStack { tokens: u64::MAX / 4, ..stack(None) }, SwigluLevel::SaveAll);
        message(SwigluStack { tokens: 1 << 50, ..stack(None) }, SwigluLevel::SaveAll);
    }
}
