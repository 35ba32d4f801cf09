//! What a forward depends on besides its inputs, for a backward that runs it again.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::precision::{self, Entered, Policy};
use crate::random::{Preserve, RandomState};
use crate::sys::autocast::{Autocast, AutocastGuard};

/// The state of a thread that decides what a forward computes: libtorch's autocast, the [policy](crate::precision) of mixed
/// precision and, where it was asked for, the default random generators. A [`Function`](super::Function) that runs its forward
/// again in backward captures it in forward, and enters it there, on whichever thread that is.
///
/// ```
/// use runtime::autograd::Surroundings;
/// use tch::{Tensor, kind::FLOAT_CPU};
///
/// let surroundings = Surroundings::capture(true)?;
/// let first = Tensor::rand([4], FLOAT_CPU);
/// let _as_then = surroundings.enter()?;
/// assert_eq!(Tensor::rand([4], FLOAT_CPU), first);
/// # Ok::<(), runtime::Error>(())
/// ```
pub struct Surroundings {
    autocast: Autocast,
    precision: Option<Arc<dyn Policy>>,
    random: Option<RandomState>,
}

/// This thread's own state comes back when it is dropped.
#[must_use = "the thread's own state comes back when the guard is dropped"]
pub struct Surrounded {
    _autocast: AutocastGuard,
    _precision: Entered,
    _random: Option<Preserve>,
}

impl Surroundings {
    /// Reads this thread's state; with `random` that of the default generators too, which costs a copy of some kilobytes.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn capture(random: bool) -> Result<Self> {
        let random = random.then(RandomState::capture_all).transpose()?;
        Ok(Self { autocast: Autocast::capture()?, precision: precision::current(), random })
    }

    /// Makes it this thread's state for as long as the guard lives.
    ///
    /// # Errors
    /// Those of libtorch.
    pub fn enter(&self) -> Result<Surrounded> {
        Ok(Surrounded {
            _autocast: self.autocast.enter()?,
            _precision: precision::enter(self.precision.clone()),
            _random: self.random.as_ref().map(RandomState::replay).transpose()?,
        })
    }
}

impl fmt::Debug for Surroundings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surroundings").field("random", &self.random.is_some()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Surrounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surrounded").finish_non_exhaustive()
    }
}
