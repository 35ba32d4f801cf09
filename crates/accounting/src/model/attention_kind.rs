//! The kind of each layer's attention.
//!
//! [`Sizes`](decoder::Sizes) counts the layers of each kind, and here they are placed as the families have them: layers of full attention
//! evenly, and each as the last of its group. Of L layers with f of full attention, layer i has it where `⌊(i + 1)·f/L⌋ > ⌊i·f/L⌋`: every fourth
//! of Qwen3.5, every second of gpt-oss, every sixth of Gemma 3. No sum over the layers depends on it; it decides only which layers
//! come before the first one that learns, and which one is the last.

use super::Decoder;

/// The kind of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionKind {
    /// Over all tokens before.
    Full,
    /// Over the last tokens.
    Windowed {
        /// Tokens that a token attends to, itself included.
        tokens: u64,
    },
    /// Linear attention.
    Linear,
}

impl Decoder {
    /// Returns the kind of a layer's attention. A model has windows or linear attention, not both.
    pub(crate) fn attention_of(&self, layer: u64) -> AttentionKind {
        let (other, count) = match (self.linear, self.windows) {
            (Some(linear), _) => (AttentionKind::Linear, linear.layers),
            (None, Some(windows)) => (AttentionKind::Windowed { tokens: windows.tokens }, windows.layers),
            (None, None) => return AttentionKind::Full,
        };
        let full = u128::from(self.layers - count);
        let groups = |layers: u128| layers * full / u128::from(self.layers);
        let layer = u128::from(layer);
        if groups(layer + 1) > groups(layer) { AttentionKind::Full } else { other }
    }

    /// Returns whether a layer has linear attention.
    pub fn is_linear(&self, layer: u64) -> bool {
        layer < self.layers && self.attention_of(layer) == AttentionKind::Linear
    }

    /// Returns the number of layers of each kind.
    pub(crate) fn attention_kinds(&self) -> Vec<(AttentionKind, u64)> {
        let (linear, windows) = (self.linear, self.windows.filter(|_| self.linear.is_none()));
        let of_linear = linear.map(|linear| (AttentionKind::Linear, linear.layers));
        let windowed =
            windows.map(|windows| (AttentionKind::Windowed { tokens: windows.tokens }, windows.layers));
        let others: u64 = of_linear.iter().chain(&windowed).map(|(_, layers)| layers).sum();
        let full = (AttentionKind::Full, self.layers - others);
        [Some(full), of_linear, windowed].into_iter().flatten().filter(|(_, layers)| *layers > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use decoder::{DecoderConfig, Family, LayerType, LinearAttention};

    use super::*;

    /// The rule places the layers as the files do.
    #[test]
    fn layers_are_where_the_families_have_them() {
        use LayerType::{Full, Linear, Sliding};
        let linear = LinearAttention { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 8, window: 4 };
        let pattern = |others: LayerType, of: usize| {
            (0..24).map(|layer| if (layer + 1) % of == 0 { Full } else { others }).collect::<Vec<_>>()
        };
        for (family, layer_types) in [
            (Family::Qwen35, pattern(Linear, 4)),
            (Family::GptOss, pattern(Sliding, 2)),
            (Family::Gemma3, pattern(Sliding, 6)),
        ] {
            let is_linear = layer_types.contains(&Linear);
            let config = DecoderConfig {
                family,
                layer_types,
                sliding_window: (!is_linear).then_some(8),
                linear_attention: is_linear.then_some(linear),
                ..DecoderConfig::llama(100, 32, 64, 24, 4)
            };
            let model = Decoder::from_config(&config).unwrap();
            let found = (0..24).map(|layer| match model.attention_of(layer) {
                AttentionKind::Full => Full,
                AttentionKind::Windowed { .. } => Sliding,
                AttentionKind::Linear => Linear,
            });
            assert_eq!(found.collect::<Vec<_>>(), config.layer_types, "{family:?}");
            let counts: u64 = model.attention_kinds().iter().map(|(_, layers)| layers).sum();
            assert_eq!(counts, 24);
        }
    }
}
