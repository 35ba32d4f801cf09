//! What the device can do at best, to print a rate as a percentage of.

use tch::{Device, Kind, Tensor};

use super::{Measurement, Plan, Work, black_box, run};
use crate::error::{Error, Result};

/// Bytes that [`copy_bandwidth`] copies on the CPU: beyond any cache, and small beside the memory of a laptop.
const CPU_COPY: i64 = 256 << 20;
/// The same on CUDA: enough for the launch not to count.
const CUDA_COPY: i64 = 1 << 30;
/// Seconds that a limit may take to measure.
const BUDGET: f64 = 5.0;

/// Rate of a matrix product `[m, k] × [k, n]` in FLOP/s, a multiplication and an addition counted as 2. The result is
/// written into a tensor that is there before, so that no allocation is measured.
///
/// # Errors
/// A size below 1, a kind without products, a device that is not there, too little memory.
///
/// ```
/// use runtime::measure::physical;
/// use tch::{Device, Kind};
///
/// let product = physical::gemm_rate(Device::Cpu, Kind::Float, 64, 64, 64)?;
/// assert!(product.rate().unwrap() > 0.0);
/// # Ok::<(), runtime::Error>(())
/// ```
pub fn gemm_rate(device: Device, kind: Kind, m: i64, n: i64, k: i64) -> Result<Measurement> {
    if [m, n, k].iter().any(|size| *size < 1) {
        return Err(Error::invalid(
            "gemm_rate",
            format!("sizes m {m}, n {n}, k {k}; expected each from 1 on"),
        ));
    }
    crate::device::checked(device)?;
    let _no_grad = tch::no_grad_guard();
    // Ones, not zeros: a processor may be quicker with zeros, and draws less power.
    let a = Tensor::f_ones([m, k], (kind, device))?;
    let b = Tensor::f_ones([k, n], (kind, device))?;
    let out = Tensor::f_empty([m, n], (kind, device))?;
    let work = Work::flops(2.0 * m as f64 * n as f64 * k as f64);
    run(&plan(device, work), |_| {
        let _product = black_box(a.f_mm_out(&out, &b)?);
        Ok(())
    })
}

/// Rate of a copy on the device in B/s, the bytes read and the bytes written both counted.
///
/// # Errors
/// A device that is not there, too little memory (512 MiB on the CPU, 2 GiB on CUDA).
pub fn copy_bandwidth(device: Device) -> Result<Measurement> {
    let bytes = if crate::device::checked(device)?.is_some() { CUDA_COPY } else { CPU_COPY };
    let _no_grad = tch::no_grad_guard();
    let source = Tensor::f_ones([bytes], (Kind::Uint8, device))?;
    let mut target = Tensor::f_zeros([bytes], (Kind::Uint8, device))?;
    run(&plan(device, Work::bytes(2.0 * bytes as f64)), |_| {
        target.f_copy_(black_box(&source))?;
        Ok(())
    })
}

fn plan(device: Device, work: Work) -> Plan {
    Plan { warmup: 2, repeats: 15, budget: Some(BUDGET), work: Some(work), ..Plan::new(device) }
}
