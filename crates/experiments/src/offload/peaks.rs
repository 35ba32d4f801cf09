//! `offload peaks`: the predicted peak of a step beside the measured one, over a table of combinations.

use report::cli::Scale;
use report::{Case, Metric};

use super::predicted_peaks::{Row, rows};
use crate::driver::Bench;

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    runtime::memory::track_cpu()?;
    let every = if bench.scale == Scale::Smoke { 10 } else { 1 };
    let rows = rows();
    // The first run makes all that a process makes once.
    rows[0].measure()?;
    let label = |row: &&Row| format!("{}, {}, {}", row.shape, row.pass_name(), row.place_names()[0]);
    bench.each(rows.iter().step_by(every), label, |bench, row| {
        let [placement, ring, tier] = row.place_names();
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
        bench.put(&case, metrics)
    })
}
