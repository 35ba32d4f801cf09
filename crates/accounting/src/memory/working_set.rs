//! Temporaries: gradients of activations inside one block's backward, and ZeRO's buffers.
//!
//! A block's backward holds the gradient of the residual stream and that of its branch, and then the larger of
//!
//! - the feed-forward layer: gradients of its wide tensors, and of those that its level recomputes. A SwiGLU of framework
//!   operations has two gradients at a time beyond what was kept, a hand-written one (which works in place) one, as the table
//!   of [`swiglu`](crate::swiglu) shows; a plain one two;
//! - the attention, after everything that the feed-forward layer kept is freed: gradients of its output, Q, K and V, with an
//!   fp32 accumulator for Q's (flash), or of the scores and probabilities (eager), and the probabilities themselves if they are
//!   recomputed.
//!
//! If the whole block is recomputed, everything that its forward keeps is added, except its input.
//!
//! ZeRO-2 and 3 reduce the gradients of one block while the next is computed: a bucket of one block. ZeRO-3 gathers the
//! parameters of a block, or of the largest matrix outside, and prefetches the next: two of them. Tensors on the host
//! ([`OnHost`]) are copied in the same way.

use crate::decoder_flops::Workload;
use crate::memory::activations::{
    ActivationChoices, feed_forward_branch, input_kept_inside, inside_block, probabilities,
};
use crate::memory::host::OnHost;
use crate::memory::zero::{Sharding, ZeroStage};
use crate::memory::{Item, total};
use crate::model::{Decoder, Part};
use crate::recompute::{AttentionKernel, Recompute, SwigluLevel};
use crate::{Error, exact};

/// Returns the temporaries of one block's backward.
pub fn block_backward(
    model: &Decoder,
    work: Workload,
    choices: &ActivationChoices,
) -> Result<Vec<Item>, Error> {
    let mut items = stream(model, work, choices)?;
    let feed_forward = feed_forward(model, work.tokens()?, choices)?;
    let attention = total(&attention(model, work, choices)?)?;
    let bytes = attention.saturating_sub(total(&feed_forward_branch(model, work, choices)?)?);
    if bytes > total(&feed_forward)? {
        items.push(Item { name: "gradients in the attention, beyond what is freed before", bytes });
    } else {
        items.extend(feed_forward);
    }
    if choices.recomputation.checkpoint == Recompute::Full {
        // The block's input already exists.
        let input = input_kept_inside(model, work, choices)?;
        let bytes = total(&inside_block(model, work, choices)?)? - input;
        items.push(Item { name: "activations of the recomputed block", bytes });
    }
    Ok(items)
}

fn stream(model: &Decoder, work: Workload, choices: &ActivationChoices) -> Result<Vec<Item>, Error> {
    let size = [work.tokens()?, model.hidden];
    Ok(vec![
        Item::new("gradient of the residual stream", choices.residual_bytes(), &size)?,
        Item::new("gradient of a branch", choices.compute_bytes(), &size)?,
    ])
}

fn feed_forward(model: &Decoder, tokens: u64, choices: &ActivationChoices) -> Result<Vec<Item>, Error> {
    let (c, f) = (choices.compute_bytes(), model.feed_forward);
    if !model.family.is_swiglu() {
        return Ok(vec![Item::new("gradients in the feed-forward layer", c, &[2, tokens, f])?]);
    }
    let level = choices.recomputation.swiglu;
    let gradients = if level == SwigluLevel::Eager { 2 } else { 1 };
    Ok(vec![
        Item::new("gradients in the feed-forward layer", c, &[gradients, tokens, f])?,
        Item::new("products that the SwiGLU makes again", c, &[level.recomputed_products(), tokens, f])?,
    ])
}

fn attention(model: &Decoder, work: Workload, choices: &ActivationChoices) -> Result<Vec<Item>, Error> {
    let (tokens, c) = (work.tokens()?, choices.compute_bytes());
    let query = [tokens, model.heads, model.head_dim];
    let mut items = vec![
        Item::new("gradients of the attention's output and Q", c, &[2, tokens, model.heads, model.head_dim])?,
        Item::new("gradients of K and V", c, &[2, tokens, model.kv_heads, model.head_dim])?,
    ];
    match choices.recomputation.attention {
        AttentionKernel::Flash => items.push(Item::new("fp32 accumulator of Q's gradient", 4, &query)?),
        AttentionKernel::Eager => {
            let pairs = [2, tokens, model.heads, work.sequence];
            let bytes = if choices.recipe.casts { 4 } else { c };
            items.push(Item::new("gradients of probabilities and scores", bytes, &pairs)?);
            if choices.recomputation.checkpoint == Recompute::Selective {
                probabilities(&mut items, model, work, choices)?;
            }
        }
    }
    Ok(items)
}

/// The item of [`communication`] that exists in the forward too.
pub const GATHERED: &str = "gathered parameters";

/// Lists the buffers of ZeRO's, or the host's, communication during forward and backward: gathered parameters and gradients to
/// be reduced.
pub fn communication(
    model: &Decoder,
    choices: &ActivationChoices,
    sharding: Sharding,
    host: OnHost,
) -> Result<Vec<Item>, Error> {
    let block = model.block_parameters()?;
    let mut items = Vec::new();
    if sharding.divides(ZeroStage::Two) || host.gradients {
        let bytes = choices.recipe.gradients.bytes(block)?;
        items.push(Item { name: "gradients to be reduced", bytes });
    }
    if sharding.divides(ZeroStage::Three) || host.parameters {
        let outside = model.parameters_by_part()?;
        let outside = outside.iter().filter(|(part, _)| matches!(part, Part::Embedding | Part::Output));
        let largest = outside.map(|(_, elements)| *elements).fold(block, u64::max);
        let two = exact::product("gathered parameters", &[2, largest])?;
        items.push(Item { name: GATHERED, bytes: choices.recipe.compute.bytes(two)? });
    }
    Ok(items)
}
