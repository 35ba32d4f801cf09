//! A model's folder whose weights stay in a GGUF file.
//!
//! Everything that reads a model's folder reads such a one: it has `config.json`, `tokenizer.json` and the other files that
//! [`ModelFile`] gives, and in place of weights [`POINTER`], which names the file:
//!
//! ```json
//! { "file": "/models/qwen.gguf", "untied": false, "bytes": 491400064, "modified": 1738886400000000000, "version": 1 }
//! ```
//!
//! The folder is made once for a file and is made again when the file has changed.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::error::{Result, file_error, io_error};
use crate::json;
use crate::model_file::{ModelFile, ReadOptions};
use crate::writer::MAGIC;

/// The name of the file that names the GGUF file.
pub const POINTER: &str = "model.gguf.json";
/// Version of what is written. Increased when the same file gives other files than before.
const VERSION: u32 = 2;

/// Returns whether a file begins as a GGUF file does.
pub fn is_gguf(path: &Path) -> bool {
    let mut start = [0; MAGIC.len()];
    path.is_file()
        && fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && start == MAGIC
}

/// Makes the folder of a file, under `cache`, or finds the one that is there.
///
/// # Errors
/// As [`ModelFile::open`] and [`ModelFile::companion_files`]; a folder that cannot be written.
pub fn make(file: &Path, options: ReadOptions, cache: &Path) -> Result<PathBuf> {
    let file = file.canonicalize().map_err(|cause| io_error(file, cause))?;
    let pointer = pointer(&file, options)?;
    let digest = Sha256::digest(format!("{}\n{}", file.display(), options.untied));
    let digest: String = digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let target = cache.join(format!("{stem}-{digest}"));
    let is_current = || json::read(&target.join(POINTER)).is_ok_and(|there| Value::Object(there) == pointer);
    if is_current() {
        return Ok(target);
    }
    let model = ModelFile::open(&file, options)?;
    fs::create_dir_all(cache).map_err(|cause| io_error(cache, cause))?;
    let new = cache.join(format!(".{stem}-{digest}-{}", std::process::id()));
    let write = |name: &str, text: &str| {
        let path = new.join(name);
        fs::write(&path, text).map_err(|cause| io_error(&path, cause))
    };
    let written = fs::create_dir_all(&new).map_err(|cause| io_error(&new, cause)).and_then(|()| {
        for (name, text) in model.companion_files()? {
            write(name, &text)?;
        }
        write("config.json", &format!("{:#}\n", Value::Object(model.config().clone())))?;
        write(POINTER, &format!("{pointer:#}\n"))
    });
    let placed = written.and_then(|()| {
        // Of an older state of the file; another process may have replaced it meanwhile.
        let _ = fs::remove_dir_all(&target);
        match fs::rename(&new, &target) {
            Err(cause) if !is_current() => Err(io_error(&target, cause)),
            _ => Ok(()),
        }
    });
    let _ = fs::remove_dir_all(&new);
    placed.map(|()| target)
}

/// The content of the pointer to a file.
fn pointer(file: &Path, options: ReadOptions) -> Result<Value> {
    let metadata = fs::metadata(file).map_err(|cause| io_error(file, cause))?;
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let modified = modified.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(0));
    Ok(json!({
        "file": file, "untied": options.untied, "bytes": metadata.len(), "modified": modified, "version": VERSION,
    }))
}

/// Opens the file that a folder names; `None` for a folder without [`POINTER`].
///
/// # Errors
/// A pointer that names no file, or one that has changed since; as [`ModelFile::open`].
pub fn open(folder: &Path) -> Result<Option<ModelFile>> {
    let path = folder.join(POINTER);
    if !path.is_file() {
        return Ok(None);
    }
    let fields = json::read(&path)?;
    let Some(file) = fields.get("file").and_then(Value::as_str).map(PathBuf::from) else {
        return Err(file_error(&path, "`file` is missing; give the GGUF file again"));
    };
    let options = ReadOptions { untied: fields.get("untied") == Some(&Value::Bool(true)) };
    if !file.is_file() {
        return Err(file_error(&file, "the GGUF file is gone; move it back, or give the model's new place"));
    }
    if pointer(&file, options)? != Value::Object(fields) {
        let reason =
            format!("the file has changed since {} was made of it; give the file again", folder.display());
        return Err(file_error(&file, reason));
    }
    ModelFile::open(&file, options).map(Some)
}
