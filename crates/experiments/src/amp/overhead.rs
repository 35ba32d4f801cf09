//! `amp overhead`: the overhead of a loss scaler in an optimizer step.

use report::cli::CommonArgs;
use report::{Case, Metric, Progress, Sink};

use super::scaler_step::{self, SIZES};

#[derive(clap::Args)]
pub(crate) struct Overhead {
    /// Measured rounds of each size
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Overhead) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, None)?;
    let mut progress = Progress::new(SIZES.len() as u64 * u64::from(arguments.rounds));
    for size in SIZES {
        let case = Case::new().with("tensors", size.tensors).with("parameters", size.parameters());
        progress.message(&format!("AdamW of {} tensors, with and without a scaler", size.tensors));
        let seconds = scaler_step::run(size, arguments.rounds as usize, device, |_| progress.step())?;
        let scaler_step::Overhead { plain, host, device, unscale } = &seconds;
        for (decides, scaled) in [("host", host), ("device", device)] {
            let metrics = vec![
                Metric::of_samples("plain_seconds", "s", plain),
                Metric::of_samples("scaled_seconds", "s", scaled),
                Metric::of_samples("overhead_seconds", "s", &seconds.beyond_plain(scaled)),
                Metric::of_samples("unscale_seconds", "s", unscale),
            ];
            sink.put("amp-overhead", &case.clone().with("decides", decides), metrics)?;
        }
    }
    Ok(())
}
