//! The cost of a decoder's layers under each choice: the input of [`least_recomputation`](super::least_recomputation).
//!
//! | [`Kept`] | kept until the backward | recomputed | host |
//! |---|---|---|---|
//! | `Everything` | all of the block | – | |
//! | `Products` | inputs and results of products, the residual stream | norms, activation functions, their products | |
//! | `Attention` | the attention's tensors and the feed-forward's input | the whole feed-forward layer, with its norm | |
//! | `FeedForward` | the feed-forward layer's tensors and the attention's input | the whole attention, with its norm | |
//! | `Input` | the block's input | the whole block | |
//! | `InputOnHost` | nothing | the whole block | the block's input |
//!
//! In addition each backward needs the gradients inside a block ([`working_set`](crate::memory::working_set)). Recomputed
//! products take `FLOPs / rate` (the causal count); a tensor that is recomputed elementwise is written once and its source read
//! once, `2 · bytes / bandwidth`. An input on the host is copied while other layers compute, and costs what is not hidden by
//! the forward and the backward of one layer:
//!
//! ```text
//! max(0, x/link - forward) + max(0, x/link - (2·forward + again))
//! ```
//!
//! and a second input is on the device while it is prefetched.
//!
//! All seconds are beyond those of the block with everything kept under the same [`ActivationChoices`], whose own recomputation
//! (a flash kernel's scores, a SwiGLU level's products) is the same under every choice here. A tensor that two products of a
//! block read counts as kept once, as in [`activations`].

use super::{Choice, LayerCost};
use crate::decoder_flops::{Workload, step};
use crate::memory::activations::{self, ActivationChoices};
use crate::memory::working_set::{Moments, block_moments};
use crate::memory::{Item, total};
use crate::model::{Decoder, Part};
use crate::recompute::Recompute;
use crate::{Error, exact};

/// What a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kept {
    /// Everything that the backward needs.
    Everything,
    /// Inputs and results of products; elementwise operations are recomputed.
    Products,
    /// The attention; the feed-forward layer is recomputed.
    Attention,
    /// The feed-forward layer; the attention is recomputed.
    FeedForward,
    /// The block's input; the block is recomputed.
    Input,
    /// Nothing on the device: the block's input is on the host, and the block is recomputed.
    InputOnHost,
}

impl Kept {
    /// All choices, the one that keeps most first.
    pub const ALL: [Self; 6] = [
        Self::Everything,
        Self::Products,
        Self::Attention,
        Self::FeedForward,
        Self::Input,
        Self::InputOnHost,
    ];

    /// A short name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Everything => "everything",
            Self::Products => "products",
            Self::Attention => "attention",
            Self::FeedForward => "feed-forward",
            Self::Input => "input",
            Self::InputOnHost => "input-on-host",
        }
    }
}

/// A device's rates of computing and copying. All positive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// FLOP/s of matrix products, as measured.
    pub flops: f64,
    /// Bytes per second of the device's memory, read and written.
    pub bandwidth: f64,
    /// Bytes per second between host and device, one way.
    pub link: f64,
}

/// Returns the cost of one block of `model` under each of `ways`, which replaces the recomputation of whole blocks in
/// `choices`.
///
/// # Errors
///
/// A rate that is not positive, an empty batch, counts beyond 64 bits.
pub fn layer_choices(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
    rates: Rates,
    ways: &[Kept],
) -> Result<Vec<Choice<Kept>>, Error> {
    for rate in [rates.flops, rates.bandwidth, rates.link] {
        if !(rate > 0.0 && rate.is_finite()) {
            return Err(Error::OutOfRange {
                what: "a rate",
                given: rate,
                range: "the positive numbers",
                remedy: "give FLOP/s of products and B/s of memory and link, as measured or from a data sheet",
            });
        }
    }
    let mut choices = *choices;
    choices.recomputation.checkpoint = Recompute::None;
    let block = Block::new(model, work, &choices, rates)?;
    ways.iter().map(|&of| Ok(Choice { of, cost: block.cost(of)? })).collect()
}

