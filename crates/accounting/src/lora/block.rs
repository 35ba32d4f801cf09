//! A ledger of one block's memory: forward and backward, operation by operation, in the order in which they run.
//!
//! The block's input and the gradient of its output are the caller's, and so are the gradients of the adapters, which stay.

use super::{LowRank, Projection};
use crate::estimate::Plan;
use crate::exact::product;
use crate::memory::Item;
use crate::model::{Decoder, Linear};
use crate::recompute::NormKernel;
use crate::{Error, exact};

/// Live bytes, and the most of them so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ledger {
    pub(super) live: u128,
    pub(super) peak: u128,
}

impl Ledger {
    fn make(&mut self, bytes: u64) {
        self.live += u128::from(bytes);
        self.peak = self.peak.max(self.live);
    }

    fn free(&mut self, bytes: u64) {
        self.live -= u128::from(bytes);
    }

    /// Exists for a moment.
    fn touch(&mut self, bytes: u64) {
        self.make(bytes);
        self.free(bytes);
    }
}

/// Bytes as an answer has them.
pub(super) fn checked(bytes: u128) -> Result<u64, Error> {
    u64::try_from(bytes).map_err(|_| Error::Overflow {
        what: "bytes of a block",
        bits: 64,
        terms: bytes.to_string(),
    })
}

/// Bytes of one projection's tensors.
struct Sizes {
    adapted: bool,
    /// Input and output, in the base's dtype and in fp32.
    input: u64,
    output: u64,
    wide_input: u64,
    wide_output: u64,
    /// W in fp32.
    wide_weight: u64,
    /// u, or du.
    low: u64,
    /// A byte for each element of the input.
    mask: u64,
}

