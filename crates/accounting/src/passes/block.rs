//! The forward and the backward of one block of Llama, Qwen2, Mistral or SmolLM3.
//!
//! With n tokens, d hidden, f feed-forward, and per element c bytes, the order in which `models` and autograd run it is
//!
//! ```text
//! forward    norm · q, k · rotate · v · attention · o · add · norm · gate, up · SiLU(gate) ⊙ up · down · add
//! backward   down · SiLU ⊙ · up, gate · norm · add · o · attention · v · rotate · k, q · norm · add
//! ```
//!
//! The backward of a product computes the gradients of its input and its weight while the gradient of its output and the kept
//! input still exist. A norm overwrites the gradient that it reads; SiLU(gate) ⊙ up needs two more gradients.
//!
//! The block's input and the gradient of its output are the caller's.

mod backward;
mod peaks;

use crate::exact::product;
use crate::lora::{LowRank, Projection};
use crate::memory::recipe::Recipe;
use crate::memory::{Item, nf4};
use crate::model::{Decoder, Linear};
use crate::passes::PeakTracker;
use crate::recompute::NormKernel;
use crate::{Error, exact};

pub(crate) use peaks::{KeptPasses, Passes, backward_bytes, kept_passes, passes, recomputed_bytes};

/// What is trained in a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trained<'a> {
    /// Nothing: the block is frozen, or in inference.
    Nothing,
    /// Adapters of frozen weights.
    Adapters(&'a LowRank),
    /// All weights.
    Everything,
}

/// Further settings that decide a block's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockOptions<'a> {
    /// Tokens of the batch.
    pub(crate) tokens: u64,
    /// Number formats.
    pub(crate) recipe: &'a Recipe,
    /// What a norm keeps.
    pub(crate) norm: NormKernel,
    /// What is trained.
    pub(crate) trained: Trained<'a>,
    /// Whether the gradients of trained tensors are counted as they arrive, and stay; otherwise they are the caller's.
    pub(crate) gradients: bool,
    /// Whether rows are packed: attention runs document by document, and its results are concatenated.
    pub(crate) documents: bool,
}

/// Bytes of one projection's tensors.
struct Sizes {
    adapted: bool,
    /// Input and output, in the base's dtype and in fp32.
    input: u64,
    output: u64,
    wide_input: u64,
    wide_output: u64,
    /// W in fp32, or the tile of a product with a quantized W that is multiplied in fp32, in forward and in backward.
    wide_weight: u64,
    wide_weight_back: u64,
    /// The tile of a product in the compute dtype with a quantized W that is not adapted.
    tile: u64,
    tile_back: u64,
    /// u, or du.
    low: u64,
    /// A byte for each element of the input.
    mask: u64,
    /// Gradients of what learns, as far as they are counted.
    gradients: u64,
}

/// One block with its options.
pub(crate) struct Block {
    /// Whether the base is in 16 bits, so that sums in fp32 are tensors of their own.
    rounds: bool,
    casts: bool,
    dropout: bool,
    keeps_output: bool,
    documents: bool,
    /// Whether all weights learn.
    everything: bool,
    projections: Vec<Sizes>,
    /// Gradient of a norm's weight, as far as it is counted.
    norm_gradient: u64,
    /// `[n, d]`
    pub(crate) narrow: u64,
    /// `[n, h·k]`
    query: u64,
    /// `[n, n_kv·k]`
    key: u64,
    /// `[n, f]`
    wide: u64,
    log_sum_exp: u64,
    /// One number for each token.
    statistic: u64,
}

/// Which parts of a block need a gradient, and so record a graph.
struct Recorded {
    input: bool,
    attention: bool,
    /// The residual stream between attention and feed-forward.
    middle: bool,
    feed_forward: bool,
}

