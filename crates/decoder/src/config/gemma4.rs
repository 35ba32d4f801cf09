//! Differences between the layers of a Gemma 4 in `config.json`.
//!
//! | field | transformers 5.23 | before |
//! |---|---|---|
//! | width of a head in layers that attend in full | `per_layer_config.N.head_dim` | `global_head_dim` |
//! | their key-value heads, with `attention_k_eq_v` | `per_layer_config.N.num_key_value_heads` | `num_global_key_value_heads` |
//!
//! Both forms are read, and both are written.

use serde_json::{Map, Value, json};

use super::file::{HuggingFace, refuse};
use super::{DecoderConfig, LayerType, MAX_HEADS, MAX_LAYERS, MAX_SIZE, WHAT};
use crate::error::{Error, Result};
use crate::rope::Frequencies;

const SHARED: &str = "num_kv_shared_layers";
const KEYS_ARE_VALUES: &str = "attention_k_eq_v";
const DOUBLES: &str = "use_double_wide_mlp";
const INPUTS: &str = "hidden_size_per_layer_input";
const INPUT_VOCABULARY: &str = "vocab_size_per_layer_input";
const GLOBAL_HEAD: &str = "global_head_dim";
const GLOBAL_HEADS: &str = "num_global_key_value_heads";
const BY_LAYER: &str = "per_layer_config";
/// transformers' default of [`Gemma4::global_head_dim`].
const DEFAULT_GLOBAL_HEAD: i64 = 512;
/// transformers' default of [`Gemma4::per_layer_input`].
const DEFAULT_INPUT: i64 = 256;
/// transformers' default of [`Gemma4::per_layer_vocabulary`].
const DEFAULT_INPUT_VOCABULARY: i64 = 262_144;

/// The sizes and options of a Gemma 4 by which its layers differ. Layers *attend in full* or within the window, as `layer_types` lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gemma4 {
    /// Width of a head in layers that attend in full; in the others it is [`DecoderConfig::head_dim`].
    pub global_head_dim: i64,
    /// Key-value heads of layers that attend in full.
    pub global_kv_heads: i64,
    /// `attention_k_eq_v`: whether the values of layers that attend in full are their keys before norm and rotation, without a projection.
    pub keys_are_values: bool,
    /// `num_kv_shared_layers`: the last layers, which attend to the keys and values of an earlier one; see [`DecoderConfig::key_layer`].
    pub shared_layers: i64,
    /// `use_double_wide_mlp`: whether the MLP of these layers is twice as wide.
    pub doubles_mlp: bool,
    /// `hidden_size_per_layer_input`: width of what each layer gets of a token's row in a second embedding; 0 for a model without one.
    pub per_layer_input: i64,
    /// `vocab_size_per_layer_input`: rows of the second embedding.
    pub per_layer_vocabulary: i64,
}

impl DecoderConfig {
    /// Returns whether a layer attends to every token before.
    fn attends_in_full(&self, layer: usize) -> bool {
        self.layer_types.get(layer) == Some(&LayerType::Full)
    }

    /// The options of a Gemma 4, for a layer that attends in full.
    fn in_full(&self, layer: usize) -> Option<&Gemma4> {
        self.gemma4.as_ref().filter(|_| self.attends_in_full(layer))
    }

    /// Returns the width of a layer's heads.
    pub fn layer_head_dim(&self, layer: usize) -> i64 {
        self.in_full(layer).map_or(self.head_dim, |gemma4| gemma4.global_head_dim)
    }

    /// Returns the number of key-value heads of a layer, or of the layer whose keys it attends to.
    pub fn layer_kv_heads(&self, layer: usize) -> i64 {
        self.in_full(layer).map_or(self.num_key_value_heads, |gemma4| gemma4.global_kv_heads)
    }

    /// Returns the inner width of a layer's MLP.
    pub fn layer_intermediate_size(&self, layer: usize) -> i64 {
        let doubles = self.gemma4.is_some_and(|gemma4| gemma4.doubles_mlp) && self.key_layer(layer) != layer;
        self.intermediate_size.saturating_mul(if doubles { 2 } else { 1 })
    }

    /// Returns whether a layer has a projection of values.
    pub fn has_value_projection(&self, layer: usize) -> bool {
        self.key_layer(layer) == layer && !self.in_full(layer).is_some_and(|gemma4| gemma4.keys_are_values)
    }

    /// Returns the layer whose keys and values a layer attends to: itself, or for the last [`Gemma4::shared_layers`] the last layer of its
    /// type before them.
    pub fn key_layer(&self, layer: usize) -> usize {
        let first = self.first_shared_layer();
        if layer < first {
            return layer;
        }
        let of_type = |&other: &usize| self.layer_types.get(other) == self.layer_types.get(layer);
        (0..first).rev().find(of_type).unwrap_or(layer)
    }

