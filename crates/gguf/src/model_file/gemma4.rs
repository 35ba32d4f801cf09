//! `config.json` of a Gemma 4: the inverse of `model::keys` for the sizes by which its layers differ.

use serde_json::{Value as Json, json};

use super::config::Tensors;
use super::metadata::{Metadata, integers, missing};
use crate::error::{Result, file_error, unsupported};
use crate::model::UNROTATED;
use crate::value::{Array, Value};

/// The sizes of the layers.
pub(super) struct Layers {
    /// Whether each has a window.
    sliding: Vec<bool>,
    /// Width of the feed-forward layer where keys are not shared.
    pub(super) feed_forward: u64,
    /// Key-value heads of layers with a window.
    pub(super) kv_heads: u64,
    /// Width of their heads.
    pub(super) head_dim: u64,
    full_kv_heads: u64,
    full_head_dim: u64,
    shared: u64,
    doubles: bool,
}

impl Layers {
    /// Reads the sizes of `layers` layers.
    ///
    /// # Errors
    /// Missing keys; sizes that differ otherwise than in a Gemma 4.
    pub(super) fn read(metadata: &Metadata<'_>, layers: u64, heads: u64) -> Result<Self> {
        let pattern = metadata.get("attention.sliding_window_pattern");
        let Some(Value::Array(Array::Bool(sliding))) = pattern else {
            let key = format!("{}.attention.sliding_window_pattern", metadata.architecture);
            return Err(missing(metadata.path, &key, "true and false for each layer"));
        };
        let shared = metadata.optional_size("attention.shared_kv_layers")?.unwrap_or(0);
        let first = layers.saturating_sub(shared);
        if sliding.len() as u64 != layers || shared >= layers {
            return Err(file_error(
                metadata.path,
                format!(
                    "its layers are {layers}, {} in the pattern of windows, and {shared} share keys; get the file again",
                    sliding.len()
                ),
            ));
        }
        let list = |key: &str| -> Result<Option<Vec<u64>>> {
            let Some(value) = metadata.get(key) else { return Ok(None) };
            let numbers = integers(value).unwrap_or_default();
            match numbers.len() as u64 {
                1 => Ok(Some(vec![numbers[0]; sliding.len()])),
                count if count == layers => Ok(Some(numbers)),
                _ => Err(missing(
                    metadata.path,
                    &format!("{}.{key}", metadata.architecture),
                    "a number, or one for each layer",
                )),
            }
        };
        // The one number of all layers of a kind.
        let of_kind = |numbers: &[u64], key: &str, is_of: &dyn Fn(usize) -> bool| -> Result<Option<u64>> {
            let mut of =
                numbers.iter().enumerate().filter(|(layer, _)| is_of(*layer)).map(|(_, number)| *number);
            let first = of.next();
            if of.all(|number| Some(number) == first) {
                return Ok(first);
            }
            Err(unsupported(
                format!("`{}.{key}`", metadata.architecture),
                format!("{numbers:?}"),
                "layers of one kind with different sizes cannot be read",
            ))
        };
        const FEED_FORWARD: &str = "feed_forward_length";
        const KV_HEADS: &str = "attention.head_count_kv";
        let widths = list(FEED_FORWARD)?.ok_or_else(|| {
            missing(
                metadata.path,
                &format!("{}.{FEED_FORWARD}", metadata.architecture),
                "a width for each layer",
            )
        })?;
        let shares = |layer: usize| layer as u64 >= first;
        let own = of_kind(&widths, FEED_FORWARD, &|layer| !shares(layer))?.unwrap_or(0);
        let of_shared = of_kind(&widths, FEED_FORWARD, &shares)?.unwrap_or(own);
        if of_shared != own && Some(of_shared) != own.checked_mul(2) {
            return Err(unsupported(
                format!("`{}.{FEED_FORWARD}`", metadata.architecture),
                format!("{own} and {of_shared}"),
                "layers that share keys have the same width or twice as much",
            ));
        }
        let kv_heads = list(KV_HEADS)?.unwrap_or_else(|| vec![heads; sliding.len()]);
        let of_full = of_kind(&kv_heads, KV_HEADS, &|layer| !sliding[layer])?;
        let of_sliding = of_kind(&kv_heads, KV_HEADS, &|layer| sliding[layer])?;
        let full_head_dim = metadata.size("attention.key_length")?;
        Ok(Self {
            feed_forward: own,
            kv_heads: of_sliding.or(of_full).unwrap_or(heads),
            head_dim: metadata.optional_size("attention.key_length_swa")?.unwrap_or(full_head_dim),
            full_kv_heads: of_full.or(of_sliding).unwrap_or(heads),
            full_head_dim,
            shared,
            doubles: of_shared != own,
            sliding: sliding.clone(),
        })
    }

