//! The two figures from which a reader of `--json` computes the model FLOPs utilization.

use frugal::kernels::physical;
use frugal::training::Result;
use frugal::training::probe::StepProbe;
use serde::Serialize;
use tch::{Device, Kind};

/// Tokens per second × `flops_per_token` / `peak_rate` is the model FLOPs utilization (Chowdhery et al., arXiv:2204.02311, appendix B).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Efficiency {
    /// FLOPs of forward and backward for each token that goes through the model, padding included.
    flops_per_token: f64,
    /// The machine's measured peak rate in FLOP/s; `None` if the clock was too coarse.
    peak_rate: Option<f64>,
}

impl Efficiency {
    /// Takes the work of a pass, and measures the rate of a matrix product, in under a second.
    ///
    /// # Errors
    /// A device that does not exist, too little memory.
    pub(super) fn measure(probe: &StepProbe, device: Device) -> Result<Self> {
        // Large enough to fill the device, and short.
        let size = match device {
            Device::Cpu if tch::get_num_threads() <= 8 => 512,
            Device::Cpu => 1024,
            _ => 4096,
        };
        let product = physical::gemm_rate(device, Kind::Float, size, size, size)?;
        // The best sample is the machine's limit: the others were disturbed by other work.
        let seconds = product.time.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let peak_rate = seconds.is_finite().then(|| 2.0 * (size as f64).powi(3) / seconds.max(1e-12));
        Ok(Self { flops_per_token: probe.flops_per_position(), peak_rate })
    }
}
