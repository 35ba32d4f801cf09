//! The moments of a step that trains adapters.

use super::LowRank;
use super::block::{Block, Ledger, backward_bytes, checked, recomputed_bytes};
use crate::estimate::{Budget, Estimate, Moment, Plan};
use crate::exact::{product, sum};
use crate::memory::logits::{self, Loss};
use crate::memory::optimizer::StepKernel;
use crate::memory::zero::ModelStates;
use crate::memory::{Item, total};
use crate::model::Decoder;
use crate::recompute::{NormKernel, Recompute};
use crate::{Error, exact};

/// Bytes of a piece of the output matrix that is cast up for a product: `fused-ce`'s.
const CAST: u64 = 16 << 20;

/// Estimates a training step of `lora` in a frozen `model`.
pub(crate) fn estimate(model: &Decoder, lora: &LowRank, plan: &Plan) -> Result<Estimate, Error> {
    lora.check_plan(model, plan)?;
    let adapters = lora.parameters(model)?;
    let base = model.parameters()?;
    let wide = |elements| LowRank::WIDE.bytes(elements);
    let tensors = lora.tensors(model)?;
    let states = ModelStates {
        parameters: sum("bytes of the parameters", [plan.recipe.parameters.bytes(base)?, wide(adapters)?])?,
        master: 0,
        gradients: wide(adapters)?,
        optimizer: plan
            .optimizer
            .state_bytes_of(tensors.iter().map(|&elements| (model.layers, elements)), LowRank::WIDE)?,
    };
    let block = Block::new(lora, model, plan)?;
    let full = plan.recomputation.checkpoint == Recompute::Full;
    let kept = |input: bool| {
        if full { vec![Item { name: "block input", bytes: block.narrow }] } else { block.kept(input) }
    };
    let (first, other) = (total(&kept(false))?, total(&kept(true))?);
    let others = product("activations of all blocks", &[model.layers - 1, other])?;
    let outside_blocks = outside(model, plan, &block)?;
    let final_norm = total(&outside_blocks[FIXED..])?;
    let fixed = total(&outside_blocks[..FIXED])?;
    let before_loss = sum("activations", [fixed, first, others])?;
    let all_kept = sum("activations", [before_loss, final_norm])?;

    // The last block is the first one too where there is no other.
    let last_input = model.layers > 1;
    let backward = |input| if full { recomputed_bytes(&block, input) } else { backward_bytes(&block, input) };
    let loss_peak = total(&loss(model, plan, lora)?)?;
    let held = total(&logits::held(model, plan.work, &plan.recipe, plan.loss)?)?;
    let stream = if plan.loss == Loss::Eager { block.narrow } else { 0 };
    let step = step_bytes(lora, model, plan)?;

    let all = states.gradients;
    let of_block = wide(lora.block_parameters(model)?)?;
    let early = |gradients: u64| if plan.accumulate { all } else { gradients };
    let budget = |moment, gradients, activations, logits, temporaries| {
        let ModelStates { parameters, optimizer, .. } = states;
        Budget::new(moment, [parameters, 0, 0, optimizer, gradients, activations, logits, temporaries])
    };
    // The last block's forward can be more than the loss, where nothing is kept or the vocabulary is small.
    let mut ledger = Ledger::default();
    block.forward(&mut ledger, !full, last_input);
    let in_block = checked(ledger.peak)?;
    let before_last = if last_input {
        [fixed, first, product("activations of all blocks", &[model.layers - 2, other])?]
    } else {
        [fixed, 0, 0]
    };
    let before_last = sum("activations", before_last.into_iter().chain([block.narrow]))?;
    let at_loss = if sum("bytes", [before_last, in_block])? > sum("bytes", [all_kept, loss_peak])? {
        budget(Moment::Loss, early(0), before_last, 0, in_block)?
    } else {
        budget(Moment::Loss, early(0), all_kept, loss_peak, 0)?
    };
    Ok(Estimate {
        parameters: sum("number of parameters", [base, adapters])?,
        states,
        moments: [
            at_loss,
            budget(
                Moment::LastBlock,
                early(of_block),
                before_loss,
                held,
                sum("temporaries", [stream, backward(last_input)?])?,
            )?,
            budget(
                Moment::FirstBlock,
                all,
                sum("activations", [fixed, first])?,
                held,
                sum("temporaries", [stream, backward(false)?])?,
            )?,
            budget(Moment::Embedding, all, fixed, 0, 0)?,
            budget(Moment::Step, all, fixed, 0, step)?,
        ],
        block: kept(true),
        outside_blocks,
        host_bytes: 0,
    })
}

