//! Measured rates of this machine: products, memory, transfers and files.

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use accounting::offload::Rates;
use kernels::adam::{AdamStep, AdamTensors, adam};
use kernels::physical;
use models::DecoderConfig;
use models::init::Init;
use models::module::{Input, LanguageModel};
use offload::{Method, Offload, OffloadConfig, Tier, load_rate};
use runtime::collectives::{Group, GroupConfig, Launch, Store};
use runtime::device;
use runtime::file_memory;
use runtime::measure::{Measurement, Samples};
use tch::{Device, Kind, Tensor};

use super::over_ranks::gather_rate;
use crate::error::{Error, Result};

/// Bytes of a file that [`file_read_rate`] reads at most.
const READ: u64 = 256 << 20;

/// Measured rates of a machine.
#[derive(Clone, Copy, Debug)]
pub struct MachineRates {
    /// FLOP/s of products.
    pub flops: f64,
    /// Bytes per second of the device's memory.
    pub bandwidth: f64,
    /// Bytes per second of layers, gradients and the optimizer on their ways.
    pub transfers: Rates,
    /// Bytes that the device's libraries keep for matrix products; 0 on a CPU.
    pub product_workspaces: u64,
}

impl MachineRates {
    /// Nominal rates, for results that do not depend on them: which layer is on the device when.
    pub const NOMINAL: Self = Self {
        flops: 1e11,
        bandwidth: 2e10,
        transfers: Rates { load: 5e9, store: 5e9, host_optimizer: 1e9, device_optimizer: 1e9 },
        product_workspaces: 0,
    };

    /// Measures a product of `[m, k]` and `[k, n]` (`product` is `[m, n, k]`) in the dtype that weights in `kind` are multiplied in,
    /// the memory of the device and of the host, and loads of layers from `tier`.
    ///
    /// # Errors
    /// A device that does not exist; too little memory or room on the disk.
    pub fn measure(product: [i64; 3], (kind, device): (Kind, Device), tier: &Tier) -> Result<Self> {
        // Before the first product, when they are distinguishable from other memory.
        let product_workspaces = device::product_workspaces(device)?;
        // On a CPU products of low precision run in fp32.
        let compute = kernels::matmul::compute_kind(device, product_kind(kind));
        let [m, n, k] = product;
        let flops = rate(&physical::gemm_rate(device, compute, m, n, k)?)?;
        let bandwidth = rate(&physical::copy_bandwidth(device)?)?;
        let host = rate(&physical::copy_bandwidth(Device::Cpu)?)?;
        let load = layer_load_rate(device, tier)?;
        // The same link the other way, and the same threads.
        let transfers = Rates::of_memory(load, host, bandwidth);
        Ok(Self { flops, bandwidth, transfers, product_workspaces })
    }
}

/// Returns the dtype of the operands of weights in `kind`: bf16 for quantized ones.
pub(super) fn product_kind(kind: Kind) -> Kind {
    if kernels::quantized::is_quantized_kind(kind) { Kind::BFloat16 } else { kind }
}

fn rate(measurement: &Measurement) -> Result<f64> {
    measurement.rate().ok_or(Error::NotMeasured)
}

/// Returns the bytes per second at which layers come from a tier: of two layers of 32 MiB, loaded one at a time. Layers in files come from the
/// page cache then; what a disk gives is [`file_read_rate`].
///
/// # Errors
/// As [`MachineRates::measure`].
pub fn layer_load_rate(device: Device, tier: &Tier) -> Result<f64> {
    let config = DecoderConfig::llama(64, 1024, 1365, 2, 8);
    let options =
        OffloadConfig { device, method: Method::OneLayer, tier: tier.clone(), ..OffloadConfig::default() };
    let (model, offload) = Offload::assemble(&config, Init::Constant(0.01), Kind::Float, &options)?;
    let tokens = Tensor::from_slice(&[1i64]).view([1, 1]).to_device(device);
    let _no_grad = tch::no_grad_guard();
    let mut samples = Vec::new();
    for round in 0..6 {
        offload.start_trace()?;
        let _hidden = model.hidden(&Input::new(&tokens))?;
        let trace = offload.take_trace()?;
        if round > 0 {
            samples.extend(load_rate(&trace));
        }
    }
    device::synchronize(device)?;
    Ok(Samples { samples }.median())
}

