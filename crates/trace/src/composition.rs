//! The composition of the median step.
//!
//! A step of length T on its thread is
//!
//! T = data + forward + backward + clip + optimizer + rest,
//!
//! each the sum of the ranges of that name, and `rest` the time outside them. Two more figures overlap with these parts: `idle`
//! is the part of T in which no operator ran on any thread (loader workers do not count), and `host` is the self time of
//! everything that computes nothing: operators that call others, views, allocations, nodes of the autograd graph. Self times of
//! operators that run concurrently are all counted, as thread seconds.

use std::collections::HashMap;

use super::error::ProfileError;
use super::timeline::Timeline;
use super::trace_file::{DeviceWork, Profile};

mod interval;
mod table;

use interval::covered;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// The range `data`: waiting for a batch and copying it.
    Data,
    /// The range `forward`.
    Forward,
    /// The range `backward`.
    Backward,
    /// The range `clip`.
    Clip,
    /// The range `optimizer`.
    Optimizer,
    /// The time outside these ranges.
    Rest,
}

impl Phase {
    /// All parts, in the order of a step.
    pub const ALL: [Self; 6] =
        [Self::Data, Self::Forward, Self::Backward, Self::Clip, Self::Optimizer, Self::Rest];

    /// Returns the name of its ranges.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Clip => "clip",
            Self::Optimizer => "optimizer",
            Self::Rest => "rest",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| *phase != Self::Rest && phase.name() == name)
    }
}

/// A step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTimes {
    /// Duration.
    pub seconds: f64,
    /// Its parts, in the order of [`Phase::ALL`]; they add up to `seconds`.
    pub phases: [f64; 6],
    /// Operators that the program, or a node of the autograd graph, called in each part.
    pub calls: [usize; 6],
    /// Time without any operator.
    pub idle_seconds: f64,
    /// Self time of operators that compute nothing.
    pub host_seconds: f64,
    /// Bytes allocated, whether or not they were freed.
    pub allocated_bytes: f64,
    /// Copies.
    pub copies: Copies,
    /// The CUDA devices, if any took part.
    pub device: Option<DeviceTime>,
}

/// Copies of tensors in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Copies {
    /// Calls of `aten::copy_`.
    pub count: f64,
    /// Conversions of kind or device among them (`aten::_to_copy`).
    pub conversions: f64,
    /// Time in `aten::copy_`.
    pub seconds: f64,
}

/// The work of CUDA devices in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DeviceTime {
    /// Kernels that started in it.
    pub kernels: f64,
    /// Time with a kernel, a copy or a fill on any device.
    pub busy_seconds: f64,
    /// The fraction of the step without any, from 0 to 1.
    pub idle_share: f64,
    /// Copies and fills, also between the host and the device.
    pub copies: f64,
    /// Time in copies.
    pub copy_seconds: f64,
    /// Bytes copied.
    pub copy_bytes: f64,
}

/// A part of the median step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PhaseTime {
    /// The part.
    pub phase: Phase,
    /// The median over the steps.
    pub seconds: f64,
    /// Operators called in it, the median over the steps.
    pub calls: f64,
}

/// An operator in the median step.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorTime {
    /// Such as `aten::mm`.
    pub name: String,
    /// Calls per step, including within other operators; the median over the steps.
    pub calls: f64,
    /// Self time per step, the median over the steps.
    pub seconds: f64,
    /// Fraction of the median step, from 0 to 1.
    pub share: f64,
}

/// The composition of steps. Its `Display` is a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Composition {
    /// Each step, in order.
    pub steps: Vec<StepTimes>,
    /// The median step. The medians of its parts add up to its duration only approximately.
    pub median: StepTimes,
    /// Operators and nodes, by decreasing self time.
    pub operators: Vec<OperatorTime>,
}

impl Composition {
    /// Computes the composition of a trace's steps. A range `step` within another belongs to that one.
    ///
    /// # Errors
    /// [`ProfileError::NoSteps`].
    pub fn new(profile: &Profile) -> Result<Self, ProfileError> {
        Ok(Self::on(profile, &Timeline::new(profile)?))
    }

    pub(super) fn on(profile: &Profile, timeline: &Timeline) -> Self {
        let mut steps: Vec<StepTimes> = timeline.steps.iter().map(lengths).collect();
        let mut running: Vec<Vec<(i64, i64)>> = vec![Vec::new(); steps.len()];
        // By operator and step: calls and self time.
        let mut by_name: HashMap<u32, HashMap<u32, (usize, i64)>> = HashMap::new();
        for (operator, context) in profile.operators.iter().zip(&timeline.contexts) {
            let Some(index) = context.step.filter(|_| !context.worker) else { continue };
            let step = &mut steps[index as usize];
            running[index as usize].push((operator.start, operator.end));
            let (calls, self_time) = by_name.entry(operator.name).or_default().entry(index).or_default();
            *calls += 1;
            *self_time += context.self_time;
            if context.called {
                step.calls[context.phase as usize] += 1;
            }
            if !context.works {
                step.host_seconds += seconds(context.self_time);
            }
            match profile.operator_name(operator) {
                "aten::copy_" => {
                    step.copies.count += 1.0;
                    step.copies.seconds += seconds(operator.end - operator.start);
                }
                "aten::_to_copy" => step.copies.conversions += 1.0,
                _ => {}
            }
        }
        for memory in profile.memory.iter().filter(|memory| memory.bytes > 0) {
            if let Some(index) = timeline.step_at(memory.at) {
                steps[index].allocated_bytes += memory.bytes as f64;
            }
        }
        let devices = device_times(profile, timeline);
        for (index, (times, step)) in steps.iter_mut().zip(&timeline.steps).enumerate() {
            let busy = covered(&mut running[index], step.start, step.end);
            times.idle_seconds = seconds(step.length() - busy);
            times.device = profile.cuda.then(|| devices[index]);
        }
        let median = median_step(&steps);
        let operators = operator_times(profile, &by_name, steps.len(), median.seconds);
        Self { steps, median, operators }
    }

