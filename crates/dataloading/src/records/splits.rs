//! The files of a data set's folder.
//!
//! A file belongs to a split by its name: `train.jsonl`, `train-00000-of-00002.parquet`, `validation.csv`. The files are in the folder, in
//! its folder `data`, or in folders that have the splits' names. A folder without any such name is divided into shards: all of its files of JSON
//! lines, Parquet, CSV or TSV are training files. So are the files that match a pattern such as `shards/part-*.jsonl`.

use std::path::{Path, PathBuf};

use super::FileKind;
use crate::error::{Error, Result};

const TRAIN: &[&str] = &["train", "training"];
const VALIDATION: &[&str] = &["validation", "valid", "val", "dev", "eval"];
const TEST: &[&str] = &["test"];

/// The files of each split, in order of their names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Splits {
    /// Files to train on.
    pub train: Vec<PathBuf>,
    /// Files to measure the validation loss on.
    pub validation: Vec<PathBuf>,
    /// Files to test on.
    pub test: Vec<PathBuf>,
}

impl Splits {
    /// Returns whether there is such a file or folder, or the path is a pattern.
    pub fn may_exist(path: &Path) -> bool {
        path.exists() || is_pattern(path)
    }

    /// Returns the splits of a folder; a file is its own training split, and files that match a pattern (`*`, `?`, `[a-z]`, `**`) are one.
    ///
    /// # Errors
    /// No such file or folder; a folder without training files; a pattern that no file matches; a split, or shards, in files of several types.
    pub fn find(path: &Path) -> Result<Self> {
        let io = |cause| Error::Io { path: path.to_owned(), cause };
        if !path.exists() && is_pattern(path) {
            return Ok(Self { train: of_one_kind(matching(path)?)?, ..Self::default() });
        }
        if !std::fs::metadata(path).map_err(io)?.is_dir() {
            return Ok(Self { train: vec![path.to_owned()], ..Self::default() });
        }
        for folder in [path.to_owned(), path.join("data")] {
            let split = |names: &[&str]| -> Result<Vec<PathBuf>> {
                let mut files: Vec<PathBuf> =
                    files(&folder).into_iter().filter(|file| is_of(file, names)).collect();
                if files.is_empty() {
                    files = names.iter().flat_map(|name| self::files(&folder.join(name))).collect();
                }
                of_one_kind(files)
            };
            let splits = Self { train: split(TRAIN)?, validation: split(VALIDATION)?, test: split(TEST)? };
            if !splits.train.is_empty() {
                return Ok(splits);
            }
        }
        for folder in [path.to_owned(), path.join("data")] {
            let is_shard = |file: &PathBuf| {
                // A folder with a `config.json` may be anything.
                !matches!(FileKind::from_path(file), FileKind::Text | FileKind::Json)
                    && ![VALIDATION, TEST].iter().any(|names| is_of(file, names))
            };
            let train = of_one_kind(files(&folder).into_iter().filter(is_shard).collect())?;
            if !train.is_empty() {
                let named = |names: &[&str]| {
                    let all = files(&folder).into_iter().filter(|file| is_of(file, names));
                    of_one_kind(all.collect())
                };
                return Ok(Self { train, validation: named(VALIDATION)?, test: named(TEST)? });
            }
        }
        let entries = std::fs::read_dir(path).map_err(io)?.flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names.truncate(12);
        let there = match names.is_empty() {
            true => "the folder is empty".to_owned(),
            false => format!("the folder has {}", names.join(", ")),
        };
        Err(Error::File {
            path: path.to_owned(),
            reason: format!(
                "no training data: expected a file such as train.jsonl, train.parquet or train.csv, with validation.* and \
                 test.* beside it if there are any, or shards of JSON lines, Parquet, CSV or TSV; {there}"
            ),
        })
    }
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

/// Returns the files that match a pattern, in order of their names.
fn matching(pattern: &Path) -> Result<Vec<PathBuf>> {
    let refuse = |reason: String| Error::File { path: pattern.to_owned(), reason };
    let paths = glob::glob(&pattern.to_string_lossy()).map_err(|error| {
        refuse(format!("no pattern of files: {error}; quote it, so that the shell leaves it alone"))
    })?;
    let files: Vec<PathBuf> = paths.filter_map(|path| path.ok().filter(|path| path.is_file())).collect();
    match files.is_empty() {
        true => Err(refuse("no file matches this pattern".to_owned())),
        false => Ok(files),
    }
}

/// Returns the files of records and texts in a folder, in order of their names.
fn files(folder: &Path) -> Vec<PathBuf> {
    let is_data = |path: &Path| {
        path.is_file()
            && (FileKind::from_path(path) != FileKind::Text
                || path
                    .extension()
                    .is_some_and(|extension| ["txt", "gz", "zst"].iter().any(|name| extension == *name)))
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(|path| is_data(path)).collect();
    files.sort();
    files
}

/// Returns whether a file's name begins with that of a split.
fn is_of(file: &Path, names: &[&str]) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    names.iter().any(|split| name.strip_prefix(split).is_some_and(|rest| rest.starts_with(['.', '-', '_'])))
}

fn of_one_kind(files: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    let first = files.first().map(|file| FileKind::from_path(file));
    match files.iter().find(|file| Some(FileKind::from_path(file)) != first) {
        None => Ok(files),
        Some(other) => Err(Error::File {
            path: other.clone(),
            reason: format!(
                "a file of another type than {}, which has the same split; give one of them as the data",
                files[0].display()
            ),
        }),
    }
}
