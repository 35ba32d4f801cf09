//! The tensors of a block, by family: names without `.weight`, and widths.

use crate::family::{Family, NormPlacement, QueryKeyNorm};

/// A width of a projection, by the sizes that it follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// The residual stream's.
    Hidden,
    /// All query heads together.
    Queries,
    /// All key-value heads together.
    Keys,
    /// Queries, keys and values after one another.
    QueriesKeysValues,
    /// The MLP's.
    FeedForward,
    /// Gate and up after one another.
    GateUp,
    /// All query heads, each with a gate of its width after it.
    QueriesGates,
    /// Queries, keys and values of linear attention after one another.
    LinearChannels,
    /// All value heads of linear attention together.
    LinearValues,
    /// A number for each value head of linear attention.
    LinearHeads,
}

/// The option that gives a projection a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasOption {
    /// It never has one.
    Never,
    /// It always has one.
    Always,
    /// The option of queries, keys and values.
    QueriesKeysValues,
    /// The option of the attention's output.
    AttentionOutput,
    /// The option of the MLP.
    Mlp,
}

/// A projection of a block, `[output, input]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projection {
    /// Its name, such as `self_attn.q_proj`.
    pub name: &'static str,
    /// Columns of its weight.
    pub input: Width,
    /// Rows of its weight.
    pub output: Width,
    /// Whether it has a bias.
    pub bias: BiasOption,
}

const fn projection(name: &'static str, input: Width, output: Width, bias: BiasOption) -> Projection {
    Projection { name, input, output, bias }
}

use BiasOption::{Always, AttentionOutput, Mlp, Never};
use Width::{
    FeedForward, GateUp, Hidden, Keys, LinearChannels, LinearHeads, LinearValues, Queries, QueriesGates,
    QueriesKeysValues,
};

const SEPARATE: [Projection; 7] = [
    projection("self_attn.q_proj", Hidden, Queries, BiasOption::QueriesKeysValues),
    projection("self_attn.k_proj", Hidden, Keys, BiasOption::QueriesKeysValues),
    projection("self_attn.v_proj", Hidden, Keys, BiasOption::QueriesKeysValues),
    projection("self_attn.o_proj", Queries, Hidden, AttentionOutput),
    projection("mlp.gate_proj", Hidden, FeedForward, Mlp),
    projection("mlp.up_proj", Hidden, FeedForward, Mlp),
    projection("mlp.down_proj", FeedForward, Hidden, Mlp),
];

const GATED: [Projection; 7] = {
    let mut projections = SEPARATE;
    projections[0] = projection("self_attn.q_proj", Hidden, QueriesGates, BiasOption::QueriesKeysValues);
    projections
};

/// The name of linear attention in a block.
pub const LINEAR_ATTENTION: &str = "linear_attn";

/// Returns whether a tensor is in fp32 at least in a model of any dtype, by its name with or without what precedes it: the decays of linear
/// attention.
pub fn is_kept_wide(name: &str) -> bool {
    name.ends_with("linear_attn.A_log") || name.ends_with("linear_attn.dt_bias")
}

/// The second embedding of a Gemma 4, `[vocabulary, layers·width]`: each layer gets its part of a token's row.
pub const PER_LAYER_EMBEDDING: &str = "embed_tokens_per_layer";

/// The projection of the embedded token to what is added to its row of [`PER_LAYER_EMBEDDING`].
pub const PER_LAYER_MODEL_PROJECTION: &str = "per_layer_model_projection";

/// The norm of each layer's part of that projection's result, `[width]`.
pub const PER_LAYER_NORM: &str = "per_layer_projection_norm";

/// The projection of a block's residual stream to the width of its part, `[width, hidden]`.
pub const PER_LAYER_GATE: &str = "per_layer_input_gate";

/// The projection back, `[hidden, width]`.
pub const PER_LAYER_PROJECTION: &str = "per_layer_projection";

/// The norm of its result, `[hidden]`.
pub const POST_PER_LAYER_NORM: &str = "post_per_layer_input_norm";

/// The factor of a block's result in a Gemma 4, `[1]`, which is not trained.
pub const LAYER_SCALAR: &str = "layer_scalar";

/// Prefixes of tensors that are not read, and the parts of a model that they are of.
const NOT_READ: [(&str, &str); 7] = [
    ("model.visual.", IMAGES),
    ("visual.", IMAGES),
    ("model.vision_tower.", IMAGES),
    ("model.embed_vision.", IMAGES),
    ("model.audio_tower.", SOUNDS),
    ("model.embed_audio.", SOUNDS),
    ("mtp.", "what predicts several tokens"),
];
const SOUNDS: &str = "the part that hears sounds";
const IMAGES: &str = "the part that reads images";

/// Returns the part of a model that a file's tensor is of, if it is one that is not read.
pub fn part_not_read(name: &str) -> Option<&'static str> {
    NOT_READ.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, part)| *part)
}

/// Returns the parts that these tensors of files are of and that are not read, each once.
pub fn parts_not_read<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let mut parts: Vec<&str> = names.filter_map(part_not_read).collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}

