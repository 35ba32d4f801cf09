//! A mixture of experts in place of the MLP, as `models::mixture` runs it.
//!
//! With n tokens, d hidden, E experts of inner width f, k of them for each token, and c bytes of an element:
//!
//! ```text
//! forward    router: logits [n, E] · softmax in fp32 · sort [n, E] · weights, slots and tokens of the rows [n, k]
//!            slots [n·k, d] · per expert with r rows: x [r, d] · gate, up [r, f] · product [r, f] · result [r, d] · sum [n, d]
//! backward   gradients of x by slot [n·k, d] · per expert: gradient [r, d] · q, w·q, their product [r, f] · gradient of x [r, d]
//!            sum [n, d] · weights · softmax · router
//! ```
//!
//! From forward to backward it keeps gate and up of all rows, `2·c·n·k·f`, and the router's tensors, `4·n·(E + k)` and some numbers of
//! 8 bytes for each row. How many rows an expert has depends on the tokens. The rows of all experts together are n·k; the largest expert is
//! counted with all n tokens, so that no routing takes more: beside `2·k·f + k·d` elements per token that is at most `3·f + d`.

use crate::Error;
use crate::exact::product;
use crate::memory::quantized::{self, Matrices};
use crate::memory::recipe::Recipe;
use crate::model::{Decoder, ExpertSizes};
use crate::passes::PeakTracker;

const WHAT: &str = "bytes of a mixture of experts";

/// Bytes of the tensors of a mixture.
pub(super) struct Experts {
    /// `[n, d]` of the residual stream, and of operands and results of products.
    narrow: u64,
    operand: u64,
    /// `[n, E]` in the dtype of products, where that is not fp32, and in fp32.
    logits: u64,
    narrow_logits: u64,
    probabilities: u64,
    /// `[n, E]` of 8 bytes.
    order: u64,
    /// `[n, k]` in fp32, of 8 bytes, and in the dtype of products where that is not fp32.
    weights: u64,
    indices: u64,
    narrow_weights: u64,
    /// `[n, 1]` in fp32.
    sums: u64,
    /// `[n·k, d]`.
    slots: u64,
    /// `[n, f]`: the rows of an expert that has all tokens.
    inner: u64,
    /// Gate, or up, of all rows: `[n·k, f]`.
    all_inner: u64,
    /// Tiles of a product with a quantized matrix, in forward and in backward.
    tile: u64,
    tile_back: u64,
    mixed: bool,
    everything: bool,
    /// Gradients of all experts as products give them, as they are kept, and of the router, as far as they are counted.
    narrow_gradients: u64,
    gradients: u64,
    router_gradient: u64,
}

/// The options of a block that decide a mixture.
pub(super) struct ExpertOptions<'a> {
    pub(super) tokens: u64,
    pub(super) recipe: &'a Recipe,
    pub(super) widens: bool,
    /// Whether the weights are trained, and whether their gradients are counted.
    pub(super) everything: bool,
    pub(super) gradients: bool,
    /// Largest number of bytes of a dequantized tile.
    pub(super) tile_bytes: u64,
}

impl Experts {
    pub(super) fn new(
        model: &Decoder,
        experts: &ExpertSizes,
        options: &ExpertOptions<'_>,
    ) -> Result<Self, Error> {
        let ExpertOptions { tokens, recipe, widens, everything, gradients, tile_bytes } = *options;
        if experts.shared > 0 {
            return Err(Error::Shape {
                what: "an expert for every token is not modelled".into(),
                remedy: "measure a step instead".into(),
            });
        }
        let ExpertSizes { count, per_token, feed_forward: inner, .. } = *experts;
        let d = model.hidden;
        let c = recipe.compute.storage_bits() / 8;
        let is_narrow = c < 4;
        let activation = |sizes: &[u64]| product(WHAT, &[&[tokens], sizes].concat());
        let if_narrow = |bytes: u64| if is_narrow { bytes } else { 0 };
        let element = if widens { 4 } else { c };
        let tile = |length, width| match recipe.matrices {
            Matrices::Dense => Ok(0),
            _ => quantized::tile_bytes(tile_bytes, length, width, element),
        };
        let all = product(WHAT, &[3, count, d, inner])?;
        let counted = gradients && everything;
        Ok(Self {
            narrow: activation(&[d, recipe.residual.storage_bits() / 8])?,
            operand: activation(&[d, c])?,
            logits: activation(&[count, c])?,
            narrow_logits: if_narrow(activation(&[count, c])?),
            probabilities: activation(&[count, 4])?,
            order: activation(&[count, 8])?,
            weights: activation(&[per_token, 4])?,
            indices: activation(&[per_token, 8])?,
            narrow_weights: if_narrow(activation(&[per_token, c])?),
            sums: activation(&[4])?,
            slots: activation(&[per_token, d, c])?,
            inner: activation(&[inner, c])?,
            all_inner: activation(&[per_token, inner, c])?,
            tile: tile(inner, d)?.max(tile(d, inner)?),
            tile_back: tile(inner, d)?.max(tile(d, inner)?),
            mixed: recipe.casts,
            everything,
            narrow_gradients: if counted && recipe.casts { recipe.compute.bytes(all)? } else { 0 },
            gradients: if counted { recipe.gradients.bytes(all)? } else { 0 },
            router_gradient: if counted { recipe.gradients.bytes(product(WHAT, &[count, d])?)? } else { 0 },
        })
    }

