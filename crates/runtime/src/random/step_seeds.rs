//! The seeds of a training step: each is a function of the step's base and of the number of the call.
//!
//! A seed that is drawn on the host is a constant to a graph, which would repeat one mask at every step; and a part of a model that
//! backward runs again would need the generator's earlier state. Here the base is written to the device before the step, and the
//! second run counts its calls from where the first began.
//!
//! A step belongs to the thread that runs it, so that trainings on several threads have the seeds that each has alone. It goes with the
//! graph: a hand-written [function](crate::autograd::Function) has the step of its forward in its backward, on whichever thread of the
//! engine that runs.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tch::Tensor;

thread_local! {
    /// The step that this thread runs.
    static STEP: RefCell<Option<Arc<Step>>> = const { RefCell::new(None) };
}

/// A training step.
#[derive(Debug)]
pub(crate) struct Step {
    base: u64,
    on_device: Option<Arc<Mutex<Tensor>>>,
    /// The number of seeds drawn.
    calls: AtomicU64,
}

impl Step {
    /// Returns the same step before its call `calls`.
    fn at(&self, calls: u64) -> Self {
        Self { base: self.base, on_device: self.on_device.clone(), calls: AtomicU64::new(calls) }
    }
}

/// While one of these exists, [`step_seed`] draws from its step on this thread. May nest.
#[derive(Debug)]
#[must_use = "the step's seeds end when the guard is dropped"]
pub struct StepSeeds(
    #[expect(dead_code, reason = "restores the thread's previous step when dropped")] StepGuard,
);

impl StepSeeds {
    /// Begins a step with a base, which differs from that of other steps. `on_device`, int64 `[1]`, has the same base where a graph reads it.
    pub fn enter(base: u64, on_device: Option<&Tensor>) -> Self {
        let on_device = on_device.map(|tensor| Arc::new(Mutex::new(tensor.shallow_clone())));
        Self(StepGuard::enter(Some(Arc::new(Step { base, on_device, calls: AtomicU64::new(0) }))))
    }
}

/// Restores this thread's previous step when dropped.
#[derive(Debug)]
#[must_use = "the thread's previous step is restored when the guard is dropped"]
pub(crate) struct StepGuard {
    previous: Option<Arc<Step>>,
    thread: PhantomData<*const ()>,
}

impl StepGuard {
    pub(crate) fn enter(step: Option<Arc<Step>>) -> Self {
        Self { previous: STEP.replace(step), thread: PhantomData }
    }
}

impl Drop for StepGuard {
    fn drop(&mut self) {
        STEP.set(self.previous.take());
    }
}

/// Begins a part of the step that runs, such as a micro-batch: its calls are numbered from `part`·2³² on, however many seeds other parts
/// draw, here or on another rank. Does nothing outside of a step.
pub fn begin_step_part(part: u64) {
    STEP.with_borrow(|step| step.iter().for_each(|step| step.calls.store(part << 32, Ordering::Relaxed)));
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

/// Returns the next seed of the step that this thread runs; `None` outside of a step.
pub fn step_seed() -> Option<StepSeed> {
    STEP.with_borrow(|step| {
        let step = step.as_ref()?;
        let call = step.calls.fetch_add(1, Ordering::Relaxed);
        Some(StepSeed { base: step.base, call, on_device: step.on_device.is_some() })
    })
}

/// Returns the base on the device of the step that this thread runs, int64 `[1]`.
pub fn step_base() -> Option<Tensor> {
    STEP.with_borrow(|step| Some(step.as_ref()?.on_device.as_ref()?.lock().shallow_clone()))
}

/// Returns the step that this thread runs, for a backward of it.
pub(crate) fn current_step() -> Option<Arc<Step>> {
    STEP.with_borrow(Clone::clone)
}

/// Returns the step that this thread runs as it is at this moment, for a second run of what follows.
pub(crate) fn step_at_this_call() -> Option<Arc<Step>> {
    STEP.with_borrow(|step| {
        let step = step.as_ref()?;
        Some(Arc::new(step.at(step.calls.load(Ordering::Relaxed))))
    })
}

/// Enters a step from [`step_at_this_call`]. Each run counts its calls from there.
pub(crate) fn enter_again(step: Option<&Arc<Step>>) -> StepGuard {
    StepGuard::enter(step.map(|step| Arc::new(step.at(step.calls.load(Ordering::Relaxed)))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::{backward, checkpoint};
    use tch::{Kind, kind};

    fn calls(count: usize) -> Vec<(u64, u64)> {
        (0..count).filter_map(|_| step_seed()).map(|seed| (seed.base, seed.call)).collect()
    }

    #[test]
    fn each_thread_has_its_own_step_and_a_nested_one_ends() {
        let _outer = StepSeeds::enter(1, None);
        assert_eq!(calls(2), [(1, 0), (1, 1)]);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert_eq!(step_seed(), None);
                let _step = StepSeeds::enter(2, None);
                calls(2)
            });
            assert_eq!(other.join().unwrap(), [(2, 0), (2, 1)]);
        });
        {
            let _inner = StepSeeds::enter(3, None);
            begin_step_part(1);
            assert_eq!(calls(1), [(3, 1 << 32)]);
        }
        assert_eq!(calls(1), [(1, 2)]);
    }

    #[test]
    fn a_second_run_draws_the_seeds_of_the_first_on_another_thread() {
        let drawn = Arc::new(Mutex::new(Vec::new()));
        let x = Tensor::ones([2], kind::FLOAT_CPU).set_requires_grad(true);
        let (loss, base) = {
            let base = Tensor::from_slice(&[5i64]);
            let _step = StepSeeds::enter(5, Some(&base));
            assert_eq!(calls(3).len(), 3);
            let seen = drawn.clone();
            let [y] = checkpoint(
                move |[x]| {
                    seen.lock().push((step_seed(), step_base().map(|base| base.int64_value(&[0]))));
                    Ok([x.f_square()?])
                },
                [&x],
            )
            .unwrap();
            (y.sum(Kind::Float), base)
        };
        std::thread::spawn(move || backward(&[&loss]).unwrap()).join().unwrap();
        let seed = StepSeed { base: 5, call: 3, on_device: true };
        assert_eq!(*drawn.lock(), [(Some(seed), Some(5)), (Some(seed), Some(5))]);
        drop(base);
    }
}
