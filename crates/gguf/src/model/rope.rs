//! The rotary embedding: base, rotated elements, and how positions or frequencies are scaled.
//!
//! | `rope_type` | in the file |
//! |---|---|
//! | `default` | `rope.freq_base` |
//! | `linear`, `yarn` | and `rope.scaling.type`, `rope.scaling.factor`, for yarn the original context and its parameters |
//! | `llama3` | and the tensor `rope_freqs.weight`: for each frequency the number by which it is divided |
//! | `proportional` (Gemma 4) | and `rope_freqs.weight`, with 10³⁰ for a pair that does not rotate |
//! | `longrope` (Phi-3) | and the tensors `rope_factors_long.weight` and `rope_factors_short.weight` |
//!
//! Other types are refused by name.

use decoder::rope::{Frequencies, Scaling, Yarn};
use decoder::{LongRope, RopeSpellings, Sizes};
use serde_json::Value as Json;

use super::family::Family;
use super::keys::{count, float};
use crate::error::{Result, file_error, unsupported};
use crate::json::Fields;
use crate::value::{Array, Value};

/// `mrope_section`, where a file has none, by transformers.
const SECTIONS: [i32; 3] = [11, 11, 10];

/// The rotary embedding of a model's layers.
struct Rope {
    /// `default`, `linear`, `yarn`, `llama3` or `longrope`.
    kind: String,
    base: f64,
    /// The fraction of a head's elements that are rotated.
    fraction: f64,
    /// Base of layers with a window, where they have their own.
    window_base: Option<f64>,
    parameters: Fields,
}

impl Rope {
    fn read(config: &Fields, family: &Family) -> Result<Self> {
        check_names(config)?;
        let spellings = RopeSpellings::read(&config.fields);
        let [full, local] = spellings
            .and_then(|spellings| spellings.join(family.kind))
            .map_err(|cause| file_error(&config.path, cause.to_string()))?;
        let fields = |fields| Fields { path: config.path.clone(), fields };
        let (kind, parameters) = (full.rope_type, fields(full.numbers));
        let local_kind = local.rope_type;
        let is_proportional = kind.as_deref() == Some(PROPORTIONAL);
        let fraction = match parameters.optional_number("partial_rotary_factor")? {
            // Whole heads, in which some pairs do not rotate.
            _ if is_proportional => 1.0,
            Some(fraction) => fraction,
            None => {
                config.optional_number("partial_rotary_factor")?.or(family.partial_rotation).unwrap_or(1.0)
            }
        };
        let local = fields(local.numbers);
        if family.is_gemma4 && local_kind.as_deref().is_some_and(|kind| kind != "default") {
            return Err(unsupported(
                format!("the `rope_type` of layers with a window of a `{}`", family.model_type),
                format!("`{}`", local_kind.unwrap_or_default()),
                "llama.cpp does not scale their frequencies",
            ));
        }
        let rope = Self {
            kind: kind.unwrap_or_else(|| "default".to_owned()),
            base: parameters.optional_number("rope_theta")?.unwrap_or(family.theta),
            fraction,
            window_base: local.optional_number("rope_theta")?,
            parameters,
        };
        rope.check(family)?;
        Ok(rope)
    }

