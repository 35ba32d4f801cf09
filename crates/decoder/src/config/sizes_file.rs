//! The sizes in a `config.json`.
//!
//! Files of the families with rotary positions are read as [`DecoderConfig`]s. The GPT-2s have fields of their own: a file without
//! `model_type` that has `embedding_dim` and `ff_dim` is the training assignment's model ([`Family::Gpt2Like`]), and fields that
//! transformers leaves out when they have their default get the same default: `n_inner` (4 · `n_embd`), tied embeddings (true for gpt2).

use std::path::Path;

use serde_json::{Map, Value};

use super::text_config;
use crate::config::DecoderConfig;
use crate::error::{Error, Result};
use crate::family::Family;
use crate::sizes::Sizes;

impl Sizes {
    /// Reads the `config.json` at `path`.
    ///
    /// # Errors
    /// [`Error::File`] with the path, and with the field if there is one.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|cause| file_error(path, format!("{cause}; give the path of a model's config.json")))?;
        Self::parse(path, &text)
    }

    /// Reads the text of a `config.json`; `path` only names it in errors.
    ///
    /// # Errors
    /// As [`Sizes::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let text = &*text_config(text);
        let value: Value = serde_json::from_str(text)
            .map_err(|cause| file_error(path, format!("not JSON ({cause}); copy or download it again")))?;
        let Value::Object(object) = value else {
            let kind = describe(&value);
            let reason = format!("{kind}, not an object; give the path of a model's config.json");
            return Err(file_error(path, reason));
        };
        let fields = Fields { path, object: &object };
        match fields.family()? {
            Family::Gpt2 => fields.gpt2(),
            Family::Gpt2Like => fields.gpt2_like(),
            _ => {
                let config = DecoderConfig::sizes_from_str(text);
                Ok(config.map_err(|cause| file_error(path, cause.to_string()))?.sizes())
            }
        }
    }
}

fn file_error(path: &Path, reason: String) -> Error {
    Error::File { path: path.to_owned(), reason }
}

struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn family(&self) -> Result<Family> {
        let known = format!("known are {}", Family::ALL.map(Family::model_type).join(", "));
        let known = known.as_str();
        match self.object.get("model_type") {
            Some(Value::String(name)) => name
                .parse()
                .map_err(|_| self.wrong("model_type", format!("is `{name}`, which is unknown"), known)),
            Some(other) => {
                Err(self.wrong("model_type", format!("is {}, not a string", describe(other)), known))
            }
            None if self.object.contains_key("embedding_dim") && self.object.contains_key("ff_dim") => {
                Ok(Family::Gpt2Like)
            }
            None => Err(self.wrong("model_type", "is missing".into(), known)),
        }
    }

    fn gpt2(&self) -> Result<Sizes> {
        let (hidden, heads) = (self.size("n_embd")?, self.size("n_head")?);
        Ok(Sizes {
            family: Family::Gpt2,
            vocabulary: self.size("vocab_size")?,
            context: self.size("n_positions")?,
            embedding: hidden,
            hidden,
            layers: self.size("n_layer")?,
            heads,
            kv_heads: heads,
            head_dim: self.divide(("n_embd", hidden), ("n_head", heads))?,
            feed_forward: self.size_or("n_inner", hidden.saturating_mul(4))?,
            tied: self.flag_or("tie_word_embeddings", true)?,
            attention_bias: false,
            mlp_bias: false,
            experts: None,
            linear: None,
            windows: None,
            gemma4: None,
        })
    }

    fn gpt2_like(&self) -> Result<Sizes> {
        let (hidden, heads) = (self.size("hidden_dim")?, self.size("num_heads")?);
        Ok(Sizes {
            family: Family::Gpt2Like,
            vocabulary: self.size("vocab_size")?,
            context: self.size("max_length")?,
            embedding: self.size("embedding_dim")?,
            hidden,
            layers: self.size_or("num_layers", 1)?,
            heads,
            kv_heads: heads,
            head_dim: self.divide(("hidden_dim", hidden), ("num_heads", heads))?,
            feed_forward: self.size("ff_dim")?,
            tied: false,
            attention_bias: false,
            mlp_bias: false,
            experts: None,
            linear: None,
            windows: None,
            gemma4: None,
        })
    }

    /// Returns the value of a field; `null` counts as absent.
    fn optional(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn size(&self, field: &str) -> Result<u64> {
        const REMEDY: &str = "write a whole number of at least 1";
        let Some(value) = self.optional(field) else {
            return Err(self.wrong(field, "is missing".into(), REMEDY));
        };
        match value.as_u64() {
            Some(0) => Err(self.wrong(field, "is 0".into(), REMEDY)),
            Some(size) => Ok(size),
            None => {
                Err(self.wrong(field, format!("is {}, not a positive whole number", describe(value)), REMEDY))
            }
        }
    }

    fn size_or(&self, field: &str, default: u64) -> Result<u64> {
        if self.optional(field).is_some() { self.size(field) } else { Ok(default) }
    }

    fn flag_or(&self, field: &str, default: bool) -> Result<bool> {
        match self.optional(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => {
                let problem = format!("is {}, not true or false", describe(other));
                Err(self.wrong(field, problem, "write true or false"))
            }
        }
    }

    /// Returns `width / parts`, which must divide evenly; both have their field's name.
    fn divide(&self, (field, width): (&str, u64), (divisor, parts): (&str, u64)) -> Result<u64> {
        if width.is_multiple_of(parts) {
            return Ok(width / parts);
        }
        let problem = format!("is {width}, which `{divisor}` = {parts} does not divide");
        Err(self.wrong(field, problem, &format!("write a multiple of `{divisor}`")))
    }

    fn wrong(&self, field: &str, problem: String, remedy: &str) -> Error {
        file_error(self.path, format!("field `{field}` {problem}; {remedy}"))
    }
}

/// Describes a JSON value briefly.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) => format!("the string {:?}", text.chars().take(40).collect::<String>()),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
    }
}
