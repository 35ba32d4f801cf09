//! Low-rank adaptation of a frozen base (Hu et al., arXiv:2106.09685): parameters, bytes and FLOPs of a training step.
//!
//! Each adapted projection W `[o, i]` has A `[r, i]` and B `[o, r]`, and only these are trained:
//!
//! ```text
//! u = x·Aᵀ                     [n, r]
//! y = x·Wᵀ + s·u·Bᵀ            [n, o]
//! dB = s·gᵀ·u,  du = s·g·B,  dA = duᵀ·x,  dx = g·W + du·A          g = ∂L/∂y
//! ```
//!
//! **DoRA** (Liu et al., arXiv:2402.09353) multiplies y, without a bias, by m/ν: a trained m `[o]` and the norms ν `[o]` of the rows of
//! W + s·B·A. **A subtracted term** (PiSSA, OLoRA) is a second A and B of the same rank, which are frozen.
//!
//! **Trained parameters**: `r·(i + o)` for each adapted projection; with DoRA `o` more.
//!
//! **States.** The base is in the recipe's dtype, without gradient, master weight or optimizer state. A and B, their gradients
//! and state are in fp32 for any base: `16` bytes per number with AdamW.
//!
//! **Activations**, as this workspace's own functions keep them. No product of a frozen matrix keeps its input; what remains is
//! needed by the adapters, or by operations without weights:
//!
//! | kept by | tensor | elements per token |
//! |---|---|---|
//! | a norm | its output ([`NormKernel::Output`]) or its input; a number in fp32 | `d`, `1` |
//! | adapted q, k, v | the norm's output, once for all three; u for each, in fp32 (on a GPU in the base's dtype, with A and B) | `d`, `r` each |
//! | attention | rotated queries and keys, values, output; log-sum-exp in fp32 | `2·h·k + 2·n·k`, `h` |
//! | an adapted o | the attention's output, which is already kept; u | `r` |
//! | SwiGLU | gate and up | `2·f` |
//! | adapted gate, up | the norm's output; u for each | `d`, `r` each |
//! | an adapted down | the product of the gate; u | `f`, `r` |
//! | DoRA of any projection | y before it is multiplied, in fp32 | `o` |
//!
//! The dropout mask is recomputed from its seed. Nothing before the first adapter is kept: the first norm keeps nothing,
//! because the embedding is frozen. A recomputed block ([`Recompute::Full`]) keeps only its input.
//!
//! **The loss** is computed for labelled tokens only and has no gradient of the frozen output matrix.
//!
//! **Temporaries** are those of a block's forward and backward, operation by operation (`passes`). The peak of a backward is
//! usually where gate and up meet their two gradients: `4·f` per token.
//!
//! **Experts of a mixture** are adapted by the tensors that hold all of a layer ([`ExpertTargets`]), as `models::mixture` computes it: for E
//! experts of inner width f, A `[E·r, d]` and B `[2f, r·E]` of gate and up, A `[E·r, f]` and B `[d, r·E]` of down. Each of the n·k rows that
//! tokens are given to keeps r numbers of each in fp32.
//!
//! **FLOPs** are in [`flops`].
//!
//! Not modelled, and refused: families whose query, key and value are one projection, and attention that keeps its probabilities.

pub mod flops;
mod targets;

pub use targets::{ExpertTargets, Projection, Targets};

use crate::decoder_flops::{Recomputation, Workload};
use crate::exact::{self, positive};
use crate::model::{AttentionKind, Decoder};
use crate::recompute::{AttentionKernel, SwigluLevel};
use crate::{Dtype, Error};

#[cfg(doc)]
use crate::recompute::{NormKernel, Recompute};

/// Adapters of a frozen base.
///
/// ```
/// use accounting::lora::{LowRank, Targets};
/// use accounting::presets;
///
/// let lora = LowRank { rank: 8, ..LowRank::default() };
/// assert_eq!(lora.targets, Targets::ATTENTION);
/// assert_eq!(lora.parameters(&presets::find("qwen2.5-0.5b")?)?, 1_081_344);
/// # Ok::<(), accounting::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRank {
    /// r.
    pub rank: u64,
    /// The adapted projections of every block.
    pub targets: Targets,
    /// The adapted tensors of all experts of every block.
    pub experts: ExpertTargets,
    /// Whether the adapters' input has dropout. It takes memory during a pass, and none between passes.
    pub dropout: bool,
    /// Whether each row of a weight has a trained magnitude (DoRA).
    pub magnitudes: bool,
    /// Whether the adapters begin at a part of the weights, which a frozen term of the same rank subtracts (PiSSA, OLoRA).
    pub subtracted: bool,
    /// Whether it runs on a CPU: there u and the sums of a base in 16 bits are in fp32, and a fused loss rounds the gradient of a tile of
    /// logits in place, if at all. On a GPU they are in the base's dtype, and A and B are kept rounded to it. No effect on a base in fp32.
    pub on_cpu: bool,
    /// Rows of tokens that are trained beside the adapters.
    pub token_rows: TokenRows,
}

