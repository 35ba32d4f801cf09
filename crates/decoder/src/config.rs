//! The configuration of a decoder, as in `config.json`.

mod file;
mod gemma4;
mod layers;
mod linear_attention;
mod mixture;
mod nested;
mod rope_file;
mod sizes_file;
mod window_file;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use serde_json::{Map, Value};

pub use gemma4::Gemma4;
pub use layers::{LayerType, LongRope};
pub use linear_attention::LinearAttention;
pub use mixture::{ClampedSwiglu, Mixture};
pub use nested::text_config;
pub use rope_file::{RopeFields, RopeSpellings};

use crate::error::{Error, Result};
use crate::family::Family;
use crate::rope::Frequencies;
use crate::strict_json;
use file::HuggingFace;

const WHAT: &str = "decoder";

/// Maximum number of positions: beyond all published models (10 485 760, Llama 4 Scout).
const MAX_POSITIONS: i64 = 1 << 24;
/// Maximum number of layers: ten times that of the deepest models.
const MAX_LAYERS: i64 = 1 << 12;
/// Maximum width of a head, and maximum number of heads.
const MAX_HEADS: i64 = 1 << 16;
/// Maximum vocabulary and width of a layer. Products of two, and their bytes, are far below 2⁶³.
const MAX_SIZE: i64 = 1 << 28;

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionPath {
    /// Scores, softmax and products as separate tensors: the textbook form, and the oracle of the others.
    Explicit,
    /// libtorch's attention with a mask that each forward builds and converts to the scores' dtype.
    DenseMask,
    /// Allocates nothing of size `t²`.
    #[default]
    Fused,
}

/// Sizes and options of a decoder with rotary positions, RMS norms and a gated MLP. Serde reads and writes Hugging Face's `config.json`
/// (`serde_json::from_str`), in the older form (`rope_theta`, `rope_scaling`) and in transformers 5's (`rope_parameters`);
/// missing fields have transformers' defaults, and fields that no computation depends on are kept for writing
/// ([`DecoderConfig::other_fields`]). Unsupported options (another activation, other scalings of the rotary embedding) are refused by
/// name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "HuggingFace", into = "HuggingFace")]
pub struct DecoderConfig {
    /// The family.
    pub family: Family,
    /// Vocabulary size.
    pub vocab_size: i64,
    /// Width of the residual stream.
    pub hidden_size: i64,
    /// Inner width of the MLP.
    pub intermediate_size: i64,
    /// Number of blocks.
    pub num_hidden_layers: i64,
    /// Number of query heads.
    pub num_attention_heads: i64,
    /// Number of key and value heads; they divide the query heads.
    pub num_key_value_heads: i64,
    /// Width of a head, even.
    pub head_dim: i64,
    /// Maximum sequence length.
    pub max_position_embeddings: i64,
    /// Added to the mean square.
    pub rms_norm_eps: f64,
    /// Frequencies of the rotary embedding.
    pub rope: Frequencies,
    /// Whether the head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Whether the four attention projections have biases. Qwen2 always has them on queries, keys and values; Mistral and Phi-3
    /// never have any.
    pub attention_bias: bool,
    /// Whether the three projections of the MLP have biases, in Llama, SmolLM3 and Granite.
    pub mlp_bias: bool,
    /// Dropout probability of attention weights in training.
    pub attention_dropout: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Tokens that a token attends to in layers with a window, itself included.
    pub sliding_window: Option<i64>,
    /// The layers with a window or with linear attention; empty for all with a window, if there is one.
    pub layer_types: Vec<LayerType>,
    /// Whether each layer rotates queries and keys; empty if all do.
    pub rotary_layers: Vec<bool>,
    /// Frequencies of the layers with a window, if they have their own.
    pub local_rope: Option<Frequencies>,
    /// Factors of each frequency by the length of rows.
    pub long_rope: Option<LongRope>,
    /// Part of each head that rotates, its first columns.
    pub partial_rotary_factor: f64,
    /// Factor of the embedding's rows. A Gemma also multiplies by √hidden, rounded to the weights' dtype.
    pub embedding_multiplier: f64,
    /// Factor of the attention scores, instead of 1/√head.
    pub attention_multiplier: Option<f64>,
    /// s of a factor 1/√s of the attention scores, instead of 1/√head.
    pub query_pre_attn_scalar: Option<f64>,
    /// Factor of the outputs of attention and MLP before they are added to the residual stream.
    pub residual_multiplier: f64,
    /// Divides the logits.
    pub logits_scaling: f64,
    /// c of c·tanh(s/c), to which attention scores are limited.
    pub attn_logit_softcapping: Option<f64>,
    /// The same of logits, after their division.
    pub final_logit_softcapping: Option<f64>,
    /// The experts of the layers that have some.
    pub mixture: Option<Mixture>,
    /// The sizes of the layers with linear attention, in a family that has some.
    pub linear_attention: Option<LinearAttention>,
    /// How layers differ, in a Gemma 4.
    pub gemma4: Option<Gemma4>,
    /// How attention is computed. Not in the file.
    pub attention: AttentionPath,
    /// The file's other fields, which are written again: tokens, versions, options of other programs.
    pub other_fields: Map<String, Value>,
}

