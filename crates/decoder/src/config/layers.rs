//! Differences between layers: windows and rotary embeddings.

use super::{DecoderConfig, WHAT};
use crate::error::{Error, Result};
use crate::rope::Frequencies;

/// The tokens that a layer attends to: an entry of `layer_types`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// Every token before.
    Full,
    /// The tokens within [`DecoderConfig::sliding_window`].
    Sliding,
    /// Every token before, through the state of [`LinearAttention`](super::LinearAttention).
    Linear,
}

impl LayerType {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
            Self::Linear => "linear_attention",
        }
    }

    pub(super) fn from_name(name: &str) -> Result<Self> {
        [Self::Full, Self::Sliding, Self::Linear].into_iter().find(|kind| kind.name() == name).ok_or_else(
            || {
                let reason = format!(
                    "`layer_types` has a `{name}` layer; expected {}, {} or {}",
                    Self::Full.name(),
                    Self::Sliding.name(),
                    Self::Linear.name()
                );
                Error::Config { what: WHAT, reason }
            },
        )
    }
}

/// Phi-3's `longrope` (Ding et al., arXiv:2402.13753): every pair's frequency is divided by its own factor, by one list for rows of at
/// most `original_positions` and by another for longer ones, and cosines and sines are multiplied by
/// [`LongRope::amplitude`]. As in transformers, the largest position of a batch decides for all of its rows: the loss of a row of at most
/// `original_positions` depends on whether a longer one is in its batch. One row in each batch has its own factors.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// Factors of rows of at most `original_positions`.
    pub short_factor: Vec<f64>,
    /// Factors of longer rows.
    pub long_factor: Vec<f64>,
    /// The longest row of the training.
    pub original_positions: i64,
    /// `attention_factor`: the amplitude, if the file gives it.
    pub attention_factor: Option<f64>,
    /// `factor`: the ratio that the amplitude follows from, if the file gives it; else that of maximum and original positions.
    pub factor: Option<f64>,
}

impl LongRope {
    /// Returns the factor of cosines and sines of a model for rows of `positions`: √(1 + ln s / ln original) with s = positions/original.
    pub fn amplitude(&self, positions: i64) -> f64 {
        let original = self.original_positions as f64;
        let factor = self.factor.unwrap_or(positions as f64 / original);
        self.attention_factor
            .unwrap_or_else(|| if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() })
    }
}

impl DecoderConfig {
    /// Returns the window of a layer: the number of tokens that a token attends to, itself included; `None` for all before.
    pub fn window(&self, layer: usize) -> Option<i64> {
        match self.layer_types.get(layer) {
            Some(LayerType::Full | LayerType::Linear) => None,
            Some(LayerType::Sliding) | None => self.sliding_window,
        }
    }

    /// Returns the frequencies of a layer's rotary embedding; `None` for a layer without.
    pub fn layer_rope(&self, layer: usize) -> Option<&Frequencies> {
        let local = self.local_rope.as_ref().filter(|_| self.window(layer).is_some());
        let rotates = self.rotary_layers.get(layer).copied().unwrap_or(true);
        rotates.then(|| local.unwrap_or(&self.rope))
    }

    /// Returns the number of a head's columns that rotate.
    pub fn rotary_dim(&self) -> i64 {
        (self.head_dim as f64 * self.partial_rotary_factor) as i64
    }

    /// Returns the factor of the attention scores; `None` for 1/√head.
    pub fn attention_scale(&self) -> Option<f64> {
        self.attention_multiplier.or_else(|| self.query_pre_attn_scalar.map(|scalar| scalar.powf(-0.5)))
    }

    /// Refuses invalid windows, layers, factors and caps.
    pub(super) fn check_layers(&self) -> Result<()> {
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        let layers = usize::try_from(self.num_hidden_layers).unwrap_or(0);
        for (name, length) in
            [("layer_types", self.layer_types.len()), ("no_rope_layers", self.rotary_layers.len())]
        {
            if length > 0 && length < layers {
                return config(format!(
                    "`{name}` has {length} entries for {layers} layers; give each layer one"
                ));
            }
        }
        if let Some(window) = self.sliding_window.filter(|&window| window < 1) {
            return config(format!(
                "`sliding_window` is {window}; expected at least 1, or null for no window"
            ));
        }
        if self.sliding_window.is_none() && self.layer_types.contains(&LayerType::Sliding) {
            return config(
                "`layer_types` has sliding_attention layers without a `sliding_window`; give its tokens"
                    .to_owned(),
            );
        }
        for (name, number) in [
            ("embedding_multiplier", Some(self.embedding_multiplier)),
            ("attention_multiplier", self.attention_multiplier),
            ("residual_multiplier", Some(self.residual_multiplier)),
            ("logits_scaling", Some(self.logits_scaling)),
            ("query_pre_attn_scalar", self.query_pre_attn_scalar),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ] {
            if let Some(number) = number.filter(|number| !(1e-9..=1e9).contains(number)) {
                return config(format!("`{name}` is {number:?}; expected a number from 1e-9 to 1e9"));
            }
        }
        let rotary = self.rotary_dim();
        if !(2..=self.head_dim).contains(&rotary) || rotary % 2 != 0 {
            return config(format!(
                "`partial_rotary_factor` {:?} rotates {rotary} of a head's {} columns; expected an even number from 2 on",
                self.partial_rotary_factor, self.head_dim
            ));
        }
        if let Some(long) = &self.long_rope {
            for (name, factors) in [("short_factor", &long.short_factor), ("long_factor", &long.long_factor)]
            {
                if factors.len() as i64 != rotary / 2 {
                    return config(format!(
                        "`{name}` has {} numbers; expected {}, one for each pair",
                        factors.len(),
                        rotary / 2
                    ));
                }
                if let Some(factor) = factors.iter().find(|factor| !(1e-6..=1e6).contains(*factor)) {
                    return config(format!("`{name}` has {factor:?}; expected numbers from 1e-6 to 1e6"));
                }
            }
            let amplitude = long.amplitude(self.max_position_embeddings);
            if long.original_positions < 2 || !(1e-3..=1e3).contains(&amplitude) {
                return config(format!(
                    "longrope has {} original positions and multiplies cosines by {amplitude:?}; expected at least 2 positions \
                     and a factor from 0.001 to 1000",
                    long.original_positions
                ));
            }
        }
        Ok(())
    }
}
