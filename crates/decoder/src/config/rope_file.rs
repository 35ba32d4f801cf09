//! The rotary embedding in `config.json`, in the two spellings of transformers.
//!
//! | | transformers 5 | before |
//! |---|---|---|
//! | base | `rope_parameters.rope_theta` | `rope_theta` |
//! | scaling | `rope_parameters` with its `rope_type` | `rope_scaling` with its `rope_type` or `type` |
//! | layers with a window (Gemma 3) | `rope_parameters.sliding_attention` | `rope_local_base_freq` |
//! | share of a head that rotates (Phi-3, Qwen3.5) | `rope_parameters.partial_rotary_factor` | `partial_rotary_factor` |
//!
//! transformers 4 reads the older spelling alone. transformers 5 reads both, and where a file has a `rope_scaling`, that takes precedence,
//! so it does here. A number that the two versions would take from different fields has to be the same in both. A file that is written
//! has both spellings.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::file::{HuggingFace, integral, refuse};
use super::{DecoderConfig, LayerType, LongRope};
use crate::error::{Error, Result};
use crate::family::Family;
use crate::rope::{Frequencies, Scaling, Yarn};

const THETA: &str = "rope_theta";
const LOCAL_THETA: &str = "rope_local_base_freq";
const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";
const TRUNCATE: &str = "truncate";
/// How pairs are divided among the positions of an image's parts. A text has one position for all, so nothing is computed from these; a
/// file that is written keeps them.
const OF_IMAGES: [&str; 2] = ["mrope_section", "mrope_interleaved"];
/// Optional numbers of [`Yarn`], in the order of its fields.
const YARN_NUMBERS: [&str; 5] = ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"];

/// `rope_parameters` or `rope_scaling`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub struct RopeFields {
    /// The name of the scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_type: Option<String>,
    /// All other fields.
    #[serde(flatten)]
    pub numbers: Map<String, Value>,
}

/// The rotary embedding in a file, in either spelling or both.
#[derive(Debug, Default)]
pub struct RopeSpellings {
    parameters: Option<RopeFields>,
    scaling: Option<RopeFields>,
    theta: Option<f64>,
    local_theta: Option<f64>,
    partial: Option<f64>,
}

impl RopeSpellings {
    /// Takes the spellings out of the fields of a `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config): a field of another type.
    pub fn read(fields: &Map<String, Value>) -> Result<Self> {
        let rope = |name: &str| match fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(rope)) => RopeFields::try_from(rope.clone()).map(Some).map_err(refuse),
            Some(other) => Err(refuse(format!("the rotary embedding is {other}; expected an object"))),
        };
        Ok(Self {
            parameters: rope("rope_parameters")?,
            scaling: rope("rope_scaling")?,
            theta: number(fields, THETA)?,
            local_theta: number(fields, LOCAL_THETA)?,
            partial: number(fields, PARTIAL)?,
        })
    }

    /// Joins the spellings: returns the parameters of layers that attend to everything, and those of layers with a window, which only
    /// some families have.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config): spellings that disagree.
    pub fn join(self, family: Family) -> Result<[RopeFields; 2]> {
        let Self { mut parameters, scaling, theta, local_theta, partial } = self;
        if family.facts().is_gemma4 && parameters.is_none() && scaling.is_none() {
            parameters = Some(default_of_gemma4());
        }
        if family.facts().local_theta.is_none() {
            let full = scaling.filter(|older| !older.is_empty()).or(parameters).unwrap_or_default();
            let full = full.with(THETA, THETA, theta)?.with(PARTIAL, PARTIAL, partial)?;
            return Ok([full, RopeFields::default()]);
        }
        let (full, local) = match &parameters {
            Some(new) => (new.entry(LayerType::Full)?, new.entry(LayerType::Sliding)?),
            None => (None, None),
        };
        // Parameters without layer types are those of layers that attend to everything.
        let mut full = full.or(parameters.filter(|_| local.is_none())).unwrap_or_default();
        if let Some(older) = scaling {
            full.rope_type = older.rope_type.or(full.rope_type);
            full.numbers.extend(older.numbers);
        }
        let local = local.unwrap_or_default().with(THETA, LOCAL_THETA, local_theta)?;
        Ok([full.with(THETA, THETA, theta)?, local])
    }
}

