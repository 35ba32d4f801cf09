//! `offload peaks`: the predicted peak of a step beside the measured one, over a table of combinations.

use clap::Args;
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Sink};
use tch::Device;

use super::predicted_peaks::rows;

const EXPERIMENT: &str = "offload-peaks";

#[derive(Args)]
pub(crate) struct Peaks {
    /// How large it is: smoke is every tenth row
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Peaks) -> anyhow::Result<()> {
    // The CPU's allocator counts in exact bytes, whatever device the other experiments take.
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(Device::Cpu)?, arguments.scale)?;
    let every = if arguments.scale == Scale::Smoke { 10 } else { 1 };
    let rows = rows();
    let mut progress = report::Progress::new(rows.len().div_ceil(every) as u64);
    // What is made once for the whole process.
    rows[0].measure()?;
    for row in rows.iter().step_by(every) {
        let [placement, ring, tier] = row.place_names();
        progress.message(&format!("{}, {}, {placement}", row.shape, row.pass_name()));
        let (measured, predicted) = (row.measure()?, row.predict()?);
        let case = Case::new()
            .with("shape", row.shape)
            .with("step", row.pass_name())
            .with("layers", placement)
            .with("ring", ring)
            .with("tier", tier)
            .with("optimizer", row.optimizer.name())
            .with("loss", row.head_name());
        let mut expected = Metric::exact("predicted_peak_bytes", "B", predicted.total as f64);
        expected.note = Some(format!("at the {}", predicted.moment));
        let error = (predicted.total as f64 / measured as f64 - 1.0).abs();
        let metrics = vec![
            Metric::exact("peak_bytes", "B", measured as f64),
            expected,
            Metric::exact("prediction_error", "ratio", error),
        ];
        sink.put(EXPERIMENT, &case, metrics)?;
        progress.step();
    }
    Ok(())
}
