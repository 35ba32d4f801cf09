//! The rates of this machine, measured once and kept.
//!
//! They are in `rates.json` in the cache folder (`FRUGAL_CACHE`, else the user's), by processor or GPU, number of threads, dtype of
//! products and version of libtorch. [`KnownRates::measure`] measures them again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use accounting::offload::Rates;
use kernels::physical;
use offload::Tier;
use runtime::device::{memory_info, product_workspaces};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use super::rates::{MachineRates, file_optimizer_rate, layer_load_rate, product_kind};
use crate::error::{Error, Result};
use crate::rows::cache_folder;
use crate::run_folder::unix_time;

/// Sizes `[m, n, k]` of the product whose rate is measured: as of a thousand tokens and a layer of half a billion parameters' model.
const PRODUCT: [i64; 3] = [1024, 2048, 1024];
/// Free bytes of the host without which nothing is measured: a copy of 256 MiB to another, and layers of 32 MiB.
const NEEDED: u64 = 2 << 30;
const FILE: &str = "rates.json";

/// The rates of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KnownRates {
    /// FLOP/s of products.
    pub flops: f64,
    /// Bytes per second of copies in the device's memory, read and written.
    pub bandwidth: f64,
    /// The same of the host's memory.
    pub host_bandwidth: f64,
    /// Bytes per second at which layers in host memory are loaded.
    pub host_load: f64,
    /// Bytes per second at which layers in files are loaded, from the page cache.
    pub file_load: f64,
    /// Parameters per second of AdamW whose state is in files, in the page cache.
    pub file_optimizer: f64,
    /// Bytes that the device's libraries keep for matrix products; 0 on a CPU.
    pub product_workspaces: u64,
    /// When they were measured, in seconds since 1970; `None` for nominal rates, and for those of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_at: Option<u64>,
}

impl KnownRates {
    /// Returns nominal rates, for a choice that hardly depends on them: on a GPU products and memory are much faster than on its host, so
    /// that nothing is moved there that fits the GPU. The bytes that its libraries keep are measured.
    ///
    /// # Errors
    /// A device that does not exist.
    pub fn nominal(device: Device) -> Result<Self> {
        let rates = Self { product_workspaces: product_workspaces(device)?, ..Self::nominal_of_host() };
        Ok(if device.is_cuda() { rates.with_nominal_gpu() } else { rates })
    }

    /// Returns the rates of each of `processes` that share the device at the same time.
    #[must_use]
    pub fn divided(self, processes: usize) -> Self {
        let of_each = |rate: f64| rate / processes.max(1) as f64;
        Self {
            flops: of_each(self.flops),
            bandwidth: of_each(self.bandwidth),
            host_bandwidth: of_each(self.host_bandwidth),
            host_load: of_each(self.host_load),
            file_load: of_each(self.file_load),
            file_optimizer: of_each(self.file_optimizer),
            ..self
        }
    }

    fn nominal_of_host() -> Self {
        let MachineRates { flops, bandwidth, transfers, product_workspaces } = MachineRates::NOMINAL;
        Self {
            flops,
            bandwidth,
            host_bandwidth: bandwidth,
            host_load: transfers.load,
            file_load: transfers.load / 2.0,
            file_optimizer: transfers.host_optimizer / 4.0,
            product_workspaces,
            measured_at: None,
        }
    }

    fn with_nominal_gpu(self) -> Self {
        Self { flops: 1e13, bandwidth: 1e12, host_load: 1e10, ..self }
    }

    /// Returns the rates that were measured before, for weights in `kind`, of one of `processes` that share the processor.
    pub fn kept(device: Device, kind: Kind, processes: usize) -> Option<Self> {
        let key = key(device, kind, processes).ok()?;
        read(&cache_file()?).remove(&key)
    }

    /// Returns the rates that were measured before, or measures them.
    ///
    /// # Errors
    /// As [`KnownRates::measure`].
    pub fn get(device: Device, kind: Kind) -> Result<Self> {
        Self::kept(device, kind, 1).map_or_else(|| Self::measure(device, kind, 1), Ok)
    }

    /// Measures the rates, in some seconds, and keeps them; without keeping them where there is no cache folder. Returns nominal
    /// rates on a machine with too little memory to measure. Of `processes` that share the processor all measure at the same time.
    ///
    /// # Errors
    /// A device that does not exist; no room for a temporary file.
    pub fn measure(device: Device, kind: Kind, processes: usize) -> Result<Self> {
        if memory_info(Device::Cpu)?.free < NEEDED {
            return Ok(Self::nominal(device)?.divided(processes));
        }
        // Before the first product, when they are distinguishable from other memory.
        let product_workspaces = product_workspaces(device)?;
        let compute = kernels::matmul::compute_kind(device, product_kind(kind));
        let [m, n, k] = PRODUCT;
        let rate = |found: runtime::measure::Measurement| found.rate().ok_or(Error::NotMeasured);
        let flops = rate(physical::gemm_rate(device, compute, m, n, k)?)?;
        let bandwidth = rate(physical::copy_bandwidth(device)?)?;
        let host_bandwidth = match device {
            Device::Cpu => bandwidth,
            _ => rate(physical::copy_bandwidth(Device::Cpu)?)?,
        };
        let host_load = layer_load_rate(device, &Tier::Host)?;
        let scratch = tempfile::tempdir().map_err(|cause| Error::File {
            path: std::env::temp_dir(),
            reason: format!("{cause}; set TMPDIR to a folder that can be written"),
        })?;
        let file_load = layer_load_rate(device, &Tier::File(scratch.path().to_owned()))?;
        let file_optimizer = file_optimizer_rate(scratch.path())?;
        runtime::memory::empty_cache(device)?;
        let rates = Self {
            flops,
            bandwidth,
            host_bandwidth,
            host_load,
            file_load,
            file_optimizer,
            product_workspaces,
            measured_at: Some(unix_time()),
        };
        if let Some(path) = cache_file() {
            let mut all = read(&path);
            all.insert(key(device, kind, processes)?, rates);
            // The next run measures again if this fails.
            let _ = write(&path, &all);
        }
        Ok(rates)
    }

