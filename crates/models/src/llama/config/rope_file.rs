//! The rotary embedding in `config.json`: `rope_parameters`, or the older `rope_scaling` and `rope_theta`.

use runtime::fused::rope::{Frequencies, Scaling};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::file::{HuggingFace, refuse, whole};
use super::{Family, LayerType, LlamaConfig, LongRope};
use crate::error::Result;

/// `rope_parameters`, or `rope_scaling` in older files, where `rope_type` may be called `type`.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Rope {
    #[serde(default, alias = "type", skip_serializing_if = "Option::is_none")]
    rope_type: Option<String>,
    #[serde(flatten)]
    numbers: Map<String, Value>,
}

impl Rope {
    /// An optional number.
    fn optional(&self, name: &str) -> Result<Option<f64>> {
        match self.numbers.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| {
                refuse(format!("`{name}` of the rotary embedding is {value}; expected a number"))
            }),
        }
    }

    fn number(&self, name: &str) -> Result<f64> {
        self.optional(name)?
            .ok_or_else(|| refuse(format!("the scaling of the rotary embedding needs the number `{name}`")))
    }

    fn list(&self, name: &str) -> Result<Vec<f64>> {
        let found = self.numbers.get(name).unwrap_or(&Value::Null);
        let numbers: Option<Vec<f64>> =
            found.as_array().and_then(|values| values.iter().map(Value::as_f64).collect());
        numbers.ok_or_else(|| {
            refuse(format!(
                "`{name}` of the rotary embedding is no list of numbers; expected one for each pair"
            ))
        })
    }

    fn kind(&self) -> &str {
        self.rope_type.as_deref().unwrap_or("default")
    }

    fn scaling(&self, positions: i64) -> Result<Scaling> {
        match self.kind() {
            "default" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor: self.number("factor")? }),
            "llama3" => Ok(Scaling::Llama3 {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_positions: self
                    .optional("original_max_position_embeddings")?
                    .unwrap_or(positions as f64),
            }),
            other => Err(refuse(format!(
                "the rotary embedding has the scaling `{other}`; expected default, linear or llama3, or longrope of Phi-3"
            ))),
        }
    }

    fn frequencies(&self, positions: i64, theta: f64) -> Result<Frequencies> {
        Ok(Frequencies {
            theta: self.optional("rope_theta")?.unwrap_or(theta),
            scaling: self.scaling(positions)?,
        })
    }

    /// The entry of a layer type, where each has its own.
    fn of_layers(&self, layers: LayerType) -> Result<Option<Self>> {
        match self.numbers.get(layers.name()) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|cause| refuse(format!("`{}` of the rotary embedding: {cause}", layers.name()))),
        }
    }

    fn of(frequencies: &Frequencies) -> Self {
        let (kind, mut numbers) = match frequencies.scaling {
            Scaling::None => ("default", json!({})),
            Scaling::Linear { factor } => ("linear", json!({ "factor": factor })),
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => (
                "llama3",
                json!({
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": whole(original_positions),
                }),
            ),
        };
        numbers["rope_theta"] = json!(frequencies.theta);
        let numbers = numbers.as_object().cloned().unwrap_or_default();
        Self { rope_type: Some(kind.to_owned()), numbers }
    }
}

/// What a file says about the rotary embedding.
pub(super) struct Read {
    pub(super) rope: Frequencies,
    pub(super) local: Option<Frequencies>,
    pub(super) long: Option<LongRope>,
    pub(super) partial: f64,
}

/// Reads it, and removes its fields from `file`'s others.
pub(super) fn read(file: &mut HuggingFace, family: Family, positions: i64) -> Result<Read> {
    let theta = file.rope_theta.unwrap_or(family.defaults().theta);
    let rope = file.rope_parameters.take().or(file.rope_scaling.take());
    let partial = file.take_number("partial_rotary_factor")?;
    let rope = rope.unwrap_or(Rope { rope_type: None, numbers: Map::new() });
    let partial = rope.optional("partial_rotary_factor")?.or(partial).unwrap_or(1.0);
    if partial != 1.0 && family != Family::Phi3 {
        return Err(refuse(format!(
            "`partial_rotary_factor` is {partial}; expected 1, since heads of this family rotate as a whole"
        )));
    }
    match family {
        Family::Gemma3 => {
            let local_theta = file.take_number("rope_local_base_freq")?.unwrap_or(1e4);
            let (full, local) = (rope.of_layers(LayerType::Full)?, rope.of_layers(LayerType::Sliding)?);
            let local = match (&full, local) {
                (None, None) => Frequencies { theta: local_theta, scaling: Scaling::None },
                (_, local) => local.map_or_else(
                    || Ok(Frequencies { theta: local_theta, scaling: Scaling::None }),
                    |local| local.frequencies(positions, local_theta),
                )?,
            };
            let rope = full.unwrap_or(rope).frequencies(positions, theta)?;
            Ok(Read { rope, local: Some(local), long: None, partial })
        }
        Family::Phi3 => {
            let original = file.take_number("original_max_position_embeddings")?;
            // Older files call it su, and once yarn.
            if !["longrope", "su", "yarn"].contains(&rope.kind()) {
                if let Some(original) = original {
                    file.other.insert("original_max_position_embeddings".to_owned(), json!(original as i64));
                }
                return Ok(Read {
                    rope: rope.frequencies(positions, theta)?,
                    local: None,
                    long: None,
                    partial,
                });
            }
            let original = rope.optional("original_max_position_embeddings")?.or(original);
            let long = LongRope {
                short_factor: rope.list("short_factor")?,
                long_factor: rope.list("long_factor")?,
                original_positions: original.unwrap_or(4096.0) as i64,
                attention_factor: rope.optional("attention_factor")?,
                factor: rope.optional("factor")?,
            };
            let rope =
                Frequencies { theta: rope.optional("rope_theta")?.unwrap_or(theta), scaling: Scaling::None };
            Ok(Read { rope, local: None, long: Some(long), partial })
        }
        _ => Ok(Read { rope: rope.frequencies(positions, theta)?, local: None, long: None, partial }),
    }
}

/// Returns `rope_parameters`, with fields beside it for `other`.
pub(super) fn write(config: &LlamaConfig, other: &mut Map<String, Value>) -> Rope {
    let mut rope = Rope::of(&config.rope);
    if let Some(local) = &config.local_rope {
        let both = [(LayerType::Full, &config.rope), (LayerType::Sliding, local)];
        let of = |(layers, rope): (LayerType, &Frequencies)| {
            (layers.name().to_owned(), serde_json::to_value(Rope::of(rope)).unwrap_or_default())
        };
        return Rope { rope_type: None, numbers: both.into_iter().map(of).collect() };
    }
    if config.family == Family::Phi3 {
        rope.numbers.insert("partial_rotary_factor".to_owned(), json!(config.partial_rotary_factor));
    }
    if let Some(long) = &config.long_rope {
        rope.rope_type = Some("longrope".to_owned());
        rope.numbers.insert("short_factor".to_owned(), json!(long.short_factor));
        rope.numbers.insert("long_factor".to_owned(), json!(long.long_factor));
        let optional = [("factor", long.factor), ("attention_factor", long.attention_factor)];
        for (name, number) in optional.into_iter().filter_map(|(name, number)| Some((name, number?))) {
            rope.numbers.insert(name.to_owned(), json!(number));
        }
        let original = json!(long.original_positions);
        rope.numbers.insert("original_max_position_embeddings".to_owned(), original.clone());
        other.insert("original_max_position_embeddings".to_owned(), original);
    }
    rope
}
