//! The peaks of a block's forward and backward, by replaying their allocations in a [`PeakTracker`].
//!
//! A layer of an activation plan keeps some tensors of its forward and computes the others again before its backward:
//!
//! | plan | kept from forward to backward | computed again |
//! |---|---|---|
//! | [`KeepAll`](LayerPlan::KeepAll) | all | – |
//! | [`RecomputeElementwise`](LayerPlan::RecomputeElementwise) | the input, and the results of products and attention | the other tensors, and the output |
//! | [`RecomputeAttention`](LayerPlan::RecomputeAttention) | all but the attention's, from the queries to its output | these, and the attention's output |
//! | [`RecomputeMlp`](LayerPlan::RecomputeMlp) | all but the results of gate and up and their product, and a mixture's routing | these, and the MLP's output |
//! | [`RecomputeAll`](LayerPlan::RecomputeAll) | the input | all, and the output |
//! | [`Offload`](LayerPlan::Offload) | the input, on the host | the same; the input and that of the layer before return |

use super::Block;
use crate::activation_plan::LayerPlan;
use crate::lora::Projection;
use crate::passes::PeakTracker;
use crate::{Error, exact};

const WHAT: &str = "bytes of a block";

/// Bytes of one block's passes, behind a part that is trained.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passes {
    /// Peak of a forward that saves nothing, without its input.
    pub(crate) forward: u64,
    /// Peak of recomputing the forward and running backward, with the gradient of the output and without the input.
    pub(crate) recomputed: u64,
    /// Bytes that are saved for backward; the input counts if the norm saves it.
    pub(crate) kept: u64,
    /// Peak of a forward that saves for backward, with the saved bytes and without the input.
    pub(crate) keeping: u64,
    /// Peak of the backward, with the gradient of the output and without the saved bytes.
    pub(crate) backward: u64,
}

impl Passes {
    /// Returns the larger of each.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            forward: self.forward.max(other.forward),
            recomputed: self.recomputed.max(other.recomputed),
            kept: self.kept.max(other.kept),
            keeping: self.keeping.max(other.keeping),
            backward: self.backward.max(other.backward),
        }
    }
}

/// Returns the passes of a block behind a part that is trained. A block that learns nothing has only a forward.
pub(crate) fn passes(block: &Block) -> Result<Passes, Error> {
    let forward = forward_peak(block, false, true)?;
    if !block.trains {
        return Ok(Passes { forward, recomputed: 0, kept: 0, keeping: 0, backward: 0 });
    }
    recorded_passes(block, forward, true)
}

/// The passes of a block with a backward; `input` is whether its input has a gradient.
fn recorded_passes(block: &Block, forward: u64, input: bool) -> Result<Passes, Error> {
    let kept = exact::sum(WHAT, block.kept(input).iter().map(|item| item.bytes))?;
    Ok(Passes {
        forward,
        recomputed: recomputed_peak(block, input)?,
        kept,
        keeping: forward_peak(block, true, input)?,
        backward: backward_peak(block, kept, input)?,
    })
}

fn forward_peak(block: &Block, saves: bool, input: bool) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    block.forward(&mut tracker, saves, input);
    tracker.peak()
}

/// The peak of the backward beyond the kept bytes, with the gradient of the output.
fn backward_peak(block: &Block, kept: u64, input: bool) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    tracker.make(kept);
    tracker.make(block.narrow);
    block.backward(&mut tracker, input);
    Ok(tracker.peak()? - kept)
}

/// The peak of a forward that is run again and its backward, with the gradient of the output.
fn recomputed_peak(block: &Block, input: bool) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    // The gradient of the output is there first; the second output is live until the backward is done.
    tracker.make(block.narrow);
    block.forward(&mut tracker, true, input);
    block.backward(&mut tracker, input);
    tracker.peak()
}

/// Bytes of a block that stays on the device and whose activations follow a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptPasses {
    /// Bytes that are kept from forward to backward.
    pub(crate) kept: u64,
    /// Peak of the forward, with its input and the kept bytes.
    pub(crate) forward: u64,
    /// Peak of the backward beyond the kept bytes, with the gradient of the output.
    pub(crate) backward: u64,
}

/// Returns the passes of `block` under `plan`; see the [module](self). `first` is whether no layer is before it, `input` whether its input
/// has a gradient. A block that has nothing to learn and no such input runs forward alone.
pub(crate) fn kept_passes(
    block: &Block,
    plan: LayerPlan,
    first: bool,
    input: bool,
) -> Result<KeptPasses, Error> {
    let narrow = block.narrow;
    let with_input = |bytes: u64| exact::sum(WHAT, [narrow, bytes]);
    let forward = forward_peak(block, false, input)?;
    if !block.records(input) {
        return Ok(KeptPasses { kept: 0, forward: with_input(forward)?, backward: 0 });
    }
    let passes = recorded_passes(block, forward, input)?;
    let Passes { recomputed, kept, keeping, backward, .. } = passes;
    // An attention that nothing learns from is not run again.
    let plan = match plan {
        LayerPlan::RecomputeAttention if !block.recorded(input).attention && !block.output_learns() => {
            LayerPlan::KeepAll
        }
        plan => plan,
    };
    match plan {
        LayerPlan::KeepAll => Ok(KeptPasses { kept, forward: with_input(keeping)?, backward }),
        LayerPlan::RecomputeElementwise => keeping_products(block, passes),
        LayerPlan::RecomputeMlp => recomputing_mlp(block, passes, input),
        LayerPlan::RecomputeAttention => recomputing_attention(block, kept, input),
        LayerPlan::RecomputeAll => {
            Ok(KeptPasses { kept: narrow, forward: with_input(forward)?, backward: recomputed })
        }
        LayerPlan::Offload => {
            let inputs = if first { narrow } else { 2 * narrow };
            let backward = exact::sum(WHAT, [recomputed, inputs])?;
            Ok(KeptPasses { kept: 0, forward: with_input(forward)?, backward })
        }
    }
}

