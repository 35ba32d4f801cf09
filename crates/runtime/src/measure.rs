//! Time, memory and rate of a piece of work.
//!
//! A [`Plan`] says how often the work runs; [`run`] warms up, repeats, and keeps every sample. Time is taken between
//! events of the current stream: on CUDA the device's own time without the launches before it, on the CPU the clock's.
//! The device is idle when a repeat begins, so no repeat pays for the one before.
//!
//! The figures are the median and half the interquartile range: a repeat that something else disturbed moves neither.
//! [`physical`] has the limits of the device to hold a rate against.
//!
//! ```
//! use runtime::measure::{self, Plan, Work};
//! use tch::{Device, Tensor, kind};
//!
//! let x = Tensor::ones([64, 64], kind::FLOAT_CPU).set_requires_grad(true);
//! let plan = Plan { warmup: 1, repeats: 5, work: Some(Work::flops(3.0 * 2.0 * 64.0 * 64.0 * 64.0)), ..Plan::new(Device::Cpu) };
//! let measured = measure::run(&plan, |lap| {
//!     let loss = x.f_matmul(&x)?.f_sum(tch::Kind::Float)?;
//!     lap.end("forward")?;
//!     loss.f_backward()?;
//!     lap.end("backward")
//! })?;
//! assert_eq!(measured.time.samples.len(), 5);
//! assert_eq!(measured.phase("forward").unwrap().samples.len(), 5);
//! assert!(measured.rate().unwrap() > 0.0);
//! # Ok::<(), runtime::Error>(())
//! ```

mod lap;
pub mod physical;
mod samples;

use std::time::Instant;

use tch::Device;

pub use lap::Lap;
pub use samples::Samples;
pub use std::hint::black_box;

use crate::device;
use crate::error::{Error, Result};
use crate::memory::{Region, RegionUsage};

/// How a piece of work is measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Where the work runs.
    pub device: Device,
    /// Runs before the measured ones: they fill caches and allocators, and choose kernels.
    pub warmup: usize,
    /// Measured runs, at most.
    pub repeats: usize,
    /// Measured runs, at least, whatever the budget.
    pub min_repeats: usize,
    /// Seconds after which no further run begins; the warm-up may use half of it, and runs once in any case. `None`: no
    /// limit.
    pub budget: Option<f64>,
    /// What one run accomplishes.
    pub work: Option<Work>,
}

impl Plan {
    /// 2 runs of warm-up, then 10 repeats without a time limit.
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

/// What one run accomplishes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// How much.
    pub amount: f64,
    /// Of what, in the singular: `token`, `FLOP`, `B`.
    pub unit: &'static str,
}

impl Work {
    /// So many tokens in a run.
    pub fn tokens(amount: f64) -> Self {
        Self { amount, unit: "token" }
    }

    /// So many floating-point operations in a run.
    pub fn flops(amount: f64) -> Self {
        Self { amount, unit: "FLOP" }
    }

    /// So many bytes moved in a run.
    pub fn bytes(amount: f64) -> Self {
        Self { amount, unit: "B" }
    }
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Seconds of each repeat.
    pub time: Samples,
    /// Seconds of each phase in each repeat, in the order in which the phases first ended.
    pub phases: Vec<(&'static str, Samples)>,
    /// Bytes of the device's allocator over all repeats, the warm-up left out.
    pub memory: RegionUsage,
    /// What one run accomplishes.
    pub work: Option<Work>,
}

impl Measurement {
    /// Seconds of a phase.
    pub fn phase(&self, name: &str) -> Option<&Samples> {
        self.phases.iter().find(|(phase, _)| *phase == name).map(|(_, samples)| samples)
    }

    /// Work per second at the median time, in [`Work::unit`]s per second; `None` without declared work. A run too short
    /// for the clock has an infinite rate.
    pub fn rate(&self) -> Option<f64> {
        self.work.map(|work| work.amount / self.time.median())
    }

    /// Half the interquartile range of the rates of single repeats, in [`Work::unit`]s per second.
    pub fn rate_spread(&self) -> Option<f64> {
        let work = self.work?;
        let rates = self.time.samples.iter().map(|seconds| work.amount / seconds).collect();
        Some(Samples { samples: rates }.spread())
    }
}

/// Measures `body`, which does the work once and may divide it into phases with [`Lap::end`].
///
/// # Errors
/// A plan that makes no sense; a device that is not there; the body's own error, at once; a failed CPU stream, which
/// [`device::synchronize`] finds before a run; a phase that ended in some repeats only.
pub fn run(plan: &Plan, mut body: impl FnMut(&mut Lap) -> Result<()>) -> Result<Measurement> {
    plan.check()?;
    let began = Instant::now();
    let spent =
        |share: f64| plan.budget.is_some_and(|budget| began.elapsed().as_secs_f64() >= budget * share);

    let mut lap = Lap::new(plan.device)?;
    for run in 0..plan.warmup {
        if run > 0 && spent(0.5) {
            break;
        }
        lap.start()?;
        body(&mut lap)?;
        lap.finish()?;
    }

    let region = Region::start(plan.device)?;
    let mut time = Vec::new();
    let mut phases: Vec<(&'static str, Samples)> = Vec::new();
    let at_least = plan.min_repeats.min(plan.repeats);
    while time.len() < plan.repeats && (time.len() < at_least || !spent(1.0)) {
        lap.start()?;
        body(&mut lap)?;
        let pieces = lap.finish()?;
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

/// Every phase has a sample of every repeat, or its median would be of another set of repeats than the total's.
fn same_phases(phases: &[(&'static str, Samples)], repeats: usize) -> Result<()> {
    match phases.iter().find(|(_, samples)| samples.samples.len() != repeats) {
        None => Ok(()),
        Some((name, _)) => Err(Error::invalid(
            "measure",
            format!("the phase {name:?} did not end in every repeat; end the same phases each time"),
        )),
    }
}