    /// Rates of layers in host memory, and of the optimizer on device and host.
    pub fn transfers(&self) -> Rates {
        Rates::of_memory(self.host_load, self.host_bandwidth, self.bandwidth)
    }

    /// Returns the same in the form of a measurement for one tier.
    pub fn machine(&self) -> MachineRates {
        MachineRates {
            flops: self.flops,
            bandwidth: self.bandwidth,
            transfers: self.transfers(),
            product_workspaces: self.product_workspaces,
        }
    }
}

/// Returns the file of kept rates; `None` without a cache folder.
fn cache_file() -> Option<PathBuf> {
    Some(cache_folder()?.parent()?.join(FILE))
}

fn key(device: Device, kind: Kind, processes: usize) -> Result<String> {
    let name = runtime::device::name(device)?;
    let compute = kernels::matmul::compute_kind(device, product_kind(kind));
    let (threads, version) = (tch::get_num_threads(), runtime::torch_version());
    let sharing = if processes > 1 { format!(" in each of {processes} processes") } else { String::new() };
    Ok(format!("{name}, {threads} threads{sharing}, {compute:?}, libtorch {version}"))
}

/// An unreadable file has no rates.
fn read(path: &Path) -> BTreeMap<String, KnownRates> {
    let text = std::fs::read(path).unwrap_or_default();
    let mut all: BTreeMap<String, KnownRates> = serde_json::from_slice(&text).unwrap_or_default();
    let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
    all.retain(|_, found| {
        let KnownRates { flops, bandwidth, host_bandwidth, host_load, file_load, file_optimizer, .. } =
            *found;
        [flops, bandwidth, host_bandwidth, host_load, file_load, file_optimizer].into_iter().all(is_rate)
    });
    all
}

fn write(path: &Path, all: &BTreeMap<String, KnownRates>) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    files::atomic_write::file(path, |file| file.write_all(&serde_json::to_vec_pretty(all)?))
}

#[cfg(test)]
mod tests {
    use accounting::offload::AvailableMemory;
    use models::DecoderConfig;

    use super::*;
    use crate::config::Config;
    use crate::planning::{self, DataShape};

    #[test]
    fn kept_rates_are_read_again_and_damaged_ones_are_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache").join(FILE);
        assert!(read(&path).is_empty());
        let rates = KnownRates::nominal(Device::Cpu).unwrap();
        let all = BTreeMap::from([("this machine".to_owned(), rates)]);
        write(&path, &all).unwrap();
        assert_eq!(read(&path), all);
        let zero = KnownRates { flops: 0.0, ..rates };
        write(&path, &BTreeMap::from([("a".to_owned(), zero), ("b".to_owned(), rates)])).unwrap();
        assert_eq!(read(&path), BTreeMap::from([("b".to_owned(), rates)]));
        // Earlier versions kept no date.
        let dated = KnownRates { measured_at: Some(1_790_000_000), ..rates };
        write(&path, &BTreeMap::from([("a".to_owned(), dated), ("b".to_owned(), rates)])).unwrap();
        assert_eq!(read(&path)["a"].measured_at, Some(1_790_000_000));
        assert_eq!(read(&path)["b"].measured_at, None);
        std::fs::write(&path, "{").unwrap();
        assert!(read(&path).is_empty());
    }

    /// Before anything is measured, a model that fits a GPU is trained there, and not by its host.
    #[test]
    fn nominal_rates_of_a_gpu_keep_all_on_it() {
        let shape =
            DecoderConfig { tie_word_embeddings: true, ..DecoderConfig::qwen2(4096, 512, 2048, 8, 8) };
        let (config, data) = (Config::default(), DataShape::uniform(4, 128, false));
        let (kind, device) = (Kind::Float, Device::Cuda(0));
        let host = KnownRates::nominal_of_host();
        let chosen = |rates: &KnownRates| {
            let job = planning::job(&config, &shape, (kind, device), &data, rates).unwrap();
            let allowed = planning::allowed(&config, 8, device).unwrap();
            let plans = job.search(&allowed, AvailableMemory { device: 100 << 30, host: None }).unwrap();
            let chosen = plans.chosen().unwrap();
            (chosen.name(), chosen.seconds)
        };
        let (name, seconds) = chosen(&host.with_nominal_gpu());
        assert_eq!(name, "keep all");
        // The step is not predicted at the host's rates.
        let (_, on_host) = chosen(&host);
        assert!(seconds < on_host / 10.0, "{seconds} s, {on_host} s at the host's rates");
    }
}
