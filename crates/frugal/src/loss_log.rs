//! The loss log of a training: a file of JSON lines, which a resume continues.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use runtime::atomic_write;
use serde_json::{Value, json};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

use crate::error::{Error, Result};

/// Returns a step as a JSON object.
pub fn of_step(record: &StepRecord) -> Value {
    let &StepRecord { step, loss, learning_rate, gradient_norm, tokens, padding, targets, timings, .. } =
        record;
    json!({
        "step": step, "loss": loss, "learning_rate": learning_rate, "gradient_norm": gradient_norm,
        "tokens": tokens, "padding": padding, "targets": targets, "seconds": timings.total,
    })
}

/// Returns an evaluation as a JSON object.
pub fn of_evaluation(evaluation: &Evaluation) -> Value {
    let &Evaluation { step, loss, accuracy, seconds, .. } = evaluation;
    json!({ "step": step, "validation_loss": loss, "validation_accuracy": accuracy, "seconds": seconds })
}

/// Steps and evaluations in a file, a line of JSON each. A resume removes what came after its checkpoint.
#[derive(Debug)]
pub struct LossLog {
    path: PathBuf,
    file: File,
}

impl LossLog {
    /// Opens a new file, or with `resume` one that exists.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn open(path: &Path, resume: bool) -> training::Result<Self> {
        let file = OpenOptions::new().create(true).write(true).append(resume).truncate(!resume).open(path);
        let file = file.map_err(|cause| training::Error::Io { path: path.to_owned(), cause })?;
        Ok(Self { path: path.to_owned(), file })
    }

    fn io(&self, result: std::io::Result<()>) -> training::Result<()> {
        result.map_err(|cause| training::Error::Io { path: self.path.clone(), cause })
    }

    fn put(&mut self, value: &Value) -> training::Result<()> {
        let line = format!("{value}\n");
        let written = self.file.write_all(line.as_bytes());
        self.io(written)
    }
}

impl Observer for LossLog {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        if record.step == 1 {
            // A resume without a checkpoint starts again.
            let emptied = self.file.set_len(0);
            self.io(emptied)?;
        }
        self.put(&of_step(record))
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        self.put(&of_evaluation(evaluation))
    }

    fn on_resume(&mut self, step: u64) -> training::Result<()> {
        let before = |line: &&str| {
            let value: Option<Value> = serde_json::from_str(line).ok();
            // A kill may have cut the last line short.
            value.and_then(|value| value["step"].as_u64()).is_some_and(|of| of <= step)
        };
        // Atomic, so that a kill leaves the old log or the new one.
        let rewritten = fs::read_to_string(&self.path).and_then(|text| {
            let kept: String = text.split_inclusive('\n').filter(before).collect();
            atomic_write::file(&self.path, |out| out.write_all(kept.as_bytes()))?;
            self.file = OpenOptions::new().append(true).open(&self.path)?;
            Ok(())
        });
        self.io(rewritten)
    }
}

/// The first and the last losses of a training.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Losses {
    /// Of the first step.
    pub first: Option<f64>,
    /// Of the last step.
    pub last: Option<f64>,
    /// Of the last evaluation.
    pub validation: Option<f64>,
}

impl Losses {
    /// Reads them from a loss log; none from a file that does not exist.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(cause) => return Err(Error::File { path: path.to_owned(), reason: cause.to_string() }),
        };
        let mut losses = Self::default();
        // A kill may have cut the last line short.
        for value in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            if let Some(loss) = value["loss"].as_f64() {
                losses.first.get_or_insert(loss);
                losses.last = Some(loss);
            }
            losses.validation = value["validation_loss"].as_f64().or(losses.validation);
        }
        Ok(losses)
    }
}

/// An observer that keeps [`Losses`]. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct LossSummary(Arc<Mutex<Losses>>);

impl LossSummary {
    /// Returns the losses so far.
    pub fn get(&self) -> Losses {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for LossSummary {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let mut losses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        losses.first.get_or_insert(record.loss);
        losses.last = Some(record.loss);
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).validation = Some(evaluation.loss);
        Ok(())
    }
}
