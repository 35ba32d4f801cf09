//! Repositories of the Hugging Face hub, through the cache that all hub tools share.
//!
//! Files are stored under `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`, in the layout of Python's
//! `huggingface_hub`, so that both find each other's downloads. `HF_ENDPOINT` sets another hub, `HF_TOKEN` gives access to
//! private and gated repositories, `HF_HUB_OFFLINE=1` forbids the network. A file whose size or (for LFS files such as weights)
//! SHA-256 differs from the hub's never gets its name in the cache. A revision points to a commit only once all requested files
//! are there. Interrupted downloads resume. A hub with an https address may not redirect to http.
//!
//! ```no_run
//! use models::hub;
//! use models::hugging_face::Folder;
//! use tch::Device;
//!
//! let path = hub::resolve("Qwen/Qwen2.5-0.5B", None, false)?;
//! let model = Folder::open(&path)?.load(None, Device::Cpu)?;
//! let questions = hub::fetch_files(hub::RepositoryKind::Dataset, "openai/gsm8k", None, &["main/*.parquet"], false)?;
//! # Ok::<(), models::Error>(())
//! ```

mod cache;
mod download;
mod http;
mod partial_file;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use regex::Regex;

use crate::error::{Error, Result};
use crate::hugging_face::{CONFIG, INDEX, SINGLE, Weights};

/// The files of a model's repository that are fetched: all that this crate, or transformers on the same folder, reads, and no
/// other framework's weights.
const MODEL_FILES: [&str; 15] = [
    CONFIG,
    SINGLE,
    INDEX,
    "model-*-of-*.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// The type of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepositoryKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl RepositoryKind {
    fn word(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }
}

/// Download progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes present.
    pub bytes: u64,
    /// Bytes of all files that were missing.
    pub total: u64,
}

/// Access to a hub.
#[derive(Clone, Default)]
pub struct Hub {
    /// The hub's address; `None` for `HF_ENDPOINT`, else huggingface.co.
    pub endpoint: Option<String>,
    /// The cache folder; `None` for the environment's.
    pub cache: Option<PathBuf>,
    /// Whether to use only the cache. Only [`Hub::from_env`] reads `HF_HUB_OFFLINE`.
    pub offline: bool,
    /// Called as bytes arrive; never if nothing is missing.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// [`Hub::fetch`] with the environment's settings; `offline` or `HF_HUB_OFFLINE=1` forbids the network.
///
/// # Errors
/// As [`Hub::fetch`].
pub fn fetch(name: &str, revision: Option<&str>, offline: bool) -> Result<PathBuf> {
    Hub::from_env(offline).fetch(name, revision)
}

/// Returns the commit whose files are in a folder of the cache; `None` for other folders.
pub fn commit(folder: &Path) -> Option<&str> {
    let name =
        |folder: &Path| folder.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let snapshots = folder.parent()?;
    let is_in_cache = name(snapshots) == "snapshots" && name(snapshots.parent()?).starts_with("models--");
    folder.file_name()?.to_str().filter(|_| is_in_cache)
}

/// [`Hub::fetch_files`] with the environment's settings.
///
/// # Errors
/// As [`Hub::fetch_files`].
pub fn fetch_files(
    kind: RepositoryKind,
    name: &str,
    revision: Option<&str>,
    patterns: &[&str],
    offline: bool,
) -> Result<PathBuf> {
    Hub::from_env(offline).fetch_files(kind, name, revision, patterns)
}

/// [`Hub::resolve`] with the environment's settings.
///
/// # Errors
/// As [`Hub::resolve`].
pub fn resolve(name_or_path: &str, revision: Option<&str>, offline: bool) -> Result<PathBuf> {
    Hub::from_env(offline).resolve(name_or_path, revision)
}

impl Hub {
    /// Creates a hub from the environment; offline if `offline` is set or if `HF_HUB_OFFLINE` is 1, true, yes or on.
    pub fn from_env(offline: bool) -> Self {
        let set = std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| {
            ["1", "true", "yes", "on"].iter().any(|yes| value.trim().eq_ignore_ascii_case(yes))
        });
        Self { offline: offline || set, ..Self::default() }
    }

    /// Fetches a model's configuration, tokenizer and weights, and returns the folder in the cache. Files that are in the cache
    /// are not fetched again.
    ///
    /// # Errors
    /// No such repository or revision, no network, an interrupted download, weights in a format that is not
    /// supported; offline, a file that is not in the cache.
    pub fn fetch(&self, name: &str, revision: Option<&str>) -> Result<PathBuf> {
        let folder =
            self.fetch_files_of_patterns(RepositoryKind::Model, name, revision, &MODEL_FILES, &[CONFIG])?;
        // The index names the shards; all of them must be present and complete.
        Weights::open(&folder).map_err(|cause| {
            let remedy = if self.offline { "; fetch it once with the network" } else { "" };
            refuse(name, format!("the model in the cache is incomplete: {cause}{remedy}"))
        })?;
        Ok(folder)
    }

