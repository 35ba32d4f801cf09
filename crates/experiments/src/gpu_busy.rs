//! The time in which a GPU computes or copies during a step: what remains of the step if the host takes no time.

use anyhow::Context;
use report::Metric;
use runtime::profile::{Trace, TraceConfig};
use tch::Device;
use trace::Profile;

/// Runs `step` twice, the second time under Kineto, and returns the length of the union of the kernels' and copies' times as
/// `gpu_busy_seconds`; "not measured" on a CPU.
///
/// # Errors
/// Errors of `step`; a trace that cannot be written or read.
pub(crate) fn measure(
    device: Device,
    mut step: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Metric> {
    const NAME: &str = "gpu_busy_seconds";
    if !device.is_cuda() {
        return Ok(Metric::not_measured(NAME, "s", "the processor computes"));
    }
    step()?;
    runtime::device::synchronize(device)?;
    let folder = tempfile::tempdir().context("a folder for a trace")?;
    let path = folder.path().join("step.json");
    let trace = Trace::start(TraceConfig { cuda: true, shapes: false, memory: false })?;
    step()?;
    trace.save(&path)?;
    let events = Profile::read(&path)?.device;
    if events.is_empty() {
        return Ok(Metric::not_measured(NAME, "s", "the profiler saw no kernel"));
    }
    let nanoseconds = union(events.iter().map(|event| (event.start, event.end)).collect());
    Ok(Metric::exact(NAME, "s", nanoseconds as f64 / 1e9))
}

/// The length of the union of intervals.
fn union(mut intervals: Vec<(i64, i64)>) -> i64 {
    intervals.sort_unstable();
    let mut reached = i64::MIN;
    intervals
        .into_iter()
        .map(|(start, end)| {
            let new = (end - start.max(reached)).max(0);
            reached = reached.max(end);
            new
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_overlaps_counts_once() {
        assert_eq!(union(vec![]), 0);
        assert_eq!(union(vec![(5, 9), (0, 3)]), 7);
        assert_eq!(union(vec![(0, 10), (2, 4), (8, 12), (12, 13)]), 13);
    }

    #[test]
    fn a_processor_has_no_device_time() {
        let metric = measure(Device::Cpu, || anyhow::bail!("not run")).unwrap();
        assert_eq!(metric.value, None);
    }
}
