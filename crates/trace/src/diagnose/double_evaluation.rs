//! The model runs twice on a batch, once for its loss and once for a metric.

use super::view::{View, times};
use super::{Detector, Evidence};
use crate::composition::{Phase, seconds};

pub(super) const DETECTOR: Detector = Detector {
    name: "double evaluation",
    looks_at: "forward parts without a backward, and forward parts that do the same work twice",
    detect,
};

/// Shorter sequences may repeat by chance.
const FEWEST: usize = 3;

const PRODUCTS: &[&str] = &["aten::addmm", "aten::bmm", "aten::mm", "runtime::mm"];

/// An operator and the shapes of its inputs.
type Call<'a> = (&'a str, Vec<&'a [i64]>);

/// Returns the length of the longest sequence at the start that repeats immediately: 3 for `abcabcd`. The rest, such as the
/// loss, must be shorter.
fn repeated(calls: &[Call<'_>]) -> usize {
    let lengths = (1..=calls.len() / 2).rev().take_while(|length| 3 * length > calls.len());
    lengths.into_iter().find(|&length| calls[..length] == calls[length..2 * length]).unwrap_or(0)
}

/// Whether an operator is a major part of a model's work.
fn is_work(name: &str) -> bool {
    const WORK: &[&str] = &[
        "aten::_log_softmax",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_softmax",
        "aten::addmm",
        "aten::baddbmm",
        "aten::bmm",
        "aten::embedding",
        "aten::mm",
        "aten::native_layer_norm",
        "runtime::causal_attention",
        "runtime::mm",
        "runtime::norm",
        "runtime::swiglu",
    ];
    WORK.binary_search(&name).is_ok()
}

fn detect(view: &View<'_>) -> Option<Evidence> {
    let steps = &view.timeline.steps;
    let mut work: Vec<Vec<Call<'_>>> = vec![Vec::new(); steps.len()];
    let mut gradients = vec![0_usize; steps.len()];
    for (step, seen) in view.in_phase(Phase::Forward).filter(|(_, seen)| is_work(seen.name)) {
        let shapes = (0..seen.operator.inputs.len()).map(|input| seen.shape(input)).collect();
        work[step].push((seen.name, shapes));
    }
    let of_products = ["MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0", "linear"];
    for (step, _) in view.in_phase(Phase::Backward).filter(|(_, seen)| of_products.contains(&seen.name)) {
        gradients[step] += 1;
    }
    let mut tally = view.tally();
    for (index, step) in steps.iter().enumerate() {
        let parts = |phase| step.phases.iter().filter(move |(of, ..)| *of == phase);
        let forward: i64 = parts(Phase::Forward).map(|(_, start, end)| end - start).sum();
        let (runs, backward) = (parts(Phase::Forward).count(), parts(Phase::Backward).count());
        let half = repeated(&work[index]);
        let products = work[index][..2 * half].iter().filter(|(name, _)| PRODUCTS.contains(name)).count();
        // A repetition with gradients each time is several losses, or a layer that is used twice.
        let unused = half >= FEWEST && 2 * gradients[index] <= products;
        if backward >= 1 && runs > backward {
            tally.add(index, seconds(forward) * (runs - backward) as f64 / runs as f64);
            tally.saw(format!("{runs} forward parts and {backward} backward"));
        } else if backward >= 1 && unused {
            tally.add(index, seconds(forward) / 2.0);
            tally.saw(format!("the same {half} operators twice, with gradients for one of them"));
        }
    }
    let count = tally.count();
    (count >= 1.0).then(|| Evidence {
        evidence: format!("forward runs without a backward {}: {}", times(count), tally.shapes()),
        per_step: count,
        share: Some(tally.share()),
        remedy: "Compute the metrics from the outputs of the loss's forward.".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_prompts_are_detected() {
        let length = |calls: &[&'static str]| {
            repeated(&calls.iter().map(|&name| (name, Vec::new())).collect::<Vec<Call<'static>>>())
        };
        let cases: &[(&[&str], usize)] = &[
            (&[], 0),
            (&["a"], 0),
            (&["a", "a"], 1),
            (&["a", "b", "c", "a", "b", "c", "d"], 3),
            (&["a", "b", "b", "c"], 0),
            // Repeats at the start, but most of the work comes later.
            (&["a", "b", "a", "b", "c", "d", "e", "f"], 0),
            (&["a", "b", "a", "b", "a", "b", "a", "b"], 4),
        ];
        for (calls, expected) in cases {
            assert_eq!(length(calls), *expected, "{calls:?}");
        }
    }
}
