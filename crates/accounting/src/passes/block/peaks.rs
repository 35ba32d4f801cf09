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
#[derive(Clone, Copy, Debug)]
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

/// Returns the passes of a block behind a part that is trained. A block that learns nothing has only a forward.
pub(crate) fn passes(block: &Block) -> Result<Passes, Error> {
    let forward = forward_peak(block, false)?;
    if !block.learns(&Projection::ALL) {
        return Ok(Passes { forward, recomputed: 0, kept: 0, keeping: 0, backward: 0 });
    }
    let kept = exact::sum(WHAT, block.kept(true).iter().map(|item| item.bytes))?;
    Ok(Passes {
        forward,
        recomputed: recomputed_peak(block)?,
        kept,
        keeping: forward_peak(block, true)?,
        backward: backward_peak(block, kept)?,
    })
}

fn forward_peak(block: &Block, saves: bool) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    block.forward(&mut tracker, saves, true);
    tracker.peak()
}

/// The peak of the backward beyond the kept bytes, with the gradient of the output.
fn backward_peak(block: &Block, kept: u64) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    tracker.make(kept);
    tracker.make(block.narrow);
    block.backward(&mut tracker, true);
    Ok(tracker.peak()? - kept)
}

/// The peak of a forward that is run again and its backward, with the gradient of the output.
fn recomputed_peak(block: &Block) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    // The gradient of the output is there first; the second output is live until the backward is done.
    tracker.make(block.narrow);
    block.forward(&mut tracker, true, true);
    block.backward(&mut tracker, true);
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

/// Returns the passes of `block` under `plan`; see the [module](self). `first` is whether no layer is before it.
pub(crate) fn kept_passes(block: &Block, plan: LayerPlan, first: bool) -> Result<KeptPasses, Error> {
    let passes = passes(block)?;
    let narrow = block.narrow;
    let Passes { forward, recomputed, kept, keeping, backward } = passes;
    let with_input = |bytes: u64| exact::sum(WHAT, [narrow, bytes]);
    match plan {
        LayerPlan::KeepAll => Ok(KeptPasses { kept, forward: with_input(keeping)?, backward }),
        LayerPlan::RecomputeElementwise => keeping_products(block, passes),
        LayerPlan::RecomputeMlp => recomputing_mlp(block, passes),
        LayerPlan::RecomputeAttention => recomputing_attention(block, kept),
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
    // The output of down, gate and up; a mixture of experts runs again, but for its router.
    let of_mlp = match &block.experts {
        Some(experts) => experts.kept_products(),
        None => block.operand + 2 * block.kept_wide(),
    };
    // The input and the output of o; q, k, v and the attention's output; those of the MLP.
    let products = [
        block.narrow + block.operand,
        block.query + block.attended_query,
        2 * block.key,
        block.log_sum_exp,
        of_mlp,
        low,
        unscaled,
    ];
    let kept = exact::sum(WHAT, products)?;
    // Backward runs as if everything had been kept, beside the output that was computed again.
    let input = if block.keeps_output { block.narrow } else { 0 };
    let at_backward = exact::sum(WHAT, [all, input, block.narrow, backward])?;
    let forward = exact::sum(WHAT, [forward, kept])?;
    Ok(KeptPasses { kept, forward, backward: at_backward.saturating_sub(kept) })
}

/// Keeps everything but the results of gate and up and their product.
fn recomputing_mlp(block: &Block, passes: Passes) -> Result<KeptPasses, Error> {
    use Projection::{Gate, Up};
    let Passes { kept: all, keeping, backward, .. } = passes;
    // Tensors that are computed again.
    let again = exact::sum(WHAT, [block.mlp_bytes()?, block.kept_casts(&[Gate, Up])])?;
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
fn recomputing_attention(block: &Block, all: u64) -> Result<KeptPasses, Error> {
    let mut tracker = PeakTracker::default();
    block.forward_with(&mut tracker, [false, true], true);
    let forward = exact::sum(WHAT, [block.narrow, tracker.peak()?])?;
    // The attention's input is kept for the recomputation, also where the norm does not keep it.
    let again = block.attention_bytes()?;
    let input = if block.keeps_first_output(&block.recorded(true)) { 0 } else { block.narrow };
    let kept = exact::sum(WHAT, [all - again, input])?;
    // Backward of the MLP, with the gradient of the output.
    let mut tracker = PeakTracker::default();
    tracker.make(kept);
    tracker.make(block.narrow);
    block.backward_to_attention(&mut tracker, true);
    // The attention again; its second output is live until its backward is done.
    tracker.make(block.branch_gradient());
    block.forward_attention(&mut tracker, true, true);
    tracker.free(block.branch_gradient());
    // Backward of the attention and of the norm before it.
    block.backward_of_attention(&mut tracker, true);
    tracker.free(block.operand + input);
    block.backward_of_first_norm(&mut tracker, true);
    Ok(KeptPasses { kept, forward, backward: tracker.peak()? - kept })
}