    /// Results of products that a segment keeps: the router's.
    pub(super) fn kept_products(&self) -> u64 {
        self.logits
    }

    /// The router's tensors that are kept: its probabilities, the numbers of the experts, the weights before and after they are divided by
    /// their sums, and the slots and tokens of the rows.
    pub(super) fn kept_routing(&self) -> u64 {
        self.probabilities + 3 * self.indices + self.weights + self.sums + self.slot_weights()
    }

    /// The weights as the experts' function keeps them.
    fn slot_weights(&self) -> u64 {
        if self.narrow_weights > 0 { self.narrow_weights } else { self.weights }
    }

    /// Gate, or up, of all rows.
    pub(super) fn kept_inner(&self) -> u64 {
        self.all_inner
    }

    /// Leaves the result, and what is kept except casts of x that nothing learns from.
    pub(super) fn forward(&self, tracker: &mut PeakTracker, record: bool) {
        // A trained matrix keeps the cast of its operand.
        let cast = if self.mixed { self.operand } else { 0 };
        let keeps_cast = record && self.everything;
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !kept {
                tracker.free(bytes);
            }
        };
        tracker.make(cast + self.logits);
        release(tracker, keeps_cast, cast);
        // The logits are cast before the softmax, and sorted with their numbers.
        let widened = if self.narrow_logits > 0 { self.probabilities } else { 0 };
        tracker.make(widened + self.probabilities);
        tracker.free(widened + self.logits);
        tracker.make(self.probabilities + self.order);
        tracker.free(self.probabilities);
        tracker.make(self.indices);
        tracker.free(self.order);
        tracker.make(2 * self.weights + self.sums + 2 * self.indices);
        release(tracker, record, self.probabilities + self.indices + self.weights + self.sums);
        tracker.make(cast + self.narrow_weights);
        // The experts.
        tracker.make(self.slots);
        let (kept, rows) = if record { (2 * self.all_inner, 0) } else { (0, 2 * self.inner) };
        tracker.make(kept + rows);
        tracker.touch(self.operand + self.tile);
        tracker.touch(self.inner + self.operand + self.tile);
        tracker.free(rows);
        tracker.make(self.operand);
        tracker.free(self.slots);
        if self.narrow_weights > 0 {
            tracker.free(self.weights);
        }
        release(tracker, record, self.slot_weights() + 2 * self.indices);
        release(tracker, keeps_cast, cast);
    }

    /// Frees what was kept; leaves the gradient of x, and those of the weights as far as they are counted.
    pub(super) fn backward(&self, tracker: &mut PeakTracker) {
        tracker.make(self.slots + self.slot_weights());
        // The experts, the largest one first or last: gradients come as gate and up go.
        tracker.touch(self.operand + self.inner + self.tile_back);
        tracker.touch(self.operand + 3 * self.inner);
        tracker.free(2 * self.all_inner);
        tracker.make(if self.narrow_gradients > 0 { self.narrow_gradients } else { self.gradients });
        if self.everything {
            tracker.touch(2 * self.operand + 3 * self.inner);
        }
        tracker.make(self.operand);
        tracker.free(self.slots);
        if self.narrow_gradients > 0 {
            tracker.make(self.gradients);
            tracker.free(self.narrow_gradients);
        }
        self.cast_back(tracker);
        // The gradients of the weights, as they are kept and before they are divided by their sums.
        tracker.touch(3 * self.weights);
        tracker.free(2 * self.slot_weights() + self.weights + self.sums);
        // Those of the probabilities, the logits and x.
        tracker.make(2 * self.probabilities);
        tracker.free(self.probabilities + 3 * self.indices);
        tracker.make(self.narrow_logits);
        tracker.free(if self.narrow_logits > 0 { self.probabilities } else { 0 });
        tracker.make(self.operand + self.router_gradient);
        tracker.free(self.logits + self.probabilities);
        self.cast_back(tracker);
        // The sum of both gradients of x.
        if self.mixed {
            tracker.free(self.narrow);
        } else {
            tracker.make(self.narrow);
            tracker.free(2 * self.narrow);
        }
    }

    /// In mixed precision, casts a gradient of x, and frees the cast of x.
    fn cast_back(&self, tracker: &mut PeakTracker) {
        if self.mixed {
            tracker.make(self.narrow);
            tracker.free(self.operand);
            if self.everything {
                tracker.free(self.operand);
            }
        }
    }
}
