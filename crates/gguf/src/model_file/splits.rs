//! A model in several files: `NAME-00001-of-00003.gguf` and so on, with `split.no`, `split.count` and `split.tensors.count`.

use std::path::{Path, PathBuf};

use super::metadata::integers;
use crate::error::{Result, file_error};
use crate::reader::Reader;

/// The most files of a model: more than any has.
const MAX_FILES: u64 = 1024;

/// Opens a file, or all files of the model that it is a part of. The first one has the metadata.
///
/// # Errors
/// Errors of each file; a part that is missing, or of another model.
pub(super) fn open(path: &Path) -> Result<Vec<Reader>> {
    let file = Reader::open(path)?;
    let Some(count) = number(&file, "split.count").filter(|count| *count > 1) else { return Ok(vec![file]) };
    let refuse = |reason: String| file_error(path, reason);
    if count > MAX_FILES {
        return Err(refuse(format!("`split.count` is {count}; expected at most {MAX_FILES}")));
    }
    let parts = (1..=count).map(|part| {
        part_path(path, part, count).ok_or_else(|| {
            refuse(format!(
                "one of {count} files of a model, but its name does not end in -NNNNN-of-{count:05}.gguf; give the files their names again, \
                 or join them with `llama-gguf-split --merge`"
            ))
        })
    });
    let mut files = Vec::new();
    for (index, part) in parts.collect::<Result<Vec<PathBuf>>>()?.iter().enumerate() {
        if !part.is_file() {
            return Err(refuse(format!("{} is missing, which has a part of the model", part.display())));
        }
        let file = Reader::open(part)?;
        if (number(&file, "split.no"), number(&file, "split.count")) != (Some(index as u64), Some(count)) {
            let reason = format!("not part {} of {count} of a model; get all of its files again", index + 1);
            return Err(file_error(part, reason));
        }
        files.push(file);
    }
    let tensors: usize = files.iter().map(|file| file.header().tensors.len()).sum();
    match files.first().and_then(|first| number(first, "split.tensors.count")) {
        Some(expected) if expected != tensors as u64 => Err(refuse(format!(
            "its {count} files have {tensors} tensors of {expected}; get all of them again"
        ))),
        _ => Ok(files),
    }
}

fn number(file: &Reader, key: &str) -> Option<u64> {
    integers(file.header().get(key)?)?.first().copied()
}

/// The path of a part, by that of another.
fn part_path(path: &Path, part: u64, count: u64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, number) = stem.split_at_checked(stem.len().checked_sub(5)?)?;
    let is_number = number.bytes().all(|digit| digit.is_ascii_digit());
    is_number.then(|| path.with_file_name(format!("{stem}{part:05}-of-{count:05}.gguf")))
}