impl DecoderConfig {
    /// Returns a Llama of these sizes with heads that fill the width, as many key heads as query heads, 2048 positions, and
    /// Llama 2's options; change others by field update syntax.
    pub fn llama(vocab_size: i64, hidden_size: i64, intermediate_size: i64, layers: i64, heads: i64) -> Self {
        Self {
            family: Family::Llama,
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: hidden_size / heads.max(1),
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            rope: Frequencies::default(),
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            initializer_range: 0.02,
            sliding_window: None,
            layer_types: Vec::new(),
            rotary_layers: Vec::new(),
            local_rope: None,
            long_rope: None,
            partial_rotary_factor: 1.0,
            embedding_multiplier: 1.0,
            attention_multiplier: None,
            query_pre_attn_scalar: None,
            residual_multiplier: 1.0,
            logits_scaling: 1.0,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            mixture: None,
            linear_attention: None,
            gemma4: None,
            attention: AttentionPath::Fused,
            other_fields: Map::new(),
        }
    }

    /// Returns a Qwen2 of these sizes: biases on queries, keys and values, a tied head, theta 10⁶.
    pub fn qwen2(vocab_size: i64, hidden_size: i64, intermediate_size: i64, layers: i64, heads: i64) -> Self {
        Self {
            family: Family::Qwen2,
            tie_word_embeddings: true,
            rope: Frequencies { theta: 1e6, ..Frequencies::default() },
            ..Self::llama(vocab_size, hidden_size, intermediate_size, layers, heads)
        }
    }

    /// Reads a `config.json`. Of a model that also reads images, that of its text model, `text_config`.
    ///
    /// # Errors
    /// [`Error::File`] with the path: a missing file, invalid JSON, another architecture, an unknown option.
    pub fn read(path: &Path) -> Result<Self> {
        let file = |reason: String| Error::File { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|cause| file(cause.to_string()))?;
        strict_json::from_str(&text_config(&text)).map_err(|cause| match cause.classify() {
            Category::Syntax | Category::Eof => {
                file(format!("not JSON ({cause}); copy or download it again"))
            }
            Category::Io | Category::Data => file(cause.to_string()),
        })
    }

    /// Reads a `config.json` for its sizes alone: options that no size depends on, such as the scaling of the rotary embedding or the
    /// activation, are ignored, so they may be of a kind that is not supported otherwise.
    ///
    /// # Errors
    /// As serde; invalid JSON with its place.
    pub fn sizes_from_str(text: &str) -> Result<Self, serde_json::Error> {
        let mut file: HuggingFace = strict_json::from_str(&text_config(text))?;
        file.keep_sizes();
        file.try_into().map_err(serde::de::Error::custom)
    }

    /// Refuses invalid sizes and numbers outside their bounds, by the file's field names.
    ///
    /// # Errors
    /// [`Error::Config`] with the first of them.
    pub fn check(&self) -> Result<()> {
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        for (name, size, largest) in [
            ("vocab_size", self.vocab_size, MAX_SIZE),
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, MAX_HEADS),
            ("num_key_value_heads", self.num_key_value_heads, MAX_HEADS),
            ("head_dim", self.head_dim, MAX_HEADS),
            ("max_position_embeddings", self.max_position_embeddings, MAX_POSITIONS),
        ] {
            if size < 1 {
                return config(format!("`{name}` is {size}; expected at least 1"));
            }
            if size > largest {
                return config(format!("`{name}` is {size}; expected at most {largest}"));
            }
        }
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            return config(format!(
                "`num_key_value_heads` {} does not divide `num_attention_heads` {}; take a divisor",
                self.num_key_value_heads, self.num_attention_heads
            ));
        }
        if self.head_dim % 2 != 0 {
            return config(format!(
                "`head_dim` is {}; expected an even width, since its halves rotate with each other",
                self.head_dim
            ));
        }
        if !(0.0..1.0).contains(&self.attention_dropout) {
            return config(format!(
                "`attention_dropout` is {}; expected a probability in [0, 1)",
                self.attention_dropout
            ));
        }
        for (name, number, range) in [
            ("rms_norm_eps", self.rms_norm_eps, 0.0..=1.0),
            ("initializer_range", self.initializer_range, 0.0..=1e3),
            // From 1 on no pair rotates by more than 1 rad from one position to the next.
            ("rope_theta", self.rope.theta, 1.0..=1e18),
            ("rope_theta", self.local_rope.map_or(1.0, |rope| rope.theta), 1.0..=1e18),
        ] {
            if !range.contains(&number) {
                let (from, to) = range.into_inner();
                return config(format!("`{name}` is {number:?}; expected a number from {from} to {to:?}"));
            }
        }
        self.check_layers()?;
        self.check_mixture()?;
        self.check_linear()?;
        self.check_gemma4()?;
        for (rope, width) in self.rotations() {
            if let Err(cause) = rope.angles(width) {
                return config(format!("the scaling of the rotary embedding: {cause}"));
            }
        }
        Ok(())
    }
}