    /// Returns the fields of `config.json` that other families do not have.
    ///
    /// # Errors
    /// A rotary embedding that no Gemma 4 has.
    pub(super) fn fields(
        &self,
        metadata: &Metadata<'_>,
        tensors: &dyn Tensors,
        vocabulary: u64,
    ) -> Result<Vec<(&'static str, Json)>> {
        let types =
            self.sliding.iter().map(|sliding| if *sliding { "sliding_attention" } else { "full_attention" });
        let has_values = |layer: usize| tensors.shape(&format!("blk.{layer}.attn_v.weight")).is_some();
        let first = self.sliding.len().saturating_sub(usize::try_from(self.shared).unwrap_or(0));
        let keys_are_values = (0..first).any(|layer| !self.sliding[layer] && !has_values(layer));
        let of_layer = json!({ "head_dim": self.full_head_dim, "num_key_value_heads": self.full_kv_heads });
        let full = (0..self.sliding.len()).filter(|layer| !self.sliding[*layer]);
        let by_layer: serde_json::Map<String, Json> =
            full.map(|layer| (layer.to_string(), of_layer.clone())).collect();
        // As in files: the heads of layers that attend in full are their own only where values are keys.
        let global_heads =
            (keys_are_values && self.full_kv_heads != self.kv_heads).then_some(self.full_kv_heads);
        Ok(vec![
            ("layer_types", types.collect::<Vec<_>>().into()),
            ("global_head_dim", self.full_head_dim.into()),
            ("num_global_key_value_heads", global_heads.into()),
            ("per_layer_config", by_layer.into()),
            ("attention_k_eq_v", keys_are_values.into()),
            ("num_kv_shared_layers", self.shared.into()),
            ("use_double_wide_mlp", self.doubles.into()),
            (
                "hidden_size_per_layer_input",
                metadata.optional_size("embedding_length_per_layer_input")?.unwrap_or(0).into(),
            ),
            ("vocab_size_per_layer_input", vocabulary.into()),
            ("rope_parameters", self.rope(metadata, tensors)?),
        ])
    }

    /// The rotary embeddings of both kinds of layers.
    fn rope(&self, metadata: &Metadata<'_>, tensors: &dyn Tensors) -> Result<Json> {
        let base = |key: &str, default: f64| Ok(metadata.optional_float(key)?.unwrap_or(default));
        let (full, local) = (base("rope.freq_base", 1e6)?, base("rope.freq_base_swa", 1e4)?);
        let divisors = tensors.vector("rope_freqs.weight")?.unwrap_or_default();
        let rotated = divisors.iter().take_while(|divisor| **divisor < UNROTATED).count();
        let factor = divisors.first().copied().unwrap_or(1.0);
        let is_known = divisors.len() as u64 == self.full_head_dim / 2
            && rotated > 0
            && divisors[..rotated].iter().all(|divisor| *divisor == factor)
            && divisors[rotated..].iter().all(|divisor| *divisor >= UNROTATED);
        if !is_known && !divisors.is_empty() {
            return Err(unsupported(
                format!("`rope_freqs.weight` of {}", metadata.path.display()),
                format!("{} divisors, {rotated} of them below 1e30", divisors.len()),
                "one divisor for the first pairs of a head, and 1e30 for the others can be read",
            ));
        }
        let share = if divisors.is_empty() { 1.0 } else { rotated as f64 / divisors.len() as f64 };
        let mut of_full = json!({
            "rope_type": "proportional", "rope_theta": full, "partial_rotary_factor": share,
        });
        if factor != 1.0 {
            of_full["factor"] = f64::from(factor).into();
        }
        Ok(json!({
            "full_attention": of_full,
            "sliding_attention": { "rope_type": "default", "rope_theta": local },
        }))
    }
}
