//! The seeds of a training step: each is a function of the step's base and of the number of the call.
//!
//! A seed that is drawn on the host is a constant to a graph, which would repeat one mask at every step; and a part of a model that
//! backward runs again would need the generator's earlier state. Here the base is written to the device before the step, and the
//! second run counts its calls from where the first began.

use parking_lot::Mutex;
use tch::Tensor;

/// The step that runs. One at a time in a process: backward draws on the engine's threads.
static STEP: Mutex<Option<Step>> = Mutex::new(None);

struct Step {
    base: u64,
    on_device: Option<Tensor>,
    calls: u64,
}

/// While one of these exists, [`step_seed`] draws from its step.
#[derive(Debug)]
#[must_use = "the step's seeds end when the guard is dropped"]
pub struct StepSeeds(());

impl StepSeeds {
    /// Begins a step with a base, which differs from that of other steps. `on_device`, int64 `[1]`, has the same base where a graph reads it.
    pub fn enter(base: u64, on_device: Option<&Tensor>) -> Self {
        let on_device = on_device.map(Tensor::shallow_clone);
        *STEP.lock() = Some(Step { base, on_device, calls: 0 });
        Self(())
    }
}

impl Drop for StepSeeds {
    fn drop(&mut self) {
        *STEP.lock() = None;
    }
}

/// Begins a part of the step that runs, such as a micro-batch: its calls are numbered from `part`·2³² on, however many seeds other parts
/// draw, here or on another rank. Does nothing outside of a step.
pub fn begin_step_part(part: u64) {
    set_calls(part << 32);
}

/// A seed of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSeed {
    /// The step's base.
    pub base: u64,
    /// The number of the call, from 0 in each part of the step at its own multiple of 2³².
    pub call: u64,
    /// Whether the base has to be read from the device ([`step_base`]), because a graph repeats the call.
    pub on_device: bool,
}

/// Returns the next seed of the step that runs; `None` outside of a step.
pub fn step_seed() -> Option<StepSeed> {
    let mut step = STEP.lock();
    let step = step.as_mut()?;
    step.calls += 1;
    Some(StepSeed { base: step.base, call: step.calls - 1, on_device: step.on_device.is_some() })
}

/// Returns the base on the device of the step that runs, int64 `[1]`.
pub fn step_base() -> Option<Tensor> {
    STEP.lock().as_ref()?.on_device.as_ref().map(Tensor::shallow_clone)
}

/// Returns how many seeds the step has drawn.
pub(crate) fn calls() -> Option<u64> {
    STEP.lock().as_ref().map(|step| step.calls)
}

/// Counts calls from here on. Returns the number before; does nothing outside of a step.
pub(crate) fn set_calls(calls: u64) -> Option<u64> {
    STEP.lock().as_mut().map(|step| std::mem::replace(&mut step.calls, calls))
}