    /// Returns whether a tensor of files is used, by its name with or without what precedes `layers.`: not the projections of keys and values,
    /// nor their norms, that files have for layers which attend to the keys of others.
    pub fn uses_tensor(&self, name: &str) -> bool {
        if self.gemma4.is_none() {
            return true;
        }
        let of_layer = name.rsplit_once("layers.").and_then(|(_, rest)| rest.split_once(".self_attn."));
        let Some((layer, part)) = of_layer else { return true };
        let of_keys =
            ["k_proj.", "v_proj.", "k_norm.", "v_norm."].iter().any(|start| part.starts_with(start));
        let layer: Option<usize> = layer.parse().ok();
        !(of_keys && layer.is_some_and(|layer| self.key_layer(layer) != layer))
    }

    /// Returns whether a later layer attends to the keys and values of this one.
    pub fn gives_keys(&self, layer: usize) -> bool {
        let last = usize::try_from(self.num_hidden_layers.min(MAX_LAYERS)).unwrap_or(0);
        (self.first_shared_layer()..last).any(|other| other != layer && self.key_layer(other) == layer)
    }

    /// The first layer that attends to the keys of another; the number of layers if none does.
    pub(crate) fn first_shared_layer(&self) -> usize {
        let shared = self.gemma4.map_or(0, |gemma4| gemma4.shared_layers);
        usize::try_from(self.num_hidden_layers.min(MAX_LAYERS).saturating_sub(shared)).unwrap_or(0)
    }

    /// Refuses invalid sizes of a Gemma 4.
    pub(super) fn check_gemma4(&self) -> Result<()> {
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        let name = self.family.model_type();
        let is_gemma4 = self.family.facts().is_gemma4;
        let Some(gemma4) = &self.gemma4 else {
            if is_gemma4 {
                return config(format!("`{name}` has no sizes of its layers; give them"));
            }
            return Ok(());
        };
        if !is_gemma4 {
            return config(format!("`{name}` has the sizes of a Gemma 4's layers; expected none"));
        }
        let layers = self.num_hidden_layers;
        for (name, size, least, largest) in [
            (GLOBAL_HEAD, gemma4.global_head_dim, 2, MAX_HEADS),
            (GLOBAL_HEADS, gemma4.global_kv_heads, 1, MAX_HEADS),
            (SHARED, gemma4.shared_layers, 0, layers - 1),
            (INPUTS, gemma4.per_layer_input, 0, MAX_HEADS),
            (INPUT_VOCABULARY, gemma4.per_layer_vocabulary, 1, MAX_SIZE),
        ] {
            if !(least..=largest).contains(&size) {
                return config(format!("`{name}` is {size}; expected a number from {least} to {largest}"));
            }
        }
        if gemma4.global_head_dim % 2 != 0 {
            return config(format!(
                "`{GLOBAL_HEAD}` is {}; expected an even width, since its halves rotate with each other",
                gemma4.global_head_dim
            ));
        }
        if self.num_attention_heads % gemma4.global_kv_heads != 0 {
            return config(format!(
                "`{GLOBAL_HEADS}` {} does not divide `num_attention_heads` {}; take a divisor",
                gemma4.global_kv_heads, self.num_attention_heads
            ));
        }
        if gemma4.per_layer_input > 0 && gemma4.per_layer_vocabulary < self.vocab_size {
            return config(format!(
                "`{INPUT_VOCABULARY}` is {} and `vocab_size` {}; expected a row for each token",
                gemma4.per_layer_vocabulary, self.vocab_size
            ));
        }
        let layers = usize::try_from(layers).unwrap_or(0);
        if self.layer_types.len() < layers || self.layer_types.contains(&LayerType::Linear) {
            return config(format!("`layer_types` of `{name}` has to list each layer, full or sliding"));
        }
        let first = self.first_shared_layer();
        if let Some(layer) = (first..layers).find(|&layer| self.key_layer(layer) == layer) {
            return config(format!(
                "layer {layer} is a {} layer among the last {} of `{SHARED}`, and no layer of its type is before them; take a smaller number",
                self.layer_types[layer].name(),
                gemma4.shared_layers
            ));
        }
        Ok(())
    }

    /// Returns the frequencies of each width of heads that rotate by them.
    pub(super) fn rotations(&self) -> impl Iterator<Item = (&Frequencies, i64)> {
        let full = self.gemma4.map_or(self.rotary_dim(), |gemma4| gemma4.global_head_dim);
        [Some((&self.rope, full)), self.local_rope.as_ref().map(|rope| (rope, self.rotary_dim()))]
            .into_iter()
            .flatten()
    }
}

/// Returns the types of all layers: each sixth attends in full in a file without a list, and the last in any case.
pub(super) fn layer_types(file: &HuggingFace, listed: Vec<LayerType>) -> Vec<LayerType> {
    let layers = usize::try_from(file.num_hidden_layers.clamp(0, MAX_LAYERS)).unwrap_or(0);
    let by_rule =
        |layer: usize| if (layer + 1).is_multiple_of(6) { LayerType::Full } else { LayerType::Sliding };
    let mut types = if listed.is_empty() { (0..layers).map(by_rule).collect() } else { listed };
    if let Some(last) = types.last_mut() {
        *last = LayerType::Full;
    }
    types
}

