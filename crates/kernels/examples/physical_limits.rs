//! Prints what a device can do at best: `cargo run --release -p kernels --example physical_limits -- [DEVICE]`.

use std::io::Write;

use kernels::physical;
use runtime::device;
use runtime::measure::Measurement;
use tch::Kind;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = device::select(&std::env::args().nth(1).unwrap_or_else(|| "cpu".into()))?;
    let mut out = std::io::stdout();
    let figures = |measured: &Measurement| {
        let rate = measured.rate().unwrap_or(f64::NAN) / 1e9;
        (rate, rate * measured.time.spread() / measured.time.median())
    };
    writeln!(out, "{} ({})", device::name(device)?, device::flag(device))?;
    for (kind, size) in [(Kind::Float, 1024), (Kind::Float, 2048), (Kind::Double, 1024)] {
        let (rate, spread) = figures(&physical::gemm_rate(device, kind, size, size, size)?);
        writeln!(out, "{kind:?} product of {size}: {rate:.1} ± {spread:.1} GFLOP/s")?;
    }
    let (rate, spread) = figures(&physical::copy_bandwidth(device)?);
    writeln!(out, "copy: {rate:.1} ± {spread:.1} GB/s")?;
    Ok(())
}
