//! The problems that a command works on.

use std::path::{Path, PathBuf};

use anyhow::bail;
use frugal::config::DataConfig;
use frugal::dataloading::{
    self,
    records::{FileKind, Splits},
};
use frugal::tasks::gsm8k::{Annotations, FewShot, Problem, PromptFormat, Split, records, split};

const TRAIN: &str = "train.jsonl";
const TEST: &str = "test.jsonl";

/// The problems of a file or folder.
#[derive(Clone, Debug)]
pub(crate) struct Problems {
    data: PathBuf,
    strip_annotations: bool,
    split_seed: u64,
}

/// The three parts of the training file.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) train: Vec<Problem>,
    pub(crate) test: Vec<Problem>,
    pub(crate) validation: Vec<Problem>,
}

/// Whether a folder is GSM8K's: it has both of its files and no other split, and what the first one begins with is a problem.
pub(crate) fn is_folder(path: &Path) -> bool {
    if ![TRAIN, TEST].iter().all(|name| path.join(name).is_file()) {
        return false;
    }
    let has_validation = Splits::find(path).is_ok_and(|splits| !splits.validation.is_empty());
    let records = dataloading::records::read_all(&[path.join(TRAIN)]);
    let first = records.ok().and_then(|mut records| records.find_map(Result::ok));
    !has_validation
        && first.is_some_and(|record| {
            let text = |field: &str| record.fields.get(field).and_then(|value| value.as_str());
            let (question, answer) = (text("question"), text("answer"));
            question.zip(answer).is_some_and(|(question, answer)| Problem::new(question, answer).is_ok())
        })
}

impl Problems {
    /// The problems of a configuration.
    pub(crate) fn of(data: &DataConfig) -> Self {
        let &DataConfig { strip_annotations, split_seed, .. } = data;
        Self { data: PathBuf::from(&data.source), strip_annotations, split_seed }
    }

    fn read(&self, path: &Path) -> anyhow::Result<Vec<Problem>> {
        if matches!(FileKind::from_path(path), FileKind::Csv { .. } | FileKind::Parquet) {
            bail!(
                "{}: GSM8K's problems are read from JSON lines; convert the file, or learn its questions and answers with \
                 --format question-answer",
                path.display()
            );
        }
        let annotations = if self.strip_annotations { Annotations::Strip } else { Annotations::Keep };
        Ok(records::read(path, annotations)?)
    }

    /// A file of the folder.
    fn file(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.data.join(name);
        if path.is_file() {
            return Ok(path);
        }
        bail!(
            "{}: {name} is missing; give a folder with GSM8K's {TRAIN} and {TEST}, or one file of JSON lines",
            self.data.display()
        )
    }

    /// All problems of the training file, or of the one file.
    ///
    /// # Errors
    /// A missing file; the first line that is not a problem, with its number.
    pub(crate) fn all(&self) -> anyhow::Result<Vec<Problem>> {
        if !self.data.exists() {
            bail!(
                "{} does not exist; give a folder with GSM8K's {TRAIN} and {TEST}, or one file of JSON lines",
                self.data.display()
            );
        }
        let path = if self.data.is_dir() { self.file(TRAIN)? } else { self.data.clone() };
        self.read(&path)
    }

    /// The assignment's parts of those.
    ///
    /// # Errors
    /// As [`Problems::all`]; so few problems that a part would be empty.
    pub(crate) fn parts(&self) -> anyhow::Result<Parts> {
        let all = self.all()?;
        let Split { train, test, eval } = Split::new(all.len(), self.split_seed)?;
        let of = |numbers: &[usize]| split::select(&all, numbers);
        Ok(Parts { train: of(&train), test: of(&test), validation: of(&eval) })
    }

    /// The official test set.
    ///
    /// # Errors
    /// `--data` is a file; a file that is not there or has a bad line.
    pub(crate) fn official(&self) -> anyhow::Result<Vec<Problem>> {
        if !self.data.is_dir() {
            bail!("{}: a file has no official test set; give the folder with {TEST}", self.data.display());
        }
        self.read(&self.file(TEST)?)
    }

    /// Prompts with examples from these problems.
    ///
    /// # Errors
    /// Fewer problems than examples.
    pub(crate) fn few_shot(&self, train: &[Problem], shots: usize) -> anyhow::Result<FewShot> {
        let format = PromptFormat::default();
        Ok(match shots {
            0 => FewShot::zero(format),
            shots => FewShot::new(train, shots, format, self.split_seed)?,
        })
    }
}
