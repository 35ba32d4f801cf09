//! Peaks of a block's passes.

use super::Block;
use crate::activation_plan::LayerPlan;
use crate::lora::Projection;
use crate::passes::PeakTracker;
use crate::{Error, exact};

/// Returns the peak of a block's backward beyond what is kept, with the gradient of the output.
fn backward_bytes(block: &Block, input: bool) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    let kept = exact::sum("bytes of a block", block.kept(input).iter().map(|item| item.bytes))?;
    tracker.make(kept);
    tracker.make(block.narrow);
    block.backward(&mut tracker, input);
    Ok(tracker.peak()? - kept - block.narrow)
}

/// Returns the same for a recomputed block, which keeps only its input.
fn recomputed_bytes(block: &Block, input: bool) -> Result<u64, Error> {
    let mut tracker = PeakTracker::default();
    // The gradient of the output is there first; the second output is live until the backward is done.
    tracker.make(block.narrow);
    block.forward(&mut tracker, true, input);
    block.backward(&mut tracker, input);
    Ok(tracker.peak()? - block.narrow)
}

/// Bytes of one block's passes.
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

/// The passes of a block behind a part that is trained.
pub(crate) fn passes(block: &Block) -> Result<Passes, Error> {
    const WHAT: &str = "bytes of a block";
    let mut tracker = PeakTracker::default();
    block.forward(&mut tracker, false, true);
    let forward = tracker.peak()?;
    if !block.learns(&Projection::ALL) {
        return Ok(Passes { forward, recomputed: 0, kept: 0, keeping: 0, backward: 0 });
    }
    let mut tracker = PeakTracker::default();
    block.forward(&mut tracker, true, true);
    Ok(Passes {
        forward,
        recomputed: exact::sum(WHAT, [recomputed_bytes(block, true)?, block.narrow])?,
        kept: exact::sum(WHAT, block.kept(true).iter().map(|item| item.bytes))?,
        keeping: tracker.peak()?,
        backward: exact::sum(WHAT, [backward_bytes(block, true)?, block.narrow])?,
    })
}

/// The passes of a block that stays on the device and keeps its activations in one of the ways of an activation plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptPasses {
    /// Bytes between its passes.
    pub(crate) held: u64,
    /// The most of its forward, its input and what it comes to keep among them.
    pub(crate) forward: u64,
    /// The most of its backward beyond what is held, with the gradient of the output.
    pub(crate) backward: u64,
}

/// The passes of `block`, the first layer or another, which keeps `what`.
///
/// | what | held | made again before the backward |
/// |---|---|---|
/// | everything | all | – |
/// | products | the input, and the results of products and attention | the other tensors of "everything", and the output |
/// | attention | all but the gate's, the other and their product | these three, and the feed-forward layer's output |
/// | feed-forward | all but the attention's from the queries to its output | these, and the attention's output |
/// | input | the input | all, and the output |
/// | input on the host | – | the same; the input and the one of the layer before come back |
pub(crate) fn kept_passes(block: &Block, what: LayerPlan, first: bool) -> Result<KeptPasses, Error> {
    const WHAT: &str = "bytes of a block";
    let Passes { forward, recomputed, kept, keeping, backward } = passes(block)?;
    let narrow = block.narrow;
    let input_and = |bytes: u64| exact::sum(WHAT, [narrow, bytes]);
    Ok(match what {
        LayerPlan::KeepAll => KeptPasses { held: kept, forward: input_and(keeping)?, backward },
        LayerPlan::RecomputeElementwise => {
            // Results of products: every u, and with DoRA a product instead of the output.
            let adapted = block.projections.iter().filter(|one| one.adapted);
            let lows = exact::sum(WHAT, adapted.map(|one| one.terms * one.low))?;
            let unscaled = block.projections.iter().filter(|one| one.unscaled > 0);
            let unscaled = exact::sum(WHAT, unscaled.map(|one| one.unscaled - one.output))?;
            let held = exact::sum(
                WHAT,
                [
                    narrow + 2 * block.operand,
                    block.query + block.attended_query,
                    2 * block.key,
                    block.log_sum_exp,
                    2 * block.wide,
                    lows,
                    unscaled,
                ],
            )?;
            let input = if block.keeps_output { narrow } else { 0 };
            let whole = exact::sum(WHAT, [kept, input, narrow, backward])?;
            KeptPasses {
                held,
                forward: exact::sum(WHAT, [forward, held])?,
                backward: whole.saturating_sub(held),
            }
        }
        LayerPlan::RecomputeMlp => {
            use Projection::{Down, Gate, Up};
            let low = block.of_adapters(&[Gate, Up, Down])?;
            let product = if block.learns(&[Down]) { block.wide } else { 0 };
            let again = exact::sum(WHAT, [2 * block.wide, product, low, block.kept_casts(&[Gate, Up])])?;
            // The gradient of the branch is there until the branch's backward is done.
            let gradient = block.branch_gradient();
            // What the norm made is the recomputed branch's input.
            let input = if block.mixed { narrow } else { 0 };
            KeptPasses {
                held: exact::sum(WHAT, [kept - again, input])?,
                forward: input_and(keeping)?,
                backward: exact::sum(WHAT, [again, block.operand, backward, gradient])?,
            }
        }
        LayerPlan::RecomputeAttention => {
            let again = block.attention_bytes()?;
            let mut tracker = PeakTracker::default();
            block.forward_with(&mut tracker, [false, true], true);
            let forward = tracker.peak()?;
            // The attention's input is kept for it in any case.
            let input = if block.keeps_first_output(&block.recorded(true)) { 0 } else { narrow };
            let held = exact::sum(WHAT, [kept - again, input])?;
            let mut tracker = PeakTracker::default();
            tracker.make(held);
            tracker.make(narrow);
            block.backward_to_attention(&mut tracker, true);
            // The second output is there until the attention's backward is done.
            tracker.make(block.branch_gradient());
            block.forward_attention(&mut tracker, true, true);
            tracker.free(block.branch_gradient());
            block.backward_of_attention(&mut tracker, true);
            tracker.free(block.operand + input);
            block.backward_of_first_norm(&mut tracker, true);
            KeptPasses { held, forward: input_and(forward)?, backward: tracker.peak()? - held }
        }
        LayerPlan::RecomputeAll => {
            KeptPasses { held: narrow, forward: input_and(forward)?, backward: recomputed }
        }
        LayerPlan::Offload => KeptPasses {
            held: 0,
            forward: input_and(forward)?,
            backward: exact::sum(WHAT, [recomputed, narrow, if first { 0 } else { narrow }])?,
        },
    })
}
