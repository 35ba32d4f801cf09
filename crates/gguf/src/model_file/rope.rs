//! The rotary embedding of a file as fields of `config.json`: the inverse of `model::rope`.

use decoder::LongRope;
use decoder::rope::{Frequencies, Scaling};
use serde_json::{Map, Value as Json, json};

use super::config::Tensors;
use super::metadata::{Metadata, integers, missing};
use crate::error::{Result, unsupported};
use crate::model::Family;

/// Of llama.cpp, where a file has no base.
const BASE: f64 = 10_000.0;

/// Returns the fields; `rotated` elements of a head of `head_dim` rotate.
///
/// # Errors
/// A scaling that no configuration has.
pub(super) fn fields(
    metadata: &Metadata<'_>,
    family: &Family,
    tensors: &dyn Tensors,
    (rotated, head_dim): (u64, u64),
) -> Result<Map<String, Json>> {
    let base = metadata.optional_float("rope.freq_base")?.unwrap_or(BASE);
    let mut fields = Map::new();
    let mut put = |key: &str, value: Json| drop(fields.insert(key.to_owned(), value));
    put("rope_theta", base.into());
    if family.local_theta.is_some() {
        let local = metadata.optional_float("rope.freq_base_swa")?.unwrap_or(BASE);
        put("rope_local_base_freq", local.into());
    }
    if rotated != head_dim {
        if family.partial_rotation.is_none() {
            return Err(unsupported(
                format!("`{}.rope.dimension_count` of {}", metadata.architecture, metadata.path.display()),
                rotated.to_string(),
                format!("heads of this family rotate as a whole ({head_dim})"),
            ));
        }
        put("partial_rotary_factor", (rotated as f64 / head_dim as f64).into());
    }
    let original = metadata.optional_size("rope.scaling.original_context_length")?;
    if family.has_long_rope
        && let Some(original) = original
    {
        put("original_max_position_embeddings", original.into());
    }
    let mut scaling = scaling(metadata, family, tensors, (base, rotated), original)?;
    // Of an image's parts: the fourth position is of no model.
    if let Some(sections) = metadata.get("rope.dimension_sections").and_then(integers) {
        let sections = sections.get(..3).unwrap_or(&sections);
        scaling.get_or_insert_with(|| json!({ "rope_type": "default" }))["mrope_section"] = json!(sections);
    }
    if let Some(scaling) = scaling {
        put("rope_scaling", scaling);
    }
    Ok(fields)
}

/// Returns `rope_scaling`; `None` without one.
fn scaling(
    metadata: &Metadata<'_>,
    family: &Family,
    tensors: &dyn Tensors,
    (base, rotated): (f64, u64),
    original: Option<u64>,
) -> Result<Option<Json>> {
    let list = |name: &str| tensors.vector(name);
    if let Some(divisors) = list("rope_freqs.weight")? {
        return llama3(metadata, &divisors, base, rotated).map(Some);
    }
    if let (Some(long), Some(short)) = (list("rope_factors_long.weight")?, list("rope_factors_short.weight")?)
    {
        let original = original.ok_or_else(|| {
            missing(
                metadata.path,
                "rope.scaling.original_context_length",
                "the context of the first training",
            )
        })?;
        let decimals = |list: &[f32]| -> Vec<Json> {
            list.iter().map(|x| json!(x.to_string().parse::<f64>().unwrap_or_default())).collect()
        };
        let mut scaling = json!({
            "type": "longrope", "long_factor": decimals(&long), "short_factor": decimals(&short),
        });
        // transformers 4 has no place for a factor that follows from the two contexts.
        let plain = LongRope {
            short_factor: Vec::new(),
            long_factor: Vec::new(),
            original_positions: original as i64,
            attention_factor: None,
            factor: None,
        };
        let usual = plain.amplitude(metadata.size("context_length")? as i64);
        let attention = metadata.optional_float("rope.scaling.attn_factor")?;
        if let Some(attention) = attention.filter(|factor| (factor - usual).abs() > 1e-5) {
            scaling["attention_factor"] = attention.into();
        }
        return Ok(Some(scaling));
    }
    // The older key of a linear scaling.
    let older =
        metadata.optional_float("rope.scale_linear")?.filter(|factor| *factor != 1.0 && *factor > 0.0);
    let factor = metadata.optional_float("rope.scaling.factor")?.filter(|factor| *factor > 0.0).or(older);
    let kind = metadata.get("rope.scaling.type").and_then(|kind| kind.as_str());
    match (kind.unwrap_or(if factor.is_some() { "linear" } else { "none" }), factor) {
        ("none", _) | ("linear", None | Some(1.0)) => Ok(None),
        ("linear", Some(factor)) => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
        ("yarn", Some(factor)) => {
            let mut scaling = json!({ "rope_type": "yarn", "factor": factor });
            if let Some(original) = original {
                scaling["original_max_position_embeddings"] = original.into();
            }
            for (key, name) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
                if let Some(beta) = metadata.optional_float(&format!("rope.scaling.{key}"))? {
                    scaling[name] = beta.into();
                }
            }
            if family.has_sinks {
                // As in every published model; a file has no key for it.
                scaling["truncate"] = false.into();
            }
            Ok(Some(scaling))
        }
        (other, factor) => Err(unsupported(
            format!("the scaling of the rotary embedding of {}", metadata.path.display()),
            format!("`{other}` with the factor {factor:?}"),
            "none, linear, yarn, llama3 and longrope can be read",
        )),
    }
}