/// Rows of the embedding and of the head that are trained alone and replace the table's, for new tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenRows {
    /// Trained rows: those of a tied head are the embedding's.
    pub trained: u64,
    /// Rows that the embedding has in place of its own.
    pub in_embedding: u64,
    /// Rows that the head has in place of its own.
    pub in_head: u64,
}

impl TokenRows {
    /// Returns the number of trained parameters.
    ///
    /// # Errors
    /// A number beyond 64 bits.
    pub fn parameters(&self, model: &Decoder) -> Result<u64, Error> {
        exact::product("parameters of token rows", &[self.trained, model.hidden])
    }
}

impl Default for LowRank {
    /// Rank 8 on q, k, v and o, without dropout, on an accelerator.
    fn default() -> Self {
        Self {
            rank: 8,
            targets: Targets::ATTENTION,
            experts: ExpertTargets::NONE,
            dropout: false,
            magnitudes: false,
            subtracted: false,
            on_cpu: false,
            token_rows: TokenRows::default(),
        }
    }
}

impl LowRank {
    /// Returns the number of trained parameters in all blocks of `model`, without rows of tokens.
    ///
    /// # Errors
    /// A rank of 0, no target, or a model whose family has no such projections.
    pub fn parameters(&self, model: &Decoder) -> Result<u64, Error> {
        const WHAT: &str = "parameters of the adapters";
        let mut all = 0;
        for (kind, layers) in model.attention_kinds() {
            let of_block = exact::sum(WHAT, self.tensors(model, kind)?)?;
            all = exact::sum(WHAT, [all, exact::product(WHAT, &[layers, of_block])?])?;
        }
        Ok(all)
    }

    /// Low-rank terms of a projection: a trained one, and the frozen one that is subtracted.
    pub(crate) fn terms(&self) -> u64 {
        1 + u64::from(self.subtracted)
    }

    /// Elements of each trained tensor of one block with this kind of attention: A and B of each adapted projection, and its magnitudes; A and B of all experts.
    pub(crate) fn tensors(&self, model: &Decoder, kind: AttentionKind) -> Result<Vec<u64>, Error> {
        let elements = |shape: Vec<u64>| exact::product("elements of an adapter", &shape);
        self.shapes(model, kind)?.into_iter().map(elements).collect()
    }

    /// The same, with their shapes.
    pub(crate) fn shapes(&self, model: &Decoder, kind: AttentionKind) -> Result<Vec<Vec<u64>>, Error> {
        self.check(model)?;
        model.check_experts()?;
        let mut shapes = Vec::new();
        for (_, linear) in
            Projection::linears(model, kind)?.iter().filter(|(which, _)| self.targets.has(*which))
        {
            shapes.push(vec![self.rank, linear.inputs]);
            shapes.push(vec![linear.outputs, self.rank]);
            if self.magnitudes {
                shapes.push(vec![linear.outputs]);
            }
        }
        if let Some(experts) = &model.experts {
            for [inputs, outputs] in self.experts.widths(model.hidden, experts)? {
                shapes.push(vec![experts.count, self.rank, inputs]);
                shapes.push(vec![experts.count, outputs, self.rank]);
            }
        }
        Ok(shapes)
    }