/// Reads the options of a Gemma 4, and removes their fields from `file`'s others.
pub(super) fn read(file: &mut HuggingFace, types: &[LayerType], kv_heads: i64) -> Result<Gemma4> {
    if file.get::<bool>("enable_moe_block")? == Some(true) {
        return Err(refuse(
            "`enable_moe_block` is true: the mixture of experts of a Gemma 4 is not supported; its dense models are".to_owned(),
        ));
    }
    let keys_are_values = file.take(KEYS_ARE_VALUES)?.unwrap_or(false);
    let mut gemma4 = Gemma4 {
        global_head_dim: file.take(GLOBAL_HEAD)?.unwrap_or(DEFAULT_GLOBAL_HEAD),
        global_kv_heads: file.take(GLOBAL_HEADS)?.filter(|_| keys_are_values).unwrap_or(kv_heads),
        keys_are_values,
        shared_layers: file.take(SHARED)?.unwrap_or(0),
        doubles_mlp: file.take(DOUBLES)?.unwrap_or(false),
        // Null is none.
        per_layer_input: match file.other.contains_key(INPUTS) {
            true => file.take(INPUTS)?.unwrap_or(0),
            false => DEFAULT_INPUT,
        },
        per_layer_vocabulary: file.take(INPUT_VOCABULARY)?.unwrap_or(DEFAULT_INPUT_VOCABULARY),
    };
    if let Some(by_layer) = file.take::<Map<String, Value>>(BY_LAYER)? {
        (gemma4.global_head_dim, gemma4.global_kv_heads) = of_full_layers(file, types, &by_layer, kv_heads)?;
    }
    Ok(gemma4)
}

/// The width of heads and the key-value heads that `per_layer_config` gives all layers that attend in full, and no other layer.
fn of_full_layers(
    file: &HuggingFace,
    types: &[LayerType],
    by_layer: &Map<String, Value>,
    kv_heads: i64,
) -> Result<(i64, i64)> {
    let wrong = |reason: String| Err(refuse(format!("`{BY_LAYER}`: {reason}")));
    let head_dim = file.head_dim.unwrap_or(256);
    let mut of_full = None;
    for (layer, kind) in types.iter().enumerate() {
        let fields = match by_layer.get(&layer.to_string()) {
            None | Some(Value::Null) => &Map::new(),
            Some(Value::Object(fields)) => fields,
            Some(other) => return wrong(format!("layer {layer} is {other}; expected an object")),
        };
        let (mut head, mut heads) = (head_dim, kv_heads);
        for (name, value) in fields {
            let size = match (name.as_str(), value.as_i64()) {
                ("head_dim", Some(size)) => (&mut head, size),
                ("num_key_value_heads", Some(size)) => (&mut heads, size),
                _ => {
                    return wrong(format!(
                        "layer {layer} has `{name}` {value}; expected `head_dim` and `num_key_value_heads` alone, whole numbers"
                    ));
                }
            };
            *size.0 = size.1;
        }
        let expected = match kind {
            LayerType::Full => *of_full.get_or_insert((head, heads)),
            LayerType::Sliding | LayerType::Linear => (head_dim, kv_heads),
        };
        if (head, heads) != expected {
            return wrong(format!(
                "layer {layer} has heads of {head} and {heads} key-value heads, and other {} layers {} and {}; expected one size for each type",
                kind.name(),
                expected.0,
                expected.1
            ));
        }
    }
    Ok(of_full.unwrap_or((head_dim, kv_heads)))
}

/// Returns the fields.
pub(super) fn write(config: &DecoderConfig, gemma4: &Gemma4) -> Vec<(&'static str, Value)> {
    let mut of_layer = json!({ "head_dim": gemma4.global_head_dim });
    let own_heads = gemma4.global_kv_heads != config.num_key_value_heads;
    if own_heads {
        of_layer["num_key_value_heads"] = json!(gemma4.global_kv_heads);
    }
    let full = (0..config.layer_types.len()).filter(|&layer| config.attends_in_full(layer));
    let by_layer: Map<String, Value> = full.map(|layer| (layer.to_string(), of_layer.clone())).collect();
    vec![
        (KEYS_ARE_VALUES, json!(gemma4.keys_are_values)),
        (SHARED, json!(gemma4.shared_layers)),
        (DOUBLES, json!(gemma4.doubles_mlp)),
        (INPUTS, json!(gemma4.per_layer_input)),
        (INPUT_VOCABULARY, json!(gemma4.per_layer_vocabulary)),
        (GLOBAL_HEAD, json!(gemma4.global_head_dim)),
        (GLOBAL_HEADS, json!(own_heads.then_some(gemma4.global_kv_heads))),
        (BY_LAYER, Value::Object(by_layer)),
    ]
}