/// Returns the parameters per second of AdamW whose weights, gradients and state are in files in `folder`, in the page cache.
///
/// # Errors
/// A folder that cannot be written, or has too little space.
pub(super) fn file_optimizer_rate(folder: &Path) -> Result<f64> {
    const PARAMETERS: i64 = 4 << 20;
    let tensor = || file_memory::zeros(folder, &[PARAMETERS], Kind::Float);
    let (master, gradient, exp_avg, exp_avg_sq) = (tensor()?, tensor()?, tensor()?, tensor()?);
    let all = [&master, &gradient, &exp_avg, &exp_avg_sq];
    let tensors = AdamTensors {
        gradient: &gradient,
        master: &master,
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        weight: None,
    };
    let mut samples = Vec::new();
    for step in 1..=6 {
        let began = Instant::now();
        all.into_iter().try_for_each(file_memory::fetch)?;
        adam(&tensors, &AdamStep { step, ..AdamStep::default() })?;
        all.into_iter().try_for_each(file_memory::release)?;
        if step > 1 {
            samples.push(PARAMETERS as f64 / began.elapsed().as_secs_f64());
        }
    }
    Ok(Samples { samples }.median())
}

/// Returns the bytes per second at which a file is read from its disk: up to 256 MiB of it, which are dropped from the page cache first.
///
/// # Errors
/// A file that cannot be read or is empty.
pub fn file_read_rate(path: &Path) -> Result<f64> {
    let failed = |cause: std::io::Error| Error::File { path: path.to_owned(), reason: cause.to_string() };
    let mut file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len().min(READ);
    // Pages that are not on the disk yet stay in the cache.
    file.sync_data().map_err(failed)?;
    let bytes_of_file = std::num::NonZeroU64::new(length);
    rustix::fs::fadvise(&file, 0, bytes_of_file, rustix::fs::Advice::DontNeed)
        .map_err(|cause| failed(std::io::Error::from(cause)))?;
    let mut buffer = vec![0; 4 << 20];
    let (mut bytes, began) = (0, Instant::now());
    while bytes < length {
        match file.read(&mut buffer).map_err(failed)? {
            0 => break,
            count => bytes += count as u64,
        }
    }
    match bytes {
        0 => Err(failed(std::io::Error::other("it is empty, and no rate can be measured"))),
        _ => Ok(bytes as f64 / began.elapsed().as_secs_f64()),
    }
}

/// Returns the bytes per second that each of two ranks on this machine sends while they gather a tensor.
///
/// # Errors
/// A loopback interface that does not connect them.
pub fn loopback_rate() -> Result<f64> {
    let port = || TcpListener::bind(("127.0.0.1", 0))?.local_addr().map(|address| address.port());
    let port = port().map_err(|cause| runtime::Error::Other(Box::new(cause)))?;
    let run = |rank: usize| -> Result<f64> {
        let launch = Launch::read(|name| match name {
            "RANK" | "LOCAL_RANK" => Some(rank.to_string()),
            "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some("2".to_owned()),
            "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
            "MASTER_PORT" => Some(port.to_string()),
            _ => None,
        })?;
        let launch = launch.expect("its rank is set");
        let options = GroupConfig { timeout: Duration::from_secs(30), ..GroupConfig::default() };
        let store = Store::connect(&launch, options.timeout)?;
        let group = Group::new(&store, "loopback", options)?;
        let rate = gather_rate(&group)?;
        group.barrier("end")?;
        Ok(rate)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        let first = run(0);
        other.join().expect("a rank returns its error")?;
        first
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_of_this_machine_have_a_rate() {
        let rate = loopback_rate().unwrap();
        assert!((1e7..1e12).contains(&rate), "{rate}");
    }

    #[test]
    fn a_file_is_read_at_a_rate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layers");
        std::fs::write(&path, vec![1; 9 << 20]).unwrap();
        assert!(file_read_rate(&path).unwrap() > 1e5);
        std::fs::write(&path, []).unwrap();
        let error = file_read_rate(&path).unwrap_err().to_string();
        assert!(error.ends_with("it is empty, and no rate can be measured"), "{error}");
    }
}
