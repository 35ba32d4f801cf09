//! The peak memory of training steps, without the evaluations between them.

use runtime::memory::Region;
use tch::Device;
use training::Result;

/// The most bytes that were live in any region of a training that ended with a step. An observer calls it where regions end:
/// losses are read before an evaluation, so a region that ends with a step's record contains no evaluation.
#[derive(Debug)]
pub(crate) struct StepPeak {
    device: Device,
    /// Since the last step or evaluation.
    stretch: Region,
    peak: u64,
}

impl StepPeak {
    /// Starts the first region.
    ///
    /// # Errors
    /// Errors of [`Region::start`].
    pub(crate) fn start(device: Device) -> Result<Self> {
        Ok(Self { device, stretch: Region::start(device)?, peak: 0 })
    }

    /// A step's record came.
    ///
    /// # Errors
    /// Errors of [`Region`].
    pub(crate) fn after_step(&mut self) -> Result<()> {
        self.peak = self.next_stretch()?.max(self.peak);
        Ok(())
    }

    /// An evaluation ended; what it held does not count.
    ///
    /// # Errors
    /// Errors of [`Region`].
    pub(crate) fn after_evaluation(&mut self) -> Result<()> {
        self.next_stretch().map(drop)
    }

    /// Bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.peak
    }

    fn next_stretch(&mut self) -> Result<u64> {
        let next = Region::start(self.device)?;
        Ok(std::mem::replace(&mut self.stretch, next).finish()?.peak)
    }
}
