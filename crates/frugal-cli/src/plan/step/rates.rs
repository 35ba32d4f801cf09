//! The rates of a plan: measured on this machine, a GPU's, or those of the flags.

use std::io::Write;
use std::path::{Path, PathBuf};

use accounting::offload::{ADAMW_STEP_BYTES, GEN4, Rates};
use anyhow::{Context, bail};
use frugal::config::OffloadTier;
use frugal::planning::{self, KnownRates, MachineRates};
use tch::Device;

use super::{PlannedStep, StepArgs};

/// Bytes per second of the memory of a host with a GPU, by default.
const GPU_HOST_BANDWIDTH: f64 = 2.0 * GEN4;

impl StepArgs {
    /// Measures this machine, unless a GPU is given. Rates among the flags win.
    pub(super) fn rates(&self, planned: &PlannedStep) -> anyhow::Result<MachineRates> {
        let bytes = |rate: Option<u64>| rate.map(|rate| rate as f64);
        let rates = [
            ("--flops", self.flops),
            ("--link", bytes(self.link)),
            ("--host-bandwidth", bytes(self.host_bandwidth)),
        ];
        for (flag, rate) in rates {
            if let Some(rate) = rate.filter(|rate| !(*rate > 0.0 && rate.is_finite())) {
                bail!("{flag} is {rate}; give a rate above 0");
            }
        }
        let mut rates = match self.hardware {
            Some(gpu) => {
                let bandwidth = gpu.data_sheet()?.bandwidth;
                let transfers = Rates::of_memory(gpu.link, GPU_HOST_BANDWIDTH, bandwidth);
                let flops = match self.flops {
                    Some(flops) => flops,
                    None => gpu.products(planned.format.recipe().compute)?,
                };
                MachineRates { flops, bandwidth, transfers, product_workspaces: 0 }
            }
            None => self.measure(planned)?,
        };
        if self.link.is_some() || self.host_bandwidth.is_some() {
            let link = self.link.map_or(rates.transfers.load, |link| link as f64);
            let host = match (self.host_bandwidth, self.hardware) {
                (Some(rate), _) => rate as f64,
                (None, Some(_)) => GPU_HOST_BANDWIDTH,
                (None, None) => {
                    kernels::physical::copy_bandwidth(Device::Cpu)?.rate().context("the rate of a copy")?
                }
            };
            rates.transfers = Rates::of_memory(link, host, rates.bandwidth);
        }
        if let (OffloadTier::File, Some(_), Some(link)) = (planned.tier, self.hardware, self.link) {
            let disk = link as f64 / ADAMW_STEP_BYTES;
            rates.transfers.host_optimizer = rates.transfers.host_optimizer.min(disk);
        }
        rates.flops = self.flops.unwrap_or(rates.flops);
        Ok(rates)
    }

    /// The rates that were measured before, or are now. What the page cache cannot hold comes from the disk in every step.
    fn measure(&self, planned: &PlannedStep) -> anyhow::Result<MachineRates> {
        let &PlannedStep { format, device, tier, weights, .. } = planned;
        let known = KnownRates::get(device, format.kind)?;
        let mut rates = known.machine();
        if tier == OffloadTier::Host {
            return Ok(rates);
        }
        rates.transfers.load = known.file_load;
        rates.transfers.host_optimizer = known.file_optimizer;
        if weights > runtime::device::memory_info(Device::Cpu)?.free {
            let scratch = self.scratch()?;
            let file = match self.model.folder().as_deref().map(weights_file).transpose()?.flatten() {
                Some(file) => file,
                None => written(scratch.path())?,
            };
            let disk = planning::file_read_rate(&file)?;
            rates.transfers.load = rates.transfers.load.min(disk);
            rates.transfers.host_optimizer = rates.transfers.host_optimizer.min(disk / ADAMW_STEP_BYTES);
        }
        Ok(rates)
    }

    /// A folder for the files that are measured; it is removed with the value.
    fn scratch(&self) -> anyhow::Result<tempfile::TempDir> {
        let folder = self.folder.as_deref().unwrap_or(Path::new("."));
        tempfile::Builder::new().prefix(".frugal-plan-").tempdir_in(folder).with_context(|| {
            format!(
                "{} cannot be written; give a folder on the disk with the model as --folder",
                folder.display()
            )
        })
    }
}

/// A file with weights in a model's folder.
fn weights_file(folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .max_by_key(|path| path.metadata().map_or(0, |metadata| metadata.len())))
}

/// A file of 64 MiB on the disk.
fn written(folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join("read");
    let mut file = std::fs::File::create(&path)?;
    let block = vec![1; 1 << 20];
    (0..64).try_for_each(|_| file.write_all(&block)).with_context(|| path.display().to_string())?;
    Ok(path)
}
