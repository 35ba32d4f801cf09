//! The model families, and the structure that each decides.

/// The model family: `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    /// Llama 1 to 3, SmolLM2.
    #[default]
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3, dense: each head's queries and keys are normalised before they rotate.
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

/// How queries and keys are normalised before they rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// Not at all.
    None,
    /// Each head, with one weight `[head]` for all.
    PerHead,
    /// All heads of a token together, with a weight `[heads·head]`.
    Whole,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 10] = [
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
    ];

    /// Returns the name in `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Mistral => "mistral",
            Self::SmolLm3 => "smollm3",
            Self::Granite => "granite",
            Self::Olmo2 => "olmo2",
            Self::Gemma3 => "gemma3_text",
            Self::Gemma2 => "gemma2",
            Self::Phi3 => "phi3",
        }
    }

    /// Returns the name in `architectures`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::SmolLm3 => "SmolLM3ForCausalLM",
            Self::Granite => "GraniteForCausalLM",
            Self::Olmo2 => "Olmo2ForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Gemma2 => "Gemma2ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
        }
    }

    /// Returns where its blocks have norms.
    pub fn norms(self) -> NormPlacement {
        match self {
            Self::Olmo2 => NormPlacement::Post,
            Self::Gemma2 | Self::Gemma3 => NormPlacement::Both,
            _ => NormPlacement::Pre,
        }
    }

    /// Returns how it normalises queries and keys.
    pub fn query_key_norm(self) -> QueryKeyNorm {
        match self {
            Self::Qwen3 | Self::Gemma3 => QueryKeyNorm::PerHead,
            Self::Olmo2 => QueryKeyNorm::Whole,
            _ => QueryKeyNorm::None,
        }
    }

    /// Returns whether it is a Gemma: norms multiply by 1 + weight, the embedding by √hidden, and the MLP's gate is a GELU.
    pub fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Returns whether queries, keys and values are one projection `qkv_proj`, and gate and up one `gate_up_proj`.
    pub fn has_joint_projections(self) -> bool {
        self == Self::Phi3
    }

    /// Whether a configuration decides about biases of the four attention projections.
    pub(super) fn reads_attention_bias(self) -> bool {
        !matches!(self, Self::Qwen2 | Self::Mistral | Self::Phi3)
    }

    /// Whether a configuration decides about biases of the MLP.
    pub(super) fn reads_mlp_bias(self) -> bool {
        matches!(self, Self::Llama | Self::SmolLm3 | Self::Granite)
    }

    /// Whether its layers may have a window.
    pub(super) fn has_windows(self) -> bool {
        !matches!(self, Self::Llama | Self::Granite | Self::Olmo2)
    }

    /// Whether windows apply only with `use_sliding_window`.
    pub(super) fn windows_are_optional(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen3 | Self::SmolLm3)
    }
}

/// transformers' values of fields that a file leaves out.
pub(super) struct Defaults {
    pub(super) positions: i64,
    pub(super) eps: f64,
    pub(super) theta: f64,
    pub(super) head_dim: Option<i64>,
    pub(super) tied: bool,
    pub(super) window: Option<i64>,
}

impl Family {
    pub(super) fn defaults(self) -> Defaults {
        let llama =
            Defaults { positions: 2048, eps: 1e-6, theta: 1e4, head_dim: None, tied: false, window: None };
        match self {
            Self::Llama | Self::Granite => llama,
            Self::Qwen2 => Defaults { positions: 32768, window: Some(4096), ..llama },
            Self::Qwen3 => Defaults { positions: 32768, head_dim: Some(128), window: Some(4096), ..llama },
            Self::Mistral => Defaults { positions: 131_072, window: Some(4096), ..llama },
            Self::SmolLm3 => Defaults { positions: 32768, theta: 2e6, tied: true, ..llama },
            Self::Olmo2 => Defaults { eps: 1e-5, ..llama },
            Self::Gemma3 => Defaults {
                positions: 131_072,
                theta: 1e6,
                head_dim: Some(256),
                tied: true,
                window: Some(4096),
                ..llama
            },
            Self::Gemma2 => {
                Defaults { positions: 8192, head_dim: Some(256), tied: true, window: Some(4096), ..llama }
            }
            Self::Phi3 => Defaults { positions: 4096, eps: 1e-5, ..llama },
        }
    }
}

/// Says why a known `model_type` or architecture is none of the families, if that is more than its name.
pub(super) fn why_not(found: &str) -> Option<&'static str> {
    let name = found.to_ascii_lowercase();
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
