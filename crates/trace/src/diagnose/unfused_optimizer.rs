//! An optimizer that runs separate operators for each term of each parameter's update.
//!
//! A pass over p elements by an operator with two inputs reads 2p and writes p; Adam needs about ten. The fused kernel reads
//! four tensors and writes three, once. With c passes per parameter it moves 7/(3·c) of the bytes, and a memory-bound update
//! takes that share of the time; the rest is at stake.

use super::view::View;
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector = Detector {
    name: "unfused optimizer",
    looks_at: "the number of operators per parameter in the optimizer's part",
    detect,
};

/// Passes over a parameter from which a fused kernel moves fewer bytes: plain SGD has one, momentum two.
const PASSES: f64 = 3.0;
/// Tensors that a fused step of Adam reads and writes; and those of an operator with two inputs.
const FUSED_TRAFFIC: f64 = 7.0;
const OPERATOR_TRAFFIC: f64 = 3.0;

fn detect(view: &View<'_>) -> Option<Evidence> {
    let (shapes, parameters) = view.parameters();
    let mut tally = view.tally();
    for (step, seen) in view.in_phase(Phase::Optimizer) {
        // The input differs: x.mul_(0.9) calls a product of 0.9 and x.
        let mut inputs = seen.operator.inputs.iter().map(|input| input.dims.shape());
        let covers_parameters = inputs.any(|shape| !shape.is_empty() && shapes.contains(&shape));
        if seen.context.works && covers_parameters {
            tally.add(step, seen.seconds());
        }
    }
    let count = tally.count();
    let passes = count / parameters.max(1.0);
    if passes < PASSES {
        return None;
    }
    let time = view.composition.phase(Phase::Optimizer);
    let share = time.seconds / view.composition.median.seconds;
    Some(Evidence {
        evidence: format!(
            "{count} operators over {parameters} parameters in a step, {passes:.1} each; the optimizer takes {:.1} % of \
             the step",
            100.0 * share
        ),
        per_step: count,
        share: Some(share * (1.0 - FUSED_TRAFFIC / (OPERATOR_TRAFFIC * passes)).max(0.0)),
        remedy:
            "Use the fused optimizer, which updates all parameters in one operator and one pass over memory."
                .into(),
    })
}
