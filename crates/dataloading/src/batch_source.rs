//! Batches by index.

use tch::Device;

use crate::batch::Batch;
use crate::error::Result;
use crate::host_batch::HostBatch;

/// Batches that are a pure function of (seed, epoch, index).
///
/// Hence any number of workers makes the same batches in any division of work, ranks divide them by index, and resuming
/// needs only the next index.
pub trait BatchSource: Send + Sync {
    /// Returns the seed of all random choices.
    fn seed(&self) -> u64;

    /// Returns the number of batches of epoch `epoch`.
    fn batches(&self, epoch: u64) -> usize;

    /// Returns a fingerprint of everything that determines the batches besides seed, epoch and index: the data, the
    /// strategy and its options ([`Fingerprint`](crate::fingerprint::Fingerprint)). A loader resumes only if it matches, so
    /// it must be the same in every process.
    fn fingerprint(&self) -> u64;

    /// Writes batch `index` of epoch `epoch`.
    ///
    /// # Errors
    /// A record cannot be read (the error names its position); the index exceeds the batches of the epoch.
    fn fill(&self, epoch: u64, index: usize, host: &mut HostBatch) -> Result<()>;

    /// Returns batch `index` of epoch `epoch` on the CPU, in its own memory.
    ///
    /// # Errors
    /// Same as [`BatchSource::fill`].
    fn batch(&self, epoch: u64, index: usize) -> Result<Batch> {
        let mut host = HostBatch::new(Device::Cpu);
        self.fill(epoch, index, &mut host)?;
        host.finish()
    }
}

impl<B: BatchSource + ?Sized> BatchSource for std::sync::Arc<B> {
    fn seed(&self) -> u64 {
        (**self).seed()
    }

    fn batches(&self, epoch: u64) -> usize {
        (**self).batches(epoch)
    }

    fn fingerprint(&self) -> u64 {
        (**self).fingerprint()
    }

    fn fill(&self, epoch: u64, index: usize, host: &mut HostBatch) -> Result<()> {
        (**self).fill(epoch, index, host)
    }
}
