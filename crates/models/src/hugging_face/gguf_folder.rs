//! The folder of a GGUF file, in the user's cache.

use std::path::{Path, PathBuf};

use gguf::ReadOptions;
use gguf::ollama::store;

use crate::error::{Error, Result};

/// Returns the folder of a model that is a GGUF file (`name` is its path), a model of Ollama's store (`ollama:llama3.2:1b`) or the path of
/// one of its manifests; `None` for any other name. The folder is made in `gguf` in `FRUGAL_CACHE`, else in the user's cache folder.
///
/// # Errors
/// As [`gguf::ModelFile::open`]; a model that Ollama's store does not have; a folder that cannot be written.
pub fn of_file(name: &str, untied: bool) -> Result<Option<PathBuf>> {
    let other = |error: gguf::Error| Error::Other(error.into());
    let path = Path::new(name);
    let in_store = store::find(name).map_err(other)?;
    let is_file = || path.is_file() && path.extension().is_some_and(|extension| extension == "gguf");
    let file = match in_store {
        Some(file) => file,
        None if is_file() || gguf::folder::is_gguf(path) => path.to_owned(),
        None => return Ok(None),
    };
    gguf::folder::make(&file, ReadOptions { untied }, &cache()).map(Some).map_err(other)
}

fn cache() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("FRUGAL_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("frugal")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/frugal")));
    cache.unwrap_or_else(|| std::env::temp_dir().join("frugal")).join("gguf")
}