impl Block {
    pub(crate) fn new(model: &Decoder, options: &BlockOptions<'_>) -> Result<Self, Error> {
        let BlockOptions { tokens, recipe, norm, trained, gradients, documents } = *options;
        let (everything, lora) = match trained {
            Trained::Nothing => (false, None),
            Trained::Adapters(lora) => (false, Some(lora)),
            Trained::Everything => (true, None),
        };
        let c = recipe.compute.storage_bits() / 8;
        let rounds = c < 4;
        let of = |width: u64, bytes: u64| product("bytes of an activation", &[tokens, width, bytes]);
        let sizes = |(which, linear): (Projection, Linear)| {
            let adapted = lora.is_some_and(|lora| lora.targets.has(which));
            let rank = lora.map_or(0, |lora| lora.rank);
            let weight = product("elements of a weight", &[linear.inputs, linear.outputs])?;
            let bias = if linear.bias { linear.outputs } else { 0 };
            let forward = |bytes| nf4::tile_bytes(linear.outputs, linear.inputs, bytes);
            let backward = |bytes| nf4::tile_bytes(linear.inputs, linear.outputs, bytes);
            let learns = match (gradients, everything, adapted) {
                (true, true, _) => {
                    recipe.gradients.bytes(exact::sum("elements of a weight", [weight, bias])?)?
                }
                (true, false, true) => {
                    let widths = exact::sum("widths of a projection", [linear.inputs, linear.outputs])?;
                    LowRank::WIDE.bytes(product("elements of an adapter", &[rank, widths])?)?
                }
                _ => 0,
            };
            Ok::<_, Error>(Sizes {
                adapted,
                input: of(linear.inputs, c)?,
                output: of(linear.outputs, c)?,
                wide_input: of(linear.inputs, 4)?,
                wide_output: of(linear.outputs, 4)?,
                wide_weight: if recipe.quantized {
                    forward(4)?
                } else {
                    product("bytes of a weight", &[weight, 4])?
                },
                wide_weight_back: if recipe.quantized {
                    backward(4)?
                } else {
                    product("bytes of a weight", &[weight, 4])?
                },
                tile: if recipe.quantized { forward(c)? } else { 0 },
                tile_back: if recipe.quantized { backward(c)? } else { 0 },
                low: of(rank, 4)?,
                mask: of(linear.inputs, 1)?,
                gradients: learns,
            })
        };
        let norm_gradient = if gradients && everything { recipe.gradients.bytes(model.hidden)? } else { 0 };
        Ok(Self {
            rounds,
            casts: rounds && lora.is_some_and(|lora| lora.on_cpu),
            dropout: lora.is_some_and(|lora| lora.dropout),
            keeps_output: norm == NormKernel::Output,
            documents,
            everything,
            projections: Projection::linears(model)?.into_iter().map(sizes).collect::<Result<_, _>>()?,
            norm_gradient,
            narrow: of(model.hidden, c)?,
            query: of(model.query_width()?, c)?,
            key: of(model.kv_width()?, c)?,
            wide: of(model.feed_forward, c)?,
            log_sum_exp: of(model.heads, 4)?,
            statistic: of(1, 4)?,
        })
    }

    fn of(&self, which: Projection) -> &Sizes {
        &self.projections[which as usize]
    }

    /// Whether one of them learns, itself or by an adapter, so that its input is kept.
    fn learns(&self, which: &[Projection]) -> bool {
        self.everything || which.iter().any(|one| self.of(*one).adapted)
    }

    fn recorded(&self, input: bool) -> Recorded {
        use Projection::{Down, Gate, Key, Output, Query, Up, Value};
        let attention = input || self.learns(&[Query, Key, Value]);
        let middle = attention || self.learns(&[Output]);
        Recorded { input, attention, middle, feed_forward: middle || self.learns(&[Gate, Up, Down]) }
    }

