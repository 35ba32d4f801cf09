//! Layers with linear attention in `config.json`, those of Qwen3.5.

use serde_json::{Value, json};

use super::file::{HuggingFace, refuse};
use super::{DecoderConfig, LayerType, MAX_HEADS, MAX_LAYERS, WHAT};
use crate::error::{Error, Result};

/// Maximum window of the convolution; published models have 4.
const MAX_WINDOW: i64 = 64;
/// Maximum channels of the convolution: with its window and bytes far below 2⁶³.
const MAX_CHANNELS: i64 = 1 << 28;

/// The sizes of gated DeltaNet (Yang, Kautz & Hatamizadeh, arXiv:2412.06464), which replaces attention in some layers. `kernels::delta_rule` has
/// the mathematics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearAttention {
    /// `linear_num_key_heads`: heads of queries and of keys.
    pub key_heads: i64,
    /// `linear_num_value_heads`: heads of values, a multiple of `key_heads`.
    pub value_heads: i64,
    /// `linear_key_head_dim`: width of a query and of a key.
    pub key_dim: i64,
    /// `linear_value_head_dim`: width of a value.
    pub value_dim: i64,
    /// `linear_conv_kernel_dim`: tokens that the convolution reads, the token itself included.
    pub window: i64,
}

/// The fields, in the struct's order, with transformers' defaults.
const FIELDS: [(&str, i64); 5] = [
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_conv_kernel_dim", 4),
];

impl LinearAttention {
    /// Returns the channels of the convolution: those of queries, keys and values.
    pub fn channels(&self) -> i64 {
        self.key_heads.saturating_mul(self.key_dim).saturating_mul(2).saturating_add(self.values())
    }

    /// Returns the width of all value heads together.
    pub fn values(&self) -> i64 {
        self.value_heads.saturating_mul(self.value_dim)
    }

    /// Names and shapes of the tensors besides projections.
    pub(crate) fn shapes(&self) -> impl Iterator<Item = (&'static str, Vec<i64>)> + use<> {
        [
            ("conv1d.weight", vec![self.channels(), 1, self.window]),
            ("A_log", vec![self.value_heads]),
            ("dt_bias", vec![self.value_heads]),
            ("norm.weight", vec![self.value_dim]),
        ]
        .into_iter()
    }

    fn numbers(&self) -> [i64; 5] {
        [self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.window]
    }
}

impl DecoderConfig {
    /// Returns whether a layer has linear attention.
    pub fn is_linear(&self, layer: usize) -> bool {
        self.layer_types.get(layer) == Some(&LayerType::Linear)
    }

    /// Returns the number of layers with linear attention.
    pub fn linear_layers(&self) -> usize {
        self.all_linear().count()
    }

    /// Returns the number of layers with linear attention and a mixture of experts.
    pub(crate) fn linear_mixture_layers(&self) -> usize {
        self.all_linear().filter(|&layer| self.layer_mixture(layer).is_some()).count()
    }

    fn all_linear(&self) -> impl Iterator<Item = usize> + '_ {
        let layers = usize::try_from(self.num_hidden_layers.min(MAX_LAYERS)).unwrap_or(0);
        (0..layers).filter(|&layer| self.is_linear(layer))
    }

    /// Refuses invalid sizes of linear attention.
    pub(super) fn check_linear(&self) -> Result<()> {
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        let name = self.family.model_type();
        let Some(linear) = &self.linear_attention else {
            if self.linear_layers() > 0 {
                return config(format!(
                    "`layer_types` has linear_attention layers, whose sizes `{name}` lacks"
                ));
            }
            return Ok(());
        };
        if !self.family.facts().has_linear_layers {
            return config(format!("`{name}` has sizes of linear attention; expected none"));
        }
        let largest = [MAX_HEADS, MAX_HEADS, MAX_HEADS, MAX_HEADS, MAX_WINDOW];
        for (((name, _), size), largest) in FIELDS.iter().zip(linear.numbers()).zip(largest) {
            if !(1..=largest).contains(&size) {
                return config(format!("`{name}` is {size}; expected a number from 1 to {largest}"));
            }
        }
        if linear.value_heads % linear.key_heads != 0 {
            return config(format!(
                "`linear_num_key_heads` {} does not divide `linear_num_value_heads` {}; take a divisor",
                linear.key_heads, linear.value_heads
            ));
        }
        if linear.channels() > MAX_CHANNELS {
            return config(format!(
                "linear attention has {} channels; expected at most {MAX_CHANNELS}",
                linear.channels()
            ));
        }
        Ok(())
    }
}

/// Reads the sizes of a family with linear attention, and removes its fields from `file`'s others. What only a multi-token prediction head or
/// its converter reads is removed, too, since there is none here.
pub(super) fn read(file: &mut HuggingFace) -> Result<LinearAttention> {
    if file.get::<bool>("attn_output_gate")? == Some(false) {
        return Err(refuse(
            "`attn_output_gate` is false; expected true, since the output of attention has a gate".to_owned(),
        ));
    }
    for name in ["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"] {
        file.other.shift_remove(name);
    }
    let mut numbers = [0; FIELDS.len()];
    for (number, (name, default)) in numbers.iter_mut().zip(FIELDS) {
        *number = file.take(name)?.unwrap_or(default);
    }
    let [key_heads, value_heads, key_dim, value_dim, window] = numbers;
    Ok(LinearAttention { key_heads, value_heads, key_dim, value_dim, window })
}

/// Returns the fields.
pub(super) fn write(linear: &LinearAttention) -> impl Iterator<Item = (&'static str, Value)> + use<> {
    FIELDS.into_iter().zip(linear.numbers()).map(|((name, _), number)| (name, json!(number)))
}

/// The layers' types of a file without a list of them: each `full_attention_interval`-th attends in full.
pub(super) fn layers_by_interval(file: &mut HuggingFace) -> Result<Vec<LayerType>> {
    let interval: i64 = file.take("full_attention_interval")?.unwrap_or(4);
    if interval < 1 {
        return Err(refuse(format!("`full_attention_interval` is {interval}; expected at least 1")));
    }
    let layers = file.num_hidden_layers.clamp(0, MAX_LAYERS);
    let of_layer = |layer| if (layer + 1) % interval == 0 { LayerType::Full } else { LayerType::Linear };
    Ok((0..layers).map(of_layer).collect())
}
