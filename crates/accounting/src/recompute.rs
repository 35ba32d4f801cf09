//! Tensors that a forward keeps for the backward, and the backward's recomputation.
//!
//! The choices are independent of each other: the attention kernel (a flash kernel always recomputes its scores),
//! the norm's kernel, the SwiGLU's level, and the checkpoints around them.

use std::str::FromStr;

use crate::Error;

/// The implementation of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionKernel {
    /// Scores and probabilities are tensors of `[batch, heads, sequence, sequence]`.
    Eager,
    /// A fused kernel keeps its output and one number per row; its backward recomputes `Q·Kᵀ`.
    #[default]
    Flash,
}

/// The implementation of an RMSNorm. (A LayerNorm is one kernel everywhere.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormKernel {
    /// A single kernel, which keeps its input and a number per token.
    #[default]
    Fused,
    /// A single kernel that keeps its output instead of its input, because the next product keeps it too (Apex's
    /// `memory_efficient`; `runtime`'s norms on a CPU). Under autocast, where the product keeps its own copy, it equals
    /// [`NormKernel::Fused`].
    Output,
}

/// The checkpoints around blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Everything that the backward needs is kept.
    #[default]
    None,
    /// The attention's core is recomputed (Korthikanti et al.); a flash kernel does so itself.
    Selective,
    /// Each block keeps only its input, and its whole forward is recomputed.
    Full,
}

/// The tensors that a SwiGLU layer `(SiLU(xW) ⊙ xV)·U` keeps, per token (`H` hidden, `F` feed-forward). No hand-written level keeps
/// the input of `U`: it is an elementwise product of two kept or recomputed tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwigluLevel {
    /// Composed of framework operations: x, xW, SiLU(xW), xV and their product, `H + 4F`.
    #[default]
    Eager,
    /// x, xW, SiLU(xW), xV: `H + 3F`. The assignment's level 0.
    SaveAll,
    /// x, xW, xV: `H + 2F`.
    SaveGateUp,
    /// x and one of the products; the other is recomputed: `H + F`.
    SaveOne,
    /// x; both products are recomputed, the down-projection never: `H`. The assignment's level 1.
    InputOnly,
}

impl AttentionKernel {
    /// All kernels.
    pub const ALL: [Self; 2] = [Self::Eager, Self::Flash];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Flash => "flash",
        }
    }
}

impl Recompute {
    /// All choices, the one that keeps most first.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }
}

impl SwigluLevel {
    /// All levels, the one that keeps most first.
    pub const ALL: [Self; 5] = [Self::Eager, Self::SaveAll, Self::SaveGateUp, Self::SaveOne, Self::InputOnly];

    /// Returns the name for [`FromStr`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::SaveAll => "save-all",
            Self::SaveGateUp => "save-gate-up",
            Self::SaveOne => "save-one",
            Self::InputOnly => "input-only",
        }
    }

    /// Returns how many tensors of `[tokens, feed-forward]` are kept besides the input.
    pub const fn kept_feed_forward_tensors(self) -> u64 {
        match self {
            Self::Eager => 4,
            Self::SaveAll => 3,
            Self::SaveGateUp => 2,
            Self::SaveOne => 1,
            Self::InputOnly => 0,
        }
    }

    /// Returns how many of the products xW and xV the backward recomputes.
    pub const fn recomputed_products(self) -> u64 {
        match self {
            Self::Eager | Self::SaveAll | Self::SaveGateUp => 0,
            Self::SaveOne => 1,
            Self::InputOnly => 2,
        }
    }
}

macro_rules! read_by_name {
    ($($kind:ty, $what:literal);*) => { $(
        impl FromStr for $kind {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                Self::ALL
                    .into_iter()
                    .find(|known| known.name().eq_ignore_ascii_case(text))
                    .ok_or_else(|| Error::unknown($what, text, Self::ALL.map(Self::name)))
            }
        }
    )* };
}

read_by_name!(
    AttentionKernel, "attention kernel";
    Recompute, "recomputation";
    SwigluLevel, "SwiGLU level"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_bytes_of_llama_3_8b_in_bf16() {
        // H = 4096, F = 14336: 120, 92, 64, 36 and 8 KiB per token.
        let kib = SwigluLevel::ALL.map(|l| 2 * (4096 + l.kept_feed_forward_tensors() * 14336) / 1024);
        assert_eq!(kib, [120, 92, 64, 36, 8]);
    }

    #[test]
    fn names_round_trip() {
        assert!(SwigluLevel::ALL.iter().all(|l| l.name().parse::<SwigluLevel>().unwrap() == *l));
        assert!(Recompute::ALL.iter().all(|r| r.name().parse::<Recompute>().unwrap() == *r));
        assert!(AttentionKernel::ALL.iter().all(|k| k.name().parse::<AttentionKernel>().unwrap() == *k));
    }
}
