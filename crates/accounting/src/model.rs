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
//! | [`Qwen35`](Family::Qwen35) | linear attention in most layers; in the others as Qwen3 with a gate, `d → 2hk` | SwiGLU `3 · d · f` | RMSNorm | rotary |
//! | [`Qwen35Moe`](Family::Qwen35Moe) | as Qwen3.5 | as Qwen3-MoE, with an expert for every token and its gate | RMSNorm | rotary |
//! | [`Qwen3Moe`](Family::Qwen3Moe) | as Qwen3 | SwiGLU `3 · d · f` in each of the experts, a router | RMSNorm | rotary |
//! | [`GptOss`](Family::GptOss) | as Qwen2, all four with biases, a sink for each head | clamped SwiGLU `3 · d · f` with biases in each of the experts, a router | RMSNorm | rotary |
//! | [`Olmo2`](Family::Olmo2) | the same, queries and keys normalised as a whole | SwiGLU `3 · d · f` | RMSNorm after each branch | rotary |
//! | [`Phi3`](Family::Phi3) | one `d → hk + 2nk` | SwiGLU, `d → 2f` and `f → d` | RMSNorm | rotary |
//! | [`Gemma3`](Family::Gemma3) ([`Gemma2`](Family::Gemma2)) | as Qwen3 (Llama) | GELU-gated, `3 · d · f` | RMSNorm × 4 | rotary |
//! | [`Gemma4`](Family::Gemma4) | as Gemma 3, with other `n` and `k` in some layers, and queries alone in the last | GELU-gated, `3 · d · f`, and a gated input of each layer | RMSNorm × 5 | rotary |
//!
//! The "transformer accounting" of CS336 (assignment 1) is the Llama family with untied embeddings and GPT-2's sizes.
//!
//! ```
//! let model = accounting::presets::find("qwen2.5-0.5b")?;
//! assert_eq!(model.parameters()?, 494_032_768);
//! # Ok::<(), accounting::Error>(())
//! ```

mod attention_kind;
mod checks;

use std::ops::Deref;
use std::path::Path;

use decoder::{DecoderConfig, Projection, QueryKeyNorm, SHARED_EXPERT_GATE, Width};

use crate::exact::positive;
use crate::{Error, exact};

pub(crate) use attention_kind::AttentionKind;
pub use checks::has_modelled_passes;
pub use decoder::{ExpertSizes, Family, Gemma4Sizes, LinearSizes, Sizes, WindowedLayers};

/// The projections of the expert that computes every token, in the order of an MLP's.
const SHARED_PROJECTIONS: [&str; 3] =
    ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"];

/// Maximum number of experts of a layer.
const MAX_EXPERTS: u64 = 1 << 11;

/// A decoder with consistent sizes whose parameters can be counted in 64 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoder {
    sizes: Sizes,
}

impl Deref for Decoder {
    type Target = Sizes;

    fn deref(&self) -> &Sizes {
        &self.sizes
    }
}

