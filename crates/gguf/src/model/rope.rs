//! The rotary embedding: base, rotated elements, and how positions or frequencies are scaled.
//!
//! | `rope_type` | in the file |
//! |---|---|
//! | `default` | `rope.freq_base` |
//! | `linear`, `yarn` | and `rope.scaling.type`, `rope.scaling.factor`, for yarn the original context and its parameters |
//! | `llama3` | and the tensor `rope_freqs.weight`: for each frequency the number by which it is divided |
//! | `longrope` (Phi-3) | and the tensors `rope_factors_long.weight` and `rope_factors_short.weight` |
//!
//! Other types are refused by name.

use std::f64::consts::TAU;

use serde_json::{Map, Value as Json};

use super::family::{Family, Sizes};
use super::keys::float;
use crate::error::{Result, file_error, unsupported};
use crate::json::Fields;
use crate::value::Value;

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
    /// Reads the spelling of transformers 5 (`rope_parameters`) or the older one (`rope_theta` and `rope_scaling`), which takes precedence
    /// where a file has both, as in all versions of transformers.
    fn read(config: &Fields, family: &Family) -> Result<Self> {
        let wrong = |reason: String| file_error(&config.path, reason);
        let fields = |value: &Json| match value {
            Json::Object(fields) => named(fields.clone()).map_err(wrong),
            other => Err(wrong(format!("the rotary embedding is {other}; expected an object"))),
        };
        let new = config.get("rope_parameters").map(fields).transpose()?;
        let older = config.get("rope_scaling").map(fields).transpose()?;
        let by_layer = |kind: &str| {
            let entry = new.as_ref().and_then(|new| new.get(kind)).filter(|entry| !entry.is_null());
            entry.map(fields).transpose()
        };
        let (full, window) = (by_layer("full_attention")?, by_layer("sliding_attention")?);
        let full = full.or_else(|| new.clone().filter(|_| window.is_none()));
        let mut full = full.unwrap_or_default();
        if let Some(older) = older.filter(|older| !older.is_empty()) {
            // Gemma 3's has a scaling for one kind of layer, which is joined with that layer's parameters.
            if family.model_type != "gemma3_text" {
                full.clear();
            }
            full.extend(older);
        }
        let with = |mut fields: Map<String, Json>, key: &str| -> Result<Fields> {
            if let Some(older) = config.optional_number(key)? {
                let new = fields.entry("rope_theta").or_insert_with(|| older.into());
                if new.as_f64() != Some(older) {
                    return Err(wrong(format!(
                        "`rope_theta` is {new} in the rotary embedding's parameters, and `{key}` is {older:?}; they must agree"
                    )));
                }
            }
            Ok(Fields { path: config.path.clone(), fields })
        };
        let parameters = with(full, "rope_theta")?;
        let base = parameters.optional_number("rope_theta")?.unwrap_or(family.theta);
        let window = with(window.unwrap_or_default(), "rope_local_base_freq")?;
        let window_base = window.optional_number("rope_theta")?;
        let fraction = match parameters.optional_number("partial_rotary_factor")? {
            Some(fraction) => fraction,
            None => config.optional_number("partial_rotary_factor")?.unwrap_or(1.0),
        };
        let kind = parameters.get(TYPE).map_or(Ok("default"), |_| parameters.text(TYPE))?.to_owned();
        let rope = Self { kind, base, fraction, window_base, parameters };
        rope.check(family)?;
        Ok(rope)
    }

    fn check(&self, family: &Family) -> Result<()> {
        let refuse = |what: &str, found: String, remedy: &str| {
            Err(unsupported(format!("{what} of a `{}`", family.model_type), found, remedy.to_owned()))
        };
        let known: &[&str] = match family.model_type {
            "phi3" => &["default", "longrope", "su"],
            "gemma2" | "gemma3_text" => &["default", "linear"],
            "llama" | "mistral" | "granite" => &["default", "linear", "llama3", "yarn"],
            _ => &["default", "linear", "yarn"],
        };
        if !known.contains(&&*self.kind) {
            return refuse(
                "the `rope_type`",
                format!("`{}`", self.kind),
                &format!("known are {}", known.join(", ")),
            );
        }
        if self.fraction != 1.0 && family.model_type != "phi3" {
            return refuse(
                "`partial_rotary_factor`",
                self.fraction.to_string(),
                "llama.cpp rotates whole heads of this family",
            );
        }
        if self.kind == "yarn" {
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

    fn rotated(&self, sizes: &Sizes) -> u32 {
        (f64::from(sizes.head_dim) * self.fraction) as u32
    }
}

const TYPE: &str = "rope_type";

/// Returns fields whose scaling is named by `rope_type` alone: older files call it `type`, and some have both.
fn named(mut fields: Map<String, Json>) -> std::result::Result<Map<String, Json>, String> {
    if let Some(old) = fields.remove("type").filter(|old| !old.is_null()) {
        let new = fields.get(TYPE).filter(|new| !new.is_null()).cloned().unwrap_or_else(|| old.clone());
        if usual_name(&new) != usual_name(&old) {
            return Err(format!(
                "the rotary embedding has the `rope_type` {new} and the `type` {old}; they must agree"
            ));
        }
        fields.insert(TYPE.to_owned(), new);
    }
    Ok(fields)
}

/// `longrope`, which Phi-3's older files call `su`.
fn usual_name(kind: &Json) -> &str {
    match kind.as_str() {
        Some("su") => "longrope",
        other => other.unwrap_or_default(),
    }
}

/// Returns the metadata of the rotary embedding.
pub(super) fn keys(config: &Fields, family: &Family, sizes: &Sizes) -> Result<Vec<(String, Value)>> {
    let rope = Rope::read(config, family)?;
    let parameters = &rope.parameters;
    let mut keys: Vec<(&str, Value)> =
        vec![("rope.dimension_count", rope.rotated(sizes).into()), ("rope.freq_base", float(rope.base))];
    if let Some(base) = rope.window_base.filter(|_| family.model_type == "gemma3_text") {
        keys.push(("rope.freq_base_swa", float(base)));
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
            keys.push(("rope.scaling.original_context_length", original.unwrap_or(sizes.context).into()));
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
            let scale = f64::from(sizes.context) / f64::from(original);
            let factor = match parameters.optional_number("attention_factor")? {
                Some(factor) => factor,
                None if scale <= 1.0 => 1.0,
                None => (1.0 + scale.ln() / f64::from(original).ln()).sqrt(),
            };
            keys.push(("rope.scaling.original_context_length", original.into()));
            keys.push(("rope.scaling.attn_factor", float(factor)));
        }
        _ if family.model_type == "phi3" => {
            let original = original_context(config, parameters).unwrap_or(sizes.context);
            keys.push(("rope.scaling.original_context_length", original.into()));
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

/// Returns the tensors of factors by which frequencies are divided.
pub(super) fn factors(
    config: &Fields,
    family: &Family,
    sizes: &Sizes,
) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let rope = Rope::read(config, family)?;
    match &*rope.kind {
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

/// Llama 3: high frequencies stay, low ones are divided by the factor, and those between are interpolated.
fn llama3(rope: &Rope, sizes: &Sizes) -> Result<Vec<f32>> {
    let number = |key: &str| rope.parameters.number(key);
    let (factor, low, high) = (number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?);
    let original = f64::from(rope.parameters.size("original_max_position_embeddings")?);
    let elements = rope.rotated(sizes);
    let of = |pair: u32| {
        let wavelength = TAU * rope.base.powf(f64::from(2 * pair) / f64::from(elements));
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    Ok((0..elements / 2).map(|pair| of(pair) as f32).collect())
}