    /// Fetches files of a model's or data set's repository by their paths; `*` matches any characters. Returns the folder that
    /// contains them under those paths.
    ///
    /// # Errors
    /// As [`Hub::fetch`]; a pattern that matches no file.
    pub fn fetch_files(
        &self,
        kind: RepositoryKind,
        name: &str,
        revision: Option<&str>,
        patterns: &[&str],
    ) -> Result<PathBuf> {
        self.fetch_files_of_patterns(kind, name, revision, patterns, patterns)
    }

    /// Returns `name_or_path` if it is a folder, or else fetches that model from the hub: the value of `--model`.
    ///
    /// # Errors
    /// As [`Hub::fetch`], adding that no such folder exists.
    pub fn resolve(&self, name_or_path: &str, revision: Option<&str>) -> Result<PathBuf> {
        let path = Path::new(name_or_path);
        if path.is_dir() {
            return Ok(path.to_owned());
        }
        #[cfg(feature = "gguf")]
        if let Some(folder) = crate::hugging_face::of_file(name_or_path, false)? {
            return Ok(folder);
        }
        if path.is_file() {
            let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
            let model = if is_gguf { "the model that the GGUF file was made of" } else { "a model" };
            return Err(refuse(name_or_path, format!("it is a file; give the folder of {model}")));
        }
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
            return Err(refuse(name_or_path, "there is no such file".to_owned()));
        }
        if path.is_absolute() || name_or_path.starts_with('.') {
            let reason = "there is no such folder; if it was moved, move it back or link the name to its new place (a run takes --set model.name=PATH, too)";
            return Err(refuse(name_or_path, reason.to_owned()));
        }
        self.fetch(name_or_path, revision).map_err(|error| {
            let message = error.to_string();
            match message.strip_prefix(&format!("`{name_or_path}`: ")) {
                Some(reason) => {
                    refuse(name_or_path, format!("no folder has that name, and on the hub: {reason}"))
                }
                None => error,
            }
        })
    }

    fn fetch_files_of_patterns(
        &self,
        kind: RepositoryKind,
        name: &str,
        revision: Option<&str>,
        patterns: &[&str],
        needed: &[&str],
    ) -> Result<PathBuf> {
        check_name(name)?;
        check_revision(name, revision)?;
        let patterns: Vec<Regex> =
            patterns.iter().map(|pattern| matcher(name, pattern)).collect::<Result<_>>()?;
        let is_wanted = |path: &str| patterns.iter().any(|pattern| pattern.is_match(path));
        let (folder, files) = if self.offline {
            self.cached(kind, name, revision)?
        } else {
            self.download(kind, name, revision, &is_wanted)?
        };
        for pattern in needed {
            let matcher = matcher(name, pattern)?;
            if !files.iter().any(|path| matcher.is_match(path)) {
                let repository = if self.offline { "the cache's copy" } else { "the repository" };
                let remedy = if self.offline { "; fetch it once with the network" } else { "" };
                return Err(refuse(
                    name,
                    format!("{repository} has no `{pattern}`{remedy}; {}", listed(&files)),
                ));
            }
        }
        Ok(folder)
    }
}

/// `owner/name`, or only `name` for the hub's oldest repositories.
fn check_name(name: &str) -> Result<()> {
    let part = |part: &str| {
        let letters = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && part.chars().all(letters) && !part.starts_with('.') && !part.contains("..")
    };
    if name.split('/').count() <= 2 && name.split('/').all(part) {
        return Ok(());
    }
    Err(refuse(name, "not a repository name; expected `owner/name`, such as `Qwen/Qwen2.5-0.5B`".to_owned()))
}

fn check_revision(name: &str, revision: Option<&str>) -> Result<()> {
    match revision {
        Some(revision) if !cache::is_inside(revision) => Err(refuse(
            name,
            format!("`{revision}` is not a revision; expected a branch, a tag or a commit, such as `main`"),
        )),
        _ => Ok(()),
    }
}

fn matcher(name: &str, pattern: &str) -> Result<Regex> {
    let anchored = format!("^{}$", regex::escape(pattern).replace(r"\*", ".*"));
    Regex::new(&anchored).map_err(|cause| refuse(name, format!("the pattern `{pattern}`: {cause}")))
}

fn listed(files: &[String]) -> String {
    match (files.len(), files.len().saturating_sub(8)) {
        (0, _) => "it has no files".to_owned(),
        (_, 0) => format!("it has {}", files.join(", ")),
        (_, more) => format!("it has {} and {more} more", files[..8].join(", ")),
    }
}

fn refuse(name: &str, reason: String) -> Error {
    Error::Other(format!("`{name}`: {reason}").into())
}
