//! The thread-local state that a forward depends on, for a backward that recomputes it.

use std::fmt;
use std::sync::Arc;

use crate::device::graph;
use crate::error::{Error, Result};
use crate::precision::{self, Policy, PolicyGuard};
use crate::random::{self, Preserve, RandomState, Step, StepGuard};
use crate::sys::autocast::{Autocast, AutocastGuard};

/// The thread-local state that decides what a forward computes: libtorch's autocast, the mixed-precision
/// [policy](crate::precision), the training step and the number of seeds that it has drawn ([`crate::random::StepSeeds`]) and, if asked
/// for, the default random generators. A [`Function`](super::Function) that recomputes its
/// forward captures the state in forward and enters it in backward, on any thread. Like ATen's `ThreadLocalState`.
///
/// ```
/// use runtime::autograd::ThreadLocalState;
/// use tch::{Tensor, kind::FLOAT_CPU};
///
/// let state = ThreadLocalState::capture(true)?;
/// let first = Tensor::rand([4], FLOAT_CPU);
/// let _guard = state.enter()?;
/// assert_eq!(Tensor::rand([4], FLOAT_CPU), first);
/// # Ok::<(), runtime::Error>(())
/// ```
pub struct ThreadLocalState {
    autocast: Autocast,
    precision: Option<Arc<dyn Policy>>,
    random: Option<RandomState>,
    /// The training step before its next seed.
    step: Option<Arc<Step>>,
}

/// Restores the thread's previous state when dropped.
#[must_use = "the thread's previous state is restored when the guard is dropped"]
pub struct ThreadLocalStateGuard {
    _autocast: AutocastGuard,
    _precision: PolicyGuard,
    _random: Option<Preserve>,
    _step: StepGuard,
}

impl ThreadLocalState {
    /// Captures this thread's state; with `random` that of the default generators too, a copy of a few kilobytes. Not while a CUDA graph
    /// is captured, which cannot set a generator back: see [`ThreadLocalState::expect_no_draws`].
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn capture(random: bool) -> Result<Self> {
        let random = random && graph::progress() != graph::Progress::Capturing;
        let random = random.then(RandomState::capture_all).transpose()?;
        Ok(Self {
            autocast: Autocast::capture()?,
            precision: precision::current(),
            random,
            step: random::step_at_this_call(),
        })
    }

    /// For a forward that is a part of a step which a graph will repeat: forgets the generators' state, which no graph can restore, and
    /// refuses a forward that has drawn from them since [`ThreadLocalState::capture`]. Otherwise does nothing.
    ///
    /// # Errors
    /// A forward that has drawn random numbers; errors of libtorch.
    pub fn expect_no_draws(&mut self) -> Result<()> {
        if graph::progress() == graph::Progress::Eager {
            return Ok(());
        }
        match self.random.take() {
            Some(before) if before != RandomState::capture_all()? => {
                let reason = "a part of a model that backward runs again draws random numbers, for example for dropout; its second run \
                              needs the generator's earlier state, which a graph cannot restore";
                Err(Error::invalid("captured step", reason))
            }
            _ => Ok(()),
        }
    }

    /// Makes it this thread's state until the guard is dropped.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn enter(&self) -> Result<ThreadLocalStateGuard> {
        Ok(ThreadLocalStateGuard {
            _autocast: self.autocast.enter()?,
            _precision: precision::enter(self.precision.clone()),
            _random: self.random.as_ref().map(RandomState::replay).transpose()?,
            _step: random::enter_again(self.step.as_ref()),
        })
    }
}

impl fmt::Debug for ThreadLocalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadLocalState").field("random", &self.random.is_some()).finish_non_exhaustive()
    }
}

impl fmt::Debug for ThreadLocalStateGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadLocalStateGuard").finish_non_exhaustive()
    }
}
