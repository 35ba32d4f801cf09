//! Random generators: seeds, the state of the default generators, and separate generators.
//!
//! libtorch has one default generator per device, shared by all threads: a Mersenne Twister on the CPU, a counter-based
//! Philox on CUDA. Dropout, initialisation and sampling draw from it. To draw the same numbers twice, such as the
//! dropout mask of a recomputed segment, restore the generator's earlier state:
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

mod step_seeds;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::sys::random as sys;
pub(crate) use step_seeds::{Step, StepGuard, current_step, enter_again, step_at_this_call};
pub use step_seeds::{StepSeed, StepSeeds, begin_step_part, step_base, step_seed};

/// The magic number of [`RandomState::to_bytes`].
const MAGIC: &[u8; 8] = b"rngstat1";

/// Seeds the generator of the CPU and of every CUDA device.
///
/// The same seed gives the same numbers on the same kind of device, but not the same numbers on a CPU and on a GPU.
///
/// # Errors
/// [`Error::Torch`] if CUDA exists and cannot be initialised.
pub fn seed(seed: u64) -> Result<()> {
    // libtorch decides at this call whether CUDA exists, so its CUDA library must be loaded before.
    crate::device::cuda_count()?;
    sys::seed(seed)
}

/// The state of the default generators: always the CPU's, and the device's own for a CUDA device.
///
/// The CPU's generator is always included because operations on a CUDA device draw from it too if they create a tensor
/// on the host first.
#[derive(Clone, PartialEq, Eq)]
pub struct RandomState {
    states: Vec<(Device, Vec<u8>)>,
}

impl RandomState {
    /// Captures the state of the generators that code working on `device` can draw from.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a CUDA device that does not exist, and for a device that is neither CPU nor CUDA.
    pub fn capture(device: Device) -> Result<Self> {
        Self::capture_on(&[device])
    }

    /// Captures the states of the CPU's generator and of those of `devices`.
    ///
    /// # Errors
    /// As [`RandomState::capture`].
    pub fn capture_on(devices: &[Device]) -> Result<Self> {
        let mut states = vec![(Device::Cpu, sys::state(Device::Cpu)?)];
        for &device in devices {
            if states.iter().all(|(known, _)| *known != device) {
                crate::device::checked(device)?;
                states.push((device, sys::state(device)?));
            }
        }
        Ok(Self { states })
    }

    /// Captures the states of the CPU's generator and of those of all CUDA devices.
    ///
    /// # Errors
    /// [`Error::Torch`] if CUDA exists and cannot be initialised.
    pub fn capture_all() -> Result<Self> {
        let cuda = (0..crate::device::cuda_count()?).map(Device::Cuda);
        Self::of(std::iter::once(Device::Cpu).chain(cuda))
    }

    fn of(devices: impl Iterator<Item = Device>) -> Result<Self> {
        Ok(Self { states: devices.map(|device| Ok((device, sys::state(device)?))).collect::<Result<_>>()? })
    }

    /// Restores the generators.
    ///
    /// # Errors
    /// [`Error::Torch`] if CUDA refuses, for example during the capture of a graph.
    pub fn restore(&self) -> Result<()> {
        crate::sys::recorder::refuse("a random generator is set back to an earlier state")?;
        self.states.iter().try_for_each(|(device, bytes)| sys::restore(*device, bytes))
    }

    /// Restores only the generators of the CPU and of `devices`, so that a state from a machine with more devices can be used.
    /// Returns those of `devices` without a captured state.
    ///
    /// # Errors
    /// As [`RandomState::restore`].
    pub fn restore_on(&self, devices: &[Device]) -> Result<Vec<Device>> {
        let wanted = |device: &Device| *device == Device::Cpu || devices.contains(device);
        let mut states = self.states.iter().filter(|(device, _)| wanted(device));
        states.try_for_each(|(device, bytes)| sys::restore(*device, bytes))?;
        let known = |device: &Device| self.states.iter().any(|(known, _)| known == device);
        Ok(devices.iter().copied().filter(|device| !known(device)).collect())
    }

    /// Restores this state until the guard is dropped; then the generators continue from their state before this call.
    ///
    /// # Errors
    /// As [`RandomState::capture`] and [`RandomState::restore`].
    pub fn replay(&self) -> Result<Preserve> {
        let current = Preserve { state: Self::of(self.states.iter().map(|(device, _)| *device))? };
        self.restore()?;
        Ok(current)
    }

    /// Returns a number that depends on the state of the CPU's generator (FNV-1a of its bytes).
    #[must_use]
    pub fn digest(&self) -> u64 {
        let cpu = self.states.iter().filter(|(device, _)| *device == Device::Cpu);
        let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        cpu.flat_map(|(_, bytes)| bytes).fold(0xcbf2_9ce4_8422_2325, fold)
    }

