//! The families of decoders: one row of a table each.

use std::str::FromStr;

use crate::error::Error;
use crate::tensors::BiasOption;

/// The placement of a block's norms.
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
    /// They are not.
    None,
    /// Each head, with one weight `[head]` for all.
    PerHead,
    /// All heads of a token together, with a weight `[heads·head]`.
    AllHeads,
}

/// Biases of the four attention projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBias {
    /// No projection has a bias.
    None,
    /// Queries, keys and values have biases.
    QueriesKeysValues,
    /// All have biases if `attention_bias` is true.
    Configured,
    /// All have biases unless `attention_bias` is false.
    UnlessFalse,
    /// All have biases.
    All,
}

/// When layers attend only to a window of the last tokens. `layer_types`, or else the [`WindowRule`], lists these layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// Never: a configuration with a window is refused.
    None,
    /// If `use_sliding_window` is true.
    Optional,
    /// If there is a `sliding_window`.
    Configured,
}

/// The layers with a window in a file without `layer_types`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowRule {
    /// All layers; a list with other layers is refused.
    All,
    /// Layers 0, 2, 4, …
    Alternate,
    /// All but each sixth, or each `sliding_window_pattern`-th.
    Pattern,
    /// Layers that do not rotate queries and keys.
    Unrotated,
    /// Layers from `max_window_layers` on, by default 28.
    From,
}

/// A row of the table: the structure of a family's blocks, and transformers' defaults of the fields that a `config.json` leaves out.
#[derive(Debug)]
pub struct Facts {
    /// `model_type`, and the family's name for [`FromStr`], where hyphens and underscores are equal.
    pub model_type: &'static str,
    /// The class in `architectures`.
    pub architecture: &'static str,
    /// The placement of norms.
    pub norms: NormPlacement,
    /// How queries and keys are normalized.
    pub query_key_norm: QueryKeyNorm,
    /// Whether it is a Gemma: the embedding is multiplied by √hidden, and the MLP's gate is a GELU.
    pub is_gemma: bool,
    /// Whether it is a Gemma 4, whose layers differ as [`Gemma4`](crate::Gemma4) has it, and whose values are normalized, too.
    pub is_gemma4: bool,
    /// Whether norms multiply by 1 + weight.
    pub has_offset_norms: bool,
    /// Whether `q_proj` also gives a gate for each head's output, which its sigmoid multiplies.
    pub has_attention_gate: bool,
    /// Whether some layers have [`LinearAttention`](crate::LinearAttention), which `layer_types` or `full_attention_interval` lists.
    pub has_linear_layers: bool,
    /// Whether queries, keys and values are one projection `qkv_proj`, and gate and up one `gate_up_proj`.
    pub has_joint_projections: bool,
    /// Biases of the attention projections.
    pub attention_bias: AttentionBias,
    /// Whether the three projections of the MLP have biases if `mlp_bias` is true.
    pub reads_mlp_bias: bool,
    /// When layers have a window.
    pub windows: Windows,
    /// The layers with a window in a file without `layer_types`.
    pub window_rule: WindowRule,
    /// Whether `no_rope_layers` lists layers that do not rotate queries and keys, without a list each fourth.
    pub has_unrotated_layers: bool,
    /// Default of `partial_rotary_factor`, if that limits the columns of a head that rotate.
    pub partial_rotation: Option<f64>,
    /// Whether `longrope` may scale the rotary embedding.
    pub has_long_rope: bool,
    /// Whether layers have a [`Mixture`](crate::Mixture) of experts in place of the MLP.
    pub has_experts: bool,
    /// Whether a mixture is gpt-oss's: `mlp.router` and the experts have biases, whose SwiGLU is [clamped](crate::ClampedSwiglu).
    pub has_clamped_experts: bool,
    /// Whether each query head has a sink, `self_attn.sinks`: a score whose weight multiplies no value.
    pub has_sinks: bool,
    /// Whether a mixture also has an expert that computes every token, and normalises the others' weights in any case.
    pub has_shared_expert: bool,
    /// Whether the branches of a block, the embedding, the scores and the logits have factors.
    pub has_multipliers: bool,
    /// Defaults of `attn_logit_softcapping` and `final_logit_softcapping`.
    pub softcaps: Option<[f64; 2]>,
    /// Fields that have to be 0: dropouts that no model here computes.
    pub zero_fields: &'static [&'static str],
    /// Default of `max_position_embeddings`.
    pub positions: i64,
    /// Default of `rms_norm_eps`.
    pub eps: f64,
    /// Default of `rope_theta`.
    pub theta: f64,
    /// Default of `rope_local_base_freq`, where layers with a window have their own frequencies.
    pub local_theta: Option<f64>,
    /// Default of `head_dim`; `None` for hidden size / heads.
    pub head_dim: Option<i64>,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Default of `sliding_window`.
    pub window: Option<i64>,
}

