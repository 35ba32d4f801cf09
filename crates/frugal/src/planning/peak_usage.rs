//! Peak memory of the process, to compare with its budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use runtime::device::{reset_resident_peak, resident_memory};
use runtime::memory::{Region, RegionUsage};
use tch::Device;

use crate::error::Result;

/// Measures the peak memory of a stretch of work.
///
/// The kernel keeps the peak of all resident pages, but pages of mapped files (libraries, weights) do not count against a budget: it
/// drops them when memory gets short. Their bytes are sampled, and the largest sample is subtracted. So [`PeakUsage::anonymous`] is exact if the
/// pages of files stay, and otherwise at least the most that a sample saw.
pub struct PeakMeter {
    region: Region,
    samples: MemorySamples,
    /// The process's peak before the start, and its anonymous part: 0 where the work alone is measured.
    earlier: [u64; 2],
}

/// Anonymous memory of the process when [`note_preparation`] was called.
static PREPARED: AtomicU64 = AtomicU64::new(0);
/// The most that it had held in RAM by then, the pages of files included.
static PREPARED_IN_RAM: AtomicU64 = AtomicU64::new(0);

/// Notes the peak of the process up to this point, such as when the data is prepared and no weights are mapped yet: the pages of files are known
/// then that were among those of the peak. [`PeakMeter::of_process`] counts it.
///
/// # Errors
/// A system that does not count.
pub fn note_preparation() -> Result<()> {
    let now = resident_memory()?;
    PREPARED.fetch_max(now.peak.saturating_sub(now.file).max(now.anonymous), Ordering::Relaxed);
    PREPARED_IN_RAM.fetch_max(now.peak, Ordering::Relaxed);
    Ok(())
}

/// The most bytes that the process held in RAM until [`note_preparation`]; 0 before, and on a GPU.
pub(super) fn prepared_bytes(device: Device) -> u64 {
    if device == Device::Cpu { PREPARED_IN_RAM.load(Ordering::Relaxed) } else { 0 }
}

/// The most that samples of the process's memory saw. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemorySamples {
    anonymous: Arc<AtomicU64>,
    file: Arc<AtomicU64>,
}

impl MemorySamples {
    /// Looks at the process's memory, in some 20 microseconds.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn take(&self) -> Result<()> {
        let now = resident_memory()?;
        self.anonymous.fetch_max(now.anonymous, Ordering::Relaxed);
        self.file.fetch_max(now.file, Ordering::Relaxed);
        Ok(())
    }
}

/// The peak memory of a stretch of work.
#[derive(Clone, Copy, Debug)]
pub struct PeakUsage {
    /// Of the device's allocator.
    pub tensors: RegionUsage,
    /// The most bytes that the process held in RAM.
    pub process: u64,
    /// The most of them that are not pages of mapped files.
    pub anonymous: u64,
    /// The most bytes of pages of mapped files that a sample saw.
    pub file: u64,
}

impl PeakMeter {
    /// Starts to measure.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn start(device: Device) -> Result<Self> {
        Self::since(device, [0, 0])
    }

    /// Starts to measure work to which everything that the process did before belongs, such as reading and encoding the data.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn of_process(device: Device) -> Result<Self> {
        note_preparation()?;
        Self::since(device, [resident_memory()?.peak, PREPARED.load(Ordering::Relaxed)])
    }

    fn since(device: Device, earlier: [u64; 2]) -> Result<Self> {
        reset_resident_peak()?;
        let samples = MemorySamples::default();
        samples.take()?;
        Ok(Self { region: Region::start(device)?, samples, earlier })
    }

    /// Returns the samples, to be taken between steps.
    pub fn samples(&self) -> MemorySamples {
        self.samples.clone()
    }

    /// Returns the peaks since the start, or of the process.
    ///
    /// # Errors
    /// A system that does not count.
    pub fn finish(self) -> Result<PeakUsage> {
        self.samples.take()?;
        let (file, process) = (self.samples.file.load(Ordering::Relaxed), resident_memory()?.peak);
        let anonymous = process.saturating_sub(file).max(self.samples.anonymous.load(Ordering::Relaxed));
        let [before, anonymous_before] = self.earlier;
        Ok(PeakUsage {
            tensors: self.region.finish()?,
            process: process.max(before),
            anonymous: anonymous.max(anonymous_before),
            file,
        })
    }
}

impl PeakUsage {
    /// Returns the bytes that a budget is compared with: on the CPU those of the process without pages of mapped files, the device's
    /// otherwise.
    pub fn counted(&self, device: Device) -> u64 {
        if device == Device::Cpu { self.anonymous } else { self.tensors.peak }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Mutex;

    use super::*;

    /// The process has one peak.
    static PEAK: Mutex<()> = Mutex::new(());

    /// The peak of a training includes the memory of reading its data.
    #[test]
    fn work_before_the_start_counts_where_it_belongs_to_the_process() {
        const BYTES: u64 = 96 << 20;
        let _alone = PEAK.lock().unwrap();
        reset_resident_peak().unwrap();
        let before = resident_memory().unwrap();
        drop(std::hint::black_box(vec![1_u8; BYTES as usize]));
        let usage = PeakMeter::of_process(Device::Cpu).unwrap().finish().unwrap();
        assert!(usage.anonymous + (8 << 20) > before.anonymous + BYTES, "{usage:?} {before:?}");
    }

    /// A mapped file is in the process's memory, and not in what a budget is compared with.
    #[test]
    fn pages_of_files_are_not_counted() {
        const BYTES: usize = 96 << 20;
        let _alone = PEAK.lock().unwrap();
        // Beside the program: a file in memory would be no file's.
        let place = std::env::current_exe().unwrap();
        let mut file = tempfile::NamedTempFile::new_in(place.parent().unwrap()).unwrap();
        file.write_all(&vec![1; BYTES]).unwrap();
        let meter = PeakMeter::start(Device::Cpu).unwrap();
        let before = resident_memory().unwrap();
        let mapped = files::mapped::MappedFile::open(file.path()).unwrap();
        assert_eq!(
            mapped.iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>(),
            BYTES as u64 / 4096
        );
        meter.samples().take().unwrap();
        drop(mapped);
        let block = std::hint::black_box(vec![1_u8; 48 << 20]);
        drop(block);
        let usage = meter.finish().unwrap();
        let slack = 16 << 20;
        assert!(usage.file + slack >= before.file + BYTES as u64, "{usage:?} {before:?}");
        assert!(usage.process + slack >= before.current + BYTES as u64, "{usage:?} {before:?}");
        let counted = usage.counted(Device::Cpu);
        assert!(counted < before.anonymous + BYTES as u64 / 2 + slack, "{usage:?} {before:?}");
    }
}
