//! The structure of a decoder: its sizes, matrix products and parameters.
//!
//! The families differ in their blocks (`d` hidden, `h` heads, `n` key-value heads, `k` size of a
//! head, `f` feed-forward, `v` vocabulary):
//!
//! | family | attention | feed-forward | norm | positions |
//! |---|---|---|---|---|
//! | [`Gpt2`](Family::Gpt2) | one `d → 3d` with bias | `d → f → d` with biases, GELU | LayerNorm | learned |
//! | [`Gpt2Like`](Family::Gpt2Like) | `torch.nn.TransformerDecoderLayer`: two of them | `d → f → d` with biases | LayerNorm × 3 | sinusoids |
//! | [`Qwen2`](Family::Qwen2) | `d → hk`, `d → nk` × 2 with biases | SwiGLU `3 · d · f` | RMSNorm | rotary |
//! | [`Llama`](Family::Llama), [`Mistral`](Family::Mistral), [`SmolLm3`](Family::SmolLm3), [`Granite`](Family::Granite) | the same, without biases | SwiGLU `3 · d · f` | RMSNorm | rotary |
//! | [`Qwen3`](Family::Qwen3) | the same, queries and keys normalised per head | SwiGLU `3 · d · f` | RMSNorm | rotary |
//! | [`Olmo2`](Family::Olmo2) | the same, queries and keys normalised as a whole | SwiGLU `3 · d · f` | RMSNorm after each branch | rotary |
//! | [`Phi3`](Family::Phi3) | one `d → hk + 2nk` | SwiGLU, `d → 2f` and `f → d` | RMSNorm | rotary |
//! | [`Gemma3`](Family::Gemma3) ([`Gemma2`](Family::Gemma2)) | as Qwen3 (Llama) | GELU-gated, `3 · d · f` | RMSNorm × 4 | rotary |
//!
//! The "transformer accounting" of CS336 (assignment 1) is the Llama family with untied embeddings and GPT-2's sizes.
//!
//! ```
//! let model = accounting::presets::find("qwen2.5-0.5b")?;
//! assert_eq!(model.parameters()?, 494_032_768);
//! # Ok::<(), accounting::Error>(())
//! ```

use std::ops::Deref;

use crate::exact::positive;
use crate::{Error, exact};

use decoder::{AttentionBias, BiasOption, DecoderConfig, Projection, QueryKeyNorm, Width};

pub use decoder::Family;

/// The sizes of a decoder. [`Decoder::new`] checks that they are consistent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The kind of decoder.
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
    /// Whether the four attention projections have biases; the GPT-2s, Qwen2, Mistral and Phi-3 decide this themselves.
    pub attention_bias: bool,
    /// Whether the three feed-forward projections of Llama, SmolLM3 and Granite have biases; the others decide this themselves.
    pub mlp_bias: bool,
}

/// Layers in which a token attends only to the last tokens before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Number of these layers.
    pub layers: u64,
    /// Tokens that a token attends to, itself included.
    pub tokens: u64,
}

/// A decoder with consistent sizes whose parameters can be counted in 64 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoder {
    shape: Shape,
    windows: Option<Windows>,
}

impl Deref for Decoder {
    type Target = Shape;

    fn deref(&self) -> &Shape {
        &self.shape
    }
}

impl Decoder {
    /// Checks `shape`: every size is at least 1, key-value heads divide heads, the family supports the options, and the
    /// parameters can be counted.
    pub fn new(shape: Shape) -> Result<Self, Error> {
        let sizes = [
            ("vocabulary", shape.vocabulary),
            ("context", shape.context),
            ("embedding", shape.embedding),
            ("hidden", shape.hidden),
            ("layers", shape.layers),
            ("heads", shape.heads),
            ("kv-heads", shape.kv_heads),
            ("head-dim", shape.head_dim),
            ("feed-forward", shape.feed_forward),
        ];
        for (what, value) in sizes {
            positive(what, value)?;
        }
        let Shape { family, heads, kv_heads, hidden, head_dim, embedding, .. } = shape;
        let wrong = |what: String, remedy: String| Err(Error::Shape { what, remedy });
        if !heads.is_multiple_of(kv_heads) {
            return wrong(
                format!("{heads} heads are not a multiple of {kv_heads} key-value heads"),
                "give key-value heads that divide the heads".into(),
            );
        }
        if !family.is_rotary() {
            if kv_heads != heads {
                return wrong(
                    format!("{} has {kv_heads} key-value heads for {heads} heads", family.model_type()),
                    "give as many key-value heads as heads, or the family qwen2 or llama".into(),
                );
            }
            if heads.checked_mul(head_dim) != Some(hidden) {
                return wrong(
                    format!(
                        "{} has {heads} heads of {head_dim} in a hidden size of {hidden}",
                        family.model_type()
                    ),
                    "give a hidden size of heads × head-dim".into(),
                );
            }
        }
        if embedding != hidden && family != Family::Gpt2Like {
            return wrong(
                format!("the embedding is {embedding} wide and the hidden size is {hidden}"),
                "give them the same width, or the family gpt2-like".into(),
            );
        }
        if shape.tied && family == Family::Gpt2Like {
            return wrong(
                "gpt2-like cannot tie its output projection, which has another input than the embedding"
                    .into(),
                "give it untied embeddings".into(),
            );
        }
        let model = Self { shape, windows: None };
        model.parameters()?;
        Ok(model)
    }