/// Defines [`Family`] and its table: a variant and a row for each family.
macro_rules! families {
    ($($(#[$meta:meta])* $family:ident = $row:ident { $($facts:tt)* })*) => {
        /// A family of decoders.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub enum Family {
            $($(#[$meta])* $family,)*
        }

        $(const $row: Facts = Facts { $($facts)* };)*

        impl Family {
            /// All families.
            pub const ALL: [Self; [$(stringify!($family)),*].len()] = [$(Self::$family),*];

            /// Returns the family's row of the table.
            pub const fn facts(self) -> &'static Facts {
                match self {
                    $(Self::$family => &$row,)*
                }
            }
        }
    };
}

families! {
    /// Llama 1 to 3, SmolLM2.
    #[default]
    Llama = LLAMA {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        norms: NormPlacement::Pre,
        query_key_norm: QueryKeyNorm::None,
        is_gemma: false,
        is_gemma4: false,
        has_offset_norms: false,
        has_attention_gate: false,
        has_linear_layers: false,
        has_joint_projections: false,
        attention_bias: AttentionBias::Configured,
        reads_mlp_bias: true,
        windows: Windows::None,
        window_rule: WindowRule::All,
        has_unrotated_layers: false,
        partial_rotation: None,
        has_long_rope: false,
        has_experts: false,
        has_clamped_experts: false,
        has_sinks: false,
        has_shared_expert: false,
        has_multipliers: false,
        softcaps: None,
        zero_fields: &[],
        positions: 2048,
        eps: 1e-6,
        theta: 1e4,
        local_theta: None,
        head_dim: None,
        tied: false,
        window: None,
    }

    /// Qwen2 and Qwen2.5: biases of queries, keys and values.
    Qwen2 = QWEN2 {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        attention_bias: AttentionBias::QueriesKeysValues,
        reads_mlp_bias: false,
        windows: Windows::Optional,
        window_rule: WindowRule::From,
        positions: 32768,
        window: Some(4096),
        ..LLAMA
    }

    /// Qwen3, dense: each head's queries and keys are normalized before they rotate.
    Qwen3 = QWEN3 {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        query_key_norm: QueryKeyNorm::PerHead,
        attention_bias: AttentionBias::Configured,
        head_dim: Some(128),
        ..QWEN2
    }

    /// Qwen3 with a mixture of experts in place of the MLP.
    Qwen3Moe = QWEN3_MOE {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        window_rule: WindowRule::All,
        has_experts: true,
        head_dim: None,
        ..QWEN3
    }

    /// Qwen3.5's text model, dense: gated DeltaNet in most layers, and gated attention in the others.
    Qwen35 = QWEN35 {
        model_type: "qwen3_5_text",
        architecture: "Qwen3_5ForCausalLM",
        has_offset_norms: true,
        has_attention_gate: true,
        has_linear_layers: true,
        windows: Windows::None,
        window_rule: WindowRule::All,
        partial_rotation: Some(0.25),
        head_dim: Some(256),
        window: None,
        ..QWEN3
    }

    /// Qwen3.5 with a mixture of experts in place of the MLP.
    Qwen35Moe = QWEN35_MOE {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        has_experts: true,
        has_shared_expert: true,
        ..QWEN35
    }

    /// gpt-oss: attention sinks, windows in every other layer, and a mixture of experts with biases and a clamped SwiGLU.
    GptOss = GPT_OSS {
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        attention_bias: AttentionBias::UnlessFalse,
        reads_mlp_bias: false,
        windows: Windows::Configured,
        window_rule: WindowRule::Alternate,
        has_experts: true,
        has_clamped_experts: true,
        has_sinks: true,
        positions: 131_072,
        eps: 1e-5,
        theta: 150_000.0,
        head_dim: Some(64),
        window: Some(128),
        ..LLAMA
    }

    /// Mistral: a sliding window, in later versions none.
    Mistral = MISTRAL {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        attention_bias: AttentionBias::None,
        reads_mlp_bias: false,
        windows: Windows::Configured,
        positions: 131_072,
        window: Some(4096),
        ..LLAMA
    }

    /// SmolLM3: some layers do not rotate queries and keys.
    SmolLm3 = SMOL_LM3 {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        windows: Windows::Optional,
        window_rule: WindowRule::Unrotated,
        has_unrotated_layers: true,
        positions: 32768,
        theta: 2e6,
        tied: true,
        ..LLAMA
    }

    /// Granite 3, dense: factors of the embedding, the scores, the residual branches and the logits.
    Granite = GRANITE {
        model_type: "granite",
        architecture: "GraniteForCausalLM",
        has_multipliers: true,
        ..LLAMA
    }

    /// OLMo 2: norms after attention and MLP instead of before, and norms of all queries and of all keys together.
    Olmo2 = OLMO2 {
        model_type: "olmo2",
        architecture: "Olmo2ForCausalLM",
        norms: NormPlacement::Post,
        query_key_norm: QueryKeyNorm::AllHeads,
        reads_mlp_bias: false,
        eps: 1e-5,
        ..LLAMA
    }

    /// Gemma 3's text model: norms before and after, per head of queries and keys, and windows in most layers, with their own
    /// rotary frequencies.
    Gemma3 = GEMMA3 {
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        norms: NormPlacement::Both,
        query_key_norm: QueryKeyNorm::PerHead,
        is_gemma: true,
        has_offset_norms: true,
        reads_mlp_bias: false,
        windows: Windows::Configured,
        window_rule: WindowRule::Pattern,
        positions: 131_072,
        theta: 1e6,
        local_theta: Some(1e4),
        head_dim: Some(256),
        tied: true,
        window: Some(4096),
        ..LLAMA
    }

    /// Gemma 2: as Gemma 3, with caps of scores and logits instead of norms of queries and keys.
    Gemma2 = GEMMA2 {
        model_type: "gemma2",
        architecture: "Gemma2ForCausalLM",
        query_key_norm: QueryKeyNorm::None,
        window_rule: WindowRule::Alternate,
        softcaps: Some([50.0, 30.0]),
        positions: 8192,
        theta: 1e4,
        local_theta: None,
        ..GEMMA3
    }

    /// Gemma 4's dense text model: two widths of heads, a second embedding for the layers, last layers that attend to earlier ones' keys.
    Gemma4 = GEMMA4 {
        model_type: "gemma4_text",
        architecture: "Gemma4ForCausalLM",
        is_gemma4: true,
        has_offset_norms: false,
        window: Some(512),
        ..GEMMA3
    }

    /// Phi-3, Phi-3.5 and Phi-4-mini: one projection for queries, keys and values, and one for gate and up.
    Phi3 = PHI3 {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        has_joint_projections: true,
        attention_bias: AttentionBias::None,
        reads_mlp_bias: false,
        windows: Windows::Configured,
        partial_rotation: Some(1.0),
        has_long_rope: true,
        zero_fields: &["resid_pdrop", "embd_pdrop"],
        positions: 4096,
        eps: 1e-5,
        ..LLAMA
    }

    /// GPT-2 as published: `GPT2LMHeadModel` of transformers.
    Gpt2 = GPT2 {
        model_type: "gpt2",
        architecture: "GPT2LMHeadModel",
        has_joint_projections: true,
        attention_bias: AttentionBias::All,
        reads_mlp_bias: false,
        positions: 1024,
        eps: 1e-5,
        tied: true,
        ..LLAMA
    }

    /// The model of the training assignment: an embedding, a projection to the hidden size, and
    /// `TransformerDecoderLayer`s whose memory is their own input, so each attends twice.
    Gpt2Like = GPT2_LIKE {
        model_type: "gpt2-like",
        architecture: "",
        norms: NormPlacement::Post,
        tied: false,
        ..GPT2
    }
}

impl Family {
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
}

impl Facts {
    /// Returns whether projections with this option have a bias, where `attention_bias` and `mlp_bias` are those of the file.
    pub(crate) fn has_bias(&self, option: BiasOption, attention_bias: bool, mlp_bias: bool) -> bool {
        match (option, self.attention_bias) {
            (BiasOption::Never, _) => false,
            (BiasOption::Always, _) => true,
            (BiasOption::Mlp, _) => self.reads_mlp_bias && mlp_bias,
            (_, AttentionBias::None) => false,
            (_, AttentionBias::All) => true,
            (_, AttentionBias::Configured | AttentionBias::UnlessFalse) => attention_bias,
            (option, AttentionBias::QueriesKeysValues) => option == BiasOption::QueriesKeysValues,
        }
    }
}

impl FromStr for Family {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.to_ascii_lowercase().replace('_', "-");
        let has_name = |family: &Self| family.model_type().replace('_', "-") == name;
        Self::ALL.into_iter().find(has_name).ok_or_else(|| Error::UnknownFamily {
            given: text.chars().take(40).collect(),
            known: Self::ALL.map(Self::model_type).join(", "),
        })
    }
}

/// Returns why a known `model_type` or architecture is not supported, where its name alone does not explain it.
pub(crate) fn why_not(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    if has(&["moe", "mixtral"]) {
        Some("of the mixtures of experts, qwen3_moe, qwen3_5_moe_text and gpt_oss are supported")
    } else if has(&["qwen3_next", "qwen3next"]) {
        Some(
            "the projections of its linear attention are grouped by key head, which is not supported; qwen3_5_text is",
        )
    } else if has(&["mamba", "bamba", "falcon_h1", "hybrid", "jamba"]) {
        Some("state-space layers are not supported")
    } else if ["gemma3", "gemma3forconditionalgeneration"].contains(&&*name) || has(&["_vl", "vlfor"]) {
        Some("it also reads images; its text model alone is supported")
    } else {
        None
    }
}