impl Decoder {
    /// Checks `sizes`: each is at least 1, key-value heads divide heads, the family supports the options, no more layers have a
    /// window than there are, and the parameters can be counted.
    ///
    /// # Errors
    /// The sizes that are invalid or contradict each other.
    pub fn new(sizes: Sizes) -> Result<Self, Error> {
        for (what, value) in [
            ("vocabulary", sizes.vocabulary),
            ("context", sizes.context),
            ("embedding", sizes.embedding),
            ("hidden", sizes.hidden),
            ("layers", sizes.layers),
            ("heads", sizes.heads),
            ("kv-heads", sizes.kv_heads),
            ("head-dim", sizes.head_dim),
            ("feed-forward", sizes.feed_forward),
            ("the window", sizes.windows.map_or(1, |windows| windows.tokens)),
            ("layers with experts", sizes.experts.map_or(1, |experts| experts.layers)),
            ("experts", sizes.experts.map_or(1, |experts| experts.count)),
            ("experts of a token", sizes.experts.map_or(1, |experts| experts.per_token)),
            ("feed-forward of an expert", sizes.experts.map_or(1, |experts| experts.feed_forward)),
            ("layers with linear attention", sizes.linear.map_or(1, |linear| linear.layers)),
            ("key heads of linear attention", sizes.linear.map_or(1, |linear| linear.key_heads)),
            ("value heads of linear attention", sizes.linear.map_or(1, |linear| linear.value_heads)),
            ("a key of linear attention", sizes.linear.map_or(1, |linear| linear.key)),
            ("a value of linear attention", sizes.linear.map_or(1, |linear| linear.value)),
            ("the convolution's window", sizes.linear.map_or(1, |linear| linear.window)),
            ("a head of layers that attend in full", sizes.gemma4.map_or(1, |gemma4| gemma4.head_dim)),
            (
                "key-value heads of layers that attend in full",
                sizes.gemma4.map_or(1, |gemma4| gemma4.kv_heads),
            ),
            (
                "feed-forward of layers that share keys",
                sizes.gemma4.map_or(1, |gemma4| gemma4.shared_feed_forward),
            ),
        ] {
            positive(what, value)?;
        }
        let Sizes { family, layers, heads, kv_heads, hidden, head_dim, embedding, .. } = sizes;
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
        if sizes.tied && family == Family::Gpt2Like {
            return wrong(
                "gpt2-like cannot tie its output projection, which has another input than the embedding"
                    .into(),
                "give it untied embeddings".into(),
            );
        }
        if let Some(windows) = sizes.windows.filter(|windows| windows.layers > layers) {
            return wrong(
                format!("{} of {layers} layers have a window", windows.layers),
                "give at most as many as the model has".into(),
            );
        }
        if let Some(experts) = sizes.experts {
            if !family.facts().has_experts {
                return wrong(
                    format!("{} has a mixture of experts", family.model_type()),
                    "give a family that has one".into(),
                );
            }
            if experts.layers > layers || experts.per_token > experts.count || experts.count > MAX_EXPERTS {
                return wrong(
                    format!(
                        "{} of {layers} layers have {} experts, and a token has {} of them",
                        experts.layers, experts.count, experts.per_token
                    ),
                    format!(
                        "give at most the layers of the model, {MAX_EXPERTS} experts, and a token at most all"
                    ),
                );
            }
        }
        if let Some(linear) = sizes.linear {
            if !family.facts().has_linear_layers {
                return wrong(
                    format!("{} has linear attention", family.model_type()),
                    "give a family that has it".into(),
                );
            }
            if linear.layers > layers || !linear.value_heads.is_multiple_of(linear.key_heads) {
                return wrong(
                    format!(
                        "{} of {layers} layers have linear attention with {} key heads for {} value heads",
                        linear.layers, linear.key_heads, linear.value_heads
                    ),
                    "give at most the layers of the model, and key heads that divide the value heads".into(),
                );
            }
        }
        if sizes.gemma4.is_some() != family.facts().is_gemma4 {
            return wrong(
                format!(
                    "{} has {} sizes of a Gemma 4's layers",
                    family.model_type(),
                    if sizes.gemma4.is_some() { "the" } else { "no" }
                ),
                "read the sizes of the model's config.json".into(),
            );
        }
        let windows = sizes.windows.filter(|windows| windows.layers > 0);
        let model = Self { sizes: Sizes { windows, ..sizes } };
        if let Some(gemma4) = &sizes.gemma4 {
            model.check_gemma4(gemma4)?;
        }
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
    /// assert_eq!(Decoder::from_config(&config)?.parameters()?, config.parameter_count());
    /// # Ok::<(), accounting::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Decoder::new`].
    pub fn from_config(config: &DecoderConfig) -> Result<Self, Error> {
        Self::new(config.sizes())
    }

    /// Reads the sizes in a Hugging Face `config.json`; the GPT-2s' are read, too.
    ///
    /// # Errors
    /// A file that is missing or invalid, with its path and the field; sizes that contradict each other.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::from_file(path, Sizes::read(path))
    }