/// Bytes and seconds of one block that keeps everything.
struct Block {
    input: u64,
    /// Bytes of the input, as far as it is among the kept tensors.
    shared: u64,
    /// Kept by the attentions and the feed-forward layer, and how much of each is elementwise.
    attention: u64,
    attention_elementwise: u64,
    feed_forward: u64,
    feed_forward_elementwise: u64,
    gradients: Moments,
    attention_seconds: f64,
    feed_forward_seconds: f64,
    rates: Rates,
}

impl Block {
    fn new(
        model: &Decoder,
        work: Workload,
        choices: &ActivationChoices,
        rates: Rates,
    ) -> Result<Self, Error> {
        let attention = activations::attention_branch(model, work, choices)?;
        let feed_forward = activations::feed_forward_branch(model, work, choices)?;
        let mut again: Vec<Item> = attention.iter().copied().filter(activations::is_elementwise).collect();
        if !model.family.has_final_norm() {
            // Norms come last, so the first projections read the block's input, which nothing else keeps.
            let first = again.iter().position(|item| item.name == activations::QKV_INPUT);
            first.map(|first| again.remove(first));
        }
        let wide: Vec<Item> = feed_forward.iter().copied().filter(activations::is_elementwise).collect();
        let rows = step(model, work, &choices.recomputation)?.rows;
        let seconds = |part| {
            let flops = rows.iter().filter(|row| row.part == part).map(|row| row.forward.causal);
            let flops = exact::wide_sum("FLOPs of the blocks", flops)?;
            Ok::<_, Error>(flops as f64 / model.layers as f64 / rates.flops)
        };
        Ok(Self {
            input: activations::block_input(model, work, choices)?.bytes,
            shared: activations::input_kept_inside(model, work, choices)?,
            attention: total(&attention)?,
            attention_elementwise: total(&again)?,
            feed_forward: total(&feed_forward)?,
            feed_forward_elementwise: total(&wide)?,
            gradients: block_moments(model, work, choices)?,
            attention_seconds: seconds(Part::Attention)?,
            feed_forward_seconds: seconds(Part::FeedForward)?,
            rates,
        })
    }

    fn cost(&self, kept: Kept) -> Result<LayerCost, Error> {
        let whole = exact::sum(WHAT, [self.attention, self.feed_forward])?;
        let elementwise = self.attention_elementwise + self.feed_forward_elementwise;
        // What the attention's and the feed-forward layer's backward recompute, and what the latter had kept and is freed when
        // the former runs.
        let moment = |attention: u64, feed_forward: u64, freed: u64| {
            let Moments { stream, attention: core, feed_forward: wide } = self.gradients;
            let core = exact::sum(WHAT, [core, attention])?.saturating_sub(freed);
            let wide = exact::sum(WHAT, [wide, feed_forward])?;
            exact::sum(WHAT, [stream, core.max(wide)])
        };
        let whole_moment = moment(0, 0, self.feed_forward)?;
        let none = LayerCost::default();
        Ok(match kept {
            Kept::Everything => LayerCost { held_bytes: whole, transient_bytes: whole_moment, ..none },
            Kept::Products => LayerCost {
                held_bytes: whole - elementwise,
                transient_bytes: moment(
                    self.attention_elementwise,
                    self.feed_forward_elementwise,
                    self.feed_forward - self.feed_forward_elementwise,
                )?,
                recompute_seconds: self.passes(elementwise),
                ..none
            },
            Kept::Attention => LayerCost {
                held_bytes: exact::sum(WHAT, [self.attention, self.input])?,
                transient_bytes: moment(0, self.feed_forward - self.shared, self.input)?,
                recompute_seconds: self.feed_forward_seconds + self.passes(self.feed_forward_elementwise),
                ..none
            },
            // The feed-forward layer's tensors are freed when the attention is computed again.
            Kept::FeedForward => LayerCost {
                held_bytes: exact::sum(WHAT, [self.feed_forward, self.input])?,
                transient_bytes: moment(self.attention - self.shared, 0, self.feed_forward)?,
                recompute_seconds: self.attention_seconds + self.passes(self.attention_elementwise),
                ..none
            },
            // A recomputed block is complete before its backward starts.
            Kept::Input => LayerCost {
                held_bytes: self.input,
                transient_bytes: exact::sum(WHAT, [whole_moment, whole - self.shared])?,
                recompute_seconds: self.again(elementwise),
                ..none
            },
            Kept::InputOnHost => LayerCost {
                held_bytes: 0,
                host_bytes: self.input,
                transient_bytes: exact::sum(
                    WHAT,
                    [whole_moment, whole - self.shared, self.input, self.input],
                )?,
                recompute_seconds: self.again(elementwise) + self.unhidden(self.again(elementwise)),
            },
        })
    }

