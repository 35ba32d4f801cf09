//! Gradients that are filled with zeros and then added to; dropping them lets backward store its own tensor.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::Phase;

pub(super) const DETECTOR: Detector = Detector {
    name: "zeroed gradients",
    looks_at: "zeros written over tensors of parameters' shapes, outside of forward and backward",
    detect,
};

fn detect(view: &View<'_>) -> Option<Evidence> {
    let (parameters, _) = view.parameters();
    let mut tally = view.tally();
    for seen in view.all().filter(|seen| seen.context.called) {
        let Some(step) = seen.context.cycle else { continue };
        let zeroes = ["aten::zero_", "aten::fill_", "aten::_foreach_zero_"].contains(&seen.name);
        if !zeroes || matches!(seen.context.phase, Phase::Forward | Phase::Backward) {
            continue;
        }
        let shapes = seen.operator.inputs.first().map_or(&[][..], |input| input.dims.shapes());
        let gradients: Vec<_> =
            shapes.iter().filter(|shape| !shape.is_empty() && parameters.contains(&&shape[..])).collect();
        if let Some(first) = gradients.first() {
            gradients.iter().for_each(|_| tally.add(step as usize, seen.seconds() / gradients.len() as f64));
            tally.saw(format!("{first:?}"));
        }
    }
    let count = tally.count();
    let mut additions = view.tally();
    // Additions of backward to the zeros.
    for (step, seen) in view.in_steps().filter(|(_, seen)| seen.name == "aten::add_") {
        let around = view.parent(&seen);
        if around.is_some_and(|around| around.name == "torch::autograd::AccumulateGrad") {
            tally.also(step, seen.seconds());
            additions.add(step, 0.0);
        }
    }
    let added = additions.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!(
            "zeros over tensors of parameters' shapes {} ({}), and {added} additions to gradients in backward",
            times(count),
            tally.shapes()
        ),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Drop the gradients after the step, as zero_grad with set_to_none does, so that backward need not read \
                 and add to them."
            .into(),
    })
}