fn unknown_scaling(name: &str) -> Error {
    refuse(format!(
        "the rotary embedding has the scaling `{name}`; expected default, linear, dynamic, yarn or llama3, longrope of Phi-3, or proportional \
         of Gemma 4"
    ))
}

/// An optional number of the rotary embedding.
fn number(fields: &Map<String, Value>, name: &str) -> Result<Option<f64>> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value
            .as_f64()
            .map(Some)
            .ok_or_else(|| refuse(format!("`{name}` of the rotary embedding is {value}; expected a number"))),
    }
}

/// Takes the scaling's name out of the fields. Files have it as `rope_type`, as the older `type`, or as both; transformers 5 reads the
/// first.
impl TryFrom<Map<String, Value>> for RopeFields {
    type Error = String;

    fn try_from(mut numbers: Map<String, Value>) -> Result<Self, String> {
        let mut name = |key: &str| match numbers.shift_remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(name)) => Ok(Some(name)),
            Some(other) => Err(format!("`{key}` of the rotary embedding is {other}; expected a text")),
        };
        let (new, old) = (name("rope_type")?, name("type")?);
        Ok(Self { rope_type: new.or(old), numbers })
    }
}

impl RopeFields {
    fn optional(&self, name: &str) -> Result<Option<f64>> {
        number(&self.numbers, name)
    }

    fn number(&self, name: &str) -> Result<f64> {
        self.optional(name)?
            .ok_or_else(|| refuse(format!("the scaling of the rotary embedding needs the number `{name}`")))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.numbers.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => {
                Err(refuse(format!("`{name}` of the rotary embedding is {other}; expected true or false")))
            }
        }
    }

    fn list(&self, name: &str) -> Result<Vec<f64>> {
        let value = self.numbers.get(name).unwrap_or(&Value::Null);
        let numbers: Option<Vec<f64>> =
            value.as_array().and_then(|values| values.iter().map(Value::as_f64).collect());
        numbers.ok_or_else(|| {
            refuse(format!(
                "`{name}` of the rotary embedding is no list of numbers; expected one for each pair"
            ))
        })
    }

    fn kind(&self) -> &str {
        self.rope_type.as_deref().unwrap_or("default")
    }

    fn is_empty(&self) -> bool {
        self.rope_type.is_none() && self.numbers.is_empty()
    }

    /// Adds a number that older files have beside the scaling, unless it is missing there.
    fn with(mut self, name: &str, key: &str, older: Option<f64>) -> Result<Self> {
        let Some(older) = older else { return Ok(self) };
        match self.optional(name)? {
            Some(new) if new != older => Err(refuse(format!(
                "`{name}` is {new:?} in the rotary embedding's parameters, and `{key}` is {older:?}; they must agree"
            ))),
            Some(_) => Ok(self),
            None => {
                self.numbers.insert(name.to_owned(), json!(older));
                Ok(self)
            }
        }
    }

    fn scaling(&self, positions: i64) -> Result<Scaling> {
        match self.kind() {
            "default" => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor: self.number("factor")? }),
            "llama3" => Ok(Scaling::Llama3 {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_positions: self.optional(ORIGINAL)?.unwrap_or(positions as f64),
            }),
            "dynamic" => Ok(Scaling::Dynamic { factor: self.number("factor")? }),
            "proportional" => Ok(Scaling::Proportional {
                share: self.optional(PARTIAL)?.unwrap_or(1.0),
                factor: self.optional("factor")?.unwrap_or(1.0),
            }),
            "yarn" => {
                let original_positions = self.optional(ORIGINAL)?.unwrap_or(positions as f64);
                let [beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim] =
                    YARN_NUMBERS.map(|name| self.optional(name));
                Ok(Scaling::Yarn(Yarn {
                    factor: self.optional("factor")?.unwrap_or(positions as f64 / original_positions),
                    original_positions,
                    beta_fast: beta_fast?,
                    beta_slow: beta_slow?,
                    attention_factor: attention_factor?,
                    mscale: mscale?,
                    mscale_all_dim: mscale_all_dim?,
                    truncate: self.flag(TRUNCATE)?,
                }))
            }
            other => Err(unknown_scaling(other)),
        }
    }

    fn frequencies(&self, positions: i64, theta: f64) -> Result<Frequencies> {
        Ok(Frequencies { theta: self.optional(THETA)?.unwrap_or(theta), scaling: self.scaling(positions)? })
    }

    /// The entry of a layer type, where each has its own.
    fn entry(&self, layers: LayerType) -> Result<Option<Self>> {
        match self.numbers.get(layers.name()) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|cause| refuse(format!("`{}` of the rotary embedding: {cause}", layers.name()))),
        }
    }

    fn from_frequencies(frequencies: &Frequencies) -> Self {
        let (kind, mut numbers) = match frequencies.scaling {
            Scaling::None => ("default", json!({})),
            Scaling::Linear { factor } => ("linear", json!({ "factor": factor })),
            Scaling::Dynamic { factor } => ("dynamic", json!({ "factor": factor })),
            Scaling::Proportional { share, factor } => {
                let mut fields = json!({ PARTIAL: share });
                if factor != 1.0 {
                    fields["factor"] = json!(factor);
                }
                ("proportional", fields)
            }
            Scaling::Yarn(yarn) => {
                let mut fields =
                    json!({ "factor": yarn.factor, ORIGINAL: integral(yarn.original_positions) });
                let numbers =
                    [yarn.beta_fast, yarn.beta_slow, yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim];
                for (name, number) in YARN_NUMBERS.into_iter().zip(numbers) {
                    if let Some(number) = number {
                        fields[name] = json!(number);
                    }
                }
                if let Some(truncate) = yarn.truncate {
                    fields[TRUNCATE] = json!(truncate);
                }
                ("yarn", fields)
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => (
                "llama3",
                json!({
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    ORIGINAL: integral(original_positions),
                }),
            ),
        };
        numbers[THETA] = json!(frequencies.theta);
        let numbers = numbers.as_object().cloned().unwrap_or_default();
        Self { rope_type: Some(kind.to_owned()), numbers }
    }
}

