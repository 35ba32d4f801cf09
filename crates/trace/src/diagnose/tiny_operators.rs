//! Finds steps of operators so small that calling them takes longer than their work.

use super::view::View;
use super::{Detector, Evidence};
use crate::composition::{median, seconds};
use crate::trace_file::DeviceWork;

pub(super) const DETECTOR: Detector = Detector {
    name: "tiny operators",
    looks_at: "the median length of operators or kernels, and the time around them",
    detect,
};

/// Seconds below which the call costs as much as the work.
const TINY: f64 = 20e-6;
/// The minimum share of a step in and around small operators.
const MIN_SHARE: f64 = 0.25;
/// The minimum number of operators in a step.
const MIN_COUNT: f64 = 16.0;

/// Returns, for each step, the seconds between outermost operators of its thread. Gaps of [`TINY`] and more have other causes and do not
/// count.
fn gaps(view: &View<'_>) -> Vec<f64> {
    let mut seconds_by_step = vec![0.0; view.timeline.steps.len()];
    let mut outer: Vec<(usize, i64, i64)> = view
        .in_steps()
        .filter(|(step, seen)| {
            seen.context.parent.is_none() && seen.operator.thread == view.timeline.steps[*step].thread
        })
        .map(|(step, seen)| (step, seen.operator.start, seen.operator.end))
        .collect();
    outer.sort_unstable();
    for pair in outer.windows(2) {
        let (step, gap) = (pair[1].0, seconds(pair[1].1 - pair[0].2));
        if pair[0].0 == step && gap < TINY {
            seconds_by_step[step] += gap.max(0.0);
        }
    }
    seconds_by_step
}

/// Compares the median length of kernels (on CUDA) or of computing operators (else) with [`TINY`], and the share of the step at stake with
/// [`MIN_SHARE`]: on CUDA the device's idle share, else small operators, the gaps between them and the host's own time.
fn detect(view: &View<'_>) -> Option<Evidence> {
    let step = view.composition.median;
    let mut tally = view.tally();
    let lengths: Vec<f64> = if view.profile.cuda {
        let kernels = view.profile.device.iter().filter(|event| event.work == DeviceWork::Kernel);
        kernels
            .filter_map(|kernel| {
                let length = seconds(kernel.end - kernel.start);
                tally.add(view.timeline.step_at(kernel.start)?, 0.0);
                Some(length)
            })
            .collect()
    } else {
        // Operators that compute, not those that only call them.
        let computing = view.in_steps().filter(|(_, seen)| seen.context.works);
        computing
            .map(|(index, seen)| {
                let length = seen.seconds();
                tally.add(index, 0.0);
                if length < TINY {
                    tally.also(index, length);
                }
                length
            })
            .collect()
    };
    let median_length = median(lengths.into_iter());
    let share = match step.device {
        Some(device) => device.idle_share,
        None => tally.share() + (median(gaps(view).into_iter()) + step.host_seconds) / step.seconds,
    };
    let unit = if view.profile.cuda { "kernels" } else { "operators" };
    (tally.count() >= MIN_COUNT && median_length < TINY && share >= MIN_SHARE).then(|| Evidence {
        evidence: format!(
            "{} {unit} in a step, half of them shorter than {:.1} µs, with {:.1} % of the step in and around the small ones",
            tally.count(),
            1e6 * median_length,
            100.0 * share
        ),
        per_step: tally.count(),
        share: Some(share),
        remedy: "Give each call more work: larger batches, fused operators, lists of tensors at once; on CUDA also a graph \
                 of the whole step."
            .into(),
    })
}