    /// Lists what the block keeps; `input` is whether a gradient continues to what is before it.
    pub(crate) fn kept(&self, input: bool) -> Vec<Item> {
        use Projection::{Down, Gate, Key, Output, Query, Up, Value};
        let of = self.recorded(input);
        let mut items = Vec::new();
        let mut keep = |condition: bool, name, bytes| {
            if condition {
                items.push(Item { name, bytes });
            }
        };
        keep(of.input && !self.keeps_output, "norm input", self.narrow);
        keep(of.input, "norm statistics", self.statistic);
        keep(self.keeps_first_output(&of), "query, key, value input", self.narrow);
        keep(of.attention, "query", self.query);
        keep(of.attention, "key and value", 2 * self.key);
        keep(of.attention, "log-sum-exp of scores", self.log_sum_exp);
        keep(of.attention || self.learns(&[Output]), "attention output", self.query);
        keep(self.keeps_both_outputs(&of), "attention output of each document", self.query);
        keep(of.middle && !self.keeps_output, "norm input", self.narrow);
        keep(of.middle, "norm statistics", self.statistic);
        keep(self.keeps_second_output(&of), "feed-forward input", self.narrow);
        let gates = of.middle || self.learns(&[Gate, Up]);
        keep(gates, "gate xW", self.wide);
        keep(gates, "up xV", self.wide);
        keep(self.learns(&[Down]), "SiLU(xW) ⊙ xV", self.wide);
        for which in [Query, Key, Value, Output, Gate, Up, Down] {
            keep(self.of(which).adapted, "low-rank products", self.of(which).low);
        }
        items
    }

    /// Bytes that the attention keeps between its input and its output, for a gradient of its input.
    pub(super) fn attention_bytes(&self) -> Result<u64, Error> {
        use Projection::{Key, Output, Query, Value};
        let low = [Query, Key, Value, Output].into_iter().map(|which| self.of(which));
        let low = exact::sum("bytes of a block", low.filter(|one| one.adapted).map(|one| one.low))?;
        let again = if self.documents && self.learns(&[Output]) { self.query } else { 0 };
        exact::sum("bytes of a block", [2 * self.query, 2 * self.key, self.log_sum_exp, low, again])
    }

    /// Whether the results of attention are kept before and after they are concatenated: before for its backward, after for that of
    /// the output's projection.
    fn keeps_both_outputs(&self, of: &Recorded) -> bool {
        self.documents && of.attention && self.learns(&[Projection::Output])
    }

    fn keeps_first_output(&self, of: &Recorded) -> bool {
        use Projection::{Key, Query, Value};
        of.input && self.keeps_output || self.learns(&[Query, Key, Value])
    }

    fn keeps_second_output(&self, of: &Recorded) -> bool {
        of.middle && self.keeps_output || self.learns(&[Projection::Gate, Projection::Up])
    }

    /// Leaves the block's output and, with `record`, what it keeps except its input; `input` as for [`Block::kept`].
    pub(crate) fn forward(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
        self.forward_with(tracker, [record; 2], input);
    }

    /// [`Block::forward`], which records the attention, and the rest, separately.
    pub(super) fn forward_with(
        &self,
        tracker: &mut PeakTracker,
        [attention, record]: [bool; 2],
        input: bool,
    ) {
        let of = self.recorded(input);
        tracker.make(self.narrow + self.statistic);
        if !(record && of.input) {
            tracker.free(self.statistic);
        }
        self.forward_attention(tracker, attention, input);
        // The residual stream is computed, then the branch is freed.
        tracker.make(self.narrow);
        tracker.free(self.narrow);
        // The input of a recomputed attention is kept in any case.
        if !(record && (!attention || self.keeps_first_output(&of))) {
            tracker.free(self.narrow);
        }
        self.forward_feed_forward(tracker, record, input);
    }

    /// From the queries' projection to the output's.
    pub(super) fn forward_attention(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
        use Projection::{Key, Output, Query, Value};
        let of = self.recorded(input);
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        self.project(tracker, Query, record);
        self.project(tracker, Key, record);
        // First the rotated ones, then the others are freed.
        tracker.make(self.query + self.key);
        tracker.free(self.query + self.key);
        self.project(tracker, Value, record);
        tracker.make(self.query + self.log_sum_exp);
        release(tracker, of.attention, self.log_sum_exp);
        if self.documents {
            tracker.make(self.query);
            if !(record && self.keeps_both_outputs(&of)) {
                tracker.free(self.query);
            }
        }
        self.project(tracker, Output, record);
        // Queries, keys, values and output exist until their function ends.
        release(tracker, of.attention, self.query + 2 * self.key);
        release(tracker, of.attention || self.learns(&[Output]), self.query);
    }

