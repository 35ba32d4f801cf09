//! `amp overhead`: the overhead of a loss scaler in an optimizer step.

use report::{Case, Metric};

use super::scaler_step::{self, SIZES, Size};
use crate::driver::Bench;

#[derive(clap::Args)]
pub(crate) struct Overhead {
    /// Measured rounds of each size
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Overhead) -> anyhow::Result<()> {
    let device = bench.device;
    let label = |size: &Size| format!("AdamW of {} tensors, with and without a scaler", size.tensors);
    bench.each(SIZES, label, |bench, size| {
        let case = Case::new().with("tensors", size.tensors).with("parameters", size.parameters());
        let seconds = scaler_step::run(size, arguments.rounds as usize, device)?;
        let scaler_step::Overhead { plain, host, device, unscale } = &seconds;
        for (decides, scaled) in [("host", host), ("device", device)] {
            let metrics = vec![
                Metric::of_samples("plain_seconds", "s", plain),
                Metric::of_samples("scaled_seconds", "s", scaled),
                Metric::of_samples("overhead_seconds", "s", &seconds.beyond_plain(scaled)),
                Metric::of_samples("unscale_seconds", "s", unscale),
            ];
            bench.put(&case.clone().with("decides", decides), metrics)?;
        }
        Ok(())
    })
}
