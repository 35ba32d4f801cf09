//! Families of decoders, and what they have.

use std::str::FromStr;

use crate::Error;

/// A family of decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// GPT-2 as published: `GPT2LMHeadModel` of transformers.
    Gpt2,
    /// The model of the training assignment: an embedding, a projection to the hidden size, and
    /// `TransformerDecoderLayer`s whose memory is their own input, so each attends twice.
    Gpt2Like,
    /// Qwen2 and Qwen2.5: `Qwen2ForCausalLM`.
    Qwen2,
    /// Llama 1 to 3: `LlamaForCausalLM`.
    Llama,
    /// Qwen3, dense: `Qwen3ForCausalLM`.
    Qwen3,
    /// Mistral: `MistralForCausalLM`.
    Mistral,
    /// SmolLM3: `SmolLM3ForCausalLM`.
    SmolLm3,
    /// Granite 3, dense: `GraniteForCausalLM`.
    Granite,
    /// OLMo 2: `Olmo2ForCausalLM`.
    Olmo2,
    /// Gemma 3's text model: `Gemma3ForCausalLM`.
    Gemma3,
    /// Gemma 2: `Gemma2ForCausalLM`.
    Gemma2,
    /// Phi-3, Phi-3.5 and Phi-4-mini: `Phi3ForCausalLM`.
    Phi3,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 12] = [
        Self::Gpt2,
        Self::Gpt2Like,
        Self::Qwen2,
        Self::Llama,
        Self::Qwen3,
        Self::Mistral,
        Self::SmolLm3,
        Self::Granite,
        Self::Olmo2,
        Self::Gemma3,
        Self::Gemma2,
        Self::Phi3,
    ];

    /// Returns the name for [`FromStr`], where hyphens and underscores are equal; `model_type` in a `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Gpt2Like => "gpt2-like",
            Self::Qwen2 => "qwen2",
            Self::Llama => "llama",
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

    /// Returns whether it is a decoder with rotary positions, RMS norms and a gated feed-forward layer: every family but the GPT-2s.
    pub const fn is_rotary(self) -> bool {
        !matches!(self, Self::Gpt2 | Self::Gpt2Like)
    }

    /// Returns whether the feed-forward layer is a SwiGLU.
    pub const fn is_swiglu(self) -> bool {
        self.is_rotary() && !self.is_gemma()
    }

    /// Returns whether it is a Gemma.
    pub const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Returns whether a block has the projections q, k, v, o, gate, up and down.
    pub const fn has_separate_projections(self) -> bool {
        self.is_rotary() && !matches!(self, Self::Phi3)
    }

    /// Returns whether the activations and the peak of its blocks are modelled, where no window is shorter than the sequence.
    pub const fn has_modelled_activations(self) -> bool {
        matches!(
            self,
            Self::Gpt2 | Self::Gpt2Like | Self::Qwen2 | Self::Llama | Self::Mistral | Self::SmolLm3
        )
    }

    /// Returns whether the memory of its blocks' passes is modelled operation by operation, as `models` runs them, where no window is shorter
    /// than the sequence.
    pub const fn has_modelled_passes(self) -> bool {
        self.is_swiglu() && self.has_separate_projections() && !matches!(self, Self::Olmo2)
    }

    /// Returns whether queries and keys are normalised before they rotate.
    pub const fn has_query_key_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Olmo2 | Self::Gemma3)
    }

    /// Returns whether the branches of a block are multiplied before they are added to the residual stream, and the logits before the loss.
    pub const fn has_multipliers(self) -> bool {
        matches!(self, Self::Granite)
    }

    /// Returns whether norms are RMSNorm (one weight, one statistic per token) or LayerNorm (two of both).
    pub const fn is_rms_norm(self) -> bool {
        self.is_rotary()
    }

    /// Returns whether positions are a table of parameters, which bounds the sequence.
    pub const fn has_learned_positions(self) -> bool {
        matches!(self, Self::Gpt2)
    }

    /// Attentions in a block.
    pub const fn attentions(self) -> u64 {
        if matches!(self, Self::Gpt2Like) { 2 } else { 1 }
    }

    /// Norms in a block, without those of queries and keys.
    pub const fn norms(self) -> u64 {
        if self.is_gemma() { 4 } else { 1 + self.attentions() }
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
        Self::ALL
            .into_iter()
            .find(|family| family.name().replace('_', "-") == wanted)
            .ok_or_else(|| Error::unknown("model family", text, Self::ALL.map(Self::name)))
    }
}
