//! A step: its schedule, and what it takes.

use super::footprint::{Footprint, footprint, host_bytes};
use super::job::{Job, Rates};
use super::schedule::run;
use super::setup::{Setup, Start, check};
use super::timeline::{Lane, Span};
use crate::{Error, exact};

/// A step that was simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What ran when, lane by lane in the order of their start.
    pub spans: Vec<Span>,
    /// Seconds until all is done but for loads that run ahead of the next step.
    pub seconds: f64,
    /// Seconds of them in which compute does nothing.
    pub idle_seconds: f64,
    /// Bytes moved to the device.
    pub load_bytes: u64,
    /// Bytes moved from the device.
    pub store_bytes: u64,
    /// The device's bytes at their peak.
    pub device: Footprint,
    /// Bytes on the host: of streamed layers, of the optimizer, of gradients that came and were not consumed.
    pub host_bytes: u64,
}

impl Step {
    /// Seconds in which `lane` works.
    pub fn busy(&self, lane: Lane) -> f64 {
        self.of(lane).map(|span| span.end - span.start).sum()
    }

    /// The share of the load lane's seconds that compute works too; 1 where nothing is loaded.
    pub fn overlap(&self) -> f64 {
        let loads = self.busy(Lane::Load);
        let together = |load: &Span| {
            let shared = |span: &Span| (span.end.min(load.end) - span.start.max(load.start)).max(0.0);
            self.of(Lane::Compute).map(shared).sum::<f64>()
        };
        if loads > 0.0 { self.of(Lane::Load).map(together).sum::<f64>() / loads } else { 1.0 }
    }

    fn of(&self, lane: Lane) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(move |span| span.lane == lane)
    }
}

/// Runs `job` by `setup`.
///
/// # Errors
/// No layers, rates or seconds out of range, a ring of no or too many slots, resident layers that do not exist, a resident
/// training without recomputation whose [`Working::kept`](super::Working::kept) is missing, bytes beyond 64 bits.
pub fn simulate(job: &Job, rates: &Rates, setup: &Setup, start: Start) -> Result<Step, Error> {
    check(job, rates, setup)?;
    // What a step leaves in the ring repeats from the third on.
    let wanted = match start {
        Start::Cold => 0,
        Start::Warm => 3,
    };
    // One more, for the loads that run ahead.
    let (spans, ends) = run(job, rates, setup, wanted + 2);
    let (begin, end) = (ends[wanted], ends[wanted + 1]);
    let mut spans: Vec<Span> =
        spans.into_iter().filter(|span| span.end > begin && span.start < end).collect();
    let moved = |lane| {
        let began = spans.iter().filter(|span: &&Span| span.lane == lane && span.start >= begin);
        exact::sum("bytes moved", began.map(|span| span.bytes))
    };
    let (load_bytes, store_bytes) = (moved(Lane::Load)?, moved(Lane::Store)?);
    for span in &mut spans {
        if span.start < begin {
            span.bytes = 0;
        }
        (span.start, span.end) = (span.start.max(begin) - begin, span.end.min(end) - begin);
    }
    spans.sort_by(|a, b| a.lane.cmp(&b.lane).then(a.start.total_cmp(&b.start)));
    let mut step = Step {
        spans,
        seconds: end - begin,
        idle_seconds: 0.0,
        load_bytes,
        store_bytes,
        device: Footprint::default(),
        host_bytes: 0,
    };
    step.idle_seconds = (step.seconds - step.busy(Lane::Compute)).max(0.0);
    step.device = footprint(job, setup, &step.spans)?;
    step.host_bytes = host_bytes(job, setup, &step.spans)?;
    Ok(step)
}