    fn again(&self, elementwise: u64) -> f64 {
        self.attention_seconds + self.feed_forward_seconds + self.passes(elementwise)
    }

    fn passes(&self, elementwise: u64) -> f64 {
        2.0 * elementwise as f64 / self.rates.bandwidth
    }

    /// Seconds of copying the input out and back that no computation hides.
    fn unhidden(&self, again: f64) -> f64 {
        let way = self.input as f64 / self.rates.link;
        let forward = self.attention_seconds + self.feed_forward_seconds;
        (way - forward).max(0.0) + (way - 2.0 * forward - again).max(0.0)
    }
}

const WHAT: &str = "bytes of a layer";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation_plan::{Search, least_recomputation, peak_bytes};
    use crate::memory::recipe::Recipe;
    use crate::memory::working_set::block_backward;
    use crate::model::{Family, Shape};
    use crate::recompute::NormKernel;
    use crate::{estimate, presets};

    const RATES: Rates = Rates { flops: 400e12, bandwidth: 2e12, link: 25e9 };

    fn costs(model: &str, work: Workload, choices: &ActivationChoices) -> Vec<LayerCost> {
        let model = presets::find(model).unwrap();
        let choices = layer_choices(&model, work, choices, RATES, &Kept::ALL).unwrap();
        choices.iter().map(|choice| choice.cost).collect()
    }

    /// By hand, per token, bf16, d = 4096, f = 14336: two norm and two projection inputs of d, Q and output of d, K and
    /// V of d/4, 4 f, and statistics.
    #[test]
    fn llama_3_8b_by_hand() {
        let work = Workload { batch: 2, sequence: 4096 };
        let choices = estimate::Plan::default().activation_choices();
        let found = costs("llama-3-8b", work, &choices);
        let (d, f, statistics) = (2 * 4096, 2 * 14336, 4 * 32 + 2 * 4);
        let tokens = 8192;
        let everything = 4 * d + 2 * d + 2 * d / 4 + statistics + 4 * f;
        let held = [
            everything,
            everything - 2 * d - 2 * f,
            (2 * d + 2 * d + 2 * d / 4 + statistics - 4) + d,
            2 * d + 4 * f + 4 + d,
            d,
            0,
        ];
        assert_eq!(found.iter().map(|cost| cost.held_bytes).collect::<Vec<_>>(), held.map(|b| b * tokens));
        // Gradients: residual and branch, and two wide ones.
        let gradients = 2 * d + 2 * f;
        let transient = [
            gradients,
            gradients + d + 2 * f,
            gradients + d + 4 * f + 4,
            gradients + everything - d,
            gradients + everything + d,
        ];
        let transients: Vec<u64> = found.iter().map(|cost| cost.transient_bytes).collect();
        assert_eq!(transients, transient.map(|bytes| bytes * tokens));
        assert_eq!(found.iter().map(|cost| cost.host_bytes).sum::<u64>(), d * tokens);

        let product = 2.0 * tokens as f64 * 4096.0 * 14336.0;
        let norms_and_silu = 2.0 * (tokens * (2 * d + 2 * f)) as f64 / RATES.bandwidth;
        let again = found[3].recompute_seconds;
        let mlp = 3.0 * product / RATES.flops + 2.0 * (tokens * (d + 2 * f)) as f64 / RATES.bandwidth;
        for (ours, hand) in [(found[1].recompute_seconds, norms_and_silu), (found[2].recompute_seconds, mlp)]
        {
            assert!((ours / hand - 1.0).abs() < 1e-12, "{ours} {hand}");
        }
        assert!(found[0].recompute_seconds == 0.0 && again > mlp && again < 2.0 * mlp);
        // 64 MiB in 2.7 ms over the link, behind a forward of 9 ms.
        assert_eq!(found[4].recompute_seconds, again);
    }

    /// Peaks of forward and backward in torch 2.11 on a CPU, by its profiler, of six blocks of `F.rms_norm`,
    /// `scaled_dot_product_attention` and a SwiGLU of plain operations in fp32, 4 × 512 tokens, d = 128, f = 352, 8 heads
    /// and 4 key-value heads of 16; gradients of weights dropped as they came. `E`: a block that keeps everything; `A`:
    /// its feed-forward layer with its norm in `torch.utils.checkpoint`; `I`: the whole block in it. The first block's
    /// input was there before.
    #[test]
    fn what_torch_needs_for_a_stack() {
        let model = Decoder::new(Shape {
            family: Family::Llama,
            vocabulary: 10,
            context: 512,
            embedding: 128,
            hidden: 128,
            layers: 6,
            heads: 8,
            kv_heads: 4,
            head_dim: 16,
            feed_forward: 352,
            tied: true,
            attention_bias: false,
            mlp_bias: false,
        })
        .unwrap();
        let plan =
            estimate::Plan { recipe: Recipe::FP32, norm: NormKernel::Composed, ..estimate::Plan::default() };
        let work = Workload { batch: 4, sequence: 512 };
        let ways = [Kept::Everything, Kept::Attention, Kept::Input];
        let costs = layer_choices(&model, work, &plan.activation_choices(), RATES, &ways).unwrap();
        let input = 4 * 4 * 512 * 128;
        for (stack, measured) in [
            ("EEEEEE", 133_136_384),
            ("IIIIII", 33_142_400),
            ("IIIEEE", 73_136_960),
            ("EEEIII", 93_141_824),
            ("IIIIIE", 33_137_344),
            ("EIEIEI", 93_141_824),
            ("AAAAAA", 64_968_320),
            ("IAAAAE", 58_598_080),
            ("IIAAEE", 65_867_520),
        ] {
            let chosen = stack.chars().map(|letter| costs["EAI".find(letter).unwrap()].cost);
            let predicted = peak_bytes(chosen).unwrap() - input;
            // What is left is gradients of single weights, which come and go.
            let off = measured as f64 / predicted as f64 - 1.0;
            assert!((0.0..0.001).contains(&off), "{stack}: {predicted}, measured {measured}");
        }
    }

    #[test]
    fn a_slow_link_is_waited_for() {
        let model = presets::find("llama-3-8b").unwrap();
        let work = Workload { batch: 1, sequence: 512 };
        let choices = estimate::Plan::default().activation_choices();
        let seconds = |link| {
            let rates = Rates { link, ..RATES };
            let ways = [Kept::Input, Kept::InputOnHost];
            let found = layer_choices(&model, work, &choices, rates, &ways).unwrap();
            found[1].cost.recompute_seconds - found[0].cost.recompute_seconds
        };
        let bytes = 2.0 * 4096.0 * 512.0;
        assert_eq!(seconds(1e12), 0.0);
        // One second each way, of which next to nothing is hidden.
        assert!((seconds(bytes) - 2.0).abs() < 0.02, "{}", seconds(bytes));
    }

    /// With everything kept or recomputed, the plan's peak is that of the estimate at the same moments.
    #[test]
    fn plans_agree_with_the_estimate() {
        for (name, _) in presets::ALL {
            let model = presets::find(name).unwrap();
            for recipe in [Recipe::BF16, Recipe::FP32, Recipe::AMP_BF16] {
                for checkpoint in [Recompute::None, Recompute::Full] {
                    let work = Workload { batch: 2, sequence: 256 };
                    let mut choices =
                        estimate::Plan { recipe, ..estimate::Plan::default() }.activation_choices();
                    let kept = if checkpoint == Recompute::Full { Kept::Input } else { Kept::Everything };
                    let one = layer_choices(&model, work, &choices, RATES, &[kept]).unwrap();
                    choices.recomputation.checkpoint = checkpoint;
                    let block = total(&activations::block(&model, work, &choices).unwrap()).unwrap();
                    let backward = total(&block_backward(&model, work, &choices).unwrap()).unwrap();
                    let plan = least_recomputation(model.layers as usize, &one, u64::MAX).unwrap();
                    assert_eq!(plan.peak_bytes, model.layers * block + backward, "{name} {}", recipe.name);
                }
            }
        }
    }

    /// Each choice keeps less than the one before. The last block is always kept: recomputing it takes as much.
    #[test]
    fn a_budget_between_the_ways_mixes_them() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let work = Workload { batch: 4, sequence: 1024 };
        let choices = estimate::Plan::default().activation_choices();
        let ways = layer_choices(&model, work, &choices, RATES, &Kept::ALL[..4]).unwrap();
        assert!(ways.is_sorted_by(|a, b| a.cost.held_bytes > b.cost.held_bytes));
        assert!(ways.is_sorted_by(|a, b| a.cost.recompute_seconds < b.cost.recompute_seconds));
        let peak = |kept: usize| {
            let cost = ways[kept].cost;
            model.layers * cost.held_bytes + cost.transient_bytes
        };
        let middle = (peak(0) + peak(3)) / 2;
        let plan = least_recomputation(model.layers as usize, &ways, middle).unwrap();
        assert!(plan.layers.contains(&Kept::Products) && plan.peak_bytes <= middle);
        for budget in [peak(3), middle, peak(0)] {
            let plan = least_recomputation(model.layers as usize, &ways, budget).unwrap();
            assert_eq!(plan.layers.last(), Some(&Kept::Everything), "{budget}");
        }
    }

    /// Costs of real layers never make the search count in coarser units.
    #[test]
    fn plans_of_known_models_are_exact() {
        for (name, _) in presets::ALL {
            let model = presets::find(name).unwrap();
            let choices = estimate::Plan::default().activation_choices();
            for sequence in [512, 1000] {
                let work = Workload { batch: 3, sequence };
                let ways = layer_choices(&model, work, &choices, RATES, &Kept::ALL).unwrap();
                let search = Search::new(model.layers as usize, &ways).unwrap();
                let (least, all) = (search.least_budget(), model.layers * ways[0].cost.held_bytes);
                for eighth in 0..8 {
                    let budget = least + all.saturating_sub(least) / 8 * eighth;
                    let found = search.least_units(budget, None);
                    assert!(matches!(found, Ok(Some(_))), "{name} {sequence} {eighth}");
                }
            }
        }
    }

    #[test]
    fn rates_must_be_positive() {
        let model = presets::find("gpt2").unwrap();
        let choices = estimate::Plan::default().activation_choices();
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            for rates in [
                Rates { flops: rate, ..RATES },
                Rates { bandwidth: rate, ..RATES },
                Rates { link: rate, ..RATES },
            ] {
                let work = Workload { batch: 1, sequence: 64 };
                assert!(layer_choices(&model, work, &choices, rates, &Kept::ALL).is_err());
            }
        }
    }
}
