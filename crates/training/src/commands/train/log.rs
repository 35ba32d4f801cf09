//! What a training writes for programs to read.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
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
