//! The experts of a mixture: Hugging Face's names, and its files that hold all of a layer's in one tensor.
//!
//! | tensor of a file | parts, for expert N |
//! |---|---|
//! | `experts.gate_up_proj` `[experts, 2·inner, hidden]` | `N.gate_proj.weight`, `N.up_proj.weight` `[inner, hidden]` |
//! | `experts.down_proj` `[experts, hidden, inner]` | `N.down_proj.weight` `[hidden, inner]` |
//! | of gpt-oss: `experts.gate_up_proj` `[experts, hidden, 2·inner]`, columns g₀ u₀ g₁ u₁ … | the same, transposed |
//! | `experts.gate_up_proj_bias` `[experts, 2·inner]`, g₀ u₀ g₁ u₁ … | `N.gate_proj.bias`, `N.up_proj.bias` `[inner]` |
//! | `experts.down_proj` `[experts, inner, hidden]`, `experts.down_proj_bias` `[experts, hidden]` | `N.down_proj.weight`, `.bias` |
//!
//! A GGUF file has all gates, all ups and all downs of a layer in one tensor each, `[experts, rows, columns]`.

use std::collections::BTreeMap;

use decoder::{EXPERT_PROJECTIONS, Family, SHARED_EXPERT, SHARED_EXPERT_GATE, Sizes};

use crate::safetensors::{Location, Turns};

const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";
const BIAS: &str = "_bias";

/// A tensor of a layer's mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MixtureTensor<'a> {
    /// The router's weight, or its bias.
    Router { is_bias: bool },
    /// Of an expert: its number, the projection, and whether it is its bias.
    Expert { expert: u64, projection: &'a str, is_bias: bool },
    /// A projection of the expert that computes every token.
    Shared { projection: &'a str },
    /// The gate of that one's result.
    SharedGate,
}

impl<'a> MixtureTensor<'a> {
    /// Returns the layer and the tensor of a name; `None` for one that is not of a mixture of this family.
    pub(crate) fn parse(family: Family, name: &'a str) -> Option<(u64, Self)> {
        if !family.facts().has_experts {
            return None;
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (module, kind) = rest.rsplit_once('.')?;
        let is_bias = match kind {
            "weight" => false,
            "bias" if family.facts().has_clamped_experts => true,
            _ => return None,
        };
        let known = |projection: &str| EXPERT_PROJECTIONS.contains(&projection);
        let tensor = if module == family.router() {
            Self::Router { is_bias }
        } else if let Some(rest) = module.strip_prefix("mlp.experts.") {
            let (expert, projection) = rest.split_once('.')?;
            let expert = expert.parse().ok()?;
            known(projection).then_some(Self::Expert { expert, projection, is_bias })?
        } else if !family.facts().has_shared_expert || is_bias {
            return None;
        } else if module == SHARED_EXPERT_GATE {
            Self::SharedGate
        } else {
            let projection = module.strip_prefix(SHARED_EXPERT)?.strip_prefix('.')?;
            known(projection).then_some(Self::Shared { projection })?
        };
        Some((layer.parse().ok()?, tensor))
    }

    /// Returns Hugging Face's shape.
    pub(crate) fn shape(self, sizes: &Sizes) -> Option<Vec<u64>> {
        let experts = sizes.experts?;
        let matrix = |projection: &str, inner: u64| match projection {
            DOWN => vec![sizes.hidden, inner],
            _ => vec![inner, sizes.hidden],
        };
        Some(match self {
            Self::Router { is_bias: true } => vec![experts.count],
            Self::Router { is_bias: false } => vec![experts.count, sizes.hidden],
            Self::Expert { projection, is_bias, .. } => {
                let mut shape = matrix(projection, experts.feed_forward);
                shape.truncate(if is_bias { 1 } else { 2 });
                shape
            }
            Self::Shared { projection } => matrix(projection, experts.shared),
            Self::SharedGate => vec![1, sizes.hidden],
        })
    }

    /// Returns the name in a GGUF file within its layer.
    pub(crate) fn gguf_name(self) -> String {
        let part = |projection: &str| projection.trim_end_matches("_proj").to_owned();
        let kind = |is_bias: bool| if is_bias { "bias" } else { "weight" };
        match self {
            Self::Router { is_bias } => format!("ffn_gate_inp.{}", kind(is_bias)),
            Self::Expert { projection, is_bias, .. } => {
                format!("ffn_{}_exps.{}", part(projection), kind(is_bias))
            }
            Self::Shared { projection } => format!("ffn_{}_shexp.weight", part(projection)),
            Self::SharedGate => "ffn_gate_inp_shexp.weight".to_owned(),
        }
    }
}

/// Divides the tensors that hold all experts of a layer into those of each.
pub(crate) fn divide(tensors: BTreeMap<String, Location>) -> BTreeMap<String, Location> {
    // The layout of gpt-oss alone has biases.
    let is_transposed = tensors.keys().any(|name| name.ends_with(".mlp.experts.gate_up_proj_bias"));
    let mut divided = BTreeMap::new();
    for (name, location) in tensors {
        match parts(&name, &location, is_transposed) {
            Some(parts) => divided.extend(parts),
            None => drop(divided.insert(name, location)),
        }
    }
    divided
}

/// Returns the parts of such a tensor; `None` for any other.
fn parts(name: &str, location: &Location, is_transposed: bool) -> Option<Vec<(String, Location)>> {
    let (layer, rest) = name.rsplit_once('.')?;
    if !layer.ends_with(".mlp.experts") {
        return None;
    }
    let (projection, is_bias) = match rest.strip_suffix(BIAS) {
        Some(projection) => (projection, true),
        None => (rest, false),
    };
    let names: &[&str] = match projection {
        GATE_UP => &["gate_proj", "up_proj"],
        DOWN => &[DOWN],
        _ => return None,
    };
    let count = names.len() as u64;
    let (experts, rows, columns) = match (&location.shape[..], is_bias) {
        (&[experts, width], true) if is_transposed => (experts, width, 1),
        (&[experts, columns, rows], false) if is_transposed => (experts, rows, columns),
        (&[experts, rows, columns], false) => (experts, rows, columns),
        _ => return None,
    };
    if rows % count != 0 || experts == 0 {
        return None;
    }
    let of_part = rows / count;
    let shape = if is_bias { vec![of_part] } else { vec![of_part, columns] };
    let mut parts = Vec::new();
    for expert in 0..experts {
        for (index, part) in (0..).zip(names) {
            let first = expert * rows * columns;
            let turns = is_transposed.then_some(Turns { rows, columns, first: index, step: count });
            let first = if is_transposed { first } else { first + index * of_part * columns };
            let location = location.part(first, shape.clone(), turns);
            let kind = if is_bias { "bias" } else { "weight" };
            parts.push((format!("{layer}.{expert}.{part}.{kind}"), location));
        }
    }
    Some(parts)
}
