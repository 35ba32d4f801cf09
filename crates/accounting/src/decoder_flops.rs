//! FLOPs of a whole decoder, forward and backward, compared with the rule of thumb.
//!
//! For `T = b·t` tokens, with `N` weights in matrix products ([`Decoder::product_parameters`]), `L` blocks of `a`
//! attentions (one, except in [`Gpt2Like`](decoder::Family::Gpt2Like)), `h` heads of `k`:
//!
//! ```text
//! forward    = 2·N·T + 4·a·L·b·h·k·pairs     pairs = t² (dense) or t·(t+1)/2 (causal), within the window in layers with one
//! backward   = 2 · forward                   every product's two factors need their gradient; of linear attention: delta_rule
//! recomputed = the recomputation of the backward, by choice
//! ```
//!
//! The rule "forward 2·N·D, backward 4·N·D, together 6·N·D" (`D` tokens, `N` parameters) is the first term alone.
//! It fails
//! - **by attention**, whose FLOPs per token grow with the sequence and have no weights: PaLM's correction is
//!   `+ 12·L·h·k·t` per trained token;
//! - **by embeddings**, if `N` includes them: an input embedding has parameters but no FLOPs; a tied one counts once
//!   and is used in one product, so that the rule with all parameters happens to be right;
//! - **by recomputation**: full recomputation adds another forward of the blocks, so that the hardware does 8·N·D.
//!   Model FLOPs utilization counts 6·N·D of them, hardware FLOPs utilization all.
//!
//! ```
//! use accounting::decoder_flops::{Recomputation, Workload, step};
//! use accounting::presets;
//!
//! let work = Workload { batch: 1, sequence: 1024 };
//! let flops = step(&presets::find("cs336-xl")?, work, &Recomputation::default())?;
//! assert_eq!(flops.forward.dense, 4_513_336_524_800);
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::delta_rule::{self, RuleFlops};
use crate::exact::{positive, wide_sum};
use crate::flops::{AttentionCore, Convention, MatrixProduct};
use crate::model::{Decoder, Part};
use crate::recompute::{AttentionKernel, Recompute, SwigluLevel};
use crate::{Error, exact};

/// The batch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub sequence: u64,
}

impl Workload {
    /// Returns the tokens of the step, `b·t`.
    pub fn tokens(self) -> Result<u64, Error> {
        positive("batch", self.batch)?;
        positive("sequence", self.sequence)?;
        exact::product("tokens of a step", &[self.batch, self.sequence])
    }
}

/// The recomputation of a backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recomputation {
    /// The attention's kernel.
    pub attention: AttentionKernel,
    /// The checkpoints around blocks.
    pub checkpoint: Recompute,
    /// The tensors that a SwiGLU keeps. No effect in a family without SwiGLU.
    pub swiglu: SwigluLevel,
}

/// FLOPs in both [conventions](Convention).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// All pairs of positions.
    pub dense: u128,
    /// The pairs that the causal mask leaves.
    pub causal: u128,
}

impl Flops {
    pub(crate) fn both(flops: u128) -> Self {
        Self { dense: flops, causal: flops }
    }

    pub(crate) fn of_core(count: impl Fn(Convention) -> Result<u128, Error>) -> Result<Self, Error> {
        Ok(Self { dense: count(Convention::Dense)?, causal: count(Convention::Causal)? })
    }

    pub(crate) fn times(self, factor: u64) -> Result<Self, Error> {
        let times = |flops: u128| {
            flops.checked_mul(factor.into()).ok_or_else(|| Error::Overflow {
                what: "FLOPs of a step",
                bits: 128,
                terms: format!("{flops} × {factor}"),
            })
        };
        Ok(Self { dense: times(self.dense)?, causal: times(self.causal)? })
    }

    pub(crate) fn sum(terms: impl IntoIterator<Item = Self>) -> Result<Self, Error> {
        let (dense, causal): (Vec<_>, Vec<_>) = terms.into_iter().map(|f| (f.dense, f.causal)).unzip();
        Ok(Self { dense: wide_sum("FLOPs of a step", dense)?, causal: wide_sum("FLOPs of a step", causal)? })
    }
}