    /// Serialises the state for a checkpoint, to be read by the same version of libtorch.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for (device, state) in &self.states {
            let number = if let Device::Cuda(index) = device { *index as u64 + 1 } else { 0 };
            bytes.extend(number.to_le_bytes());
            bytes.extend((state.len() as u64).to_le_bytes());
            bytes.extend(state);
        }
        bytes
    }

    /// Parses the bytes of [`RandomState::to_bytes`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid or truncated bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let invalid = |reason: &str| {
            let reason = format!("{} bytes: {reason}; expected what RandomState::to_bytes gave", bytes.len());
            Error::invalid("RandomState::from_bytes", reason)
        };
        let mut rest = bytes.strip_prefix(MAGIC).ok_or_else(|| invalid("another beginning"))?;
        let mut states = Vec::new();
        while !rest.is_empty() {
            let (device, after) = rest.split_first_chunk().ok_or_else(|| invalid("cut short"))?;
            let (length, after) = after.split_first_chunk().ok_or_else(|| invalid("cut short"))?;
            let length = usize::try_from(u64::from_le_bytes(*length))
                .map_err(|_| invalid("a length beyond memory"))?;
            let (state, after) = after.split_at_checked(length).ok_or_else(|| invalid("cut short"))?;
            let device = match u64::from_le_bytes(*device) {
                0 => Device::Cpu,
                number => Device::Cuda(usize::try_from(number - 1).map_err(|_| invalid("no such device"))?),
            };
            states.push((device, state.to_vec()));
            rest = after;
        }
        if states.is_empty() { Err(invalid("no generator")) } else { Ok(Self { states }) }
    }

    /// Returns the last captured device, which is the device of [`RandomState::capture`].
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

/// A guard that restores, when dropped, the state that the generators had when it was created.
///
/// The generators are shared by all threads, so numbers that another thread draws meanwhile are drawn again.
#[derive(Debug)]
#[must_use = "the generators go back at once when the guard is dropped at once"]
pub struct Preserve {
    state: RandomState,
}

impl Drop for Preserve {
    fn drop(&mut self) {
        // A drop cannot return an error; this fails only during the capture of a CUDA graph.
        let _ = self.state.restore();
    }
}

/// A separate random generator on the CPU (a Mersenne Twister), independent of the default generator that other code and threads
/// use.
///
/// Its numbers are those of `torch.Generator().manual_seed(seed)`.
///
/// ```
/// use runtime::random::Generator;
/// use tch::kind::FLOAT_CPU;
///
/// let (mut first, mut second) = (Generator::new(7)?, Generator::new(7)?);
/// let drawn = first.normal(&[4], FLOAT_CPU)?;
/// runtime::random::seed(0)?;
/// assert_eq!(second.normal(&[4], FLOAT_CPU)?, drawn);
/// # Ok::<(), runtime::Error>(())
/// ```
pub struct Generator(sys::Generator);

impl Generator {
    /// Creates a generator with a seed.
    ///
    /// # Errors
    /// [`Error::Torch`] if memory is short.
    pub fn new(seed: u64) -> Result<Self> {
        Ok(Self(sys::Generator::new(seed)?))
    }

    /// Returns a tensor `[shape]` of numbers with mean 0 and variance 1. Drawn on the CPU, then copied to the device.
    ///
    /// # Errors
    /// A dtype that is not a floating-point one, a device that does not exist, an invalid shape.
    pub fn normal(&mut self, shape: &[i64], (kind, device): (Kind, Device)) -> Result<Tensor> {
        crate::device::checked(device)?;
        let mut drawn = Tensor::f_empty(shape, (kind, Device::Cpu))?;
        self.0.normal(&mut drawn, 0.0, 1.0)?;
        Ok(drawn.f_to_device(device)?)
    }

    /// Returns a tensor `[shape]` of numbers uniform in `[low, high)`. Drawn on the CPU, then copied to the device.
    ///
    /// # Errors
    /// As [`Generator::normal`]; bounds in the wrong order or not finite.
    pub fn uniform(
        &mut self,
        shape: &[i64],
        (low, high): (f64, f64),
        (kind, device): (Kind, Device),
    ) -> Result<Tensor> {
        crate::device::checked(device)?;
        let mut drawn = Tensor::f_empty(shape, (kind, Device::Cpu))?;
        self.0.uniform(&mut drawn, low, high)?;
        Ok(drawn.f_to_device(device)?)
    }
}

impl std::fmt::Debug for Generator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator").finish_non_exhaustive()
    }
}
