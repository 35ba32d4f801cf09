//! Windows and layers without rotation in `config.json`: `sliding_window`, `layer_types`, `no_rope_layers`, and the rules by which
//! older files imply them.

use serde_json::Value;

use super::file::{HuggingFace, refuse};
use super::{LayerType, MAX_LAYERS, linear_attention};
use crate::error::Result;
use crate::family::{Family, WindowRule, Windows};

/// Returns the window and the layers' types.
pub(super) fn windows(file: &mut HuggingFace, family: Family) -> Result<(Option<i64>, Vec<LayerType>)> {
    let bidirectional = file.other.get("use_bidirectional_attention");
    // The images of a Gemma 4 attend to each other, and its text is causal.
    let of_images = family.facts().is_gemma4 && bidirectional == Some(&Value::from("vision"));
    if let Some(value) =
        bidirectional.filter(|value| !of_images && !matches!(value, Value::Null | Value::Bool(false)))
    {
        return Err(refuse(format!("`use_bidirectional_attention` is {value}; expected causal attention")));
    }
    let names: Option<Vec<String>> = file.take("layer_types")?;
    let types: Option<Vec<LayerType>> =
        names.map(|names| names.iter().map(|name| LayerType::from_name(name)).collect()).transpose()?;
    let listed = types.as_ref().is_some_and(|types| types.contains(&LayerType::Sliding));
    let is_used = file.get::<bool>("use_sliding_window")? == Some(true);
    let facts = family.facts();
    if types.as_ref().is_some_and(|types| types.contains(&LayerType::Linear)) && !facts.has_linear_layers {
        return Err(refuse(format!(
            "`layer_types` has a `{}` layer, which `{}` does not have; expected {} or {}",
            LayerType::Linear.name(),
            family.model_type(),
            LayerType::Full.name(),
            LayerType::Sliding.name()
        )));
    }
    if facts.windows == Windows::None && (listed || is_used) {
        return Err(refuse(format!(
            "attention has a sliding window, which `{}` does not have; set `use_sliding_window` to false if every layer attends \
             in full",
            family.model_type()
        )));
    }
    if facts.windows == Windows::None || facts.windows == Windows::Optional && !is_used {
        if listed {
            return Err(refuse(
                "`layer_types` has sliding_attention layers, but `use_sliding_window` is not true; they must agree"
                    .to_owned(),
            ));
        }
        let types = match types {
            None if facts.has_linear_layers => linear_attention::layers_by_interval(file)?,
            types => types.unwrap_or_default(),
        };
        return Ok((None, types));
    }
    if facts.windows == Windows::Optional {
        file.other.shift_remove("use_sliding_window");
    }
    let named = file.other.contains_key("sliding_window");
    let window = file.take("sliding_window")?;
    let window = if named { window } else { facts.window };
    match types {
        // transformers computes windows in all layers of such a family, whatever the list has.
        Some(types)
            if facts.window_rule == WindowRule::All
                && window.is_some()
                && types.contains(&LayerType::Full) =>
        {
            Err(refuse(format!(
                "`layer_types` has full_attention layers, but every layer of `{}` has the `sliding_window`; leave one of them out",
                family.model_type()
            )))
        }
        Some(types) => Ok((window, types)),
        None if window.is_none() => Ok((None, Vec::new())),
        None => Ok((window, layers_by_rule(file, family)?)),
    }
}

/// The layers with a window, where the file has no list of them.
fn layers_by_rule(file: &HuggingFace, family: Family) -> Result<Vec<LayerType>> {
    let layers = usize::try_from(file.num_hidden_layers.min(MAX_LAYERS)).unwrap_or(0);
    let sliding = |rule: &dyn Fn(usize) -> bool| {
        (0..layers).map(|layer| if rule(layer) { LayerType::Sliding } else { LayerType::Full }).collect()
    };
    Ok(match family.facts().window_rule {
        WindowRule::All => Vec::new(),
        WindowRule::Alternate => sliding(&|layer| layer % 2 == 0),
        WindowRule::Pattern => {
            // transformers writes `_sliding_window_pattern`, and reads this one alone.
            let every: Option<usize> = file.get("sliding_window_pattern")?;
            let every = every.unwrap_or(6).max(1);
            sliding(&|layer| (layer + 1) % every != 0)
        }
        WindowRule::Unrotated => {
            let rotates = rotary_layers(file)?;
            sliding(&|layer| rotates.get(layer) == Some(&false))
        }
        WindowRule::From => {
            let first: usize = file.get("max_window_layers")?.unwrap_or(28);
            sliding(&|layer| layer >= first)
        }
    })
}

/// Returns whether each layer rotates queries and keys.
pub(super) fn rotary_layers(file: &HuggingFace) -> Result<Vec<bool>> {
    let wrong = |name: &str, value: &Value, expected: &str| {
        Err(refuse(format!("`{name}` is {value}; expected {expected}")))
    };
    match file.other.get("no_rope_layers") {
        None | Some(Value::Null) => {}
        Some(Value::Array(list)) if list.iter().all(|entry| matches!(entry.as_i64(), Some(0 | 1))) => {
            return Ok(list.iter().map(|entry| entry.as_i64() == Some(1)).collect());
        }
        Some(value) => return wrong("no_rope_layers", value, "a list of 1 (rotates) and 0 for each layer"),
    }
    let interval = match file.other.get("no_rope_layer_interval") {
        None | Some(Value::Null) => 4,
        Some(value) => match value.as_i64() {
            Some(interval) if interval >= 1 => interval,
            _ => return wrong("no_rope_layer_interval", value, "a whole number of at least 1"),
        },
    };
    let layers = file.num_hidden_layers.clamp(0, MAX_LAYERS);
    Ok((0..layers).map(|layer| (layer + 1) % interval != 0).collect())
}
