//! JSON files of a model's folder, with errors that name the file and the key.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Result, file_error, io_error};

/// Reads a file that contains an object.
pub(crate) fn read(path: &Path) -> Result<Map<String, Value>> {
    let text = std::fs::read(path).map_err(|cause| io_error(path, cause))?;
    serde_json::from_slice(&text)
        .map_err(|cause| file_error(path, format!("{cause}; expected a JSON object")))
}

/// Reads a file that may be missing; then it is an empty object.
pub(crate) fn read_optional(path: &Path) -> Result<Map<String, Value>> {
    if path.is_file() { read(path) } else { Ok(Map::new()) }
}

/// An object and the file that it is from.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    pub(crate) path: PathBuf,
    pub(crate) fields: Map<String, Value>,
}

impl Fields {
    /// Reads the `config.json` of a model, or of the text model of one that also reads images.
    pub(crate) fn read_config(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|cause| io_error(path, cause))?;
        let fields = serde_json::from_str(&decoder::text_config(&text))
            .map_err(|cause| file_error(path, format!("{cause}; expected a JSON object")))?;
        Ok(Self { path: path.to_owned(), fields })
    }

    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), fields: read(path)? })
    }

    /// Returns a value; null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: &str) -> crate::Error {
        let value = self.get(key).map_or_else(|| "missing".to_owned(), Value::to_string);
        file_error(&self.path, format!("`{key}` is {value}; expected {expected}"))
    }

    /// Returns a whole number from 1 to 2^32 − 1.
    pub(crate) fn size(&self, key: &str) -> Result<u32> {
        self.optional_size(key)?.ok_or_else(|| self.wrong(key, "a whole number above 0"))
    }

    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number =
            value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0);
        number.map(Some).ok_or_else(|| self.wrong(key, "a whole number above 0"))
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64> {
        self.optional_number(key)?.ok_or_else(|| self.wrong(key, "a number"))
    }

    pub(crate) fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong(key, "a number"))
    }

    /// Returns a Boolean; absent is `default`.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))
    }

    pub(crate) fn text(&self, key: &str) -> Result<&str> {
        self.get(key).and_then(Value::as_str).ok_or_else(|| self.wrong(key, "a text"))
    }
}
