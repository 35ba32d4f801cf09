//! The families of decoders: one row of a table each.

use std::str::FromStr;

use crate::error::Error;

/// A family of decoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Family {
    /// Llama 1 to 3, SmolLM2.
    #[default]
    Llama,
    /// Qwen2 and Qwen2.5: biases of queries, keys and values.
    Qwen2,
    /// Qwen3, dense: each head's queries and keys are normalized before they rotate.
    Qwen3,
    /// Mistral: a sliding window, in later versions none.
    Mistral,
    /// SmolLM3: some layers do not rotate queries and keys.
    SmolLm3,
    /// Granite 3, dense: factors of the embedding, the scores, the residual branches and the logits.
    Granite,
    /// OLMo 2: norms after attention and MLP instead of before, and norms of all queries and of all keys together.
    Olmo2,
    /// Gemma 3's text model: norms before and after, per head of queries and keys, and windows in most layers, with their own
    /// rotary frequencies.
    Gemma3,
    /// Gemma 2: as Gemma 3, with caps of scores and logits instead of norms of queries and keys.
    Gemma2,
    /// Phi-3, Phi-3.5 and Phi-4-mini: one projection for queries, keys and values, and one for gate and up.
    Phi3,
    /// GPT-2 as published: `GPT2LMHeadModel` of transformers.
    Gpt2,
    /// The model of the training assignment: an embedding, a projection to the hidden size, and
    /// `TransformerDecoderLayer`s whose memory is their own input, so each attends twice.
    Gpt2Like,
}

/// Where a block has norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and before the MLP.
    Pre,
    /// After each, before the residual sum.
    Post,
    /// Before and after each.
    Both,
}

/// How queries and keys are normalized before they rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// Not at all.
    None,
    /// Each head, with one weight `[head]` for all.
    PerHead,
    /// All heads of a token together, with a weight `[heads·head]`.
    Whole,
}

/// Which of the four attention projections have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBias {
    /// None.
    None,
    /// Those of queries, keys and values.
    QueriesKeysValues,
    /// All, if `attention_bias` is true.
    Configured,
    /// All.
    All,
}

/// Which layers attend only to a window of the last tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// None: a configuration with a window is refused.
    None,
    /// With `use_sliding_window`, those that `layer_types` or a rule says.
    Optional,
    /// With a `sliding_window`, those that `layer_types` or a rule says.
    Configured,
}

/// What a family decides, and transformers' defaults of the fields that a `config.json` leaves out.
#[derive(Debug)]
pub struct Facts {
    /// `model_type`, and the family's name for [`FromStr`], where hyphens and underscores are equal.
    pub model_type: &'static str,
    /// The class in `architectures`.
    pub architecture: &'static str,
    /// Where a block has norms.
    pub norms: NormPlacement,
    /// How queries and keys are normalized.
    pub query_key_norm: QueryKeyNorm,
    /// Whether it is a Gemma: norms multiply by 1 + weight, the embedding by √hidden, and the MLP's gate is a GELU.
    pub is_gemma: bool,
    /// Whether queries, keys and values are one projection `qkv_proj`, and gate and up one `gate_up_proj`.
    pub has_joint_projections: bool,
    /// Biases of the attention projections.
    pub attention_bias: AttentionBias,
    /// Whether the three projections of the MLP have biases if `mlp_bias` is true.
    pub reads_mlp_bias: bool,
    /// Layers with a window.
    pub windows: Windows,
    /// Whether the branches of a block, the embedding, the scores and the logits have factors.
    pub has_multipliers: bool,
    /// Default of `max_position_embeddings`.
    pub positions: i64,
    /// Default of `rms_norm_eps`.
    pub eps: f64,
    /// Default of `rope_theta`.
    pub theta: f64,
    /// Default of `head_dim`; `None` for hidden size / heads.
    pub head_dim: Option<i64>,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Default of `sliding_window`.
    pub window: Option<i64>,
}

const LLAMA: Facts = Facts {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    norms: NormPlacement::Pre,
    query_key_norm: QueryKeyNorm::None,
    is_gemma: false,
    has_joint_projections: false,
    attention_bias: AttentionBias::Configured,
    reads_mlp_bias: true,
    windows: Windows::None,
    has_multipliers: false,
    positions: 2048,
    eps: 1e-6,
    theta: 1e4,
    head_dim: None,
    tied: false,
    window: None,
};

const QWEN2: Facts = Facts {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    attention_bias: AttentionBias::QueriesKeysValues,
    reads_mlp_bias: false,
    windows: Windows::Optional,
    positions: 32768,
    window: Some(4096),
    ..LLAMA
};

const QWEN3: Facts = Facts {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    query_key_norm: QueryKeyNorm::PerHead,
    attention_bias: AttentionBias::Configured,
    head_dim: Some(128),
    ..QWEN2
};

const MISTRAL: Facts = Facts {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    attention_bias: AttentionBias::None,
    reads_mlp_bias: false,
    windows: Windows::Configured,
    positions: 131_072,
    window: Some(4096),
    ..LLAMA
};

const SMOL_LM3: Facts = Facts {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    windows: Windows::Optional,
    positions: 32768,
    theta: 2e6,
    tied: true,
    ..LLAMA
};

const GRANITE: Facts =
    Facts { model_type: "granite", architecture: "GraniteForCausalLM", has_multipliers: true, ..LLAMA };

