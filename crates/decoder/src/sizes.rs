//! The sizes of any decoder, the GPT-2s included. Parameters, FLOPs and bytes follow from them.

use crate::config::{DecoderConfig, LayerType};
use crate::family::Family;
use crate::tensors::{BiasOption, Width};

/// The sizes of a decoder.
///
/// ```
/// use decoder::{DecoderConfig, Sizes, Width};
///
/// let sizes: Sizes = DecoderConfig::qwen2(1000, 64, 128, 2, 4).sizes();
/// assert_eq!((sizes.layers, sizes.head_dim), (2, 16));
/// assert_eq!(sizes.width(Width::QueriesKeysValues), Some(3 * 64));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The family.
    pub family: Family,
    /// Rows of the embedding and of the output projection.
    pub vocabulary: u64,
    /// Positions that the model supports. A limit only if positions are learned.
    pub context: u64,
    /// Width of the embedding; other than `hidden` only in [`Family::Gpt2Like`].
    pub embedding: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Blocks.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key-value heads; fewer than `heads` is grouped-query attention.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Width of the feed-forward layer.
    pub feed_forward: u64,
    /// Whether the output projection is the embedding's matrix.
    pub tied: bool,
    /// `attention_bias` of the file, which some families read.
    pub attention_bias: bool,
    /// `mlp_bias` of the file, which some families read.
    pub mlp_bias: bool,
    /// Layers with experts in place of the MLP, if there are any.
    pub experts: Option<ExpertSizes>,
    /// Layers with linear attention, if there are any.
    pub linear: Option<LinearSizes>,
    /// Layers with a window, if there are any.
    pub windows: Option<WindowedLayers>,
    /// How layers differ in a Gemma 4.
    pub gemma4: Option<Gemma4Sizes>,
}

/// The layers of a Gemma 4: they attend in full or within the window, and the last *share* the keys and values of earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemma4Sizes {
    /// Number of layers that attend in full.
    pub full: u64,
    /// Width of their heads.
    pub head_dim: u64,
    /// Their key-value heads.
    pub kv_heads: u64,
    /// Whether they have no projection of values.
    pub keys_are_values: bool,
    /// Number of layers that share keys.
    pub shared: u64,
    /// Number of those that attend in full.
    pub shared_full: u64,
    /// Factor of the feed-forward width of layers that share keys: 1 or 2.
    pub shared_feed_forward: u64,
    /// Width of a layer's part of the second embedding; 0 without one.
    pub per_layer_input: u64,
    /// Rows of the second embedding.
    pub per_layer_vocabulary: u64,
}

/// Layers with a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    /// Number of these layers.
    pub layers: u64,
    /// Experts of such a layer.
    pub count: u64,
    /// Experts that compute a token.
    pub per_token: u64,
    /// Inner width of an expert.
    pub feed_forward: u64,
    /// Inner width of the expert that computes every token; 0 without one.
    pub shared: u64,
    /// Whether the router and the experts have biases.
    pub biases: bool,
}

/// Layers with linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearSizes {
    /// Number of these layers.
    pub layers: u64,
    /// Heads of queries and of keys.
    pub key_heads: u64,
    /// Heads of values, a multiple of `key_heads`.
    pub value_heads: u64,
    /// Width of a query and of a key.
    pub key: u64,
    /// Width of a value.
    pub value: u64,
    /// Tokens that the convolution reads.
    pub window: u64,
}

impl LinearSizes {
    /// Returns the channels of the convolution, those of queries, keys and values; `None` beyond 64 bits.
    pub fn channels(&self) -> Option<u64> {
        self.key_heads.checked_mul(self.key)?.checked_mul(2)?.checked_add(self.values()?)
    }

    /// Returns the width of all value heads together; `None` beyond 64 bits.
    pub fn values(&self) -> Option<u64> {
        self.value_heads.checked_mul(self.value)
    }
}

/// Layers in which a token attends only to the last tokens before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowedLayers {
    /// Number of these layers.
    pub layers: u64,
    /// Tokens that a token attends to, itself included.
    pub tokens: u64,
}