/// A kind of product of a decoder's forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlopsRow {
    /// The module's name, `Q·Kᵀ` or `P·V`.
    pub name: String,
    /// The part of the model.
    pub part: Part,
    /// Whether a factor is a weight. The products of an attention's core have none.
    pub has_weight: bool,
    /// How often a forward computes it.
    pub times: u64,
    /// FLOPs of all these products.
    pub forward: Flops,
}

/// FLOPs of one training step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepFlops {
    /// The forward, product by product.
    pub rows: Vec<FlopsRow>,
    /// Forward.
    pub forward: Flops,
    /// Backward, without recomputation.
    pub backward: Flops,
    /// Recomputation in the backward.
    pub recomputed: Flops,
}

impl StepFlops {
    /// Returns the FLOPs of model FLOPs utilization: forward and backward, without recomputation.
    pub fn model(&self) -> Result<Flops, Error> {
        Flops::sum([self.forward, self.backward])
    }

    /// Returns the FLOPs of the hardware, with recomputation.
    pub fn hardware(&self) -> Result<Flops, Error> {
        Flops::sum([self.forward, self.backward, self.recomputed])
    }
}

/// Returns the FLOPs of one training step of `model`.
pub fn step(model: &Decoder, work: Workload, recomputation: &Recomputation) -> Result<StepFlops, Error> {
    let rows = forward_rows(model, work)?;
    let forward = Flops::sum(rows.iter().map(|row| row.forward))?;
    let others = Flops::sum(rows.iter().filter(|row| row.name != DELTA_RULE).map(|row| row.forward))?;
    let rule = |of_layer: fn(RuleFlops) -> u128| match &model.linear {
        Some(linear) => Flops::both(of_layer(delta_rule::layer(linear, work)?)).times(linear.layers),
        None => Ok(Flops::default()),
    };
    let backward = Flops::sum([others.times(2)?, rule(|flops| flops.backward)?])?;
    let recomputed =
        Flops::sum([recomputed(model, work, recomputation, &rows)?, rule(|flops| flops.recomputed)?])?;
    Ok(StepFlops { rows, forward, backward, recomputed })
}

/// The row of linear attention's products of chunks.
const DELTA_RULE: &str = "delta rule";

/// Returns the products of one forward. Refuses sequences longer than a table of learned positions.
fn forward_rows(model: &Decoder, work: Workload) -> Result<Vec<FlopsRow>, Error> {
    let tokens = work.tokens()?;
    check_positions(model, work.sequence)?;
    let linear_row = |linear: &crate::model::Linear, times: u64| {
        let product = MatrixProduct::new(tokens, linear.inputs, linear.outputs);
        Ok::<_, Error>(FlopsRow {
            name: linear.name.into(),
            part: linear.part,
            has_weight: true,
            times,
            forward: Flops::both(product.flops()?).times(times)?,
        })
    };
    let mut rows = Vec::new();
    for (layers, linear) in model.all_block_linears()? {
        let row = linear_row(&linear, layers)?;
        // Layers of several kinds have a product of one name each.
        match rows.iter_mut().find(|other: &&mut FlopsRow| other.name == row.name) {
            Some(other) => {
                other.times += row.times;
                other.forward = Flops::sum([other.forward, row.forward])?;
            }
            None => rows.push(row),
        }
    }
    let full = model.layers - model.linear.map_or(0, |linear| linear.layers);
    let times = exact::product("attentions of a model", &[full, model.family.attentions()])?;
    let windowed = model.windows.map_or(0, |windows| windows.layers);
    let head_dim = model.gemma4.map_or(model.head_dim, |sizes| sizes.head_dim);
    let scores = Flops::of_core(|convention| core(model, head_dim, work).score_flops(convention))?;
    let mut all = scores.times(times - windowed)?;
    if let Some(windows) = model.windows {
        let core = core(model, model.head_dim, work);
        let within = |convention| core.windowed_score_flops(windows.tokens, convention);
        all = Flops::sum([all, Flops::of_core(within)?.times(windows.layers)?])?;
    }
    for name in ["Q·Kᵀ", "P·V"] {
        let forward = all;
        rows.push(FlopsRow { name: name.into(), part: Part::Attention, has_weight: false, times, forward });
    }
    if let Some(linear) = &model.linear {
        rows.push(FlopsRow {
            name: DELTA_RULE.into(),
            part: Part::Attention,
            has_weight: false,
            times: linear.layers,
            forward: Flops::both(delta_rule::layer(linear, work)?.forward).times(linear.layers)?,
        });
    }
    for linear in model.outer_linears() {
        rows.push(linear_row(&linear, 1)?);
    }
    Ok(rows)
}

