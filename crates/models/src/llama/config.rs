//! What a `config.json` says of a Llama or a Qwen2.

mod file;

use std::path::Path;

use runtime::fused::rope::Frequencies;
use serde::{Deserialize, Serialize};

use crate::attention::AttentionPath;
use crate::error::{Error, Result};
use crate::strict_json;
use file::HuggingFace;

const WHAT: &str = "Llama or Qwen2";

/// The most positions of a row: beyond all published models (10 485 760, Llama 4 Scout).
const MOST_POSITIONS: i64 = 1 << 24;
/// The most layers, ten times those of the deepest models.
const MOST_LAYERS: i64 = 1 << 12;
/// The widest head, and the most heads.
const MOST_OF_HEADS: i64 = 1 << 16;
/// The most tokens and the widest layer. Products of two, and their bytes, are far below 2⁶³.
const LARGEST_SIZE: i64 = 1 << 28;

/// Whose configuration it is: `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
}

impl Family {
    /// Both of them.
    const ALL: [Self; 2] = [Self::Llama, Self::Qwen2];

    /// As `model_type` names it.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        }
    }

    /// As `architectures` names it.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
        }
    }
}

/// Sizes and options of a [`Llama`](super::Llama). Reads and writes Hugging Face's `config.json` through serde
/// (`serde_json::from_str`), both the older form (`rope_theta`, `rope_scaling`) and transformers 5's (`rope_parameters`); what
/// the file leaves out is as transformers has it. What cannot be computed here (another activation, a sliding window, another
/// scaling of the rotary embedding) is refused by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "HuggingFace", into = "HuggingFace")]
pub struct LlamaConfig {
    /// Llama or Qwen2.
    pub family: Family,
    /// Number of tokens.
    pub vocab_size: i64,
    /// Width.
    pub hidden_size: i64,
    /// Width within the MLP.
    pub intermediate_size: i64,
    /// Number of blocks.
    pub num_hidden_layers: i64,
    /// Heads of the queries.
    pub num_attention_heads: i64,
    /// Heads of keys and values; they divide those of the queries.
    pub num_key_value_heads: i64,
    /// Width of a head, even.
    pub head_dim: i64,
    /// The longest row.
    pub max_position_embeddings: i64,
    /// Added to the mean square.
    pub rms_norm_eps: f64,
    /// How the heads turn with their places.
    pub rope: Frequencies,
    /// Whether the head's weights are the embedding's.
    pub tie_word_embeddings: bool,
    /// Whether a Llama's four projections of attention have biases. A Qwen2 has them on queries, keys and values always.
    pub attention_bias: bool,
    /// Whether the three projections of a Llama's MLP have them.
    pub mlp_bias: bool,
    /// Probability that an attention weight is dropped in training.
    pub attention_dropout: f64,
    /// Standard deviation of first weights.
    pub initializer_range: f64,
    /// How attention is computed. Not in the file.
    pub attention: AttentionPath,
}

impl LlamaConfig {
    /// A Llama of these sizes with heads that fill the width, as many of keys as of queries, rows of 2048, and Llama 2's
    /// options; take others by field update.
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
            attention: AttentionPath::Fused,
        }
    }

    /// The same as a Qwen2: biases on queries, keys and values, a tied head, theta 10⁶.
    pub fn qwen2(vocab_size: i64, hidden_size: i64, intermediate_size: i64, layers: i64, heads: i64) -> Self {
        Self {
            family: Family::Qwen2,
            tie_word_embeddings: true,
            rope: Frequencies { theta: 1e6, ..Frequencies::default() },
            ..Self::llama(vocab_size, hidden_size, intermediate_size, layers, heads)
        }
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`Error::File`] with the path: a file that is not there, no JSON, another architecture, an option that is not known.
    pub fn read(path: &Path) -> Result<Self> {
        let file = |reason: String| Error::File { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|cause| file(cause.to_string()))?;
        strict_json::from_str(&text).map_err(|cause| file(cause.to_string()))
    }

    /// Whether queries, keys and values have biases.
    pub fn qkv_bias(&self) -> bool {
        self.family == Family::Qwen2 || self.attention_bias
    }

    /// Whether the projection after attention has one.
    pub fn output_bias(&self) -> bool {
        self.family == Family::Llama && self.attention_bias
    }

    /// Refuses sizes that make no model, and numbers outside their bounds: by the names that the file has for them.
    pub(super) fn check(&self) -> Result<()> {
        let config = |reason: String| Err(Error::Config { what: WHAT, reason });
        for (name, size, largest) in [
            ("vocab_size", self.vocab_size, LARGEST_SIZE),
            ("hidden_size", self.hidden_size, LARGEST_SIZE),
            ("intermediate_size", self.intermediate_size, LARGEST_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, MOST_LAYERS),
            ("num_attention_heads", self.num_attention_heads, MOST_OF_HEADS),
            ("num_key_value_heads", self.num_key_value_heads, MOST_OF_HEADS),
            ("head_dim", self.head_dim, MOST_OF_HEADS),
            ("max_position_embeddings", self.max_position_embeddings, MOST_POSITIONS),
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
            // From 1 on no pair turns by more than 1 rad from one position to the next.
            ("rope_theta", self.rope.theta, 1.0..=1e18),
        ] {
            if !range.contains(&number) {
                let (from, to) = range.into_inner();
                return config(format!("`{name}` is {number:?}; expected a number from {from} to {to:?}"));
            }
        }
        match self.rope.angles(self.head_dim) {
            Err(cause) => config(format!("the positions' scaling: {cause}")),
            Ok(_) => Ok(()),
        }
    }
}
