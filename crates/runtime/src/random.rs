//! Seeds, and the state of the default random generators.
//!
//! libtorch has one default generator per device, shared by all threads: a Mersenne Twister on the CPU, a counter-based
//! Philox on CUDA. Dropout, initialisation and sampling draw from it. What must come out the same twice, such as the
//! dropout mask of a recomputed segment, needs the generator to be put back to where it stood the first time:
//!
//! ```
//! use runtime::random::{self, RandomState};
//! use tch::{Device, Tensor, kind::FLOAT_CPU};
//!
//! random::seed(42)?;
//! let state = RandomState::capture(Device::Cpu)?;
//! let first = Tensor::rand([4], FLOAT_CPU);
//! let second = Tensor::rand([4], FLOAT_CPU);
//! {
//!     let _replay = state.replay()?;
//!     assert_eq!(Tensor::rand([4], FLOAT_CPU), first);
//! }
//! // After the guard the sequence goes on as if nothing had happened in between.
//! assert_ne!(Tensor::rand([4], FLOAT_CPU), second);
//! # Ok::<(), runtime::Error>(())
//! ```

use tch::{Cuda, Device};

use crate::error::{Error, Result};
use crate::sys::random as sys;

/// Seeds the generator of the CPU and of every CUDA device.
///
/// The same seed gives the same numbers on the same kind of device, but not the same numbers on a CPU and on a GPU.
///
/// # Errors
/// [`Error::Torch`] where CUDA is there and cannot be initialised.
pub fn seed(seed: u64) -> Result<()> {
    sys::seed(seed)
}

/// Where the default generators stood: the CPU's always, and the device's own when it is a CUDA device.
///
/// The CPU's generator belongs to every state because operations on a CUDA device draw from it too when a tensor is
/// made on the host first.
#[derive(Clone, PartialEq, Eq)]
pub struct RandomState {
    states: Vec<(Device, Vec<u8>)>,
}

impl RandomState {
    /// Reads where the generators stand that code working on `device` can draw from.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a CUDA device that this machine does not have, and for a device that is neither CPU
    /// nor CUDA.
    pub fn capture(device: Device) -> Result<Self> {
        let mut states = vec![(Device::Cpu, sys::state(Device::Cpu)?)];
        if device != Device::Cpu {
            check_device(device)?;
            states.push((device, sys::state(device)?));
        }
        Ok(Self { states })
    }

    /// Puts the generators back to where they stood.
    ///
    /// # Errors
    /// [`Error::Torch`] where CUDA refuses, for example during the capture of a graph.
    pub fn restore(&self) -> Result<()> {
        self.states.iter().try_for_each(|(device, bytes)| sys::restore(*device, bytes))
    }

    /// Puts the generators back to this state until the guard is dropped; then they go on from where they are at this
    /// call.
    ///
    /// # Errors
    /// As [`RandomState::capture`] and [`RandomState::restore`].
    pub fn replay(&self) -> Result<Preserve> {
        let current = preserve(self.device())?;
        self.restore()?;
        Ok(current)
    }

    /// The device whose state this is.
    #[must_use]
    pub fn device(&self) -> Device {
        self.states.last().map_or(Device::Cpu, |(device, _)| *device)
    }
}

impl std::fmt::Debug for RandomState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RandomState").field("device", &self.device()).finish_non_exhaustive()
    }
}

/// A guard that puts the generators back, when it is dropped, to where they stood when it was made.
///
/// The generators are shared by all threads: numbers that another thread draws meanwhile are drawn again.
#[derive(Debug)]
#[must_use = "the generators go back at once when the guard is dropped at once"]
pub struct Preserve {
    state: RandomState,
}

impl Drop for Preserve {
    fn drop(&mut self) {
        // A drop has nobody to tell; it can only fail during the capture of a CUDA graph.
        let _ = self.state.restore();
    }
}

/// What is drawn while the guard lives leaves no trace in the sequence of random numbers.
///
/// # Errors
/// As [`RandomState::capture`].
pub fn preserve(device: Device) -> Result<Preserve> {
    Ok(Preserve { state: RandomState::capture(device)? })
}

fn check_device(device: Device) -> Result<()> {
    let unavailable =
        |reason: String| Err(Error::Unavailable { what: format!("the random state of {device:?}"), reason });
    match device {
        Device::Cpu => Ok(()),
        Device::Cuda(index) => match usize::try_from(Cuda::device_count()).unwrap_or(0) {
            0 => unavailable("libtorch sees no CUDA device; use Device::Cpu".into()),
            count if index >= count => {
                unavailable(format!("there are {count} CUDA devices, numbered from 0"))
            }
            _ => Ok(()),
        },
        _ => unavailable("only the CPU and CUDA have one here".into()),
    }
}
