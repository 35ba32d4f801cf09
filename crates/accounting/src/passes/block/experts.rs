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
//!
//! [`Terms`] are adapters of the experts. Biases (gpt-oss) take no memory beside the results that they are added to; the gradient of a token's
//! weights is then summed in fp32.

use super::expert_terms::{Term, Terms};
use crate::Error;
use crate::exact::product;
use crate::lora::LowRank;
use crate::memory::quantized::{self, Matrices};
use crate::memory::recipe::Recipe;
use crate::model::{Decoder, ExpertSizes};
use crate::passes::PeakTracker;

const WHAT: &str = "bytes of a mixture of experts";

/// Bytes of the tensors of a mixture.
pub(super) struct Experts {
    /// `[n, d]` of the residual stream, and of operands and results of products; in fp32 where sums of adapters are wider than these.
    narrow: u64,
    operand: u64,
    wide_operand: u64,
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
    /// `[n, f]`: the rows of an expert that has all tokens; in fp32 as `wide_operand`.
    inner: u64,
    wide_inner: u64,
    /// Gate, or up, of all rows: `[n·k, f]`.
    all_inner: u64,
    /// Tile of a product with a quantized matrix.
    tile: u64,
    mixed: bool,
    everything: bool,
    /// Whether experts have biases.
    biases: bool,
    terms: Terms,
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
    pub(super) lora: Option<&'a LowRank>,
}

impl Experts {
    pub(super) fn new(
        model: &Decoder,
        experts: &ExpertSizes,
        options: &ExpertOptions<'_>,
    ) -> Result<Self, Error> {
        let ExpertOptions { tokens, recipe, widens, everything, gradients, tile_bytes, lora } = *options;
        let ExpertSizes { count, per_token, feed_forward: inner, biases, .. } = *experts;
        let d = model.hidden;
        let c = recipe.compute.storage_bits() / 8;
        let is_narrow = c < 4;
        let activation = |sizes: &[u64]| product(WHAT, &[&[tokens], sizes].concat());
        let if_narrow = |bytes: u64| if is_narrow { bytes } else { 0 };
        let terms = Terms::new(model, experts, lora, tokens, gradients)?;
        let element = if widens || terms.any() { 4 } else { c };
        let tile = |length, width| match recipe.matrices {
            Matrices::Dense => Ok(0),
            _ => quantized::tile_bytes(tile_bytes, length, width, element),
        };
        let mut all = product(WHAT, &[3, count, d, inner])?;
        let mut router = product(WHAT, &[count, d])?;
        if biases {
            all += product(WHAT, &[count, 2 * inner + d])?;
            router += count;
        }
        let counted = gradients && everything;
        Ok(Self {
            narrow: activation(&[d, recipe.residual.storage_bits() / 8])?,
            operand: activation(&[d, c])?,
            wide_operand: if_narrow(activation(&[d, 4])?),
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
            wide_inner: if_narrow(activation(&[inner, 4])?),
            all_inner: activation(&[per_token, inner, c])?,
            tile: tile(inner, d)?.max(tile(d, inner)?),
            mixed: recipe.casts,
            everything,
            biases,
            terms,
            narrow_gradients: if counted && recipe.casts { recipe.compute.bytes(all)? } else { 0 },
            gradients: if counted { recipe.gradients.bytes(all)? } else { 0 },
            router_gradient: if counted { recipe.gradients.bytes(router)? } else { 0 },
        })
    }

    /// Whether experts learn, themselves or by adapters.
    pub(super) fn learns(&self) -> bool {
        self.everything || self.terms.any()
    }

    /// Whether their input is kept.
    pub(super) fn keeps_input(&self) -> bool {
        self.everything || self.terms.gate_up.is_some()
    }

    /// Casts of the input that are kept in mixed precision: for the experts, and for a router that learns.
    pub(super) fn kept_casts(&self) -> u64 {
        let casts = u64::from(self.keeps_input()) + u64::from(self.everything);
        if self.mixed { casts * self.operand } else { 0 }
    }

    /// Results of products that a segment keeps: the router's.
    pub(super) fn kept_products(&self) -> u64 {
        self.logits
    }

