//! Simulates a step.

use super::footprint::{Footprint, footprints, host_bytes, peak};
use super::schedule::run;
use super::setup::{Setup, Start, check};
use super::step_costs::{Rates, StepCosts};
use super::timeline::{Span, StreamKind};
use crate::{Error, exact};

/// A simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedStep {
    /// The spans, stream by stream in the order of their start.
    pub spans: Vec<Span>,
    /// Seconds until everything is done, except loads for the next step.
    pub seconds: f64,
    /// Seconds of these in which compute is idle.
    pub idle_seconds: f64,
    /// Bytes copied to the device.
    pub load_bytes: u64,
    /// Bytes copied from the device.
    pub store_bytes: u64,
    /// Peak bytes on the device.
    pub device: Footprint,
    /// Bytes on the host: streamed layers, the optimizer, gradients that are not consumed yet.
    pub host_bytes: u64,
}

impl SimulatedStep {
    /// Returns the seconds in which `stream` works.
    pub fn busy(&self, stream: StreamKind) -> f64 {
        self.stream(stream).map(|span| span.end - span.start).sum()
    }

    /// Returns the fraction of the load stream's time that overlaps with compute; 1 if nothing is loaded.
    pub fn overlap(&self) -> f64 {
        let loads = self.busy(StreamKind::Load);
        let together = |load: &Span| {
            let shared = |span: &Span| (span.end.min(load.end) - span.start.max(load.start)).max(0.0);
            self.stream(StreamKind::Compute).map(shared).sum::<f64>()
        };
        if loads > 0.0 { self.stream(StreamKind::Load).map(together).sum::<f64>() / loads } else { 1.0 }
    }

    fn stream(&self, stream: StreamKind) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(move |span| span.stream == stream)
    }
}

/// Simulates `costs` with `setup`.
///
/// # Errors
/// No layers, rates or seconds out of range, a ring of no or too many slots, resident layers that do not exist, a resident
/// training without recomputation whose [`WorkingMemory::kept`](super::WorkingMemory::kept) is missing, bytes beyond 64 bits.
pub fn simulate(
    costs: &StepCosts,
    rates: &Rates,
    setup: &Setup,
    start: Start,
) -> Result<SimulatedStep, Error> {
    check(costs, rates, setup)?;
    // The state of the ring repeats from the third step on.
    let first = match start {
        Start::Cold => 0,
        Start::Warm => 3,
    };
    // One more, for loads that run ahead.
    let (spans, ends) = run(costs, rates, setup, first + 2);
    let (begin, end) = (ends[first], ends[first + 1]);
    let mut spans: Vec<Span> =
        spans.into_iter().filter(|span| span.end > begin && span.start < end).collect();
    let moved = |stream| {
        let began = spans.iter().filter(|span: &&Span| span.stream == stream && span.start >= begin);
        exact::sum("bytes moved", began.map(|span| span.bytes))
    };
    let (load_bytes, store_bytes) = (moved(StreamKind::Load)?, moved(StreamKind::Store)?);
    for span in &mut spans {
        if span.start < begin {
            span.bytes = 0;
        }
        (span.start, span.end) = (span.start.max(begin) - begin, span.end.min(end) - begin);
    }
    spans.sort_by(|a, b| a.stream.cmp(&b.stream).then(a.start.total_cmp(&b.start)));
    let mut step = SimulatedStep {
        spans,
        seconds: end - begin,
        idle_seconds: 0.0,
        load_bytes,
        store_bytes,
        device: Footprint::default(),
        host_bytes: 0,
    };
    step.idle_seconds = (step.seconds - step.busy(StreamKind::Compute)).max(0.0);
    step.device = peak(footprints(costs, setup, &step.spans)?);
    step.host_bytes = host_bytes(costs, setup, &step.spans)?;
    Ok(step)
}

/// Returns the device's bytes at every moment of a simulated `step`, whose largest is [`SimulatedStep::device`].
///
/// # Errors
/// As [`simulate`].
pub fn moments(costs: &StepCosts, setup: &Setup, step: &SimulatedStep) -> Result<Vec<Footprint>, Error> {
    footprints(costs, setup, &step.spans)
}