/// The attention of heads of this width.
fn core(model: &Decoder, head_dim: u64, work: Workload) -> AttentionCore {
    AttentionCore { batch: work.batch, sequence: work.sequence, heads: model.heads, head_dim }
}

fn recomputed(
    model: &Decoder,
    work: Workload,
    choice: &Recomputation,
    rows: &[FlopsRow],
) -> Result<Flops, Error> {
    let in_block = |row: &&FlopsRow| matches!(row.part, Part::Attention | Part::FeedForward);
    let scores = Flops::sum(rows.iter().filter(|row| row.name == "Q·Kᵀ").map(|row| row.forward))?;
    let mut terms = Vec::new();
    if choice.checkpoint == Recompute::Full {
        terms.push(Flops::sum(rows.iter().filter(in_block).map(|row| row.forward))?);
    }
    match (choice.attention, choice.checkpoint) {
        (AttentionKernel::Flash, _) => terms.push(scores),
        (AttentionKernel::Eager, Recompute::Selective) => terms.push(scores.times(2)?),
        (AttentionKernel::Eager, _) => {}
    }
    if model.family.is_swiglu() {
        let product = MatrixProduct::new(work.tokens()?, model.hidden, model.feed_forward).flops()?;
        let times = exact::product("SwiGLU products", &[choice.swiglu.recomputed_products(), model.layers])?;
        terms.push(Flops::both(product).times(times)?);
    }
    Flops::sum(terms)
}

/// Refuses a sequence that is longer than a table of learned positions.
pub(crate) fn check_positions(model: &Decoder, sequence: u64) -> Result<(), Error> {
    if model.family.has_learned_positions() && sequence > model.context {
        return Err(Error::Shape {
            what: format!("a sequence of {sequence} tokens has no position vectors beyond {}", model.context),
            remedy: format!("give a sequence of at most {}, or a model of that context", model.context),
        });
    }
    Ok(())
}

/// The rule of thumb and the exact count of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RuleOfThumb {
    /// All parameters, embeddings included.
    pub parameters: u64,
    /// Weights in matrix products only.
    pub product_parameters: u64,
    /// `6·N·D` with all parameters.
    pub rule: u128,
    /// `6·N·D` with the weights in matrix products.
    pub product_rule: u128,
    /// Exact forward and backward, dense convention.
    pub exact: u128,
}

impl RuleOfThumb {
    /// Returns the error of the rule with all parameters: `rule / exact - 1`.
    pub fn error(&self) -> f64 {
        self.rule as f64 / self.exact as f64 - 1.0
    }

    /// Returns the error of the rule with the weights in products, which omits attention: `product_rule / exact - 1`.
    pub fn product_error(&self) -> f64 {
        self.product_rule as f64 / self.exact as f64 - 1.0
    }
}

