//! Reads a decoder's sizes from a Hugging Face `config.json`.
//!
//! Files of the families with rotary positions are read by [`DecoderConfig`]. Those of the GPT-2s are read here: a file without `model_type`
//! that has `embedding_dim` and `ff_dim` is the training assignment's model ([`Family::Gpt2Like`]), and fields that transformers
//! leaves out when they have their default get the same default: `n_inner` (4 · `n_embd`), tied embeddings (true for gpt2).

use std::path::Path;

use decoder::DecoderConfig;
use serde_json::{Map, Value};

use crate::Error;
use crate::model::{Decoder, Family, Shape};

/// Reads the `config.json` at `path`. Errors name the file, and the field if there is one.
pub fn read(path: &Path) -> Result<Decoder, Error> {
    let text =
        std::fs::read_to_string(path).map_err(|cause| Error::ConfigRead { path: path.into(), cause })?;
    parse(path, &text)
}

/// Reads the text of a `config.json`; `path` only names it in errors.
pub fn parse(path: &Path, text: &str) -> Result<Decoder, Error> {
    let value: Value =
        serde_json::from_str(text).map_err(|cause| Error::ConfigJson { path: path.into(), cause })?;
    let Value::Object(object) = value else {
        return Err(Error::ConfigField {
            path: path.into(),
            field: "(the whole file)".into(),
            problem: format!("is {}, not an object", describe(&value)),
            remedy: "give the path of a model's config.json".into(),
        });
    };
    let fields = Fields { path, object: &object };
    let model = match fields.family()? {
        Family::Gpt2 => Decoder::new(fields.gpt2()?),
        Family::Gpt2Like => Decoder::new(fields.gpt2_like()?),
        _ => {
            let config = DecoderConfig::sizes_from_str(text)
                .map_err(|cause| Error::Config { path: path.into(), reason: cause.to_string() })?;
            Decoder::of(&config)
        }
    };
    model.map_err(|cause| Error::ConfigShape { path: path.into(), cause: Box::new(cause) })
}

struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn family(&self) -> Result<Family, Error> {
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

    fn gpt2(&self) -> Result<Shape, Error> {
        let (hidden, heads) = (self.size("n_embd")?, self.size("n_head")?);
        Ok(Shape {
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
        })
    }

    fn gpt2_like(&self) -> Result<Shape, Error> {
        let (hidden, heads) = (self.size("hidden_dim")?, self.size("num_heads")?);
        Ok(Shape {
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
        })
    }

    /// Returns the value of a field; `null` counts as absent.
    fn optional(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn size(&self, field: &str) -> Result<u64, Error> {
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

    fn size_or(&self, field: &str, default: u64) -> Result<u64, Error> {
        if self.optional(field).is_some() { self.size(field) } else { Ok(default) }
    }

    fn flag_or(&self, field: &str, default: bool) -> Result<bool, Error> {
        match self.optional(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => {
                let problem = format!("is {}, not true or false", describe(other));
                Err(self.wrong(field, problem, "write true or false"))
            }
        }
    }

    /// Returns `whole / part`, which must divide evenly.
    fn divide(&self, whole: (&str, u64), part: (&str, u64)) -> Result<u64, Error> {
        if whole.1.is_multiple_of(part.1) {
            return Ok(whole.1 / part.1);
        }
        let problem = format!("is {}, which `{}` = {} does not divide", whole.1, part.0, part.1);
        Err(self.wrong(whole.0, problem, &format!("write a multiple of `{}`", part.0)))
    }

    fn wrong(&self, field: &str, problem: String, remedy: &str) -> Error {
        Error::ConfigField { path: self.path.into(), field: field.into(), problem, remedy: remedy.into() }
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
