//! The losses of a training as a table of comma-separated values.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

use crate::loss_log::keep_lines;

const HEADER: &str = "step,loss,learning_rate,gradient_norm,tokens,padding,targets,seconds,validation_loss,validation_accuracy\n";

/// Steps and evaluations in a file, a row each; what the other kind has is empty. A resume removes what came after its checkpoint.
#[derive(Debug)]
pub struct LossTable {
    path: PathBuf,
    file: File,
    /// Whether what the file has is of this training.
    continues: bool,
}

impl LossTable {
    /// Opens a new file, or with `resume` one that exists.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn open(path: &Path, resume: bool) -> training::Result<Self> {
        let file = OpenOptions::new().create(true).write(true).append(resume).truncate(!resume).open(path);
        let file = file.map_err(|cause| training::Error::io(path, cause))?;
        Ok(Self { path: path.to_owned(), file, continues: false })
    }

    fn put(&mut self, row: &str) -> training::Result<()> {
        let begin = !std::mem::replace(&mut self.continues, true);
        let written = if begin {
            // A resume without a checkpoint starts again.
            self.file.set_len(0).and_then(|()| self.file.write_all(format!("{HEADER}{row}").as_bytes()))
        } else {
            self.file.write_all(row.as_bytes())
        };
        written.map_err(|cause| training::Error::io(&self.path, cause))
    }
}

impl Observer for LossTable {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let StepRecord { step, loss, learning_rate, tokens, padding, targets, timings, .. } = record;
        let norm = record.gradient_norm.map_or_else(String::new, |norm| norm.to_string());
        let seconds = timings.total;
        self.put(&format!("{step},{loss},{learning_rate},{norm},{tokens},{padding},{targets},{seconds},,\n"))
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        let Evaluation { step, loss, accuracy, seconds, .. } = evaluation;
        self.put(&format!("{step},,,,,,,{seconds},{loss},{accuracy}\n"))
    }

    fn on_resume(&mut self, step: u64) -> training::Result<()> {
        let before = |line: &str| {
            let line_step = line.split_once(',').and_then(|(step, _)| step.parse::<u64>().ok());
            line == HEADER || line_step.is_some_and(|line_step| line_step <= step && line.ends_with('\n'))
        };
        let file = keep_lines(&self.path, before);
        self.file = file.map_err(|cause| training::Error::io(&self.path, cause))?;
        // A folder of an earlier version has no table: it begins here.
        self.continues = self.file.metadata().is_ok_and(|metadata| metadata.len() > 0);
        Ok(())
    }
}
