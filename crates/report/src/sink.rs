//! The output of an experiment: a records file and standard output.

use std::io::Write;

use crate::cli::{CommonArgs, Scale};
use crate::environment::Environment;
use crate::record::{Case, Metric, Record, RecordWriter, RecordsError};

/// Writes records to the file of `--records`, and one line per record to standard output.
pub struct Sink {
    records: Option<RecordWriter>,
    environment: Environment,
    json: bool,
}

impl Sink {
    /// Opens the records file of `--records`, if given. Each record gets the scale of the run; `None` is for an experiment that is
    /// the same at every scale.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn new(
        common: &CommonArgs,
        environment: Environment,
        scale: impl Into<Option<Scale>>,
    ) -> Result<Self, RecordsError> {
        let scale = scale.into().map(|scale: Scale| scale.name().to_owned());
        Ok(Self {
            records: common.open_records()?,
            environment: Environment { scale, ..environment },
            json: common.json,
        })
    }

    /// Writes the metrics of one case.
    ///
    /// # Errors
    /// A file or a standard output that cannot be written.
    #[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
    pub fn put(&mut self, experiment: &str, case: &Case, metrics: Vec<Metric>) -> anyhow::Result<()> {
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