/// The rotary embedding of a file.
pub(super) struct Read {
    pub(super) rope: Frequencies,
    pub(super) local: Option<Frequencies>,
    pub(super) long: Option<LongRope>,
    pub(super) partial: f64,
}

/// Reads the rotary embedding, and removes its fields from `file`'s others.
pub(super) fn read(file: &mut HuggingFace, family: Family, positions: i64) -> Result<Read> {
    let facts = family.facts();
    let partial = file.take_number(PARTIAL)?;
    let local_theta = facts.local_theta.map_or(Ok(None), |_| file.take_number(LOCAL_THETA))?;
    let (mut parameters, scaling) = (file.rope_parameters.take(), file.rope_scaling.take());
    if family == Family::GptOss && parameters.is_none() && scaling.is_none() {
        parameters = Some(default_of_gpt_oss());
    }
    let spellings = RopeSpellings { parameters, scaling, theta: file.rope_theta, local_theta, partial };
    let [full, local] = spellings.join(family)?;
    for name in OF_IMAGES {
        if let Some(value) = full.numbers.get(name) {
            file.other.insert(name.to_owned(), value.clone());
        }
    }
    if full.kind() == "proportional" && !facts.is_gemma4 {
        return Err(unknown_scaling(full.kind()));
    }
    // Of proportional scaling it is a number of the scaling.
    let partial =
        if facts.is_gemma4 && full.kind() == "proportional" { None } else { full.optional(PARTIAL)? };
    let partial = partial.or(facts.partial_rotation).unwrap_or(1.0);
    if partial != 1.0 && facts.partial_rotation.is_none() {
        return Err(refuse(format!(
            "`partial_rotary_factor` is {partial}; expected 1, since heads of this family rotate as a whole"
        )));
    }
    let original = if facts.has_long_rope { file.take_number(ORIGINAL)? } else { None };
    // Older files of Phi-3 call it su, and once yarn.
    if facts.has_long_rope && ["longrope", "su", "yarn"].contains(&full.kind()) {
        let original = full.optional(ORIGINAL)?.or(original);
        let long = LongRope {
            short_factor: full.list("short_factor")?,
            long_factor: full.list("long_factor")?,
            original_positions: original.unwrap_or(4096.0) as i64,
            attention_factor: full.optional("attention_factor")?,
            factor: full.optional("factor")?,
        };
        let theta = full.optional(THETA)?.unwrap_or(facts.theta);
        let rope = Frequencies { theta, scaling: Scaling::None };
        return Ok(Read { rope, local: None, long: Some(long), partial });
    }
    if let Some(original) = original {
        file.other.insert(ORIGINAL.to_owned(), json!(original as i64));
    }
    let local = facts.local_theta.map(|theta| local.frequencies(positions, theta)).transpose()?;
    Ok(Read { rope: full.frequencies(positions, facts.theta)?, local, long: None, partial })
}

