//! Where the figures of an experiment go.

use std::io::Write;

use report::cli::CommonArgs;
use report::{Case, Environment, Metric, Record, RecordWriter};
use tch::Device;

/// Writes records to the file that was asked for, and a line each to standard output.
pub(crate) struct Sink {
    records: Option<RecordWriter>,
    environment: Environment,
    json: bool,
}

impl Sink {
    pub(crate) fn new(common: &CommonArgs, device: Device) -> anyhow::Result<Self> {
        let name = if device.is_cuda() { runtime::device::name(device)? } else { "cpu".to_owned() };
        let environment = Environment::detect(&name, Some(runtime::torch_version()));
        Ok(Self { records: common.open_records()?, environment, json: common.json })
    }

    #[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
    pub(crate) fn put(&mut self, experiment: &str, case: &Case, metrics: Vec<Metric>) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        for metric in metrics {
            let record = Record {
                experiment: experiment.to_owned(),
                case: case.clone(),
                metric,
                environment: self.environment.clone(),
            };
            if let Some(records) = &mut self.records {
                records.write(&record)?;
            }
            if self.json {
                writeln!(out, "{}", serde_json::to_string(&record)?)?;
            } else {
                let Metric { name, unit, value, note, .. } = &record.metric;
                let value = match (value, note) {
                    (Some(value), None) => format!("{value:.6} {unit}"),
                    (Some(value), Some(note)) => format!("{value:.6} {unit} ({note})"),
                    (None, note) => format!("not measured: {}", note.as_deref().unwrap_or("no reason given")),
                };
                let case = serde_json::to_string(case)?;
                writeln!(out, "{experiment} {case}: {name} {value}")?;
            }
        }
        Ok(())
    }
}
