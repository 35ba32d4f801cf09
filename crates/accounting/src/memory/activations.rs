//! Activations that a forward keeps for the backward, tensor by tensor.
//!
//! A tensor is counted once, however many operations keep it. `c` is the recipe's bytes in matrix products, `r` those
//! of the residual stream (4 under autocast, else `c`); per token, with `d` hidden, `h` query heads and `n` key-value
//! heads of `k`, `f` feed-forward, `s` sequence:
//!
//! | kept by | tensor | bytes |
//! |---|---|---|
//! | each norm | its input ([`NormKernel::Output`]: its output, which is counted below); mean and deviation (RMSNorm: one number) in fp32 | `r·d`, `8` (`4`) |
//! | RMSNorm, composed | its input divided by its length | `r·d` |
//! | query, key, value projections | their input | `c·d` |
//! | attention | Q; K and V (eager kernels repeat them for every query head) | `c·h·k`, `2·c·n·k` |
//! | – eager | probabilities (under autocast in fp32 too) | `c·h·s` |
//! | – flash | log-sum-exp in fp32 | `4·h` |
//! | output projection | its input | `c·h·k` |
//! | SwiGLU | its input, and up to four tensors by [`SwigluLevel`] | `c·d`, `c·f` each |
//! | plain MLP | its input, the activation's input (GELU) and output | `c·d`, `c·f` each |
//! | dropout | a mask of one byte per element | |
//!
//! Autocast copies a projection's input for each projection that reads it: three for separate query, key and value projections,
//! two for gate and up. (Its cache holds copies of weights only.)
//!
//! Activation functions count as single kernels, rotary embeddings as free (their backward needs only the table of angles).
//! Additions keep nothing. A dropout mask takes a byte, as on a GPU; on a CPU torch keeps it in the dtype of the data.
//!
//! Checked against what torch 2.11 saves, storage by storage (`torch.autograd.graph.saved_tensors_hooks`), for blocks of
//! GPT-2 and Llama: see the tests.

use crate::Error;
use crate::decoder_flops::{Recomputation, Workload};
use crate::memory::Item;
use crate::memory::recipe::Recipe;
use crate::model::{Decoder, Family};
use crate::recompute::{AttentionKernel, NormKernel, Recompute, SwigluLevel};

/// Options that determine which activations are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationChoices {
    /// Number formats.
    pub recipe: Recipe,
    /// What is recomputed.
    pub recomputation: Recomputation,
    /// The implementation of an RMSNorm.
    pub norm: NormKernel,
    /// Whether dropout is on. (Qwen2 and Llama have it on the probabilities only.)
    pub dropout: bool,
}

impl ActivationChoices {
    pub(crate) fn compute_bytes(&self) -> u64 {
        self.recipe.compute.storage_bits() / 8
    }

    /// Whether a norm keeps its output, which is the next product's input and counted there.
    pub(crate) fn norm_keeps_output(&self, model: &Decoder) -> bool {
        self.norm == NormKernel::Output && !self.recipe.casts && model.family.is_rotary()
    }

    pub(crate) fn residual_bytes(&self) -> u64 {
        self.recipe.residual.storage_bits() / 8
    }
}

/// Lists what one block keeps until its backward.
pub fn block(model: &Decoder, work: Workload, choices: &ActivationChoices) -> Result<Vec<Item>, Error> {
    if choices.recomputation.checkpoint == Recompute::Full {
        return Ok(vec![block_input(model, work, choices)?]);
    }
    inside_block(model, work, choices)
}