    fn forward_feed_forward(&self, tracker: &mut PeakTracker, record: bool, input: bool) {
        use Projection::{Down, Gate, Up};
        let of = self.recorded(input);
        let release = |tracker: &mut PeakTracker, kept: bool, bytes: u64| {
            if !(record && kept) {
                tracker.free(bytes);
            }
        };
        tracker.make(self.narrow + self.statistic);
        release(tracker, of.middle, self.statistic);
        self.project(tracker, Gate, record);
        self.project(tracker, Up, record);
        tracker.make(self.wide);
        release(tracker, of.middle || self.learns(&[Gate, Up]), 2 * self.wide);
        self.project(tracker, Down, record);
        release(tracker, self.learns(&[Down]), self.wide);
        tracker.make(self.narrow);
        tracker.free(self.narrow);
        release(tracker, self.keeps_second_output(&of), self.narrow);
        release(tracker, of.middle && !self.keeps_output, self.narrow);
    }

    /// Leaves the output, and u if it is kept.
    fn project(&self, tracker: &mut PeakTracker, which: Projection, record: bool) {
        let sizes = self.of(which);
        if !sizes.adapted {
            tracker.make(sizes.output);
            return tracker.touch(sizes.tile);
        }
        tracker.make(sizes.wide_output);
        if self.casts {
            tracker.touch(sizes.wide_input + sizes.wide_weight);
        }
        let wide_input = if self.rounds { sizes.wide_input } else { 0 };
        tracker.make(wide_input + sizes.low);
        if self.dropout {
            tracker.touch(sizes.mask + sizes.wide_input);
        }
        // s·u.
        tracker.touch(sizes.low);
        if self.rounds {
            tracker.make(sizes.output);
            tracker.free(sizes.wide_output);
        }
        tracker.free(wide_input);
        if !record {
            tracker.free(sizes.low);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{lora::Targets, presets};

    /// Every set of targets, in either dtype, with either norm, with and without a gradient of the input.
    #[test]
    fn allocations_are_freed_except_listed_tensors() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        for set in 1..1u32 << 7 {
            let one = |which: &Projection| set >> (*which as u32) & 1 == 1;
            let targets = Targets::of(&Projection::ALL.into_iter().filter(one).collect::<Vec<_>>());
            for flags in 0..16u32 {
                let flag = |bit: u32| flags >> bit & 1 == 1;
                let lora = LowRank { targets, dropout: flag(2), on_cpu: true, ..LowRank::default() };
                let options = BlockOptions {
                    tokens: 128,
                    recipe: if flag(0) { &Recipe::FP32 } else { &Recipe::BF16 },
                    norm: if flag(1) { NormKernel::Output } else { NormKernel::Fused },
                    trained: Trained::Adapters(&lora),
                    gradients: false,
                    documents: flag(0) && flag(3),
                };
                let block = Block::new(&model, &options).unwrap();
                let input = flag(3);
                let mut kept: u64 = block.kept(input).iter().map(|item| item.bytes).sum();
                if input && !block.keeps_output {
                    // The first norm's input is the caller's.
                    kept -= block.narrow;
                }
                let mut tracker = PeakTracker::default();
                block.forward(&mut tracker, false, input);
                assert_eq!(tracker.live(), u128::from(block.narrow), "{targets} {flags:b}");
                let mut tracker = PeakTracker::default();
                block.forward(&mut tracker, true, input);
                assert_eq!(tracker.live(), u128::from(kept + block.narrow), "{targets} {flags:b}");
                // The gradient of the output takes the output's place.
                block.backward(&mut tracker, input);
                let left = if input { block.narrow } else { 0 };
                assert_eq!(tracker.live(), u128::from(left), "{targets} {flags:b}");
            }
        }
    }
}
