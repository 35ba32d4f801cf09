//! The limits of a device, to express rates as a percentage of.

use runtime::measure::{Measurement, MeasurementPlan, Work, black_box, run};
use runtime::random::Generator;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::matmul::mm_into;

/// Bytes that [`copy_bandwidth`] copies and [`read_bandwidth`] reads on the CPU: larger than any cache, small compared to a laptop's memory.
const CPU_COPY: i64 = 256 << 20;
/// The same on CUDA: enough to make the launch negligible.
const CUDA_COPY: i64 = 1 << 30;
/// How many different numbers an operand of [`gemm_rate`] has: a prime, so that no two rows or columns are equal.
const DRAWN: i64 = 1_000_003;
/// Maximum seconds to measure a limit.
const BUDGET: f64 = 3.0;

/// Measures the rate of a matrix product `[m, k] × [k, n]` in FLOP/s, a multiplication and an addition counted as 2: on a CPU the faster of
/// libtorch's and of [`crate::matmul`]'s. The result is written into an existing tensor, so that no allocation is measured.
///
/// The operands are normally distributed: a GPU limited by its power multiplies constant operands, which switch few transistors, 7–13 %
/// faster (H200). They come from a generator of their own, so that the default generators keep their state.
///
/// # Errors
/// A size below 1, a kind without products, a device that does not exist, too little memory.
///
/// ```
/// use kernels::physical;
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
    runtime::device::checked(device)?;
    let _no_grad = tch::no_grad_guard();
    let mut generator = Generator::new(0)?;
    let a = operand(&mut generator, [m, k], (kind, device))?;
    let b = operand(&mut generator, [k, n], (kind, device))?;
    let mut out = Tensor::f_empty([m, n], (kind, device))?;
    let work = Work::flops(2.0 * m as f64 * n as f64 * k as f64);
    let libtorch = run(&plan(device, work), |_| {
        let _product = black_box(a.f_mm_out(&out, &b)?);
        Ok(())
    })?;
    if device != Device::Cpu || !matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half) {
        return Ok(libtorch);
    }
    let crate_product = run(&plan(device, work), |_| mm_into(black_box(&mut out), &a, &b, false))?;
    Ok(if crate_product.rate() > libtorch.rate() { crate_product } else { libtorch })
}

/// Measures the rate of a copy on the device in B/s, counting both the bytes read and the bytes written.
///
/// # Errors
/// A device that does not exist, too little memory (512 MiB on the CPU, 2 GiB on CUDA).
pub fn copy_bandwidth(device: Device) -> Result<Measurement> {
    let bytes = if runtime::device::checked(device)?.is_some() { CUDA_COPY } else { CPU_COPY };
    let _no_grad = tch::no_grad_guard();
    let source = Tensor::f_ones([bytes], (Kind::Uint8, device))?;
    let mut target = Tensor::f_zeros([bytes], (Kind::Uint8, device))?;
    run(&plan(device, Work::bytes(2.0 * bytes as f64)), |_| {
        target.f_copy_(black_box(&source))?;
        Ok(())
    })
}

/// Measures the rate of reading on the device in B/s, by a sum of fp32 numbers. It is the limit of passes that read weights and write little:
/// on processors that have separate ways for reads and for writes, a copy moves more bytes in the same time.
///
/// # Errors
/// A device that does not exist, too little memory (256 MiB on the CPU, 1 GiB on CUDA).
pub fn read_bandwidth(device: Device) -> Result<Measurement> {
    let bytes = if runtime::device::checked(device)?.is_some() { CUDA_COPY } else { CPU_COPY };
    let _no_grad = tch::no_grad_guard();
    let source = Tensor::f_ones([bytes / 4], (Kind::Float, device))?;
    run(&plan(device, Work::bytes(bytes as f64)), |_| {
        let _sum = black_box(black_box(&source).f_sum(Kind::Float)?);
        Ok(())
    })
}

/// Returns a matrix of normally distributed numbers. A large one repeats [`DRAWN`] of them, since they are drawn by one thread of the host.
fn operand(generator: &mut Generator, size: [i64; 2], (kind, device): (Kind, Device)) -> Result<Tensor> {
    let matrix = Tensor::f_empty(size, (kind, device))?;
    let numbers = size[0] * size[1];
    let drawn = generator.normal(&[numbers.min(DRAWN)], (kind, device))?;
    let flat = matrix.f_view(-1)?;
    for first in (0..numbers).step_by(DRAWN as usize) {
        let count = DRAWN.min(numbers - first);
        flat.f_narrow(0, first, count)?.f_copy_(&drawn.f_narrow(0, 0, count)?)?;
    }
    Ok(matrix)
}

fn plan(device: Device, work: Work) -> MeasurementPlan {
    MeasurementPlan {
        warmup: 2,
        repeats: 15,
        budget: Some(BUDGET),
        work: Some(work),
        ..MeasurementPlan::new(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where a matrix has more numbers than are drawn.
    #[test]
    fn operands_are_normally_distributed_and_have_no_equal_rows() {
        let mut generator = Generator::new(0).unwrap();
        for kind in [Kind::Float, Kind::BFloat16] {
            for size in [[300, 700], [1024, 2048]] {
                let matrix = operand(&mut generator, size, (kind, Device::Cpu)).unwrap().to_kind(Kind::Float);
                let (mean, deviation) =
                    (matrix.mean(Kind::Float).double_value(&[]), matrix.std(false).double_value(&[]));
                assert!(mean.abs() < 0.01, "{kind:?} {size:?}: mean {mean}");
                assert!((deviation - 1.0).abs() < 0.01, "{kind:?} {size:?}: deviation {deviation}");
                let rows = matrix.unique_dim(0, true, false, false).0;
                assert_eq!(rows.size(), size, "{kind:?} {size:?}");
            }
        }
    }
}