/// Lists what one block holds between its own forward and backward: what [`block`] keeps or, if the whole block is recomputed,
/// what that second forward keeps.
pub fn inside_block(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<Vec<Item>, Error> {
    model.check_activations(work.sequence)?;
    let mut items = attention_branch(model, work, choices)?;
    items.extend(feed_forward_branch(model, work, choices)?);
    Ok(items)
}

/// What a block's attentions and their norms keep.
pub(crate) fn attention_branch(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<Vec<Item>, Error> {
    let mut items = Vec::new();
    for _ in 0..model.family.attentions() {
        norm(&mut items, model, work, choices)?;
        attention(&mut items, model, work, choices)?;
    }
    Ok(items)
}

/// What a block's feed-forward layer and its norm keep.
pub(crate) fn feed_forward_branch(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<Vec<Item>, Error> {
    let mut items = Vec::new();
    norm(&mut items, model, work, choices)?;
    feed_forward(&mut items, model, work, choices)?;
    Ok(items)
}

/// The input from the residual stream, of a block or of a branch.
pub(crate) fn block_input(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<Item, Error> {
    Item::new("block input", choices.residual_bytes(), &[work.tokens()?, model.hidden])
}

/// Returns the bytes of [`inside_block`], or of one branch, that are its input itself: what the first norm keeps, or the first
/// projection if norms come last, unless autocast copies it.
pub(crate) fn input_kept_inside(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<u64, Error> {
    let norm_comes_first = model.family.has_final_norm();
    if norm_comes_first && choices.norm_keeps_output(model) {
        Ok(0)
    } else if norm_comes_first || !choices.recipe.casts {
        Ok(block_input(model, work, choices)?.bytes)
    } else {
        Ok(0)
    }
}

/// What the query, key and value projections keep.
pub(crate) const QKV_INPUT: &str = "query, key, value input";

fn norm(
    items: &mut Vec<Item>,
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<(), Error> {
    let tokens = work.tokens()?;
    let statistics = if model.family.is_rotary() { 1 } else { 2 };
    if !choices.norm_keeps_output(model) {
        items.push(Item::new("norm input", choices.residual_bytes(), &[tokens, model.hidden])?);
    }
    items.push(Item::new(NORM_STATISTICS, 4, &[tokens, statistics])?);
    if model.family.is_rotary() && choices.norm == NormKernel::Composed {
        items.push(Item::new("normalized input", choices.residual_bytes(), &[tokens, model.hidden])?);
    }
    Ok(())
}

/// The item that Korthikanti's formulas omit.
pub const NORM_STATISTICS: &str = "norm statistics";

fn attention(
    items: &mut Vec<Item>,
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<(), Error> {
    let (tokens, c) = (work.tokens()?, choices.compute_bytes());
    let eager = choices.recomputation.attention == AttentionKernel::Eager;
    let kv_heads = if eager { model.heads } else { model.kv_heads };
    // Query, key and value are one packed projection in the GPT-2 families.
    let copies = if choices.recipe.casts && model.family.is_swiglu() { 3 } else { 1 };
    items.push(Item::new(QKV_INPUT, c, &[copies, tokens, model.hidden])?);
    items.push(Item::new("query", c, &[tokens, model.heads, model.head_dim])?);
    items.push(Item::new("key and value", c, &[2, tokens, kv_heads, model.head_dim])?);
    if eager {
        if choices.recomputation.checkpoint != Recompute::Selective {
            probabilities(items, model, work, choices)?;
        }
    } else {
        items.push(Item::new("log-sum-exp of scores", 4, &[tokens, model.heads])?);
    }
    items.push(Item::new("attention output", c, &[tokens, model.heads, model.head_dim])?);
    residual_dropout(items, model, tokens, choices)
}

/// The eager kernel's tensors of `[batch, heads, sequence, sequence]`.
pub(crate) fn probabilities(
    items: &mut Vec<Item>,
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<(), Error> {
    let pairs = [work.tokens()?, model.heads, work.sequence];
    let c = choices.compute_bytes();
    if choices.recipe.casts {
        items.push(Item::new("probabilities in fp32", 4, &pairs)?);
    }
    items.push(Item::new("probabilities", c, &pairs)?);
    if choices.dropout {
        items.push(Item::new("dropout mask of probabilities", 1, &pairs)?);
        items.push(Item::new("dropped probabilities", c, &pairs)?);
    }
    Ok(())
}

/// Dropout on a branch before it joins the residual stream, in GPT-2 only.
fn residual_dropout(
    items: &mut Vec<Item>,
    model: &Decoder,
    tokens: u64,
    choices: &ActivationChoices,
) -> Result<(), Error> {
    if choices.dropout && !model.family.is_swiglu() {
        items.push(Item::new("dropout mask", 1, &[tokens, model.hidden])?);
    }
    Ok(())
}

fn feed_forward(
    items: &mut Vec<Item>,
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<(), Error> {
    let (tokens, c, f) = (work.tokens()?, choices.compute_bytes(), model.feed_forward);
    // A hand-written SwiGLU casts its input once.
    let composed = model.family.is_swiglu() && choices.recomputation.swiglu == SwigluLevel::Eager;
    let copies = if choices.recipe.casts && composed { 2 } else { 1 };
    items.push(Item::new("feed-forward input", c, &[copies, tokens, model.hidden])?);
    let mut wide = |name, bytes| {
        items.push(Item::new(name, bytes, &[tokens, f])?);
        Ok::<(), Error>(())
    };
    match model.family {
        family if family.is_rotary() => {
            for name in kept_by_swiglu(choices.recomputation.swiglu) {
                wide(name, c)?;
            }
        }
        Family::Gpt2 => {
            wide("GELU input", c)?;
            wide("GELU output", c)?;
        }
        _ => {
            // The backward of ReLU needs its output only, which is the next product's input too.
            wide("ReLU output", c)?;
            if choices.dropout {
                wide("dropout mask of ReLU", 1)?;
                wide("dropped ReLU output", c)?;
            }
        }
    }
    residual_dropout(items, model, tokens, choices)
}

/// Returns the tensors of `[tokens, f]` that a level keeps.
pub fn kept_by_swiglu(level: SwigluLevel) -> &'static [&'static str] {
    match level {
        SwigluLevel::Eager => &["gate xW", "up xV", "SiLU(xW)", "SiLU(xW) ⊙ xV"],
        SwigluLevel::SaveAll => &["gate xW", "up xV", "SiLU(xW)"],
        SwigluLevel::SaveGateUp => &["gate xW", "up xV"],
        SwigluLevel::SaveOne => &["gate xW"],
        SwigluLevel::InputOnly => &[],
    }
}

/// Lists what is kept outside the blocks: tokens and labels (64-bit), the table of rotary angles, tensors between the last
/// block and the logits.
pub fn outside_blocks(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<Vec<Item>, Error> {
    model.check_activations(work.sequence)?;
    let (tokens, c) = (work.tokens()?, choices.compute_bytes());
    let mut items = vec![Item::new("tokens and labels", 8, &[2, tokens])?];
    match model.family {
        family if family.is_rotary() => {
            items.push(Item::new("rotary angles", c, &[2, work.sequence, model.head_dim])?);
        }
        Family::Gpt2 => {
            if choices.dropout {
                items.push(Item::new("dropout mask of the embedding", 1, &[tokens, model.hidden])?);
            }
        }
        _ => items.push(Item::new("projector input", c, &[tokens, model.embedding])?),
    }
    if model.family.has_final_norm() {
        norm(&mut items, model, work, choices)?;
    }
    items.push(Item::new("output projection input", c, &[tokens, model.hidden])?);
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{published, total};
    use crate::model::Shape;
    use crate::presets;

    fn choices(recipe: Recipe, attention: AttentionKernel, checkpoint: Recompute) -> ActivationChoices {
        let recomputation = Recomputation { attention, checkpoint, swiglu: SwigluLevel::Eager };
        ActivationChoices { recipe, recomputation, norm: NormKernel::Fused, dropout: true }
    }

    /// What torch 2.11 saved on a CPU, summed over distinct storages without parameters and their casts, for
    /// 2 × 128 tokens, d = 64: pre-norm blocks of `F.rms_norm`, `scaled_dot_product_attention` (flash) and a SwiGLU
    /// of plain operations with f = 176, and one of `LayerNorm`, packed projections and GELU with f = 256.
    #[test]
    fn kept_tensors_match_what_torch_saves() {
        let saved = |family, kv_heads, feed_forward, recipe| {
            let shape = Shape {
                family,
                vocabulary: 10,
                context: 128,
                embedding: 64,
                hidden: 64,
                layers: 1,
                heads: 4,
                kv_heads,
                head_dim: 16,
                feed_forward,
                tied: true,
                attention_bias: false,
                mlp_bias: false,
            };
            let choices = ActivationChoices {
                dropout: false,
                norm: NormKernel::Composed,
                ..choices(recipe, AttentionKernel::Flash, Recompute::None)
            };
            let work = Workload { batch: 2, sequence: 128 };
            total(&block(&Decoder::new(shape).unwrap(), work, &choices).unwrap()).unwrap()
        };
        assert_eq!(saved(Family::Llama, 4, 176, Recipe::FP32), 1_382_400);
        assert_eq!(saved(Family::Qwen2, 2, 176, Recipe::FP32), 1_316_864);
        assert_eq!(saved(Family::Llama, 4, 176, Recipe::AMP_BF16), 923_648);
        assert_eq!(saved(Family::Gpt2, 4, 256, Recipe::FP32), 1_056_768);
    }

    #[test]
    fn kept_bytes_match_korthikantis_formula() {
        for name in ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] {
            let model = presets::find(name).unwrap();
            for (batch, sequence) in [(1, 1024), (3, 77), (16, 512)] {
                let work = Workload { batch, sequence };
                for checkpoint in Recompute::ALL {
                    let choices = choices(Recipe::FP16_MASTER, AttentionKernel::Eager, checkpoint);
                    let mut items = block(&model, work, &choices).unwrap();
                    items.retain(|item| item.name != NORM_STATISTICS);
                    let formula =
                        published::block_bytes(work, model.hidden, model.heads, checkpoint).unwrap();
                    assert_eq!(total(&items).unwrap(), formula, "{name} {work:?} {checkpoint:?}");
                }
            }
        }
    }

    /// Llama-3-8B in bf16 with a flash kernel, counted manually per token: 4 norm and projection inputs of d, Q and the
    /// output of d, K and V of d/4, a log-sum-exp per head, two statistics, and 4 f.
    #[test]
    fn kept_bytes_of_llama_3_8b_match_a_manual_count() {
        let model = presets::find("llama-3-8b").unwrap();
        let work = Workload { batch: 2, sequence: 512 };
        let (d, f) = (4096, 14336);
        let fixed = 2 * (4 * d + 2 * d + 2 * d / 4) + 4 * 32 + 2 * 4;
        for level in SwigluLevel::ALL {
            let mut choices = choices(Recipe::BF16, AttentionKernel::Flash, Recompute::None);
            choices.recomputation.swiglu = level;
            let wide = 2 * level.kept_feed_forward_tensors() * f;
            let bytes = total(&block(&model, work, &choices).unwrap()).unwrap();
            assert_eq!(bytes, 1024 * (fixed + wide), "{level:?}");
            assert_eq!(kept_by_swiglu(level).len() as u64, level.kept_feed_forward_tensors());
        }
    }

    #[test]
    fn autocast_keeps_the_residual_stream_and_the_softmax_in_fp32() {
        let model = presets::find("gpt2").unwrap();
        let work = Workload { batch: 1, sequence: 64 };
        let bytes = |recipe| {
            let choices = choices(recipe, AttentionKernel::Eager, Recompute::None);
            total(&block(&model, work, &choices).unwrap()).unwrap()
        };
        let extra = 2 * 2 * 64 * 768 + 4 * 12 * 64 * 64;
        assert_eq!(bytes(Recipe::AMP_FP16), bytes(Recipe::FP16_MASTER) + extra);
    }
}