/// One block under a plan.
pub(super) struct Block {
    /// Whether the base is in 16 bits, so that sums in fp32 are tensors of their own.
    rounds: bool,
    casts: bool,
    dropout: bool,
    keeps_output: bool,
    projections: Vec<Sizes>,
    /// `[n, d]`
    pub(super) narrow: u64,
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

/// What of a block needs a gradient, and so is recorded.
struct Recorded {
    input: bool,
    attention: bool,
    /// The residual stream between attention and feed-forward.
    middle: bool,
    feed_forward: bool,
}

impl Block {
    pub(super) fn new(lora: &LowRank, model: &Decoder, plan: &Plan) -> Result<Self, Error> {
        let tokens = plan.work.tokens()?;
        let c = plan.recipe.compute.storage_bits() / 8;
        let rounds = c < 4;
        let of = |width: u64, bytes: u64| product("bytes of an activation", &[tokens, width, bytes]);
        let sizes = |(which, linear): (Projection, Linear)| {
            Ok::<_, Error>(Sizes {
                adapted: lora.targets.has(which),
                input: of(linear.inputs, c)?,
                output: of(linear.outputs, c)?,
                wide_input: of(linear.inputs, 4)?,
                wide_output: of(linear.outputs, 4)?,
                wide_weight: product("bytes of a weight", &[linear.inputs, linear.outputs, 4])?,
                low: of(lora.rank, 4)?,
                mask: of(linear.inputs, 1)?,
            })
        };
        Ok(Self {
            rounds,
            casts: rounds && lora.on_cpu,
            dropout: lora.dropout,
            keeps_output: plan.norm == NormKernel::Output,
            projections: lora.linears(model)?.into_iter().map(sizes).collect::<Result<_, _>>()?,
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

    fn adapted(&self, which: &[Projection]) -> bool {
        which.iter().any(|one| self.of(*one).adapted)
    }

    fn recorded(&self, input: bool) -> Recorded {
        use Projection::{Down, Gate, Key, Output, Query, Up, Value};
        let attention = input || self.adapted(&[Query, Key, Value]);
        let middle = attention || self.adapted(&[Output]);
        Recorded { input, attention, middle, feed_forward: middle || self.adapted(&[Gate, Up, Down]) }
    }

    /// What the block keeps, tensor by tensor; `input`: whether a gradient flows on into what is in front of it.
    pub(super) fn kept(&self, input: bool) -> Vec<Item> {
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
        keep(of.attention || self.adapted(&[Output]), "attention output", self.query);
        keep(of.middle && !self.keeps_output, "norm input", self.narrow);
        keep(of.middle, "norm statistics", self.statistic);
        keep(self.keeps_second_output(&of), "feed-forward input", self.narrow);
        let gates = of.middle || self.adapted(&[Gate, Up]);
        keep(gates, "gate xW", self.wide);
        keep(gates, "up xV", self.wide);
        keep(self.adapted(&[Down]), "SiLU(xW) ⊙ xV", self.wide);
        for which in [Query, Key, Value, Output, Gate, Up, Down] {
            keep(self.of(which).adapted, "low-rank products", self.of(which).low);
        }
        items
    }

    fn keeps_first_output(&self, of: &Recorded) -> bool {
        use Projection::{Key, Query, Value};
        of.input && self.keeps_output || self.adapted(&[Query, Key, Value])
    }

    fn keeps_second_output(&self, of: &Recorded) -> bool {
        of.middle && self.keeps_output || self.adapted(&[Projection::Gate, Projection::Up])
    }

    /// Leaves the block's output and, where `record`, what it keeps but for its input; `input` as for [`Block::kept`].
    pub(super) fn forward(&self, ledger: &mut Ledger, record: bool, input: bool) {
        use Projection::{Down, Gate, Key, Output, Query, Up, Value};
        let of = self.recorded(input);
        let release = |ledger: &mut Ledger, kept: bool, bytes: u64| {
            if !(record && kept) {
                ledger.free(bytes);
            }
        };
        ledger.make(self.narrow + self.statistic);
        release(ledger, of.input, self.statistic);
        self.project(ledger, Query, record);
        self.project(ledger, Key, record);
        // Rotated ones, then the others go.
        ledger.make(self.query + self.key);
        ledger.free(self.query + self.key);
        self.project(ledger, Value, record);
        ledger.make(self.query + self.log_sum_exp);
        release(ledger, of.attention, self.log_sum_exp);
        self.project(ledger, Output, record);
        // Queries, keys, values and output are there until their function ends.
        release(ledger, of.attention, self.query + 2 * self.key);
        release(ledger, of.attention || self.of(Output).adapted, self.query);
        // The residual stream, then the branch goes.
        ledger.make(self.narrow);
        ledger.free(self.narrow);
        release(ledger, self.keeps_first_output(&of), self.narrow);

        ledger.make(self.narrow + self.statistic);
        release(ledger, of.middle, self.statistic);
        self.project(ledger, Gate, record);
        self.project(ledger, Up, record);
        ledger.make(self.wide);
        release(ledger, of.middle || self.adapted(&[Gate, Up]), 2 * self.wide);
        self.project(ledger, Down, record);
        release(ledger, self.of(Down).adapted, self.wide);
        ledger.make(self.narrow);
        ledger.free(self.narrow);
        release(ledger, self.keeps_second_output(&of), self.narrow);
        release(ledger, of.middle && !self.keeps_output, self.narrow);
    }

    /// Leaves the output, and u where it is kept.
    fn project(&self, ledger: &mut Ledger, which: Projection, record: bool) {
        let sizes = self.of(which);
        if !sizes.adapted {
            return ledger.make(sizes.output);
        }
        ledger.make(sizes.wide_output);
        if self.casts {
            ledger.touch(sizes.wide_input + sizes.wide_weight);
        }
        let wide_input = if self.rounds { sizes.wide_input } else { 0 };
        ledger.make(wide_input + sizes.low);
        if self.dropout {
            ledger.touch(sizes.mask + sizes.wide_input);
        }
        // s·u.
        ledger.touch(sizes.low);
        if self.rounds {
            ledger.make(sizes.output);
            ledger.free(sizes.wide_output);
        }
        ledger.free(wide_input);
        if !record {
            ledger.free(sizes.low);
        }
    }

    /// Consumes what a recorded forward kept, its input left out, and the gradient of the output; leaves that of the input
    /// where one is asked for.
    pub(super) fn backward(&self, ledger: &mut Ledger, input: bool) {
        use Projection::{Down, Gate, Key, Output, Query, Up, Value};
        let of = self.recorded(input);
        let drop_if = |ledger: &mut Ledger, kept: bool, bytes: u64| {
            if kept {
                ledger.free(bytes);
            }
        };
        let gates = of.middle || self.adapted(&[Gate, Up]);
        if of.feed_forward {
            self.project_back(ledger, Down, gates);
        }
        drop_if(ledger, self.of(Down).adapted, self.wide);
        if gates {
            // One gradient takes the place of the product's; then gate and up go.
            ledger.make(self.wide);
            ledger.free(2 * self.wide);
            self.project_back(ledger, Up, of.middle);
            ledger.free(self.wide);
            self.project_back(ledger, Gate, of.middle);
            ledger.free(self.wide);
            drop_if(ledger, of.middle, self.narrow);
        }
        drop_if(ledger, self.keeps_second_output(&of), self.narrow);
        if of.middle {
            // The norm's is made in place, and added to the residual stream's.
            ledger.free(self.statistic);
            drop_if(ledger, !self.keeps_output, self.narrow);
            ledger.make(self.narrow);
            ledger.free(2 * self.narrow);
            self.project_back(ledger, Output, of.attention);
        }
        drop_if(ledger, of.attention || self.of(Output).adapted, self.query);
        if of.attention {
            ledger.make(self.query + 2 * self.key);
            ledger.free(self.query);
            ledger.free(self.query + 2 * self.key + self.log_sum_exp);
            self.project_back(ledger, Value, of.input);
            ledger.free(self.key);
            ledger.touch(self.query + self.key);
            for (which, gradient) in [(Key, self.key), (Query, self.query)] {
                self.project_back(ledger, which, of.input);
                ledger.free(gradient);
                drop_if(ledger, of.input, self.narrow);
            }
        }
        drop_if(ledger, self.keeps_first_output(&of), self.narrow);
        if of.input {
            ledger.free(self.statistic);
            ledger.make(self.narrow);
            ledger.free(2 * self.narrow);
        } else {
            ledger.free(self.narrow);
        }
    }

    /// Leaves the gradient of the input where it is asked for; takes u away.
    fn project_back(&self, ledger: &mut Ledger, which: Projection, of_input: bool) {
        let sizes = self.of(which);
        if !sizes.adapted {
            if of_input {
                ledger.make(sizes.input);
            }
            return;
        }
        let before = ledger.live;
        if self.rounds {
            ledger.make(sizes.wide_output);
        }
        ledger.make(sizes.low);
        if self.dropout {
            ledger.touch(sizes.mask + sizes.wide_input);
            ledger.make(sizes.wide_input);
            if of_input {
                ledger.make(sizes.wide_input);
            }
            ledger.free(sizes.wide_input);
        } else {
            if self.rounds {
                ledger.touch(sizes.wide_input);
            }
            if of_input {
                ledger.make(sizes.wide_input);
            }
        }
        if of_input && self.casts {
            ledger.touch(sizes.wide_output + sizes.wide_weight);
        }
        if of_input && self.rounds {
            ledger.make(sizes.input);
        }
        let left = if of_input { sizes.input } else { 0 };
        ledger.live = before + u128::from(left);
        ledger.free(sizes.low);
    }
}

/// The most that a block's backward takes, with what it keeps there already: beyond that and the gradient of its output.
pub(super) fn backward_bytes(block: &Block, input: bool) -> Result<u64, Error> {
    let mut ledger = Ledger::default();
    ledger.make(exact::sum("bytes of a block", block.kept(input).iter().map(|item| item.bytes))?);
    ledger.make(block.narrow);
    let start = ledger.live;
    block.backward(&mut ledger, input);
    checked(ledger.peak - start)
}

/// The same for a block of which its input alone is kept, and which runs again first.
pub(super) fn recomputed_bytes(block: &Block, input: bool) -> Result<u64, Error> {
    let mut ledger = Ledger::default();
    block.forward(&mut ledger, true, input);
    // The second output is there until the backward is done, beside the gradient of the first.
    ledger.make(block.narrow);
    block.backward(&mut ledger, input);
    checked(ledger.peak - u128::from(block.narrow))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder_flops::Workload;
    use crate::memory::recipe::Recipe;
    use crate::{lora::Targets, presets};

    /// Every set of targets, in either dtype, with either norm, with and without a gradient of the input.
    #[test]
    fn what_is_made_is_freed_and_what_is_kept_is_listed() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        for set in 1..1u32 << 7 {
            let one = |which: &Projection| set >> (*which as u32) & 1 == 1;
            let targets = Targets::of(&Projection::ALL.into_iter().filter(one).collect::<Vec<_>>());
            for flags in 0..16u32 {
                let flag = |bit: u32| flags >> bit & 1 == 1;
                let plan = Plan {
                    work: Workload { batch: 2, sequence: 64 },
                    recipe: if flag(0) { Recipe::FP32 } else { Recipe::BF16 },
                    norm: if flag(1) { NormKernel::Output } else { NormKernel::Fused },
                    ..Plan::default()
                };
                let lora = LowRank { targets, dropout: flag(2), on_cpu: true, ..LowRank::default() };
                let block = Block::new(&lora, &model, &plan).unwrap();
                let input = flag(3);
                let mut kept: u64 = block.kept(input).iter().map(|item| item.bytes).sum();
                if input && !block.keeps_output {
                    // The first norm's input is the caller's.
                    kept -= block.narrow;
                }
                let mut ledger = Ledger::default();
                block.forward(&mut ledger, false, input);
                assert_eq!(ledger.live, u128::from(block.narrow), "{targets} {flags:b}");
                let mut ledger = Ledger::default();
                block.forward(&mut ledger, true, input);
                assert_eq!(ledger.live, u128::from(kept + block.narrow), "{targets} {flags:b}");
                // The gradient of the output takes the output's place.
                block.backward(&mut ledger, input);
                let left = if input { block.narrow } else { 0 };
                assert_eq!(ledger.live, u128::from(left), "{targets} {flags:b}");
            }
        }
    }
}
