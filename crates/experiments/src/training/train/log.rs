//! What a training writes for programs to read.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use report::{Case, Environment, Metric, Record, RecordWriter};
use serde_json::{Value, json};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

/// One JSON object on a line of standard output.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(super) fn line(value: &Value) {
    // Nobody reading is no reason to stop training.
    let _ = writeln!(std::io::stdout().lock(), "{value}");
}

/// Steps, evaluations and checkpoints on standard output.
pub(super) struct Log;

impl Observer for Log {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        line(&json!({ "step": record }));
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        line(&json!({ "evaluation": evaluation }));
        Ok(())
    }

    fn on_checkpoint(&mut self, step: u64, path: &Path) -> training::Result<()> {
        line(&json!({ "checkpoint": path, "at": step }));
        Ok(())
    }
}

/// One JSON line for each step.
pub(super) struct LossLog {
    path: PathBuf,
    file: File,
}

impl LossLog {
    pub(super) fn append(path: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| format!("cannot open the loss log {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }
}

impl Observer for LossLog {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let bits = format!("{:016x}", record.loss.to_bits());
        let line = format!("{}\n", json!({ "step": record.step, "loss": record.loss, "bits": bits }));
        self.file
            .write_all(line.as_bytes())
            .map_err(|cause| training::Error::Io { path: self.path.clone(), cause })
    }
}

/// Steps and evaluations as records of the experiment `training`, each in the case of its step. A line is on its way to the
/// disk when its step is read: a run that is killed keeps its records. A run that goes on appends; of a step that was done
/// twice the later records are those that count.
pub(super) struct StepRecords {
    writer: RecordWriter,
    path: PathBuf,
    case: Case,
    environment: Environment,
}

impl StepRecords {
    pub(super) fn new(writer: RecordWriter, path: &Path, case: Case, environment: Environment) -> Self {
        Self { writer, path: path.to_owned(), case, environment }
    }

    fn put(&mut self, step: u64, metrics: Vec<(&str, &str, Option<f64>)>) -> training::Result<()> {
        let case = self.case.clone().with("step", step);
        for (name, unit, value) in metrics {
            let metric = match value {
                None => continue,
                Some(value) if value.is_finite() => Metric::exact(name, unit, value),
                Some(value) => Metric::not_measured(name, unit, &format!("it is {value}")),
            };
            let (case, environment) = (case.clone(), self.environment.clone());
            let record = Record { experiment: "training".to_owned(), case, metric, environment };
            self.writer.write(&record).map_err(|cause| {
                let cause = std::io::Error::other(cause);
                training::Error::Io { path: self.path.clone(), cause }
            })?;
        }
        Ok(())
    }
}

impl Observer for StepRecords {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let metrics = vec![
            ("loss", "nat", Some(record.loss)),
            ("accuracy", "ratio", record.accuracy),
            ("learning_rate", "", Some(record.learning_rate)),
            ("gradient_norm", "", record.gradient_norm),
            ("skipped", "count", Some(f64::from(u8::from(record.skipped)))),
            ("retries", "count", Some(f64::from(record.retries))),
            ("tokens", "count", Some(record.tokens as f64)),
            ("padding", "count", Some(record.padding as f64)),
            ("step_seconds", "s", Some(record.timings.total)),
        ];
        self.put(record.step, metrics)
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        let metrics = vec![
            ("validation_loss", "nat", Some(evaluation.loss)),
            ("validation_accuracy", "ratio", Some(evaluation.accuracy)),
            ("validation_seconds", "s", Some(evaluation.seconds)),
        ];
        self.put(evaluation.step, metrics)
    }
}