    /// The router's tensors that are kept: its probabilities, the numbers of the experts, the weights before and after they are divided by
    /// their sums, and the slots and tokens of the rows; without a gradient of the input the last three.
    pub(super) fn kept_routing(&self, of_input: bool) -> u64 {
        let of_router = self.probabilities + self.indices + self.weights + self.sums;
        2 * self.indices + self.slot_weights() + if of_input { of_router } else { 0 }
    }

    /// The weights as the experts' function keeps them.
    fn slot_weights(&self) -> u64 {
        if self.narrow_weights > 0 { self.narrow_weights } else { self.weights }
    }

    /// Gate, or up, of all rows.
    pub(super) fn kept_inner(&self) -> u64 {
        self.all_inner
    }

    /// What adapters keep of all rows.
    pub(super) fn kept_low(&self) -> u64 {
        self.terms.all().map(|term| term.all_low).sum()
    }

    /// Leaves the result, and what is kept except casts of x that nothing learns from. `record` says whether backward follows, `of_input`
    /// whether with a gradient of the input.
    pub(super) fn forward(&self, tracker: &mut PeakTracker, record: bool, of_input: bool) {
        let cast = if self.mixed { self.operand } else { 0 };
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !kept {
                tracker.free(bytes);
            }
        };
        // A trained matrix keeps the cast of its operand.
        tracker.make(cast + self.logits);
        release(tracker, record && self.everything, cast);
        // The logits are cast before the softmax, and sorted with their numbers.
        let widened = if self.narrow_logits > 0 { self.probabilities } else { 0 };
        tracker.make(widened + self.probabilities);
        tracker.free(widened + self.logits);
        tracker.make(self.probabilities + self.order);
        tracker.free(self.probabilities);
        tracker.make(self.indices);
        tracker.free(self.order);
        tracker.make(2 * self.weights + self.sums + 2 * self.indices);
        let of_router = self.probabilities + self.indices + self.weights + self.sums;
        release(tracker, record && of_input, of_router);
        tracker.make(cast + self.narrow_weights);
        tracker.make(self.slots);
        self.forward_of_experts(tracker, record);
        tracker.make(self.operand);
        tracker.free(self.slots);
        if self.narrow_weights > 0 {
            tracker.free(self.weights);
        }
        release(tracker, record, self.slot_weights() + 2 * self.indices);
        release(tracker, record && self.keeps_input(), cast);
    }

    /// The experts, the largest one last; leaves what is kept.
    fn forward_of_experts(&self, tracker: &mut PeakTracker, record: bool) {
        if record {
            tracker.make(2 * (self.all_inner - self.inner));
            tracker.make(self.terms.all().map(|term| term.all_low - term.low).sum());
        }
        tracker.make(self.operand);
        // Gate and up, in fp32 where a term is added.
        let copies = match &self.terms.gate_up {
            None => {
                tracker.make(2 * self.inner);
                tracker.touch(self.tile);
                tracker.free(self.operand);
                0
            }
            Some(Term { low, b, .. }) => {
                tracker.make(2 * self.wide(self.inner, self.wide_inner));
                tracker.touch(self.tile);
                tracker.make(*b + self.wide_operand);
                tracker.free(if self.wide_operand > 0 { self.operand } else { 0 });
                tracker.make(*low);
                tracker.free(self.wide(self.operand, self.wide_operand));
                for _ in 0..2 {
                    self.round(tracker, self.inner, self.wide_inner);
                }
                *b
            }
        };
        tracker.make(self.inner);
        if !record {
            tracker.free(2 * self.inner);
        }
        match &self.terms.down {
            None => {
                tracker.make(self.operand);
                tracker.touch(self.tile);
                tracker.free(self.inner);
            }
            Some(Term { low, b, .. }) => {
                tracker.make(self.wide(self.operand, self.wide_operand));
                tracker.touch(self.tile);
                tracker.make(*b + self.wide_inner);
                tracker.free(if self.wide_inner > 0 { self.inner } else { 0 });
                tracker.make(*low);
                tracker.free(*b + self.wide(self.inner, self.wide_inner));
                self.round(tracker, self.operand, self.wide_operand);
            }
        }
        tracker.free(self.operand + copies);
        if !record {
            tracker.free(self.terms.all().map(|term| term.low).sum());
        }
    }

    /// Bytes in the dtype of sums.
    fn wide(&self, narrow: u64, wide: u64) -> u64 {
        if wide > 0 { wide } else { narrow }
    }

    /// Rounds a sum to the dtype of products, if that is another.
    fn round(&self, tracker: &mut PeakTracker, narrow: u64, wide: u64) {
        if wide > 0 {
            tracker.make(narrow);
            tracker.free(wide);
        }
    }

    /// Frees what was kept; leaves the gradient of x if requested, and those of the weights as far as they are counted.
    pub(super) fn backward(&self, tracker: &mut PeakTracker, of_input: bool) {
        tracker.make(self.terms.gradients);
        if of_input {
            tracker.make(self.slots + self.slot_weights());
        }
        self.backward_of_experts(tracker, of_input);
        // Gradients come as gate and up go.
        tracker.free(2 * self.all_inner + self.kept_low());
        tracker.make(if self.narrow_gradients > 0 { self.narrow_gradients } else { self.gradients });
        if self.everything {
            tracker.touch(2 * self.operand + 3 * self.inner);
        }
        if of_input {
            tracker.make(self.operand);
            tracker.free(self.slots);
        }
        if self.narrow_gradients > 0 {
            tracker.make(self.gradients);
            tracker.free(self.narrow_gradients);
        }
        if !of_input {
            tracker.free(self.slot_weights() + 2 * self.indices);
            return tracker.free(if self.mixed && self.keeps_input() { self.operand } else { 0 });
        }
        self.cast_back(tracker, self.keeps_input());
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
        self.cast_back(tracker, self.everything);
        // The sum of both gradients of x.
        if self.mixed {
            tracker.free(self.narrow);
        } else {
            tracker.make(self.narrow);
            tracker.free(2 * self.narrow);
        }
    }

    /// The largest expert, the first one; leaves nothing.
    fn backward_of_experts(&self, tracker: &mut PeakTracker, of_input: bool) {
        let before = tracker.live();
        let Terms { gate_up, down, .. } = &self.terms;
        tracker.make(self.operand + self.terms.all().map(|term| term.b).sum::<u64>());
        let after_grad = tracker.live();
        // q, the gradient of the inner product, and the parts of its term.
        match down {
            None => tracker.make(self.inner),
            Some(term) => {
                tracker.make(self.wide(self.inner, self.wide_inner) + self.wide_operand);
                tracker.touch(self.tile);
                tracker.make(term.low);
                self.round(tracker, self.inner, self.wide_inner);
            }
        }
        tracker.touch(self.tile);
        tracker.make(self.inner);
        if of_input {
            tracker.touch(self.inner + if self.biases { self.wide_inner } else { 0 });
        }
        tracker.free(self.inner);
        if let Some(term) = down {
            // The result's gradient times the weights, and the inner product, in fp32.
            tracker
                .touch(self.wide(self.operand, self.wide_operand) + self.wide_inner + term.b.max(term.low));
        }
        tracker.release_since(after_grad);
        tracker.free(self.operand);
        if let Some(term) = gate_up {
            tracker.touch(self.operand);
            tracker.make(2 * self.wide_inner);
            tracker.touch(term.b / 2);
            tracker.make(2 * term.low);
            tracker.free(term.low);
            tracker.touch(self.operand + self.wide_operand);
            tracker.free(2 * self.wide_inner);
        }
        if of_input {
            let adapted = gate_up.is_some();
            tracker.make(if adapted { self.wide(self.operand, self.wide_operand) } else { self.operand });
            tracker.touch(self.tile);
            tracker.touch(if adapted && self.wide_operand > 0 { self.operand } else { 0 });
        }
        tracker.release_since(before);
    }

    /// In mixed precision, casts a gradient of x, and frees the cast of x if it was kept.
    fn cast_back(&self, tracker: &mut PeakTracker, was_kept: bool) {
        if self.mixed {
            tracker.make(self.narrow);
            tracker.free(self.operand);
            if was_kept {
                tracker.free(self.operand);
            }
        }
    }
}