/// Bytes of one block's passes, beyond its input and the gradient of its output.
pub(crate) struct Passes {
    /// Of a forward that keeps nothing.
    pub(crate) forward: u64,
    /// Of a forward once more and the backward.
    pub(crate) recomputed: u64,
    /// What a block keeps, its input among it.
    pub(crate) kept: u64,
    /// Of the backward beyond what was kept.
    pub(crate) backward: u64,
}

/// The passes of a block in front of which something learns. Adapters on nothing are none: their backward has no meaning.
pub(crate) fn passes(lora: &LowRank, model: &Decoder, plan: &Plan) -> Result<Passes, Error> {
    let block = Block::new(lora, model, plan)?;
    let mut ledger = Ledger::default();
    block.forward(&mut ledger, false, true);
    Ok(Passes {
        forward: checked(ledger.peak)?,
        // The gradient of the output comes on top of that of the input.
        recomputed: sum("bytes of a block", [recomputed_bytes(&block, true)?, block.narrow])?,
        kept: total(&block.kept(true))?,
        backward: sum("bytes of a block", [backward_bytes(&block, true)?, block.narrow])?,
    })
}

/// What is there from begin to end of a step, and what from the last block to the end of the loss at most.
pub(crate) fn around_blocks(lora: &LowRank, model: &Decoder, plan: &Plan) -> Result<(u64, u64), Error> {
    let outside = outside(model, plan, &Block::new(lora, model, plan)?)?;
    let head = [total(&outside[FIXED..])?, total(&loss(model, plan, lora)?)?];
    Ok((total(&outside[..FIXED])?, sum("bytes of the head", head)?))
}

/// How many items of [`outside`] are there for the whole step.
const FIXED: usize = 2;

fn outside(model: &Decoder, plan: &Plan, block: &Block) -> Result<Vec<Item>, Error> {
    let tokens = plan.work.tokens()?;
    let mut items = vec![
        Item::new("tokens and labels", 8, &[2, tokens])?,
        // Of all places, in fp32.
        Item::new("rotary angles", 4, &[model.context, model.head_dim])?,
    ];
    if plan.norm != NormKernel::Output {
        items.push(Item { name: "norm input", bytes: block.narrow });
    }
    items.push(Item::new("norm statistics", 4, &[tokens])?);
    items.push(Item { name: "output projection input", bytes: block.narrow });
    Ok(items)
}

/// The loss over the labelled tokens, with no gradient of the output matrix.
fn loss(model: &Decoder, plan: &Plan, lora: &LowRank) -> Result<Vec<Item>, Error> {
    let tokens = plan.work.tokens()?;
    let labelled = plan.labelled.unwrap_or(tokens);
    let c = plan.recipe.compute.storage_bits() / 8;
    let Loss::LinearCrossEntropy { tokens: chunk } = plan.loss else {
        let mut items = logits::peak(model, plan.work, &plan.recipe, plan.loss.within(labelled))?;
        items.retain(|item| !item.name.ends_with("of the output matrix"));
        return Ok(items);
    };
    // Chunks are as even as they can be.
    let chunks = labelled.div_ceil(exact::positive("tokens of a chunk of logits", chunk)?);
    let rows = labelled.div_ceil(chunks);
    let narrow = [rows, model.hidden];
    let mut items = vec![
        Item::new("tile of logits in fp32", 4, &[rows, model.vocabulary])?,
        Item::new("gradient of the hidden states", c, &[tokens, model.hidden])?,
        Item::new("labels and places of the labelled tokens", 16, &[labelled])?,
    ];
    if labelled < tokens || c < 4 {
        items.push(Item::new("a chunk's gradient of its hidden states", 4, &narrow)?);
    }
    if c < 4 {
        items.push(Item::new("the same, rounded", c, &narrow)?);
        if lora.on_cpu {
            let columns = (CAST / product("bytes of a row", &[model.hidden, 4])?).clamp(1, model.vocabulary);
            items.push(Item::new("a piece of the output matrix in fp32", 4, &[columns, model.hidden])?);
        } else {
            items.push(Item::new("the tile's gradient, rounded", c, &[rows, model.vocabulary])?);
        }
    }
    Ok(items)
}

fn step_bytes(lora: &LowRank, model: &Decoder, plan: &Plan) -> Result<u64, Error> {
    let elements = match plan.step {
        StepKernel::Fused => 0,
        StepKernel::Foreach => lora.parameters(model)?,
        StepKernel::Loop => lora.tensors(model)?.into_iter().max().unwrap_or(0),
    };
    plan.optimizer.step_bytes_of(elements, LowRank::WIDE)
}
