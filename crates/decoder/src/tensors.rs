//! The tensors of a block of a decoder with rotary positions, by family: names without `.weight`, and widths.

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
}

/// The option that gives a projection a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasOption {
    /// None: it never has one.
    Never,
    /// That of queries, keys and values.
    QueriesKeysValues,
    /// That of the attention's output.
    AttentionOutput,
    /// That of the MLP.
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

use BiasOption::{AttentionOutput, Mlp, Never};
use Width::{FeedForward, GateUp, Hidden, Keys, Queries, QueriesKeysValues};

const SEPARATE: [Projection; 7] = [
    projection("self_attn.q_proj", Hidden, Queries, BiasOption::QueriesKeysValues),
    projection("self_attn.k_proj", Hidden, Keys, BiasOption::QueriesKeysValues),
    projection("self_attn.v_proj", Hidden, Keys, BiasOption::QueriesKeysValues),
    projection("self_attn.o_proj", Queries, Hidden, AttentionOutput),
    projection("mlp.gate_proj", Hidden, FeedForward, Mlp),
    projection("mlp.up_proj", Hidden, FeedForward, Mlp),
    projection("mlp.down_proj", FeedForward, Hidden, Mlp),
];

const JOINT: [Projection; 4] = [
    projection("self_attn.qkv_proj", Hidden, QueriesKeysValues, Never),
    projection("self_attn.o_proj", Queries, Hidden, AttentionOutput),
    projection("mlp.gate_up_proj", Hidden, GateUp, Never),
    projection("mlp.down_proj", FeedForward, Hidden, Mlp),
];

impl Projection {
    /// Returns whether it belongs to the attention, not to the MLP.
    pub fn is_attention(&self) -> bool {
        self.name.starts_with("self_attn")
    }
}

impl Family {
    /// Returns the projections of a block, in order of execution.
    pub const fn projections(self) -> &'static [Projection] {
        if self.facts().has_joint_projections { &JOINT } else { &SEPARATE }
    }

    /// Returns the names of a block's norms, in order of execution.
    pub const fn norm_names(self) -> &'static [&'static str] {
        match self.facts().norms {
            NormPlacement::Pre => &["input_layernorm", "post_attention_layernorm"],
            NormPlacement::Post => &["post_attention_layernorm", "post_feedforward_layernorm"],
            NormPlacement::Both => &[
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
            QueryKeyNorm::PerHead | QueryKeyNorm::Whole => &["self_attn.q_norm", "self_attn.k_norm"],
        }
    }
}