    /// Returns the bytes of frozen tensors beside the base, in all blocks: the squared norm of each row of W, and A and B of subtracted
    /// terms. Offloading leaves them on the device.
    pub(crate) fn frozen_bytes(&self, model: &Decoder) -> Result<u64, Error> {
        const WHAT: &str = "frozen numbers of the adapters";
        let mut numbers = 0;
        for (kind, layers) in model.attention_kinds() {
            let linears = Projection::linears(model, kind)?;
            for (_, linear) in linears.iter().filter(|(which, _)| self.targets.has(*which)) {
                let widths = exact::sum(WHAT, [linear.inputs, linear.outputs])?;
                let term = if self.subtracted { exact::product(WHAT, &[self.rank, widths])? } else { 0 };
                let squares = if self.magnitudes { linear.outputs } else { 0 };
                let of_layer = exact::sum(WHAT, [term, squares])?;
                numbers = exact::sum(WHAT, [numbers, exact::product(WHAT, &[layers, of_layer])?])?;
            }
        }
        Self::WIDE.bytes(numbers)
    }

    /// Refuses a rank of 0, no target, and a family without these projections.
    pub(crate) fn check(&self, model: &Decoder) -> Result<(), Error> {
        positive("the rank of the adapters", self.rank)?;
        if !model.family.has_separate_projections() {
            return Err(refusal(
                format!("{} has no projections q, k, v, o, gate, up and down", model.family.model_type()),
                "give a model of the family qwen2 or llama",
            ));
        }
        if model.gemma4.is_some() {
            return Err(refusal(
                format!("adapters of {}, whose layers differ", model.family.model_type()),
                "measure a step instead",
            ));
        }
        let of_mlp = [Projection::Gate, Projection::Up, Projection::Down];
        if model.experts.is_some_and(|experts| experts.shared == 0)
            && of_mlp.iter().any(|projection| self.targets.has(*projection))
        {
            return Err(refusal(
                format!("adapters on single matrices of the experts of {}", model.family.model_type()),
                "name projections of the attention: q, k, v, o, or the tensors of all experts: gate_up_proj, down_proj",
            ));
        }
        if self.targets == Targets::NONE && !self.experts.any() {
            return Err(refusal("adapters on no projection".into(), "name at least one target"));
        }
        if self.experts.any() && model.experts.is_none() {
            return Err(refusal(
                format!("adapters on the experts of {}, which has none", model.family.model_type()),
                "name projections instead",
            ));
        }
        if self.experts.any() && (self.dropout || self.magnitudes || self.subtracted) {
            return Err(refusal(
                "adapters on experts with dropout, magnitudes or a subtracted term".into(),
                "leave these out, or adapt projections alone",
            ));
        }
        Ok(())
    }

    /// Refuses a step that is not modelled.
    pub(crate) fn check_step(
        &self,
        model: &Decoder,
        work: Workload,
        labelled: Option<u64>,
        recomputation: &Recomputation,
    ) -> Result<(), Error> {
        self.check(model)?;
        if recomputation.attention == AttentionKernel::Eager {
            return Err(not_modelled(
                "beside an attention that keeps its probabilities",
                "take flash attention",
            ));
        }
        if matches!(recomputation.swiglu, SwigluLevel::SaveOne | SwigluLevel::InputOnly) {
            return Err(not_modelled(
                "in a SwiGLU that computes its products again",
                "take the level save-gate-up, or recompute whole blocks",
            ));
        }
        let tokens = work.tokens()?;
        match labelled {
            Some(0) => Err(Error::Zero { what: "the number of labelled tokens" }),
            Some(labelled) if labelled > tokens => Err(refusal(
                format!("{labelled} labelled tokens are more than the {tokens} of the step"),
                "give at most as many",
            )),
            _ => Ok(()),
        }
    }

    /// The dtype of adapters, their gradients, their state and u.
    pub(crate) const WIDE: Dtype = Dtype::Fp32;
}

fn refusal(what: String, remedy: &str) -> Error {
    Error::Shape { what, remedy: remedy.into() }
}

/// Refuses adapters where they are not modelled.
fn not_modelled(where_: &str, remedy: &str) -> Error {
    refusal(format!("adapters {where_} are not modelled"), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn published_counts_of_trainable_parameters() {
        let count = |model: &str, rank, targets| {
            LowRank { rank, targets, ..LowRank::default() }
                .parameters(&presets::find(model).unwrap())
                .unwrap()
        };
        assert_eq!(count("qwen2.5-0.5b", 8, Targets::ATTENTION), 1_081_344);
        assert_eq!(count("qwen2.5-7b", 8, Targets::ATTENTION), 5_046_272);
        // Each of 24 blocks has 896 → 896 twice, 896 → 128 twice, 896 → 4864 three times.
        let by_hand = 24 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864));
        assert_eq!(count("qwen2.5-0.5b", 8, Targets::ALL), by_hand);
    }
}
