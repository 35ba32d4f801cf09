//! The thread-local state that a forward depends on, for a backward that recomputes it.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::precision::{self, Policy, PolicyGuard};
use crate::random::{Preserve, RandomState};
use crate::sys::autocast::{Autocast, AutocastGuard};

/// The thread-local state that decides what a forward computes: libtorch's autocast, the mixed-precision
/// [policy](crate::precision) and, if asked for, the default random generators. A [`Function`](super::Function) that recomputes its
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
}

/// Restores the thread's previous state when dropped.
#[must_use = "the thread's previous state is restored when the guard is dropped"]
pub struct ThreadLocalStateGuard {
    _autocast: AutocastGuard,
    _precision: PolicyGuard,
    _random: Option<Preserve>,
}

impl ThreadLocalState {
    /// Captures this thread's state; with `random` that of the default generators too, a copy of a few kilobytes.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn capture(random: bool) -> Result<Self> {
        let random = random.then(RandomState::capture_all).transpose()?;
        Ok(Self { autocast: Autocast::capture()?, precision: precision::current(), random })
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
