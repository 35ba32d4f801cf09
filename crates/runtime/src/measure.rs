//! Measurement of time, memory and rate.
//!
//! A [`MeasurementPlan`] says how often the work runs; [`run`] warms up, repeats, and keeps every sample. Time is
//! measured between events of the current stream: on CUDA the device's own time, on the CPU the clock's. The device is
//! idle when a repeat begins, so that repeats do not overlap.
//!
//! The figures are the median and half the interquartile range, which are robust against single disturbed repeats.
//!
//! ```
//! use runtime::measure::{self, MeasurementPlan, Work};
//! use tch::{Device, Tensor, kind};
//!
//! let x = Tensor::ones([64, 64], kind::FLOAT_CPU).set_requires_grad(true);
//! let plan = MeasurementPlan { warmup: 1, repeats: 5, work: Some(Work::flops(3.0 * 2.0 * 64.0 * 64.0 * 64.0)), ..MeasurementPlan::new(Device::Cpu) };
//! let measured = measure::run(&plan, |timer| {
//!     let loss = x.f_matmul(&x)?.f_sum(tch::Kind::Float)?;
//!     timer.end("forward")?;
//!     loss.f_backward()?;
//!     timer.end("backward")
//! })?;
//! assert_eq!(measured.time.samples.len(), 5);
//! assert_eq!(measured.phase("forward").unwrap().samples.len(), 5);
//! assert!(measured.rate().unwrap() > 0.0);
//! # Ok::<(), runtime::Error>(())
//! ```

mod phase_timer;
mod samples;

use std::time::Instant;

use tch::Device;

pub use phase_timer::PhaseTimer;
pub use samples::Samples;
pub use std::hint::black_box;

use crate::device;
use crate::error::{Error, Result};
use crate::memory::{Region, RegionUsage};

/// How to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasurementPlan {
    /// The device of the work.
    pub device: Device,
    /// Warm-up runs: they fill caches and allocators, and select kernels.
    pub warmup: usize,
    /// Maximum number of measured runs.
    pub repeats: usize,
    /// Minimum number of measured runs, whatever the budget.
    pub min_repeats: usize,
    /// Seconds after which no further run begins; the warm-up may use half of them, and runs at least once. `None`: no
    /// limit.
    pub budget: Option<f64>,
    /// The work of one run.
    pub work: Option<Work>,
}

impl MeasurementPlan {
    /// Creates a plan of 2 warm-up runs, then 10 repeats without a time limit.
    pub fn new(device: Device) -> Self {
        Self { device, warmup: 2, repeats: 10, min_repeats: 3, budget: None, work: None }
    }

    fn check(&self) -> Result<()> {
        let invalid = |reason: String| Err(Error::invalid("measure", reason));
        if self.repeats == 0 {
            return invalid("0 repeats measure nothing; ask for at least 1".into());
        }
        if let Some(budget) = self.budget
            && !(budget.is_finite() && budget > 0.0)
        {
            return invalid(format!(
                "a budget of {budget} s; expected a positive number of seconds, or None"
            ));
        }
        if let Some(work) = self.work
            && !(work.amount.is_finite() && work.amount >= 0.0)
        {
            return invalid(format!("{} {} in a run; expected a number from 0 on", work.amount, work.unit));
        }
        Ok(())
    }
}

/// The work of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The amount.
    pub amount: f64,
    /// The unit, in the singular: `token`, `FLOP`, `B`.
    pub unit: &'static str,
}

impl Work {
    /// Creates an amount of tokens.
    pub fn tokens(amount: f64) -> Self {
        Self { amount, unit: "token" }
    }

    /// Creates an amount of floating-point operations.
    pub fn flops(amount: f64) -> Self {
        Self { amount, unit: "FLOP" }
    }

    /// Creates an amount of bytes moved.
    pub fn bytes(amount: f64) -> Self {
        Self { amount, unit: "B" }
    }
}

/// The result of a measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Seconds of each repeat.
    pub time: Samples,
    /// Seconds of each phase in each repeat, in the order in which the phases first ended.
    pub phases: Vec<(&'static str, Samples)>,
    /// Bytes of the device's allocator over all repeats, without the warm-up.
    pub memory: RegionUsage,
    /// The work of one run.
    pub work: Option<Work>,
}

impl Measurement {
    /// Returns the seconds of a phase.
    pub fn phase(&self, name: &str) -> Option<&Samples> {
        self.phases.iter().find(|(phase, _)| *phase == name).map(|(_, samples)| samples)
    }

    /// Returns the rate at the median time, in [`Work::unit`]s per second; `None` without declared work. A run too
    /// short for the clock has an infinite rate.
    pub fn rate(&self) -> Option<f64> {
        self.work.map(|work| work.amount / self.time.median())
    }
}

/// Measures `body`, which runs the work once and may divide it into phases with [`PhaseTimer::end`].
///
/// # Errors
/// An invalid plan; a device that does not exist; the body's own error, immediately; a failed CPU stream, which
/// [`device::synchronize`] finds before a run; a phase that ended in some repeats only.
pub fn run(
    plan: &MeasurementPlan,
    mut body: impl FnMut(&mut PhaseTimer) -> Result<()>,
) -> Result<Measurement> {
    plan.check()?;
    let began = Instant::now();
    let spent =
        |share: f64| plan.budget.is_some_and(|budget| began.elapsed().as_secs_f64() >= budget * share);

    let mut timer = PhaseTimer::new(plan.device)?;
    for run in 0..plan.warmup {
        if run > 0 && spent(0.5) {
            break;
        }
        timer.start()?;
        body(&mut timer)?;
        timer.finish()?;
    }

    let region = Region::start(plan.device)?;
    let mut time = Vec::new();
    let mut phases: Vec<(&'static str, Samples)> = Vec::new();
    let at_least = plan.min_repeats.min(plan.repeats);
    while time.len() < plan.repeats && (time.len() < at_least || !spent(1.0)) {
        timer.start()?;
        body(&mut timer)?;
        let pieces = timer.finish()?;
        for (phase, seconds) in &pieces.phases {
            match phases.iter_mut().find(|(name, _)| name == phase) {
                Some((_, samples)) => samples.samples.push(*seconds),
                None => phases.push((phase, Samples { samples: vec![*seconds] })),
            }
        }
        time.push(pieces.total);
        same_phases(&phases, time.len())?;
    }
    device::synchronize(plan.device)?;
    let memory = region.finish()?;
    Ok(Measurement { time: Samples { samples: time }, phases, memory, work: plan.work })
}

/// Checks that every phase has a sample of every repeat, so that all medians are over the same repeats.
fn same_phases(phases: &[(&'static str, Samples)], repeats: usize) -> Result<()> {
    match phases.iter().find(|(_, samples)| samples.samples.len() != repeats) {
        None => Ok(()),
        Some((name, _)) => Err(Error::invalid(
            "measure",
            format!("the phase {name:?} did not end in every repeat; end the same phases each time"),
        )),
    }
}