    /// Returns the decoder of a configuration.
    ///
    /// ```
    /// use accounting::Decoder;
    /// use decoder::DecoderConfig;
    ///
    /// let config = DecoderConfig::qwen2(1000, 64, 128, 2, 4);
    /// assert_eq!(Decoder::of(&config)?.parameters()?, config.parameter_count());
    /// # Ok::<(), accounting::Error>(())
    /// ```
    ///
    /// # Errors
    /// A size below 1; sizes that contradict each other.
    pub fn of(config: &DecoderConfig) -> Result<Self, Error> {
        // A negative size is refused as 0 is.
        let size = |size: i64| u64::try_from(size).unwrap_or(0);
        let model = Self::new(Shape {
            family: config.family,
            vocabulary: size(config.vocab_size),
            context: size(config.max_position_embeddings),
            embedding: size(config.hidden_size),
            hidden: size(config.hidden_size),
            layers: size(config.num_hidden_layers),
            heads: size(config.num_attention_heads),
            kv_heads: size(config.num_key_value_heads),
            head_dim: size(config.head_dim),
            feed_forward: size(config.intermediate_size),
            tied: config.tie_word_embeddings,
            attention_bias: config.attention_bias,
            mlp_bias: config.mlp_bias,
        })?;
        let layers = usize::try_from(config.num_hidden_layers).unwrap_or(0);
        let windowed = (0..layers).filter(|&layer| config.window(layer).is_some()).count() as u64;
        match config.sliding_window {
            Some(window) => model.with_windows(Windows { layers: windowed, tokens: size(window) }),
            None => Ok(model),
        }
    }

    /// Returns the same decoder with windows in some of its layers.
    ///
    /// # Errors
    /// More layers than the model has, a window of no token.
    pub fn with_windows(self, windows: Windows) -> Result<Self, Error> {
        positive("the window", windows.tokens)?;
        if windows.layers > self.layers {
            return Err(Error::Shape {
                what: format!("{} of {} layers have a window", windows.layers, self.layers),
                remedy: "give at most as many as the model has".into(),
            });
        }
        Ok(Self { windows: Some(windows).filter(|windows| windows.layers > 0), ..self })
    }

    /// Returns the layers with a window, if there are any.
    pub fn windows(&self) -> Option<Windows> {
        self.windows
    }

    /// Refuses a model the memory of whose passes is not modelled operation by operation for rows of `sequence` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] with the family or the window.
    pub fn check_passes(&self, sequence: u64) -> Result<(), Error> {
        self.check_modelled(has_modelled_passes(self.family), sequence)
    }

    pub(crate) fn check_modelled(&self, is_modelled: bool, sequence: u64) -> Result<(), Error> {
        let refuse = |what: String| {
            Err(Error::Shape {
                what,
                remedy: "its parameters, FLOPs and KV cache are; measure a step instead".into(),
            })
        };
        if !is_modelled {
            return refuse(format!("the activations of {} are not modelled", self.family.model_type()));
        }
        match self.windows {
            Some(windows) if windows.tokens < sequence => refuse(format!(
                "the activations of {sequence} tokens in windows of {} are not modelled",
                windows.tokens
            )),
            _ => Ok(()),
        }
    }

    /// Widths of the norms of queries and of keys, and how many of them a token has, if the family has such norms.
    pub(crate) fn query_key_norms(&self) -> Result<Option<[(u64, u64); 2]>, Error> {
        Ok(match self.family.facts().query_key_norm {
            QueryKeyNorm::None => None,
            QueryKeyNorm::PerHead => Some([(self.head_dim, self.heads), (self.head_dim, self.kv_heads)]),
            QueryKeyNorm::Whole => Some([(self.query_width()?, 1), (self.kv_width()?, 1)]),
        })
    }

    /// Returns the width of all heads together, `h · k`.
    pub fn query_width(&self) -> Result<u64, Error> {
        exact::product("width of the query heads", &[self.heads, self.head_dim])
    }

    /// Returns the width of all key-value heads together, `n · k`.
    pub fn kv_width(&self) -> Result<u64, Error> {
        exact::product("width of the key-value heads", &[self.kv_heads, self.head_dim])
    }