impl Sizes {
    /// Returns a width of a block; `None` for one beyond 64 bits.
    pub fn width(&self, width: Width) -> Option<u64> {
        let queries = || self.heads.checked_mul(self.head_dim);
        let keys = || self.kv_heads.checked_mul(self.head_dim);
        match width {
            Width::Hidden => Some(self.hidden),
            Width::Queries => queries(),
            Width::Keys => keys(),
            Width::QueriesKeysValues => queries()?.checked_add(keys()?.checked_mul(2)?),
            Width::FeedForward => Some(self.feed_forward),
            Width::GateUp => self.feed_forward.checked_mul(2),
            Width::QueriesGates => queries()?.checked_mul(2),
            Width::LinearChannels => self.linear.map_or(Some(0), |linear| linear.channels()),
            Width::LinearValues => self.linear.map_or(Some(0), |linear| linear.values()),
            Width::LinearHeads => Some(self.linear.map_or(0, |linear| linear.value_heads)),
        }
    }

    /// Returns whether projections with this option have a bias.
    pub fn has_bias(&self, option: BiasOption) -> bool {
        self.family.facts().has_bias(option, self.attention_bias, self.mlp_bias)
    }
}

impl DecoderConfig {
    /// Returns the sizes. A negative number counts as 0.
    pub fn sizes(&self) -> Sizes {
        let size = |size: i64| u64::try_from(size).unwrap_or(0);
        // Layers beyond the list have the window.
        let layers = size(self.num_hidden_layers);
        let listed = self.layer_types.iter().take(usize::try_from(layers).unwrap_or(usize::MAX));
        let full = listed.filter(|&&layer| layer != LayerType::Sliding).count() as u64;
        let windowed = layers.saturating_sub(full);
        let windows = self.sliding_window.filter(|_| windowed > 0);
        Sizes {
            family: self.family,
            vocabulary: size(self.vocab_size),
            context: size(self.max_position_embeddings),
            embedding: size(self.hidden_size),
            hidden: size(self.hidden_size),
            layers,
            heads: size(self.num_attention_heads),
            kv_heads: size(self.num_key_value_heads),
            head_dim: size(self.head_dim),
            feed_forward: size(self.intermediate_size),
            tied: self.tie_word_embeddings,
            attention_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            experts: self.mixture.as_ref().filter(|_| self.mixture_layers() > 0).map(|mixture| ExpertSizes {
                layers: self.mixture_layers() as u64,
                count: size(mixture.experts),
                per_token: size(mixture.per_token),
                feed_forward: size(mixture.intermediate_size),
                shared: size(mixture.shared.unwrap_or(0)),
                biases: mixture.clamped.is_some(),
            }),
            linear: self.linear_attention.filter(|_| self.linear_layers() > 0).map(|linear| LinearSizes {
                layers: self.linear_layers() as u64,
                key_heads: size(linear.key_heads),
                value_heads: size(linear.value_heads),
                key: size(linear.key_dim),
                value: size(linear.value_dim),
                window: size(linear.window),
            }),
            windows: windows.map(|tokens| WindowedLayers { layers: windowed, tokens: size(tokens) }),
            gemma4: self.gemma4.map(|gemma4| {
                let types = self.layer_types.iter().take(usize::try_from(layers).unwrap_or(usize::MAX));
                let first = self.first_shared_layer();
                let in_full = |types: &mut dyn Iterator<Item = &LayerType>| {
                    types.filter(|&&layer| layer == LayerType::Full).count() as u64
                };
                Gemma4Sizes {
                    full: in_full(&mut types.clone()),
                    head_dim: size(gemma4.global_head_dim),
                    kv_heads: size(gemma4.global_kv_heads),
                    keys_are_values: gemma4.keys_are_values,
                    shared: size(gemma4.shared_layers).min(layers),
                    shared_full: in_full(&mut types.clone().skip(first)),
                    shared_feed_forward: if gemma4.doubles_mlp { 2 } else { 1 },
                    per_layer_input: size(gemma4.per_layer_input),
                    per_layer_vocabulary: size(gemma4.per_layer_vocabulary),
                }
            }),
        }
    }

    /// Returns whether projections with this option have a bias.
    pub fn has_bias(&self, option: BiasOption) -> bool {
        self.family.facts().has_bias(option, self.attention_bias, self.mlp_bias)
    }
}