/// Returns the rule `6·N·D` (2 forward, 4 backward) and the exact count.
pub fn rule_of_thumb(model: &Decoder, work: Workload) -> Result<RuleOfThumb, Error> {
    let (parameters, product_parameters) = (model.parameters()?, model.product_parameters()?);
    let six = |n: u64| exact::wide_product("6·N·D", &[6, n, work.batch, work.sequence]);
    Ok(RuleOfThumb {
        parameters,
        product_parameters,
        rule: six(parameters)?,
        product_rule: six(product_parameters)?,
        exact: step(model, work, &Recomputation::default())?.model()?.dense,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    fn forward(name: &str, sequence: u64) -> u128 {
        let model = presets::find(name).unwrap();
        step(&model, Workload { batch: 1, sequence }, &Recomputation::default()).unwrap().forward.dense
    }

    /// The course's "transformer accounting", to the five published digits.
    #[test]
    fn transformer_accounting_of_cs336() {
        let published = [
            ("cs336-xl", 1024, 4.5133e12),
            ("cs336-xl", 16384, 1.4952e14),
            ("cs336-small", 1024, 3.4963e11),
            ("cs336-medium", 1024, 1.0331e12),
            ("cs336-large", 1024, 2.2578e12),
        ];
        for (name, sequence, flops) in published {
            let ours = forward(name, sequence) as f64;
            assert!((ours / flops - 1.0).abs() < 5e-5, "{name} at {sequence}: {ours:e}");
        }
    }

    /// PaLM, appendix B: 6·N + 12·L·h·k·t FLOPs per token of forward and backward, attention counted dense.
    #[test]
    fn palm_formula() {
        for name in presets::names() {
            let model = presets::find(name).unwrap();
            let work = Workload { batch: 3, sequence: 500 };
            let per_token = 6 * u128::from(model.product_parameters().unwrap())
                + 12 * u128::from(model.layers * model.heads * model.head_dim * 500)
                    * u128::from(model.family.attentions());
            let flops = step(&model, work, &Recomputation::default()).unwrap();
            assert_eq!(flops.model().unwrap().dense, per_token * 1500, "{name}");
        }
    }

    #[test]
    fn recomputation_choices_of_llama_3_8b() {
        let model = presets::find("llama-3-8b").unwrap();
        let work = Workload { batch: 2, sequence: 4096 };
        let recomputed = |attention, checkpoint, swiglu| {
            step(&model, work, &Recomputation { attention, checkpoint, swiglu }).unwrap().recomputed.dense
        };
        use {AttentionKernel::*, Recompute::*};
        let eager = SwigluLevel::Eager;
        let scores = 2 * 2 * 32 * 4096u128 * 4096 * 128 * 32;
        let one_product = 2 * 8192 * 4096 * 14336u128 * 32;
        let blocks = forward("llama-3-8b", 4096) * 2 - 2 * 8192 * 4096 * 128_256u128;
        assert_eq!(recomputed(AttentionKernel::Eager, None, eager), 0);
        assert_eq!(recomputed(AttentionKernel::Eager, Selective, eager), 2 * scores);
        assert_eq!(recomputed(Flash, None, eager), scores);
        assert_eq!(recomputed(Flash, None, SwigluLevel::SaveOne), scores + one_product);
        assert_eq!(recomputed(Flash, None, SwigluLevel::InputOnly), scores + 2 * one_product);
        assert_eq!(recomputed(AttentionKernel::Eager, Full, eager), blocks);
    }

    #[test]
    fn the_rule_of_thumb_errs_for_embeddings_and_long_attention() {
        let rule = |name: &str, sequence| {
            rule_of_thumb(&presets::find(name).unwrap(), Workload { batch: 1, sequence }).unwrap()
        };
        // Mostly embedding, untied: the rule counts the lookup.
        let small = rule("cs336-small", 128);
        assert!(small.error() > 0.2 && small.product_error().abs() < 0.02, "{small:?}");
        // A long sequence: attention is more than half of the FLOPs.
        let long = rule("cs336-xl", 16384);
        assert!(long.product_error() < -0.5, "{long:?}");
        // The case for which the rule was made.
        assert!(rule("llama-3-70b", 2048).product_error().abs() < 0.05);
    }
}