/// Returns Llama 3's parameters. A file has only the divisors d of the frequencies ω; with s the largest divisor,
/// (1/d - 1/s)/(1 - 1/s) = (o·ω/2π - low)/(high - low), clamped to 0 and 1. All published models have low 1, high 4 and o 8192; other ones
/// are fitted with low = 1, because only two of the three numbers follow from the divisors.
fn llama3(metadata: &Metadata<'_>, divisors: &[f32], base: f64, rotated: u64) -> Result<Json> {
    let factor = divisors.iter().fold(1f64, |largest, divisor| largest.max((*divisor).into()));
    let (low, mut candidates) = (1.0, vec![(4.0, 8192.0)]);
    let plain = Frequencies { theta: base, scaling: Scaling::None };
    let angles = plain.angles(rotated.min(1 << 16) as i64).unwrap_or_default();
    // The pairs between, by least squares: kept = slope·turns_per_position - offset.
    let inner: Vec<(f64, f64)> = angles
        .iter()
        .zip(divisors)
        .filter(|(_, divisor)| **divisor > 1.0 && f64::from(**divisor) < factor)
        .map(|(angle, divisor)| {
            let kept = (1.0 / f64::from(*divisor) - 1.0 / factor) / (1.0 - 1.0 / factor);
            (angle / std::f64::consts::TAU, kept)
        })
        .collect();
    if let Some((slope, offset)) = line(&inner) {
        candidates.push((low - low / offset, -slope * low / offset));
    }
    for (high, original) in candidates {
        let [high, original] = [high, original].map(|number: f64| {
            if (number - number.round()).abs() < 1e-5 * number { number.round() } else { number }
        });
        let scaling = Scaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_positions: original,
        };
        let frequencies = Frequencies { theta: base, scaling };
        let is_valid = high > low && original > 0.0 && divisors.len() as u64 == rotated / 2;
        let agrees = |(meant, divisor): (f64, &f32)| (meant / f64::from(*divisor) - 1.0).abs() < 1e-5;
        if is_valid && frequencies.divisors(rotated as i64).zip(divisors).all(agrees) {
            return Ok(json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original as i64,
            }));
        }
    }
    Err(unsupported(
        format!("`rope_freqs.weight` of {}", metadata.path.display()),
        format!("{} divisors up to {factor}", divisors.len()),
        "those of Llama 3's scaling can be read",
    ))
}

/// Slope and offset of the line through points; `None` for fewer than two.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let (over, under) = points.iter().fold((0.0, 0.0), |(over, under), point| {
        (over + (point.0 - x) * (point.1 - y), under + (point.0 - x).powi(2))
    });
    let slope = over / under;
    (points.len() > 1 && slope.is_finite() && slope > 0.0).then_some((slope, y - slope * x))
}