/// The scaling of a gpt-oss without one in its file.
fn default_of_gpt_oss() -> RopeFields {
    let numbers = json!({
        "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, TRUNCATE: false, ORIGINAL: 4096,
    });
    let numbers = numbers.as_object().cloned().unwrap_or_default();
    RopeFields { rope_type: Some("yarn".to_owned()), numbers }
}

/// The rotary embedding of a Gemma 4 without one in its file.
fn default_of_gemma4() -> RopeFields {
    let numbers = json!({
        (LayerType::Full.name()): { "rope_type": "proportional", PARTIAL: 0.25, THETA: 1e6 },
        (LayerType::Sliding.name()): { "rope_type": "default", THETA: 1e4 },
    });
    RopeFields { rope_type: None, numbers: numbers.as_object().cloned().unwrap_or_default() }
}

/// The fields that a file gets.
pub(super) struct Written {
    /// `rope_parameters`.
    pub(super) parameters: RopeFields,
    /// `rope_scaling`; `None` where there is no scaling, and where the older spelling has no place for one.
    pub(super) scaling: Option<RopeFields>,
    /// `rope_theta`; `None` for a Gemma 4, which has the newer spelling alone.
    pub(super) theta: Option<f64>,
}

/// Returns the fields of both spellings, and inserts those that are not of the embedding alone into `other`.
pub(super) fn write(config: &DecoderConfig, other: &mut Map<String, Value>) -> Written {
    let theta = (!config.family.facts().is_gemma4).then_some(config.rope.theta);
    let mut parameters = RopeFields::from_frequencies(&config.rope);
    for name in OF_IMAGES {
        if let Some(value) = other.shift_remove(name) {
            parameters.numbers.insert(name.to_owned(), value);
        }
    }
    let mut scaling = (config.rope.scaling != Scaling::None).then(|| parameters.clone());
    scaling.iter_mut().for_each(|scaling| drop(scaling.numbers.shift_remove(THETA)));
    if let Some(local) = &config.local_rope {
        let both = [(LayerType::Full, &config.rope), (LayerType::Sliding, local)];
        let entry = |(layers, rope): (LayerType, &Frequencies)| {
            let rope = RopeFields::from_frequencies(rope);
            (layers.name().to_owned(), serde_json::to_value(rope).unwrap_or_default())
        };
        if theta.is_none() {
            scaling = None;
        } else {
            other.insert(LOCAL_THETA.to_owned(), json!(local.theta));
        }
        parameters = RopeFields { rope_type: None, numbers: both.into_iter().map(entry).collect() };
        return Written { parameters, scaling, theta };
    }
    if config.family.facts().partial_rotation.is_some() {
        parameters.numbers.insert(PARTIAL.to_owned(), json!(config.partial_rotary_factor));
        other.insert(PARTIAL.to_owned(), json!(config.partial_rotary_factor));
    }
    if let Some(long) = &config.long_rope {
        parameters.rope_type = Some("longrope".to_owned());
        let factors = [("short_factor", &long.short_factor), ("long_factor", &long.long_factor)];
        let factors: Map<String, Value> =
            factors.into_iter().map(|(name, list)| (name.to_owned(), json!(list))).collect();
        // transformers 4 demands these three fields and no other, so it cannot read a model with one of the optional ones.
        let older =
            Map::from_iter([("type".to_owned(), json!("longrope"))]).into_iter().chain(factors.clone());
        let is_plain = long.factor.is_none() && long.attention_factor.is_none();
        scaling = is_plain.then(|| RopeFields { rope_type: None, numbers: older.collect() });
        parameters.numbers.extend(factors);
        let optional = [("factor", long.factor), ("attention_factor", long.attention_factor)];
        for (name, number) in optional.into_iter().filter_map(|(name, number)| Some((name, number?))) {
            parameters.numbers.insert(name.to_owned(), json!(number));
        }
        let original = json!(long.original_positions);
        parameters.numbers.insert(ORIGINAL.to_owned(), original.clone());
        other.insert(ORIGINAL.to_owned(), original);
    }
    Written { parameters, scaling, theta }
}