    /// Reads the text of a `config.json`; `path` only names it in errors.
    ///
    /// # Errors
    /// As [`Decoder::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, Error> {
        Self::from_file(path, Sizes::parse(path, text))
    }

    fn from_file(path: &Path, sizes: decoder::Result<Sizes>) -> Result<Self, Error> {
        Self::new(sizes?).map_err(|cause| Error::ConfigShape { path: path.into(), cause: Box::new(cause) })
    }

    /// The columns of a head that rotate: the family's default.
    pub(crate) fn rotary_width(&self) -> u64 {
        match self.family.facts().partial_rotation {
            // Rounded as the configuration's.
            Some(share) => (self.head_dim as f64 * share) as u64,
            None => self.head_dim,
        }
    }

    /// Widths of the norms of queries and of keys, and how many of them a token has, if the family has such norms.
    pub(crate) fn query_key_norms(&self) -> Result<Option<[(u64, u64); 2]>, Error> {
        Ok(match self.family.facts().query_key_norm {
            QueryKeyNorm::None => None,
            QueryKeyNorm::PerHead => Some([(self.head_dim, self.heads), (self.head_dim, self.kv_heads)]),
            QueryKeyNorm::AllHeads => Some([(self.query_width()?, 1), (self.kv_width()?, 1)]),
        })
    }

    /// Returns the width of all heads together, `h · k`.
    pub fn query_width(&self) -> Result<u64, Error> {
        self.checked_width(Width::Queries)
    }

    /// Returns the width of all key-value heads together, `n · k`.
    pub fn kv_width(&self) -> Result<u64, Error> {
        self.checked_width(Width::Keys)
    }

    fn checked_width(&self, width: Width) -> Result<u64, Error> {
        self.sizes.width(width).ok_or_else(|| {
            exact::overflow(
                "width of a projection",
                64,
                &[self.heads, self.head_dim, self.feed_forward],
                ", ",
            )
        })
    }

    /// Returns the matrix products with weights of one block, in order of execution. Of a mixture of experts, a token computes
    /// `per_token` of them: each of the expert's three products is one that is as many times as wide.
    ///
    /// # Errors
    /// Widths beyond 64 bits; experts in only some of the layers; linear attention; a Gemma 4.
    pub fn block_linears(&self) -> Result<Vec<Linear>, Error> {
        self.check_uniform()?;
        Ok(self.all_block_linears()?.into_iter().map(|(_, linear)| linear).collect())
    }

    /// Returns the matrix products with weights of all blocks, each with the number of blocks that have it, in order of execution; see
    /// [`Decoder::block_linears`].
    ///
    /// # Errors
    /// Widths beyond 64 bits.
    pub fn all_block_linears(&self) -> Result<Vec<(u64, Linear)>, Error> {
        if let Some(sizes) = &self.gemma4 {
            let mut all = Vec::new();
            for kind in self.layer_kinds(sizes).iter().filter(|kind| kind.layers > 0) {
                let linears = self.linears_of_kind(sizes, kind)?.into_iter().flatten();
                all.extend(linears.map(|linear| (kind.layers, linear)));
            }
            return Ok(all);
        }
        let sparse = self.experts.map_or(0, |experts| experts.layers);
        let linear = self.linear.map_or(0, |linear| linear.layers);
        let (attention, mlp): (Vec<_>, Vec<_>) =
            self.dense_linears()?.into_iter().partition(|linear| linear.part == Part::Attention);
        let mut groups = vec![(self.layers - linear, attention)];
        groups.push((linear, self.linears_of(self.family.linear_projections())?));
        groups.push((self.layers - sparse, mlp.clone()));
        if let Some(experts) = self.experts {
            groups.push((sparse, self.expert_linears(mlp, experts)?));
        }
        let each =
            |(layers, linears): (u64, Vec<Linear>)| linears.into_iter().map(move |linear| (layers, linear));
        Ok(groups.into_iter().filter(|(layers, _)| *layers > 0).flat_map(each).collect())
    }

    /// The products of a layer's MLP, or of the mixture that all layers have in its place.
    pub(crate) fn feed_forward_linears(&self) -> Result<Vec<Linear>, Error> {
        let linears = self.dense_linears()?;
        let mlp = linears.into_iter().filter(|linear| linear.part == Part::FeedForward).collect();
        match self.experts {
            Some(experts) => self.expert_linears(mlp, experts),
            None => Ok(mlp),
        }
    }

    /// The products of a mixture of experts, from those of an MLP: for the experts of a token, the router, and the expert of every token.
    fn expert_linears(&self, mlp: Vec<Linear>, experts: ExpertSizes) -> Result<Vec<Linear>, Error> {
        let active =
            exact::product("width of a token's experts", &[experts.per_token, experts.feed_forward])?;
        let of_width = |linear: &Linear, width: u64| {
            let mut linear = linear.clone();
            let inner =
                if linear.name.ends_with("down_proj") { &mut linear.inputs } else { &mut linear.outputs };
            *inner = width;
            linear
        };
        let mut linears: Vec<Linear> = mlp.iter().map(|linear| of_width(linear, active)).collect();
        linears.push(self.router(experts));
        if experts.shared > 0 {
            let shared = mlp.iter().zip(SHARED_PROJECTIONS);
            linears.extend(shared.map(|(linear, name)| Linear { name, ..of_width(linear, experts.shared) }));
            linears.push(Linear::new(SHARED_EXPERT_GATE, Part::FeedForward, self.hidden, 1, false));
        }
        Ok(linears)
    }

    /// The router of a mixture of experts.
    pub(crate) fn router(&self, experts: ExpertSizes) -> Linear {
        Linear::new(self.family.router(), Part::FeedForward, self.hidden, experts.count, experts.biases)
    }

    /// The products of a block with an ordinary MLP and without linear attention.
    pub(crate) fn dense_linears(&self) -> Result<Vec<Linear>, Error> {
        self.linears_of(self.family.projections())
    }

    /// These products of a block.
    pub(crate) fn linears_of(&self, projections: &'static [Projection]) -> Result<Vec<Linear>, Error> {
        let linear = |projection: &Projection| {
            let part = if projection.is_attention() { Part::Attention } else { Part::FeedForward };
            let (inputs, outputs) =
                (self.checked_width(projection.input)?, self.checked_width(projection.output)?);
            Ok(Linear::new(projection.name, part, inputs, outputs, self.has_bias(projection.bias)))
        };
        projections.iter().map(linear).collect()
    }

    /// Returns the matrix products with weights outside the blocks: the output projection, and in front of it
    /// [`Family::Gpt2Like`]'s projection of the embedding, or a Gemma 4's to the width of its second one.
    pub fn outer_linears(&self) -> Vec<Linear> {
        let (e, d, v) = (self.embedding, self.hidden, self.vocabulary);
        match self.family {
            Family::Gpt2Like => vec![
                Linear::new("hidden_projector", Part::Projector, e, d, true),
                Linear::new("output_linear", Part::Output, d, v, true),
            ],
            _ => {
                let output = Linear::new("lm_head", Part::Output, d, v, false);
                self.per_layer_projection().into_iter().chain([output]).collect()
            }
        }
    }
}

/// The part of a decoder that a parameter or a FLOP belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The table of token vectors.
    Embedding,
    /// The table of position vectors.
    Position,
    /// The projection from the embedding's width to the hidden size, or to the width of a second embedding.
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
    pub(crate) fn new(name: &'static str, part: Part, inputs: u64, outputs: u64, bias: bool) -> Self {
        Self { name, part, inputs, outputs, bias }
    }
}