const OLMO2: Facts = Facts {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    norms: NormPlacement::Post,
    query_key_norm: QueryKeyNorm::Whole,
    reads_mlp_bias: false,
    eps: 1e-5,
    ..LLAMA
};

const GEMMA3: Facts = Facts {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    norms: NormPlacement::Both,
    query_key_norm: QueryKeyNorm::PerHead,
    is_gemma: true,
    reads_mlp_bias: false,
    windows: Windows::Configured,
    positions: 131_072,
    theta: 1e6,
    head_dim: Some(256),
    tied: true,
    window: Some(4096),
    ..LLAMA
};

const GEMMA2: Facts = Facts {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    query_key_norm: QueryKeyNorm::None,
    positions: 8192,
    theta: 1e4,
    ..GEMMA3
};

const PHI3: Facts = Facts {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    has_joint_projections: true,
    attention_bias: AttentionBias::None,
    reads_mlp_bias: false,
    windows: Windows::Configured,
    positions: 4096,
    eps: 1e-5,
    ..LLAMA
};

const GPT2: Facts = Facts {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    has_joint_projections: true,
    attention_bias: AttentionBias::All,
    reads_mlp_bias: false,
    positions: 1024,
    eps: 1e-5,
    tied: true,
    ..LLAMA
};

const GPT2_LIKE: Facts =
    Facts { model_type: "gpt2-like", architecture: "", norms: NormPlacement::Post, tied: false, ..GPT2 };

impl Family {
    /// All families.
    pub const ALL: [Self; 12] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mistral,
        Self::SmolLm3,
        Self::Granite,
        Self::Olmo2,
        Self::Gemma3,
        Self::Gemma2,
        Self::Phi3,
        Self::Gpt2,
        Self::Gpt2Like,
    ];

    /// Returns the family's row of the table.
    pub const fn facts(self) -> &'static Facts {
        match self {
            Self::Llama => &LLAMA,
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
            Self::Mistral => &MISTRAL,
            Self::SmolLm3 => &SMOL_LM3,
            Self::Granite => &GRANITE,
            Self::Olmo2 => &OLMO2,
            Self::Gemma3 => &GEMMA3,
            Self::Gemma2 => &GEMMA2,
            Self::Phi3 => &PHI3,
            Self::Gpt2 => &GPT2,
            Self::Gpt2Like => &GPT2_LIKE,
        }
    }

    /// Returns the name in `model_type`.
    pub const fn model_type(self) -> &'static str {
        self.facts().model_type
    }

    /// Returns the class in `architectures`.
    pub const fn architecture(self) -> &'static str {
        self.facts().architecture
    }

    /// Returns whether it is a Gemma; see [`Facts::is_gemma`].
    pub const fn is_gemma(self) -> bool {
        self.facts().is_gemma
    }

    /// Returns whether it is a decoder with rotary positions, RMS norms and a gated MLP, which a [`DecoderConfig`](crate::DecoderConfig)
    /// describes: every family but the GPT-2s.
    pub const fn is_rotary(self) -> bool {
        !matches!(self, Self::Gpt2 | Self::Gpt2Like)
    }

    /// Returns whether the MLP is a SwiGLU.
    pub const fn is_swiglu(self) -> bool {
        self.is_rotary() && !self.is_gemma()
    }

    /// Returns whether a block has the projections q, k, v, o, gate, up and down.
    pub const fn has_separate_projections(self) -> bool {
        !self.facts().has_joint_projections
    }

    /// Returns whether positions are a table of parameters, which bounds the sequence.
    pub const fn has_learned_positions(self) -> bool {
        matches!(self, Self::Gpt2)
    }

    /// Returns the number of attentions in a block.
    pub const fn attentions(self) -> u64 {
        if matches!(self, Self::Gpt2Like) { 2 } else { 1 }
    }

    /// Returns the number of norms in a block, without those of queries and keys.
    pub const fn norms(self) -> u64 {
        match self.facts().norms {
            NormPlacement::Both => 4,
            NormPlacement::Pre | NormPlacement::Post => 1 + self.attentions(),
        }
    }

    /// Returns whether there is a norm between the last block and the output projection.
    pub const fn has_final_norm(self) -> bool {
        !matches!(self, Self::Gpt2Like)
    }
}

impl FromStr for Family {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wanted = text.to_ascii_lowercase().replace('_', "-");
        let named = |family: &Self| family.model_type().replace('_', "-") == wanted;
        Self::ALL.into_iter().find(named).ok_or_else(|| Error::UnknownFamily {
            given: text.chars().take(40).collect(),
            known: Self::ALL.map(Self::model_type).join(", "),
        })
    }
}

/// Returns the reason why a known `model_type` or architecture is not supported, if more than its name is to be said.
pub(crate) fn why_not(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    if has(&["moe", "mixtral"]) {
        Some("mixtures of experts are not supported")
    } else if has(&["qwen3_5", "qwen3_next", "qwen3next", "qwen3.5"]) {
        Some("its gated DeltaNet layers are not supported")
    } else if has(&["mamba", "bamba", "falcon_h1", "hybrid", "jamba"]) {
        Some("state-space layers are not supported")
    } else if ["gemma3", "gemma3forconditionalgeneration"].contains(&&*name) || has(&["_vl", "vlfor"]) {
        Some("it also reads images; its text model alone is supported")
    } else {
        None
    }
}