/// The number of projections of linear attention before its convolution.
pub(crate) const LINEAR_INPUTS: usize = 4;

/// Those of linear attention, in place of q, k, v and o.
const LINEAR: [Projection; 5] = [
    projection("linear_attn.in_proj_qkv", Hidden, LinearChannels, Never),
    projection("linear_attn.in_proj_z", Hidden, LinearValues, Never),
    projection("linear_attn.in_proj_b", Hidden, LinearHeads, Never),
    projection("linear_attn.in_proj_a", Hidden, LinearHeads, Never),
    projection("linear_attn.out_proj", LinearValues, Hidden, Never),
];

const JOINT: [Projection; 4] = [
    projection("self_attn.qkv_proj", Hidden, QueriesKeysValues, Never),
    projection("self_attn.o_proj", Queries, Hidden, AttentionOutput),
    projection("mlp.gate_up_proj", Hidden, GateUp, Never),
    projection("mlp.down_proj", FeedForward, Hidden, Mlp),
];

const GPT2: [Projection; 4] = [
    projection("attn.c_attn", Hidden, QueriesKeysValues, BiasOption::QueriesKeysValues),
    projection("attn.c_proj", Queries, Hidden, AttentionOutput),
    projection("mlp.c_fc", Hidden, FeedForward, Always),
    projection("mlp.c_proj", FeedForward, Hidden, Always),
];

const GPT2_LIKE: [Projection; 6] = [
    projection("self_attn.in_proj", Hidden, QueriesKeysValues, BiasOption::QueriesKeysValues),
    projection("self_attn.out_proj", Queries, Hidden, AttentionOutput),
    projection("multihead_attn.in_proj", Hidden, QueriesKeysValues, BiasOption::QueriesKeysValues),
    projection("multihead_attn.out_proj", Queries, Hidden, AttentionOutput),
    projection("linear1", Hidden, FeedForward, Always),
    projection("linear2", FeedForward, Hidden, Always),
];

/// The router of a mixture of experts, `[experts, hidden]`; of gpt-oss [`CLAMPED_ROUTER`].
pub const ROUTER: &str = "mlp.gate";

/// The router of a mixture with [clamped experts](crate::Facts::has_clamped_experts).
pub const CLAMPED_ROUTER: &str = "mlp.router";

/// The sinks of a block's query heads, `[heads]`, in a family that has some.
pub const SINKS: &str = "self_attn.sinks";

/// The expert that computes every token.
pub const SHARED_EXPERT: &str = "mlp.shared_expert";

/// The gate of [`SHARED_EXPERT`]'s result, `[1, hidden]`.
pub const SHARED_EXPERT_GATE: &str = "mlp.shared_expert_gate";

/// The projections of an expert, in order of execution: to its inner width, to its inner width, and back.
pub const EXPERT_PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Returns the name of a projection of an expert: `mlp.experts.3.gate_proj`.
pub fn expert_projection(expert: u64, projection: &str) -> String {
    format!("mlp.experts.{expert}.{projection}")
}

impl Projection {
    /// Returns whether it belongs to an attention, not to the MLP.
    pub fn is_attention(&self) -> bool {
        self.name.contains("attn")
    }
}

impl Family {
    /// Returns the projections of a block, in order of execution.
    pub const fn projections(self) -> &'static [Projection] {
        match self {
            Self::Gpt2 => &GPT2,
            Self::Gpt2Like => &GPT2_LIKE,
            _ if self.facts().has_joint_projections => &JOINT,
            _ if self.facts().has_attention_gate => &GATED,
            _ => &SEPARATE,
        }
    }

    /// Returns the projections of linear attention, in order of execution; empty for a family without.
    pub const fn linear_projections(self) -> &'static [Projection] {
        if self.facts().has_linear_layers { &LINEAR } else { &[] }
    }

    /// Returns the name of a mixture's router.
    pub const fn router(self) -> &'static str {
        if self.facts().has_clamped_experts { CLAMPED_ROUTER } else { ROUTER }
    }

    /// Returns the names of a block's norms, in order of execution.
    pub const fn norm_names(self) -> &'static [&'static str] {
        match (self, self.facts().norms) {
            (Self::Gpt2, _) => &["ln_1", "ln_2"],
            (Self::Gpt2Like, _) => &["norm1", "norm2", "norm3"],
            (_, NormPlacement::Pre) => &["input_layernorm", "post_attention_layernorm"],
            (_, NormPlacement::Post) => &["post_attention_layernorm", "post_feedforward_layernorm"],
            (_, NormPlacement::Both) => &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
        }
    }

    /// Returns the names of the norms of queries and of keys; empty for a family without.
    pub const fn query_key_norm_names(self) -> &'static [&'static str] {
        match self.facts().query_key_norm {
            QueryKeyNorm::None => &[],
            QueryKeyNorm::PerHead | QueryKeyNorm::AllHeads => &["self_attn.q_norm", "self_attn.k_norm"],
        }
    }
}
