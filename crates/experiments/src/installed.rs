//! Pretrained models, which `cargo xtask setup --models` downloads into the folder `FRUGAL_MODELS`, and problems to fine-tune them on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf::ReadOptions;
use models::hugging_face::Folder;
use tempfile::TempDir;

/// Qwen2.5-Coder-0.5B-Instruct. Its shape, vocabulary and tokenizer are those of Qwen2.5-0.5B, which the assignment names.
pub(crate) const ASSIGNMENT: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf";

/// SmolLM2-135M-Instruct.
pub(crate) const SMALL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// A GGUF file as a model's folder, which is removed with the last clone.
#[derive(Clone, Debug)]
pub(crate) struct GgufFolder {
    path: PathBuf,
    _keeps: Arc<TempDir>,
}

impl GgufFolder {
    /// # Errors
    /// A file that is no GGUF file; a full disk.
    pub(crate) fn new(file: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = gguf::folder::make(file, ReadOptions::default(), folder.path())?;
        Ok(Self { path, _keeps: Arc::new(folder) })
    }

    /// # Errors
    /// Those of the model's files.
    pub(crate) fn open(&self) -> anyhow::Result<Folder> {
        Ok(Folder::open(&self.path)?)
    }
}

/// Returns the path of a model, given by its path or by its name in the folder, if it exists.
pub(crate) fn find(model: &Path) -> Option<PathBuf> {
    let named = std::env::var_os("FRUGAL_MODELS").map(|folder| PathBuf::from(folder).join(model));
    named.filter(|path| path.exists()).or_else(|| model.exists().then(|| model.to_owned()))
}

/// Says that a model is missing, and what to do.
pub(crate) fn missing(model: &Path) -> String {
    format!(
        "{} is not installed; run `cargo xtask setup --models`, or name a model as --model",
        model.display()
    )
}

/// Returns the folder with GSM8K's problems, or what is missing.
pub(crate) fn gsm8k(given: Option<&Path>) -> Result<PathBuf, &'static str> {
    let named = given.map(Path::to_owned).or_else(|| std::env::var_os("FRUGAL_GSM8K").map(PathBuf::from));
    let missing = "GSM8K is missing: set FRUGAL_GSM8K to a folder with its train.jsonl and test.jsonl";
    named.filter(|folder| folder.is_dir()).ok_or(missing)
}
