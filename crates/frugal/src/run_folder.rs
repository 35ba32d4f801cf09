//! The output folder of a training.
//!
//! | file | what it holds |
//! |---|---|
//! | `config.toml` | every setting, with its origin as a comment; `frugal finetune --config` makes the same run of it |
//! | `run.json` | a [`RunRecord`]: versions, data by SHA-256, plan, starts, outcome |
//! | `losses.jsonl`, `losses.csv` | each step and evaluation ([`LossLog`](crate::loss_log::LossLog), [`LossTable`]) |
//! | `events.out.tfevents.*` | the same for TensorBoard ([`event_file`]), a file for each start |
//! | `index.html` | the curves and all of the above on one page without scripts, rewritten while the training runs |
//! | `samples.jsonl` | answers of the model before and after |
//! | `chat_template.jinja` | the text of the template that rows are made with |
//! | the tokenizer's files, `generation_config.json` | of a training of adapters: what [`companion_files`](crate::companion_files) are |
//! | `checkpoints/` | what a resume needs ([`training::checkpoint`]) |
//! | `best/` | the adapter or the model with the least validation loss |
//! | the adapter's files, or `model/` | the last adapter or model |

pub mod event_file;
mod loss_table;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::checkpoint;

pub use loss_table::LossTable;

use crate::config::origins::Origins;
use crate::error::{Error, Result};
use crate::rows;

/// Name of the record within an output folder.
pub const RECORD: &str = "run.json";
/// The loss log within an output folder.
pub const LOSSES: &str = "losses.jsonl";
/// The losses as a table within an output folder.
pub const TABLE: &str = "losses.csv";
/// The page within an output folder.
pub const PAGE: &str = "index.html";
/// Folder of the checkpoints within an output folder.
pub const CHECKPOINTS: &str = "checkpoints";
/// Folder of the best adapter or model within an output folder.
pub const BEST: &str = "best";
/// Folder of the model within an output folder, after full fine-tuning or a training from scratch.
pub const MODEL: &str = "model";
/// Answers before and after, within an output folder.
pub const SAMPLES: &str = "samples.jsonl";

/// The largest file whose digest is recorded, in bytes: larger ones would delay the first step.
const DIGESTED: u64 = 8 << 30;

/// Versions, data, plan, starts and outcome of a training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// Version of this program.
    pub frugal: String,
    /// Version of libtorch.
    pub torch: String,
    /// The model's folder, or what shape it has.
    pub model: String,
    /// Method: `LoRA`, `DoRA`, `full` or `from scratch`.
    pub method: String,
    /// Optimizer steps in all.
    pub steps: u64,
    /// Parameters that are trained.
    pub trainable: u64,
    /// All parameters.
    pub parameters: u64,
    /// The training data.
    pub train: SplitRecord,
    /// The validation data.
    pub validation: SplitRecord,
    /// The files of a teacher's weights.
    #[serde(skip_serializing_if = "SplitRecord::is_empty")]
    pub teacher: SplitRecord,
    /// The identity of the batches, which a resume compares.
    pub batches: Value,
    /// The plan that was chosen under the budget.
    pub plan: Value,
    /// The chat template of the rows, in the output folder; absent without a template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<FileRecord>,
    /// The configuration at the last start.
    pub config: Value,
    /// Origins of its values.
    pub origins: Origins,
    /// Each start of the program.
    pub starts: Vec<StartRecord>,
    /// Outcome of the last start; `None` while it runs, and after a kill.
    pub outcome: Option<Outcome>,
}

/// A split of the data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SplitRecord {
    /// Its files.
    pub files: Vec<FileRecord>,
    /// Rows that were made of them; 0 where batches are made of documents.
    pub rows: usize,
}

/// A file that decides what is learned.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileRecord {
    /// Its absolute path.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its bytes in hexadecimal; absent for a file of more than 8 GiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A start of the program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRecord {
    /// Seconds since 1970.
    pub unix_time: u64,
    /// Completed steps at that time.
    pub step: u64,
    /// The command.
    pub command: String,
}

/// Outcome of a training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Outcome {
    /// Why.
    pub state: State,
    /// Returns the number of completed steps.
    pub step: u64,
    /// Seconds since its start.
    pub seconds: f64,
    /// The most bytes that were held, as a budget counts them: on a CPU those of the process without pages of mapped files, on a GPU those
    /// of tensors.
    pub peak_bytes: u64,
    /// The most bytes of pages of mapped files (weights, libraries) that were seen beside them on a CPU.
    pub file_bytes: u64,
    /// Error of a failed training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// State of a training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// A process works on it.
    Running,
    /// All steps are done, or the data ended.
    Finished,
    /// The validation loss did not improve any more.
    StoppedEarly,
    /// It was interrupted or killed, and can be resumed.
    #[default]
    Interrupted,
    /// It has learned nothing to the end, because its last loss is not finite or every step was skipped; or it has ended with an error,
    /// such as too little memory.
    Failed,
}

impl State {
    /// Returns the state as one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::StoppedEarly => "stopped early",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }
}

/// Returns the seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl RunRecord {
    /// Reads the record of an output folder; `None` without a record, as in folders of earlier versions.
    ///
    /// # Errors
    /// A record that cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(RECORD);
        let failed = |reason: String| Error::File { path: path.clone(), reason };
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|cause| {
                failed(format!("{cause}; remove the file, and resume the training to make it again"))
            }),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(failed(cause.to_string())),
        }
    }

    /// Writes the record into an output folder, where it appears whole.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(RECORD);
        let failed = |reason: String| Error::File { path: path.clone(), reason };
        let mut text = serde_json::to_vec_pretty(self).map_err(|cause| failed(cause.to_string()))?;
        text.push(b'\n');
        files::atomic_write::file(&path, |out| out.write_all(&text))
            .map_err(|cause| failed(cause.to_string()))
    }

    /// Returns what the training in a folder is doing.
    pub fn state(&self, folder: &Path) -> State {
        if checkpoint::is_in_use(&folder.join(CHECKPOINTS)) {
            return State::Running;
        }
        self.outcome.as_ref().map_or(State::Interrupted, |outcome| outcome.state)
    }
}

impl SplitRecord {
    fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Describes files, and the rows that were made of them.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of(files: &[PathBuf], rows: usize) -> Result<Self> {
        let files = files.iter().map(|path| FileRecord::of(path));
        Ok(Self { files: files.collect::<Result<_>>()?, rows })
    }
}

impl FileRecord {
    /// Describes a file.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        let failed = |cause: io::Error| Error::File { path: path.to_owned(), reason: cause.to_string() };
        let bytes = fs::metadata(path).map_err(failed)?.len();
        let sha256 = match bytes {
            ..=DIGESTED => Some(rows::hex_digest_of(path).map_err(failed)?),
            _ => None,
        };
        Ok(Self { path: path.canonicalize().unwrap_or_else(|_| path.to_owned()), bytes, sha256 })
    }
}
