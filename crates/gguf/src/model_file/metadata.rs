//! The metadata of a file, by type: errors name the file, the key and the remedy.

use std::path::Path;

use crate::error::{Error, Result, file_error, unsupported};
use crate::reader::Reader;
use crate::value::{Array, Value};
use crate::writer::Header;

/// The metadata of a model's file.
pub(super) struct Metadata<'a> {
    pub(super) path: &'a Path,
    header: &'a Header,
    pub(super) architecture: &'a str,
}

impl<'a> Metadata<'a> {
    /// Finds the architecture of a file.
    ///
    /// # Errors
    /// A file that is not a model's: an adapter, a vision projector, a matrix of importances, a vocabulary.
    pub(super) fn new(file: &'a Reader) -> Result<Self> {
        let (path, header) = (file.path(), file.header());
        let text = |key: &str| header.get(key).and_then(Value::as_str);
        let architecture = text("general.architecture")
            .ok_or_else(|| missing(path, "general.architecture", "the name of an architecture"))?;
        let kind = match (text("general.type"), architecture) {
            (_, "clip") => "mmproj",
            (kind, _) => kind.unwrap_or("model"),
        };
        let reason = match kind {
            "model" => return Ok(Self { path, header, architecture }),
            "adapter" => {
                "it is an adapter, not a model; give the GGUF file of its base, and the adapter as PEFT's folder with --adapter"
            }
            "mmproj" => {
                "it is the projector of a vision model, not a language model; give the file of the language model beside it"
            }
            "imatrix" => "it is a matrix of importances for quantisation, not a model; give the model's file",
            other => &format!("its `general.type` is `{other}`; expected a model"),
        };
        Err(file_error(path, reason))
    }

    /// Returns a value of the architecture.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw(&format!("{}.{key}", self.architecture))
    }

    /// Returns a value by its whole key.
    pub(super) fn raw(&self, key: &str) -> Option<&'a Value> {
        self.header.get(key)
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        let shown: String = format!("{value:?}").chars().take(80).collect();
        file_error(
            self.path,
            format!("`{}.{key}` is {shown}; expected {expected}: convert the model again", self.architecture),
        )
    }

    /// Returns a number of things, at least 1.
    pub(super) fn size(&self, key: &str) -> Result<u64> {
        match self.optional_size(key)? {
            Some(size) if size > 0 => Ok(size),
            Some(_) => Err(self.wrong(key, &Value::U32(0), "a whole number above 0")),
            None => {
                Err(missing(self.path, &format!("{}.{key}", self.architecture), "a whole number above 0"))
            }
        }
    }

    /// Returns a number of things; a list of equal ones counts as one.
    pub(super) fn optional_size(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = integers(value).unwrap_or_default();
        match numbers.as_slice() {
            [first, rest @ ..] if rest.iter().all(|number| number == first) => Ok(Some(*first)),
            [_, ..] => Err(unsupported(
                format!("`{}.{key}`", self.architecture),
                format!("{numbers:?}"),
                "layers of different sizes cannot be read",
            )),
            [] => Err(self.wrong(key, value, "a whole number")),
        }
    }

    /// Returns a number. One of 32 bits has the shortest decimals that give its bits, as 1e-5.
    pub(super) fn optional_float(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        float(value)
            .filter(|number| number.is_finite())
            .map(Some)
            .ok_or_else(|| self.wrong(key, value, "a number"))
    }

    pub(super) fn float(&self, key: &str) -> Result<f64> {
        let number = self.optional_float(key)?;
        number.ok_or_else(|| missing(self.path, &format!("{}.{key}", self.architecture), "a number"))
    }

    /// Returns the number of a special token by its name, such as `eos`.
    pub(super) fn token(&self, name: &str) -> Option<u32> {
        let numbers = integers(self.raw(&format!("tokenizer.ggml.{name}_token_id"))?)?;
        numbers.first().and_then(|id| u32::try_from(*id).ok())
    }
}

/// The error of a key that is missing.
pub(super) fn missing(path: &Path, key: &str, expected: &str) -> Error {
    file_error(
        path,
        format!(
            "`{key}` is missing ({expected}); get the file again, or convert the model again with llama.cpp"
        ),
    )
}

/// The whole numbers of a value or of an array; `None` for another type, and for negative numbers.
pub(super) fn integers(value: &Value) -> Option<Vec<u64>> {
    let signed = |number: i64| u64::try_from(number).ok();
    let one = |number: Option<u64>| number.map(|number| vec![number]);
    match value {
        Value::U8(x) => one(Some((*x).into())),
        Value::I8(x) => one(signed((*x).into())),
        Value::U16(x) => one(Some((*x).into())),
        Value::I16(x) => one(signed((*x).into())),
        Value::U32(x) => one(Some((*x).into())),
        Value::I32(x) => one(signed((*x).into())),
        Value::U64(x) => one(Some(*x)),
        Value::I64(x) => one(signed(*x)),
        Value::Array(Array::U32(all)) => Some(all.iter().map(|x| (*x).into()).collect()),
        Value::Array(Array::I32(all)) => all.iter().map(|x| signed((*x).into())).collect(),
        Value::Array(Array::U64(all)) => Some(all.clone()),
        Value::Array(Array::I64(all)) => all.iter().map(|x| signed(*x)).collect(),
        _ => None,
    }
}

fn float(value: &Value) -> Option<f64> {
    match value {
        Value::F32(x) => x.to_string().parse().ok(),
        Value::F64(x) => Some(*x),
        other => integers(other)?.first().map(|number| *number as f64),
    }
}