/// Keeps the input and the results of products and attention; norms, rotation, SiLU and sums run again.
fn keeping_products(block: &Block, passes: Passes) -> Result<KeptPasses, Error> {
    let Passes { forward, kept: all, backward, .. } = passes;
    // Each adapter's u, and with DoRA the product before its magnitudes instead of the output.
    let adapted = block.projections.iter().filter(|projection| projection.adapted);
    let low = exact::sum(WHAT, adapted.map(|projection| projection.terms * projection.low))?;
    let with_magnitudes = block.projections.iter().filter(|projection| projection.unscaled > 0);
    let unscaled =
        exact::sum(WHAT, with_magnitudes.map(|projection| projection.unscaled - projection.output))?;
    // The output of down, gate and up; a mixture of experts runs again, but for its router and the expert of every token.
    let of_mlp = match (&block.experts, &block.shared) {
        (Some(experts), None) => experts.kept_products(),
        (Some(experts), Some(_)) => experts.kept_products() + block.operand + 2 * block.kept_wide(),
        (None, _) => block.operand + 2 * block.kept_wide(),
    };
    // q, k, v and the attention's output; of linear attention its projections alone.
    let of_attention = match &block.linear {
        Some(linear) => linear.products(),
        None => {
            let queries = block.projection(Projection::Query).output;
            queries + block.attended_query + 2 * block.key + block.log_sum_exp
        }
    };
    // The input and the output of o; those of the MLP.
    let products = [block.narrow + block.operand, of_attention, of_mlp, low, unscaled];
    let kept = exact::sum(WHAT, products)?;
    // Backward runs as if everything had been kept, beside the output that was computed again.
    let input = if block.keeps_output { block.narrow } else { 0 };
    let at_backward = exact::sum(WHAT, [all, input, block.narrow, backward])?;
    let forward = exact::sum(WHAT, [forward, kept])?;
    Ok(KeptPasses { kept, forward, backward: at_backward.saturating_sub(kept) })
}

/// Keeps everything but the results of gate and up and their product.
fn recomputing_mlp(block: &Block, passes: Passes, input: bool) -> Result<KeptPasses, Error> {
    let Passes { kept: all, keeping, backward, .. } = passes;
    // Tensors that are computed again.
    let again = exact::sum(WHAT, [block.mlp_bytes(&block.recorded(input))?, block.kept_mlp_casts()])?;
    // In mixed precision the recomputed branch keeps its own input: the norm's output.
    let input = if block.mixed { block.narrow } else { 0 };
    // The gradient of the branch is live until the branch's backward is done.
    let gradient = block.branch_gradient();
    Ok(KeptPasses {
        kept: exact::sum(WHAT, [all - again, input])?,
        forward: exact::sum(WHAT, [block.narrow, keeping])?,
        backward: exact::sum(WHAT, [again, block.operand, backward, gradient])?,
    })
}

/// Keeps everything but the attention's tensors, from the queries to its output. `all` are the bytes of a block that keeps everything.
fn recomputing_attention(block: &Block, all: u64, input: bool) -> Result<KeptPasses, Error> {
    let mut tracker = PeakTracker::default();
    block.forward_with(&mut tracker, [false, true], input);
    let forward = exact::sum(WHAT, [block.narrow, tracker.peak()?])?;
    // The attention's input is kept for the recomputation, also where the norm does not keep it.
    let recorded = block.recorded(input);
    let again = block.attention_bytes(&recorded)?;
    let of_attention = if block.keeps_first_output(&recorded) { 0 } else { block.narrow };
    let kept = exact::sum(WHAT, [all - again, of_attention])?;
    // Backward of the MLP, with the gradient of the output.
    let mut tracker = PeakTracker::default();
    tracker.make(kept);
    tracker.make(block.narrow);
    block.backward_to_attention(&mut tracker, input);
    // The attention again; its second output is live until its backward is done.
    tracker.make(block.branch_gradient());
    block.forward_attention(&mut tracker, true, input);
    tracker.free(block.branch_gradient());
    // Backward of the attention and of the norm before it.
    block.backward_of_attention(&mut tracker, input);
    tracker.free(block.operand + of_attention);
    block.backward_of_first_norm(&mut tracker, input);
    Ok(KeptPasses { kept, forward, backward: tracker.peak()? - kept })
}