    fn check(&self, family: &Family) -> Result<()> {
        let refuse = |what: &str, value: String, remedy: &str| {
            Err(unsupported(format!("{what} of a `{}`", family.model_type), value, remedy.to_owned()))
        };
        if !family.rope_types.contains(&&*self.kind) {
            return refuse(
                "the `rope_type`",
                format!("`{}`", self.kind),
                &format!("known are {}", family.rope_types.join(", ")),
            );
        }
        if self.fraction != 1.0 && family.partial_rotation.is_none() {
            return refuse(
                "`partial_rotary_factor`",
                self.fraction.to_string(),
                "llama.cpp rotates whole heads of this family",
            );
        }
        if self.kind == "yarn" {
            // A file has no key for it, and is read as this family's models are.
            if family.has_sinks && self.parameters.flag("truncate", true)? {
                return refuse("yarn's `truncate`", "true".to_owned(), "this family's models have false");
            }
            for key in ["attention_factor", "mscale", "mscale_all_dim"] {
                if let Some(value) = self.parameters.get(key) {
                    return refuse(
                        &format!("yarn's `{key}`"),
                        value.to_string(),
                        "llama.cpp computes it from the factor",
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns the pairs of a head that rotate by the time, the height and the width of an image's part, and by a fourth position that no
    /// model has. llama.cpp requires them of an architecture that also reads images; the positions of a text are all the same.
    fn sections(&self) -> Result<Vec<i32>> {
        const KEY: &str = "mrope_section";
        let pairs = |value: &Json| value.as_u64().and_then(|pairs| i32::try_from(pairs).ok());
        let sections: Option<Vec<i32>> = match self.parameters.get(KEY) {
            None => Some(SECTIONS.to_vec()),
            Some(value) => value.as_array().and_then(|values| values.iter().map(pairs).collect()),
        };
        match sections {
            Some(sections) if sections.len() == SECTIONS.len() => Ok([&sections[..], &[0]].concat()),
            _ => {
                let value = self.parameters.get(KEY).map_or_else(String::new, Json::to_string);
                let reason = format!(
                    "`{KEY}` of the rotary embedding is {value}; expected the numbers of pairs for time, height and width, such as \
                     {SECTIONS:?}"
                );
                Err(file_error(&self.parameters.path, reason))
            }
        }
    }

    /// Returns the number of a head's elements that rotate.
    fn rotated(&self, sizes: &Sizes) -> u64 {
        let head = sizes.gemma4.map_or(sizes.head_dim, |gemma4| gemma4.head_dim);
        (head as f64 * self.fraction) as u64
    }
}

/// Refuses a scaling whose two names, `rope_type` and the older `type`, differ: llama.cpp's converter and transformers may read another.
/// Phi-3's older files call `longrope` `su`.
fn check_names(config: &Fields) -> Result<()> {
    let usual_name = |kind: &Json| match kind.as_str() {
        Some("su") => "longrope".to_owned(),
        other => other.unwrap_or_default().to_owned(),
    };
    for spelling in ["rope_parameters", "rope_scaling"] {
        let Some(fields) = config.get(spelling) else { continue };
        let name = |key: &str| fields.get(key).filter(|name| !name.is_null());
        if let (Some(new), Some(old)) = (name("rope_type"), name("type"))
            && usual_name(new) != usual_name(old)
        {
            let reason = format!(
                "the rotary embedding has the `rope_type` {new} and the `type` {old}; they must agree"
            );
            return Err(file_error(&config.path, reason));
        }
    }
    Ok(())
}

/// Returns the metadata of the rotary embedding.
pub(super) fn keys(config: &Fields, family: &Family, sizes: &Sizes) -> Result<Vec<(String, Value)>> {
    let rope = Rope::read(config, family)?;
    let parameters = &rope.parameters;
    let mut keys: Vec<(&str, Value)> =
        vec![("rope.dimension_count", count(rope.rotated(sizes))), ("rope.freq_base", float(rope.base))];
    if let Some(base) = rope.window_base.filter(|_| family.local_theta.is_some()) {
        keys.push(("rope.freq_base_swa", float(base)));
    }
    if family.is_gemma4 {
        keys.push(("rope.dimension_count_swa", count(sizes.head_dim)));
    }
    if sizes.linear.is_some() {
        keys.push(("rope.dimension_sections", Value::Array(Array::I32(rope.sections()?))));
    }
    match &*rope.kind {
        "linear" => {
            keys.push(("rope.scaling.type", "linear".into()));
            keys.push(("rope.scaling.factor", float(parameters.number("factor")?)));
        }
        "yarn" => {
            let original = parameters.optional_size("original_max_position_embeddings")?;
            keys.push(("rope.scaling.type", "yarn".into()));
            keys.push(("rope.scaling.factor", float(parameters.number("factor")?)));
            keys.push((
                "rope.scaling.original_context_length",
                original.map_or_else(|| count(sizes.context), Value::from),
            ));
            for (key, name) in
                [("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")]
            {
                if let Some(beta) = parameters.optional_number(key)? {
                    keys.push((name, float(beta)));
                }
            }
        }
        "longrope" | "su" => {
            let original = original_context(config, parameters)?;
            let rope = LongRope {
                short_factor: Vec::new(),
                long_factor: Vec::new(),
                original_positions: original.into(),
                attention_factor: parameters.optional_number("attention_factor")?,
                factor: None,
            };
            keys.push(("rope.scaling.original_context_length", original.into()));
            keys.push(("rope.scaling.attn_factor", float(rope.amplitude(sizes.context as i64))));
        }
        _ if family.has_long_rope => {
            let original =
                original_context(config, parameters).map_or_else(|_| count(sizes.context), Value::from);
            keys.push(("rope.scaling.original_context_length", original));
        }
        _ => {}
    }
    Ok(keys.into_iter().map(|(key, value)| (format!("{}.{key}", family.architecture), value)).collect())
}

/// The context that the model was trained with before it was lengthened.
fn original_context(config: &Fields, parameters: &Fields) -> Result<u32> {
    const KEY: &str = "original_max_position_embeddings";
    match parameters.optional_size(KEY)? {
        Some(original) => Ok(original),
        None => config.size(KEY),
    }
}

/// Returns a note where llama.cpp's YaRN has other frequencies: it always rounds the bounds of the ramp.
///
/// # Errors
/// As [`keys`].
pub(super) fn note(config: &Fields, family: &Family, sizes: &Sizes) -> Result<Option<String>> {
    let rope = Rope::read(config, family)?;
    if rope.kind != "yarn" || rope.parameters.flag("truncate", true)? {
        return Ok(None);
    }
    let original = rope.parameters.optional_number("original_max_position_embeddings")?;
    let angles = |truncate| {
        let yarn = Yarn {
            factor: rope.parameters.number("factor")?,
            original_positions: original.unwrap_or(sizes.context as f64),
            beta_fast: rope.parameters.optional_number("beta_fast")?,
            beta_slow: rope.parameters.optional_number("beta_slow")?,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: Some(truncate),
        };
        let frequencies = Frequencies { theta: rope.base, scaling: Scaling::Yarn(yarn) };
        Ok(frequencies.angles(rope.rotated(sizes) as i64).unwrap_or_default())
    };
    let differ = angles(true)? != angles(false)?;
    Ok(differ.then(|| {
        "llama.cpp rounds the bounds of yarn's ramp, which `truncate` false does not: as from its own files, log-probabilities differ \
         slightly"
            .to_owned()
    }))
}

/// Returns the tensors of factors by which frequencies are divided.
pub(super) fn factors(
    config: &Fields,
    family: &Family,
    sizes: &Sizes,
) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let rope = Rope::read(config, family)?;
    match &*rope.kind {
        // llama.cpp expects them of this family.
        _ if family.is_gemma4 => Ok(vec![("rope_freqs.weight", proportional(&rope, sizes)?)]),
        "llama3" => Ok(vec![("rope_freqs.weight", llama3(&rope, sizes)?)]),
        "longrope" | "su" => {
            let half = rope.rotated(sizes) as usize / 2;
            let list = |key: &str| -> Result<Vec<f32>> {
                let numbers = rope.parameters.get(key).and_then(Json::as_array);
                let numbers =
                    numbers.map(|all| all.iter().filter_map(Json::as_f64).map(|x| x as f32).collect());
                numbers.filter(|all: &Vec<f32>| all.len() == half).ok_or_else(|| {
                    file_error(
                        &config.path,
                        format!("`{key}` of the rotary embedding is not a list of {half} numbers"),
                    )
                })
            };
            Ok(vec![
                ("rope_factors_long.weight", list("long_factor")?),
                ("rope_factors_short.weight", list("short_factor")?),
            ])
        }
        _ => Ok(Vec::new()),
    }
}

/// The divisor of a pair that does not rotate.
pub(crate) const UNROTATED: f32 = 1e30;
/// The name of Gemma 4's scaling.
const PROPORTIONAL: &str = "proportional";

/// Returns the numbers by which Gemma 4's scaling divides the frequencies.
fn proportional(rope: &Rope, sizes: &Sizes) -> Result<Vec<f32>> {
    let share = match rope.kind == PROPORTIONAL {
        true => rope.parameters.optional_number("partial_rotary_factor")?.unwrap_or(1.0),
        false => 1.0,
    };
    let factor = match rope.kind == PROPORTIONAL {
        true => rope.parameters.optional_number("factor")?.unwrap_or(1.0),
        false => 1.0,
    };
    let frequencies = Frequencies { theta: rope.base, scaling: Scaling::Proportional { share, factor } };
    let divisors = frequencies.divisors(rope.rotated(sizes) as i64);
    Ok(divisors.map(|divisor| if divisor.is_finite() { divisor as f32 } else { UNROTATED }).collect())
}

/// Returns the numbers by which Llama 3's scaling divides the frequencies.
fn llama3(rope: &Rope, sizes: &Sizes) -> Result<Vec<f32>> {
    let number = |key: &str| rope.parameters.number(key);
    let scaling = Scaling::Llama3 {
        factor: number("factor")?,
        low_freq_factor: number("low_freq_factor")?,
        high_freq_factor: number("high_freq_factor")?,
        original_positions: f64::from(rope.parameters.size("original_max_position_embeddings")?),
    };
    let frequencies = Frequencies { theta: rope.base, scaling };
    Ok(frequencies.divisors(rope.rotated(sizes) as i64).map(|divisor| divisor as f32).collect())
}
