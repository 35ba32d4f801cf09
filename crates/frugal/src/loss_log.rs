//! The loss log of a training: a file of JSON lines, which a resume continues.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use files::atomic_write;
use serde_json::{Value, json};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

use crate::error::{Error, Result};

/// Returns a step as a JSON object.
pub fn of_step(record: &StepRecord) -> Value {
    let &StepRecord { step, loss, learning_rate, gradient_norm, tokens, padding, targets, timings, .. } =
        record;
    let mut step = json!({
        "step": step, "loss": loss, "learning_rate": learning_rate, "gradient_norm": gradient_norm,
        "tokens": tokens, "padding": padding, "targets": targets, "seconds": timings.total,
    });
    if let Some(aux) = record.router_aux_loss {
        step["router_aux_loss"] = json!(aux);
    }
    if let Some([chosen, rejected]) = record.rewards {
        (step["chosen_reward"], step["rejected_reward"]) = (json!(chosen), json!(rejected));
        step["accuracy"] = json!(record.accuracy);
    }
    if let Some(policy) = record.policy {
        let rollout = policy.rollout;
        for (key, value) in [
            ("reward", rollout.reward),
            ("reward_deviation", rollout.reward_deviation),
            ("equal_groups", rollout.equal_groups),
            ("answer_tokens", rollout.length),
            ("cut_answers", rollout.cut),
            ("divergence", policy.divergence),
            ("clipped", policy.clipped),
        ] {
            step[key] = json!(value);
        }
    }
    if let Some(own) = record.distilled {
        (step["teacher_divergence"], step["cross_entropy"]) =
            (json!(own.divergence), json!(own.cross_entropy));
    }
    if let Some(point) = record.reference_point {
        step["reference_point"] = json!(point);
    }
    if record.skipped {
        step["skipped"] = json!(true);
    }
    step
}

/// Returns an evaluation as a JSON object.
pub fn of_evaluation(evaluation: &Evaluation) -> Value {
    let &Evaluation { step, loss, accuracy, seconds, .. } = evaluation;
    let mut line =
        json!({ "step": step, "validation_loss": loss, "validation_accuracy": accuracy, "seconds": seconds });
    if let Some(reward) = evaluation.reward {
        line["validation_reward"] = json!(reward);
    }
    if let Some(own) = evaluation.distilled {
        line["validation_teacher_divergence"] = json!(own.divergence);
        line["validation_cross_entropy"] = json!(own.cross_entropy);
    }
    line
}

/// Steps and evaluations in a file, a line of JSON each. A resume removes what came after its checkpoint.
#[derive(Debug)]
pub struct LossLog {
    path: PathBuf,
    file: File,
    /// Whether what the file has is of this training.
    continues: bool,
}

impl LossLog {
    /// Opens a new file, or with `resume` one that exists.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn open(path: &Path, resume: bool) -> training::Result<Self> {
        let file = OpenOptions::new().create(true).write(true).append(resume).truncate(!resume).open(path);
        let file = file.map_err(|cause| training::Error::io(path, cause))?;
        Ok(Self { path: path.to_owned(), file, continues: false })
    }

    fn io(&self, result: std::io::Result<()>) -> training::Result<()> {
        result.map_err(|cause| training::Error::io(&self.path, cause))
    }

    fn put(&mut self, value: &Value) -> training::Result<()> {
        if !std::mem::replace(&mut self.continues, true) {
            // A resume without a checkpoint starts again.
            let emptied = self.file.set_len(0);
            self.io(emptied)?;
        }
        let line = format!("{value}\n");
        let written = self.file.write_all(line.as_bytes());
        self.io(written)
    }
}

impl Observer for LossLog {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        self.put(&of_step(record))
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        self.put(&of_evaluation(evaluation))
    }

    fn on_resume(&mut self, step: u64) -> training::Result<()> {
        let before = |line: &str| {
            let value: Option<Value> = serde_json::from_str(line).ok();
            // A kill may have cut the last line short.
            value.and_then(|value| value["step"].as_u64()).is_some_and(|of| of <= step)
        };
        let file = keep_lines(&self.path, before);
        let rewritten = file.map(|file| self.file = file);
        self.continues = true;
        self.io(rewritten)
    }
}

/// Rewrites a file with those of its lines that are to stay, and opens it to append. Atomic, so that a kill leaves the old file or the
/// new one.
///
/// # Errors
/// A file that cannot be read or written.
pub(crate) fn keep_lines(path: &Path, stays: impl Fn(&str) -> bool) -> std::io::Result<File> {
    let text = fs::read_to_string(path)?;
    let kept: String = text.split_inclusive('\n').filter(|line| stays(line)).collect();
    atomic_write::file(path, |out| out.write_all(kept.as_bytes()))?;
    OpenOptions::new().append(true).open(path)
}

/// The losses of a training.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Losses {
    /// Of the first step.
    pub first: Option<f64>,
    /// Of the last step.
    pub last: Option<f64>,
    /// The mean rewards of the first and of the last step, where rewards are learned. Losses of evaluations are rewards times −1 then.
    pub rewards: Option<[f64; 2]>,
    /// Of the last evaluation.
    pub validation: Option<f64>,
    /// Of the evaluation before the first step.
    pub before: Option<f64>,
    /// The least one of an evaluation after it, and its step.
    pub best: Option<(f64, u64)>,
    /// The last step.
    pub step: u64,
    /// Seconds of all steps.
    pub seconds: f64,
}

impl Losses {
    /// Reads them from a loss log; none from a file that does not exist.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let file = match fs::File::open(path) {
            Ok(file) => file,
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(cause) => return Err(Error::File { path: path.to_owned(), reason: cause.to_string() }),
        };
        let mut losses = Self::default();
        // A kill may have cut the last line short.
        let lines = BufReader::new(file).lines().map_while(std::result::Result::ok);
        for value in lines.filter_map(|line| serde_json::from_str::<Value>(&line).ok()) {
            let step = value["step"].as_u64().unwrap_or_default();
            if let Some(loss) = value["loss"].as_f64() {
                losses.add(step, loss, value["seconds"].as_f64().unwrap_or_default());
                losses.add_reward(value["reward"].as_f64());
            }
            if let Some(loss) = value["validation_loss"].as_f64() {
                losses.add_evaluation(step, loss);
            }
        }
        Ok(losses)
    }

    fn add(&mut self, step: u64, loss: f64, seconds: f64) {
        self.first.get_or_insert(loss);
        self.last = Some(loss);
        self.step = step;
        self.seconds += seconds;
    }

    fn add_reward(&mut self, reward: Option<f64>) {
        let Some(reward) = reward else { return };
        self.rewards.get_or_insert([reward; 2])[1] = reward;
    }

    fn add_evaluation(&mut self, step: u64, loss: f64) {
        self.validation = Some(loss);
        match step {
            0 => self.before = Some(loss),
            _ if self.best.is_none_or(|(best, _)| loss < best) => self.best = Some((loss, step)),
            _ => {}
        }
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
        losses.add(record.step, record.loss, record.timings.total);
        losses.add_reward(record.policy.map(|policy| policy.rollout.reward));
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        let mut losses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        losses.add_evaluation(evaluation.step, evaluation.loss);
        Ok(())
    }
}
