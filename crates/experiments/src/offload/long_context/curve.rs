//! The curve of allocated bytes over a step.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use offload::{HookPoint, TestHook};
use report::{Case, Metric};
use runtime::memory::{Region, live_bytes};
use tch::Device;

/// Samples the device's bytes before each layer runs, in either pass, and at the ends of the phases. On a GPU these are those of libtorch's
/// allocator as the host queues the work.
pub(super) struct Curve {
    device: Device,
    /// Live bytes before the model existed.
    before: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    began: Option<Instant>,
    /// From the last sample on.
    region: Option<Region>,
    /// Seconds, bytes, and the most bytes since the sample before.
    samples: Vec<(f64, u64, u64)>,
}

impl Curve {
    pub(super) fn new(device: Device, before: u64) -> Self {
        Self { device, before, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the samples and begins a step.
    pub(super) fn begin(&self) -> runtime::Result<()> {
        *self.state() = State { began: Some(Instant::now()), ..State::default() };
        self.sample()
    }

    /// Samples the bytes.
    pub(super) fn sample(&self) -> runtime::Result<()> {
        let mut state = self.state();
        let Some(began) = state.began else { return Ok(()) };
        let live = live_bytes(self.device)?;
        let usage = state.region.take().map(Region::finish).transpose()?;
        let peak = usage.map_or(live, |usage| usage.peak);
        state.region = Some(Region::start(self.device)?);
        let above = |bytes: u64| bytes.saturating_sub(self.before);
        state.samples.push((began.elapsed().as_secs_f64(), above(live), above(peak)));
        Ok(())
    }

    /// The samples as figures of `case`, numbered.
    pub(super) fn figures(&self, case: &Case) -> Vec<(Case, Metric)> {
        let state = self.state();
        let of_sample = |(number, &(seconds, live, peak)): (usize, &(f64, u64, u64))| {
            let case = case.clone().with("sample", number);
            [
                (case.clone(), Metric::exact("seconds", "s", seconds)),
                (case.clone(), Metric::exact("allocated_bytes", "B", live as f64)),
                (case, Metric::exact("highest_bytes", "B", peak as f64)),
            ]
        };
        state.samples.iter().enumerate().flat_map(of_sample).collect()
    }
}

impl TestHook for Curve {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        if point == HookPoint::Compute { self.sample() } else { Ok(()) }
    }
}
