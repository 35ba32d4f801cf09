//! Batches by number.

use tch::Device;

use crate::batch::Batch;
use crate::error::Result;
use crate::host_batch::HostBatch;

/// Batches that are a pure function of (seed, epoch, index).
///
/// This is what makes the rest simple: any number of workers makes the same batches, whichever of them makes which; ranks
/// divide them by number; and to resume is to know the next number.
pub trait BatchSource: Send + Sync {
    /// The seed of every random choice.
    fn seed(&self) -> u64;

    /// How many batches there are in epoch `epoch`.
    fn batches(&self, epoch: u64) -> usize;

    /// A name for all that the batches are a function of besides seed, epoch and index: the data, the strategy and its
    /// options ([`Fingerprint`](crate::fingerprint::Fingerprint)). A loader's state is resumed only where it is the same, so
    /// it must be so in every process.
    fn fingerprint(&self) -> u64;

    /// Writes batch `index` of epoch `epoch`.
    ///
    /// # Errors
    /// A record that cannot be read, named by its place; an index beyond the epoch's batches.
    fn fill(&self, epoch: u64, index: usize, host: &mut HostBatch) -> Result<()>;

    /// Batch `index` of epoch `epoch` on the CPU, in memory of its own.
    ///
    /// # Errors
    /// As [`BatchSource::fill`].
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