    /// Returns a part of the median step.
    #[must_use]
    pub fn phase(&self, phase: Phase) -> PhaseTime {
        let calls = median(self.steps.iter().map(|step| step.calls[phase as usize] as f64));
        PhaseTime { phase, seconds: self.median.phases[phase as usize], calls }
    }

    /// Returns an operator of the median step by name; `None` if it did not run.
    #[must_use]
    pub fn operator(&self, name: &str) -> Option<&OperatorTime> {
        self.operators.iter().find(|operator| operator.name == name)
    }

    /// Returns the number of operators called in the median step.
    #[must_use]
    pub fn calls(&self) -> f64 {
        median(self.steps.iter().map(|step| step.calls.iter().sum::<usize>() as f64))
    }
}

/// Converts nanoseconds to seconds.
pub(super) fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 * 1e-9
}

/// Returns the median; 0 for no values.
pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    match (values.len(), values.len() / 2) {
        (0, _) => 0.0,
        (count, middle) if count % 2 == 1 => values[middle],
        (_, middle) => values[middle - 1] + (values[middle] - values[middle - 1]) * 0.5,
    }
}

fn lengths(step: &super::timeline::TimedStep) -> StepTimes {
    let mut times = StepTimes { seconds: seconds(step.length()), ..StepTimes::default() };
    let mut rest = step.length();
    for &(phase, start, end) in &step.phases {
        times.phases[phase as usize] += seconds(end - start);
        rest -= end - start;
    }
    times.phases[Phase::Rest as usize] = seconds(rest);
    times
}

fn device_times(profile: &Profile, timeline: &Timeline) -> Vec<DeviceTime> {
    let mut times = vec![DeviceTime::default(); timeline.steps.len()];
    let mut all: Vec<(i64, i64)> = profile.device.iter().map(|event| (event.start, event.end)).collect();
    for event in &profile.device {
        let Some(index) = timeline.step_at(event.start) else { continue };
        let time = &mut times[index];
        if event.work == DeviceWork::Kernel {
            time.kernels += 1.0;
        } else {
            time.copies += 1.0;
            time.copy_seconds += seconds(event.end - event.start);
            time.copy_bytes += event.bytes as f64;
        }
    }
    if !profile.cuda {
        return times;
    }
    for (time, step) in times.iter_mut().zip(&timeline.steps) {
        let busy = covered(&mut all, step.start, step.end);
        time.busy_seconds = seconds(busy);
        time.idle_share = 1.0 - busy as f64 / step.length().max(1) as f64;
    }
    times
}

fn median_step(steps: &[StepTimes]) -> StepTimes {
    let per_step = |field: &dyn Fn(&StepTimes) -> f64| median(steps.iter().map(field));
    let device = |field: fn(&DeviceTime) -> f64| per_step(&|step| step.device.as_ref().map_or(0.0, field));
    StepTimes {
        seconds: per_step(&|step| step.seconds),
        phases: Phase::ALL.map(|phase| per_step(&|step| step.phases[phase as usize])),
        calls: Phase::ALL.map(|phase| per_step(&|step| step.calls[phase as usize] as f64) as usize),
        idle_seconds: per_step(&|step| step.idle_seconds),
        host_seconds: per_step(&|step| step.host_seconds),
        allocated_bytes: per_step(&|step| step.allocated_bytes),
        copies: Copies {
            count: per_step(&|step| step.copies.count),
            conversions: per_step(&|step| step.copies.conversions),
            seconds: per_step(&|step| step.copies.seconds),
        },
        device: steps.iter().all(|step| step.device.is_some()).then(|| DeviceTime {
            kernels: device(|time| time.kernels),
            busy_seconds: device(|time| time.busy_seconds),
            idle_share: device(|time| time.idle_share),
            copies: device(|time| time.copies),
            copy_seconds: device(|time| time.copy_seconds),
            copy_bytes: device(|time| time.copy_bytes),
        }),
    }
}

fn operator_times(
    profile: &Profile,
    by_name: &HashMap<u32, HashMap<u32, (usize, i64)>>,
    steps: usize,
    step_seconds: f64,
) -> Vec<OperatorTime> {
    let mut operators: Vec<OperatorTime> = by_name
        .iter()
        .map(|(&name, by_step)| {
            let in_step = |index: usize| by_step.get(&(index as u32)).copied().unwrap_or_default();
            let seconds_per_step = median((0..steps).map(|index| seconds(in_step(index).1)));
            OperatorTime {
                name: profile.name(name).to_owned(),
                calls: median((0..steps).map(|index| in_step(index).0 as f64)),
                seconds: seconds_per_step,
                share: if step_seconds > 0.0 { seconds_per_step / step_seconds } else { 0.0 },
            }
        })
        .collect();
    operators.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
    operators
}

#[cfg(test)]
mod tests;
