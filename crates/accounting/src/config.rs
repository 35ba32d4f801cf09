//! Reads a decoder's sizes from a Hugging Face `config.json`.
//!
//! Known `model_type`s are the names of [`Family`], with underscores. A file without `model_type` that has `embedding_dim` and
//! `ff_dim` is the training assignment's model ([`Family::Gpt2Like`]). Fields that transformers leaves out when they
//! have their default get the same default here: key-value heads (as many as heads), head size (hidden / heads),
//! `n_inner` (4 · `n_embd`), tied embeddings (true for gpt2, SmolLM3 and Gemma, false for the others), biases (false).

use std::path::Path;

use serde_json::{Map, Value};

use crate::Error;
use crate::model::{Decoder, Family, Shape, Windows};

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
    let shape = match fields.family()? {
        Family::Gpt2 => fields.gpt2()?,
        Family::Gpt2Like => fields.gpt2_like()?,
        family => fields.rotary(family)?,
    };
    let windows = fields.windows(&shape)?;
    let model = Decoder::new(shape);
    let model = match windows {
        Some(windows) => model.and_then(|model| model.with_windows(windows)),
        None => model,
    };
    model.map_err(|cause| Error::ConfigShape { path: path.into(), cause: Box::new(cause) })
}

struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn family(&self) -> Result<Family, Error> {
        let known = format!("known are {}", Family::ALL.map(Family::name).join(", "));
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

    fn rotary(&self, family: Family) -> Result<Shape, Error> {
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let kv_heads = self.size_or("num_key_value_heads", heads)?;
        self.divide(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head_dim = match (self.optional("head_dim"), family) {
            (Some(_), _) => self.size("head_dim")?,
            (None, Family::Qwen3) => 128,
            (None, Family::Gemma2 | Family::Gemma3) => 256,
            (None, _) => self.divide(("hidden_size", hidden), ("num_attention_heads", heads))?,
        };
        let context = match family {
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 => 32768,
            Family::Mistral | Family::Gemma3 => 131_072,
            Family::Gemma2 => 8192,
            Family::Phi3 => 4096,
            _ => 2048,
        };
        let tied = matches!(family, Family::SmolLm3 | Family::Gemma2 | Family::Gemma3);
        let attention_bias = !matches!(family, Family::Qwen2 | Family::Mistral | Family::Phi3);
        let mlp_bias = matches!(family, Family::Llama | Family::SmolLm3 | Family::Granite);
        Ok(Shape {
            family,
            vocabulary: self.size("vocab_size")?,
            context: self.size_or("max_position_embeddings", context)?,
            embedding: hidden,
            hidden,
            layers: self.size("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            feed_forward: self.size("intermediate_size")?,
            tied: self.flag_or("tie_word_embeddings", tied)?,
            attention_bias: attention_bias && self.flag_or("attention_bias", false)?,
            mlp_bias: mlp_bias && self.flag_or("mlp_bias", false)?,
        })
    }

    /// The layers with a window, by the rules of transformers.
    fn windows(&self, shape: &Shape) -> Result<Option<Windows>, Error> {
        use Family::{Gemma2, Gemma3, Mistral, Phi3, Qwen2, Qwen3, SmolLm3};
        let optional = matches!(shape.family, Qwen2 | Qwen3 | SmolLm3);
        let has = optional || matches!(shape.family, Mistral | Gemma2 | Gemma3 | Phi3);
        if !has || optional && !self.flag_or("use_sliding_window", false)? {
            return Ok(None);
        }
        let tokens = match self.object.get("sliding_window") {
            Some(Value::Null) => return Ok(None),
            None if matches!(shape.family, Phi3 | SmolLm3) => return Ok(None),
            None => 4096,
            Some(_) => self.size("sliding_window")?,
        };
        let layers = match (self.optional("layer_types"), shape.family) {
            (Some(Value::Array(types)), _) => {
                types.iter().take(shape.layers as usize).filter(|kind| *kind == "sliding_attention").count()
                    as u64
            }
            (_, Gemma2) => shape.layers.div_ceil(2),
            (_, Gemma3) => shape.layers - shape.layers / self.size_or("sliding_window_pattern", 6)?,
            (_, SmolLm3) => shape.layers / self.size_or("no_rope_layer_interval", 4)?,
            (_, Qwen2 | Qwen3) => shape.layers.saturating_sub(self.size_or("max_window_layers", 28)?),
            _ => shape.layers,
        };
        Ok(Some(Windows { layers, tokens }))
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
