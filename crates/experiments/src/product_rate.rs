//! The limit of the machine: the rate of one large matrix product.

use runtime::matmul::mm_into;
use runtime::measure::{self, MeasurementPlan, Work, physical};
use tch::{Device, Kind, Tensor};

/// FLOP/s of a product `[m, k]·[k, n]`: the better of libtorch's and this project's. `repeats` and `budget` (seconds) bound how
/// often this project's is measured.
///
/// # Errors
/// Too little memory, a device that is not there.
pub(crate) fn product_rate(
    (kind, device): (Kind, Device),
    [m, n, k]: [i64; 3],
    repeats: usize,
    budget: f64,
) -> anyhow::Result<f64> {
    let libtorch = physical::gemm_rate(device, kind, m, n, k)?;
    let (a, b) = (Tensor::f_ones([m, k], (kind, device))?, Tensor::f_ones([k, n], (kind, device))?);
    let mut out = Tensor::f_empty([m, n], (kind, device))?;
    let work = Work::flops(2.0 * m as f64 * n as f64 * k as f64);
    let plan =
        MeasurementPlan { repeats, budget: Some(budget), work: Some(work), ..MeasurementPlan::new(device) };
    let ours = measure::run(&plan, |_| mm_into(&mut out, &a, &b, false))?;
    Ok(ours.rate().unwrap_or(0.0).max(libtorch.rate().unwrap_or(0.0)))
}