    /// Returns the matrix products with weights of one block, in order of execution.
    pub fn block_linears(&self) -> Result<Vec<Linear>, Error> {
        let (d, f) = (self.hidden, self.feed_forward);
        let (q, kv) = (self.query_width()?, self.kv_width()?);
        let packed = exact::product("width of the packed query, key and value", &[3, q])?;
        let attention =
            |name, inputs, outputs, bias| Linear::new(name, Part::Attention, inputs, outputs, bias);
        let mlp = |name, inputs, outputs, bias| Linear::new(name, Part::FeedForward, inputs, outputs, bias);
        Ok(match self.family {
            Family::Gpt2 => vec![
                attention("attn.c_attn", d, packed, true),
                attention("attn.c_proj", q, d, true),
                mlp("mlp.c_fc", d, f, true),
                mlp("mlp.c_proj", f, d, true),
            ],
            Family::Gpt2Like => vec![
                attention("self_attn.in_proj", d, packed, true),
                attention("self_attn.out_proj", q, d, true),
                attention("multihead_attn.in_proj", d, packed, true),
                attention("multihead_attn.out_proj", q, d, true),
                mlp("linear1", d, f, true),
                mlp("linear2", f, d, true),
            ],
            family => {
                let facts = family.facts();
                let output_bias = facts.attention_bias == AttentionBias::Configured && self.attention_bias;
                let qkv_bias = facts.attention_bias == AttentionBias::QueriesKeysValues || output_bias;
                let width = |width: Width| match width {
                    Width::Hidden => Ok(d),
                    Width::Queries => Ok(q),
                    Width::Keys => Ok(kv),
                    Width::QueriesKeysValues => exact::sum("width of qkv_proj", [q, kv, kv]),
                    Width::FeedForward => Ok(f),
                    Width::GateUp => exact::product("width of gate_up_proj", &[2, f]),
                };
                let linear = |projection: &Projection| {
                    let bias = match projection.bias {
                        BiasOption::Never => false,
                        BiasOption::QueriesKeysValues => qkv_bias,
                        BiasOption::AttentionOutput => output_bias,
                        BiasOption::Mlp => facts.reads_mlp_bias && self.mlp_bias,
                    };
                    let part = if projection.is_attention() { Part::Attention } else { Part::FeedForward };
                    let (inputs, outputs) = (width(projection.input)?, width(projection.output)?);
                    Ok(Linear::new(projection.name, part, inputs, outputs, bias))
                };
                family.projections().iter().map(linear).collect::<Result<_, Error>>()?
            }
        })
    }

    /// Returns the matrix products with weights outside the blocks: the output projection, and in front of it
    /// [`Family::Gpt2Like`]'s projection of the embedding.
    pub fn outer_linears(&self) -> Vec<Linear> {
        let (e, d, v) = (self.embedding, self.hidden, self.vocabulary);
        match self.family {
            Family::Gpt2Like => vec![
                Linear::new("hidden_projector", Part::Projector, e, d, true),
                Linear::new("output_linear", Part::Output, d, v, true),
            ],
            _ => vec![Linear::new("lm_head", Part::Output, d, v, false)],
        }
    }
}

/// Returns whether the memory of the passes of a family's blocks is modelled operation by operation, as `models` runs them, where no window
/// is shorter than the sequence.
pub const fn has_modelled_passes(family: Family) -> bool {
    family.is_swiglu() && family.has_separate_projections() && !matches!(family, Family::Olmo2)
}

/// The part of a decoder that a parameter or a FLOP belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The table of token vectors.
    Embedding,
    /// The table of position vectors.
    Position,
    /// The projection from the embedding's width to the hidden size.
    Projector,
    /// Query, key, value and output projections.
    Attention,
    /// The feed-forward layer.
    FeedForward,
    /// Norms.
    Norm,
    /// The output projection to the vocabulary.
    Output,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 7] = [
        Self::Embedding,
        Self::Position,
        Self::Projector,
        Self::Attention,
        Self::FeedForward,
        Self::Norm,
        Self::Output,
    ];

    /// Returns a short name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Position => "positions",
            Self::Projector => "projector",
            Self::Attention => "attention",
            Self::FeedForward => "feed-forward",
            Self::Norm => "norms",
            Self::Output => "output",
        }
    }
}

/// A product of each token's vector with a weight matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linear {
    /// The module's name in the checkpoint, without the block.
    pub name: &'static str,
    /// The part of the model.
    pub part: Part,
    /// Input width.
    pub inputs: u64,
    /// Output width.
    pub outputs: u64,
    /// Whether a bias of `outputs` is added.
    pub bias: bool,
}

impl Linear {
    fn new(name: &'static str, part: Part, inputs: u64, outputs: u64, bias: bool) -> Self {
        Self { name, part, inputs, outputs, bias }
    }
}
