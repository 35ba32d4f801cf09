//! A budget, and what is held of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accounting::quantity::bytes_text;
use runtime::device::{reset_resident_peak, resident_memory};
use runtime::memory::{Limit, Region, RegionUsage};
use tch::Device;

use crate::error::{Error, Result};

/// The share of a budget that a plan leaves free, for short-lived tensors and what libraries allocate as they go.
pub const RESERVE: f64 = 0.03;
/// The least that it leaves free: for the buffers that libraries make in the first step, the holes of the C library's heap, in which tensors
/// below 256 KiB are, and the libraries' own pages that the first step reads. The first two were 30 to 40 MiB in trainings of a model of one
/// million parameters and of one of 135, the last 15 MiB, and 30 MiB with the decompositions of DoRA, PiSSA and OLoRA.
pub const LEAST_RESERVE: u64 = 80 << 20;

/// By how much [`least_budget`] exceeds what a budget has to be: what a process takes before its work differs from run to run, by 11 MiB where
/// it has tokenized a text.
const MARGIN: f64 = 0.01;
const LEAST_MARGIN: u64 = 24 << 20;

/// The share of the free memory that a training without a budget may take.
pub const FREE_SHARE: f64 = 0.8;

/// Returns the budget of a training without one: on the CPU the bytes that the process holds and [`FREE_SHARE`] of those that are
/// free, as the kernel and the process's control group say; on a GPU that share of its free bytes.
///
/// # Errors
/// A system that does not say.
pub fn default_budget(device: Device) -> Result<u64> {
    let free =
        runtime::device::memory_info(device)?.free.saturating_add(runtime::memory::cached_bytes(device)?);
    let held = match device {
        Device::Cpu => resident_memory()?.current,
        _ => 0,
    };
    Ok(held + (free as f64 * FREE_SHARE) as u64)
}

/// Returns the bytes of a budget that a plan leaves free.
pub fn reserve(budget: u64) -> u64 {
    ((budget as f64 * RESERVE) as u64).max(LEAST_RESERVE)
}

/// Returns the smallest budget that leaves so many bytes beside its [`reserve`].
pub fn with_reserve(bytes: u64) -> u64 {
    ((bytes as f64 / (1.0 - RESERVE)) as u64).max(bytes.saturating_add(LEAST_RESERVE))
}

/// Returns the bytes of the device that tensors may take, of a budget that on the CPU is the whole process's, beside a reserve.
///
/// # Errors
/// A budget below what the process takes already.
pub fn tensor_budget(budget: u64, reserve: u64, device: Device) -> Result<u64> {
    let taken = taken(device)?;
    match budget.saturating_sub(taken).saturating_sub(reserve) {
        free if free > 0 && budget >= prepared(device) => Ok(free),
        _ => {
            let least = least_budget(taken, 0).max(least_of_preparation(device));
            Err(Error::Budget { budget: bytes_text(budget), least: bytes_text(least) })
        }
    }
}

/// Returns the most bytes that the process has held in RAM until [`note_preparation`], which a budget has to be at least: 0 before, and for
/// the budget of a GPU.
pub fn prepared(device: Device) -> u64 {
    if device == Device::Cpu { PREPARED_IN_RAM.load(Ordering::Relaxed) } else { 0 }
}

/// Returns the least budget, in whole mebibytes, in which that is done again. It differs from run to run.
pub fn least_of_preparation(device: Device) -> u64 {
    match prepared(device) {
        0 => 0,
        bytes => (bytes + bytes / 32 + LEAST_MARGIN).div_ceil(1 << 20) << 20,
    }
}

/// Returns the bytes of a budget that the process takes before tensors are allocated.
///
/// # Errors
/// A system that does not count.
pub fn taken(device: Device) -> Result<u64> {
    Ok(match device {
        Device::Cpu => {
            // What loading and encoding data took, and freed, is no part of what follows.
            runtime::memory::release_freed_pages();
            resident_memory()?.current
        }
        // What the libraries keep there is in the plan.
        _ => 0,
    })
}

/// Returns the smallest budget, in whole MiB, that leaves so many bytes for tensors when the process already holds [`taken`].
pub fn least_budget(taken: u64, tensors: u64) -> u64 {
    let sum = taken.saturating_add(tensors);
    let least = with_reserve(sum.saturating_add(((sum as f64 * MARGIN) as u64).max(LEAST_MARGIN)));
    least.div_ceil(1 << 20) << 20
}

/// Makes the allocator refuse what goes beyond the budget. `None` on a GPU, where only the environment can do that.
///
/// # Errors
/// More is live already.
pub fn enforce(device: Device, budget: u64) -> Result<Option<Limit>> {
    match device {
        Device::Cpu => Ok(Some(runtime::memory::limit(device, budget)?)),
        _ => Ok(None),
    }
}

/// Measures the peak memory of a stretch of work.
///
/// The kernel keeps the peak of all resident pages, of which those of mapped files (libraries, weights) are not what a budget is of: it
/// drops them when memory gets short. What they take is sampled, and subtracted at its most. So [`PeakUsage::anonymous`] is exact if the
/// pages of files stay, and otherwise at least the most that a sample saw.
pub struct PeakMeter {
    region: Region,
    samples: MemorySamples,
    /// The process's peak before the start, and what of it was in no file: 0 where the work alone is measured.
    earlier: [u64; 2],
}

/// What the process held in no file when [`note_preparation`] was called.
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

    /// What the least budget leaves suffices, and a budget of a few percent less does not.
    #[test]
    fn the_least_budget_is_the_least() {
        for (taken, tensors) in [(0, 1 << 20), (135 << 20, 0), (135 << 20, 900 << 20), (1 << 30, 700 << 30)] {
            let free = |budget: u64| budget as f64 - reserve(budget) as f64 - taken as f64;
            let least = least_budget(taken, tensors);
            assert!(free(least) > tensors as f64, "{least}");
            assert!(
                free((least as f64 * 0.98) as u64 - LEAST_MARGIN - (1 << 20)) < tensors as f64,
                "{least}"
            );
        }
        let taken = taken(Device::Cpu).unwrap();
        assert!(tensor_budget(least_budget(taken, 0), LEAST_RESERVE, Device::Cpu).is_ok());
        let error = tensor_budget(taken, LEAST_RESERVE, Device::Cpu).unwrap_err().to_string();
        assert!(error.contains(" that the program itself needs; give a larger --budget"), "{error}");
    }

    /// What reading the data took is in what a training held.
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
