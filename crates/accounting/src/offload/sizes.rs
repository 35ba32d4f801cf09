//! Jobs of known models: bytes from this crate's formulas, seconds from FLOPs.
//!
//! A layer's flat buffer has one region for each dtype and trainability ([`flat_bytes`]): a frozen base with adapters has one
//! in the base's dtype and one in fp32. The memory of the passes is computed operation by operation (`passes`), for the
//! families that [`Decoder::check_passes`] accepts. Seconds are the larger of the causal FLOPs divided by one rate and of the weights' bytes
//! divided by the device's memory bandwidth (of a mixture those of the experts that have tokens; once in forward, once more for each
//! product of a backward), the same for every layer; in training on a CPU the sum of the first and of twice the second ([`Choices::packs`]).
//! Measurements should replace them.

mod choices;
mod layers;
mod weight_copies;

use super::flat_bytes;
use super::step_costs::{Fixed, Kept as LayerKept, Layer, StepCosts, WorkingMemory};
use crate::activation_plan::LayerPlan;
use crate::decoder_flops::{self, Recomputation, StepFlops, Workload};
use crate::exact::{product, sum};
use crate::experts::{self, read_bytes};
use crate::lora::{self, LowRank};
use crate::memory::optimizer::Extent;
use crate::memory::quantized;
use crate::memory::recipe::Recipe;
use crate::memory::{Item, kv_cache, total};
use crate::model::{AttentionKind, Decoder, Part};
use crate::parameters::ParameterTensor;
use crate::passes::block::{Block, BlockOptions, KeptPasses, Passes, Trained, kept_passes, passes};
use crate::passes::head::{self, FIXED, HeadOptions, outside};
use crate::recompute::{NormKernel, Recompute, SwigluLevel};
use crate::{Dtype, Error};

pub use crate::passes::head::Logits;
pub use choices::Choices;
use layers::in_order;
use weight_copies::cast_bytes;
pub use weight_copies::update_bytes;
pub(crate) use weight_copies::{update_bytes_of_adapters, update_bytes_of_one, update_copies};

/// Returns the costs of a forward that keeps nothing and ends in logits.
///
/// # Errors
/// A family without SwiGLU, an empty workload, counts beyond 64 bits; a rate that is not positive is found by
/// [`simulate`](super::simulate).
pub fn inference(model: &Decoder, work: Workload, choices: &Choices) -> Result<StepCosts, Error> {
    swiglu(model, work, choices)?;
    let flops = decoder_flops::step(model, work, &Recomputation::default())?;
    let weight_bytes = quantized::outer_bytes(model, &choices.recipe)?;
    let reading = reading_seconds(model, work, choices)?;
    let block = |kind: AttentionKind, without: bool| {
        flat_bytes(&quantized::block_bytes(model, &choices.recipe, kind, without)?)
    };
    let layer = |kind: AttentionKind| -> Result<Layer, Error> {
        let all_bytes = block(kind, false)?;
        Ok(Layer {
            slot_bytes: block(kind, choices.experts.is_some())?,
            forward_seconds: choices
                .seconds(
                    choices.share(layer_flops(&flops, model, flops.forward.causal, 1)),
                    1.0,
                    read_bytes(model, choices.part(work).tokens()?, all_bytes)?,
                )
                .max(reading),
            ..Layer::default()
        })
    };
    let head = head_options(work, None, choices, false);
    let working = WorkingMemory {
        input_bytes: input_bytes(model, work, choices)?,
        forward_bytes: passes_of(model, work, choices, Trained::Nothing)?.forward,
        head_bytes: head::inference_bytes(model, &head, choices.logits)?,
        constant_bytes: constant_bytes(model, &head, choices)?,
        ..WorkingMemory::default()
    };
    Ok(StepCosts {
        layers: in_order(&layer, model, &choices.recipe)?,
        fixed: Fixed {
            weight_bytes,
            seconds: choices.seconds(
                choices.share(outer_flops(&flops) as f64),
                1.0,
                output_bytes(model, choices)?,
            ),
            ..Fixed::default()
        },
        working,
        training: false,
    })
}

/// Returns the bytes during the whole step other than weights and layers: in mixed precision with a cast of each projection of the
/// layers, which is made once in a step.
fn constant_bytes(model: &Decoder, head: &HeadOptions<'_>, choices: &Choices) -> Result<u64, Error> {
    const WHAT: &str = "bytes beside the layers";
    let items = total(&outside(model, head)?[..FIXED])?;
    let casts = match choices.recipe.casts {
        true => product(WHAT, &[model.layers, cast_bytes(model, choices, LayerPlan::KeepAll)?])?,
        false => 0,
    };
    let slots = match choices.experts {
        Some(streamed) => experts::cache_bytes(model, &choices.recipe, streamed.cache)?,
        None => 0,
    };
    sum(WHAT, [items, choices.product_workspaces, casts, slots])
}

/// Seconds in which a layer's streamed experts are read for one pass, beside which it computes.
fn reading_seconds(model: &Decoder, work: Workload, choices: &Choices) -> Result<f64, Error> {
    let Some(streamed) = choices.experts else { return Ok(0.0) };
    let bytes = experts::pass_bytes(model, &choices.recipe, work, streamed.cache)?;
    Ok(bytes as f64 / model.layers as f64 / streamed.rate)
}

/// Returns the costs of generating up to `new` tokens after prompts of `prompt`: its memory is that of reading the prompts, with
/// a KV cache for all tokens; its time is that of one more token per row.
///
/// # Errors
/// As [`inference`].
pub fn generation(
    model: &Decoder,
    prompt: Workload,
    new: u64,
    choices: &Choices,
) -> Result<StepCosts, Error> {
    // With a cache, MLPs run over all tokens.
    let choices = Choices { logits: Logits::LastToken, mlp_tile: None, ..*choices };
    let reading = inference(model, prompt, &choices)?;
    let tokens = sum("tokens of a row", [prompt.sequence, new])?.min(model.context);
    let cached = Workload { sequence: tokens, ..prompt };
    let cache = kv_cache::bytes(model, cached, choices.recipe.compute)?;
    let constant_bytes = sum("bytes beside the layers", [reading.working.constant_bytes, cache])?;
    Ok(StepCosts {
        working: WorkingMemory { constant_bytes, ..reading.working },
        ..inference(model, Workload { sequence: 1, ..prompt }, &choices)?
    })
}

/// Returns the costs of training the whole model.
///
/// # Errors
/// As [`inference`].
pub fn training(model: &Decoder, work: Workload, choices: &Choices) -> Result<StepCosts, Error> {
    swiglu(model, work, choices)?;
    let recipe = choices.recipe;
    recipe.check_trained()?;
    if choices.experts.is_some() {
        return Err(Error::Shape {
            what: "streamed experts are frozen, and all weights are to be trained".into(),
            remedy: "train adapters, or keep the experts in memory".into(),
        });
    }
    let swiglu = choices.mlp_tile.map_or(SwigluLevel::default(), |_| SwigluLevel::InputOnly);
    let flops = decoder_flops::step(model, work, &Recomputation { swiglu, ..recomputation() })?;
    let states = |tensors: &[ParameterTensor]| {
        let numbers = tensors.iter().map(ParameterTensor::elements).collect::<Result<Vec<_>, _>>()?;
        let numbers = sum("parameters", numbers)?;
        let master = recipe.master.map_or(Ok(0), |dtype| dtype.bytes(numbers))?;
        let state = choices.optimizer.state_bytes_of(tensors.iter().map(Extent::from), recipe.state)?;
        sum("bytes of the optimizer's state", [master, state])
    };
    let outer = outer_parameters(model)?;
    let backward = flops.backward.causal + flops.recomputed.causal;
    let layer = |kind: AttentionKind| -> Result<Layer, Error> {
        let tensors = block(model, kind)?;
        let weights = region(&tensors, recipe.parameters)?;
        let read = read_bytes(model, choices.part(work).tokens()?, weights)?;
        Ok(Layer {
            slot_bytes: weights,
            trainable_bytes: weights,
            gradient_bytes: region(&tensors, recipe.gradients)?,
            trainable: sum("parameters of a layer", tensors.iter().copied())?,
            state_bytes: states(&model.block_tensors_of(kind)?)?,
            reducing_bytes: 0,
            forward_seconds: choices.training_seconds(
                choices.share(layer_flops(&flops, model, flops.forward.causal, 1)),
                1.0,
                read,
            ),
            backward_seconds: choices.training_seconds(
                choices.share(layer_flops(&flops, model, backward, 2)),
                3.0,
                read,
            ),
            kept: None,
        })
    };
    let head = head_options(work, None, choices, true);
    let working = training_working(model, work, choices, &head, Trained::Everything)?;
    let matrix = product("parameters of the output", &[model.vocabulary, model.hidden])?;
    let early = sum("parameters of the head", [matrix, model.hidden])?;
    let fixed = Fixed {
        weight_bytes: recipe.parameters.bytes(outer)?,
        gradient_bytes: recipe.gradients.bytes(outer)?,
        head_gradient_bytes: recipe.gradients.bytes(early)?,
        state_bytes: states(&model.outer_tensors())?,
        reducing_bytes: 0,
        trainable: outer,
        seconds: choices.training_seconds(
            choices.share(3.0 * outer_flops(&flops) as f64),
            3.0,
            output_bytes(model, choices)?,
        ),
        are_reduced: false,
    };
    let working = WorkingMemory {
        // The hidden states' gradient, and the embedding's own if the head's is tied to it.
        embedding_bytes: sum(
            "bytes of the embedding's backward",
            [working.input_bytes, if model.tied { recipe.gradients.bytes(matrix)? } else { 0 }],
        )?,
        ..working
    };
    Ok(StepCosts { layers: in_order(&layer, model, &choices.recipe)?, fixed, working, training: true })
}

/// Returns the costs of training adapters of a frozen base, with `labelled` labelled tokens (`None`: all). Adapters, their
/// gradients and their state are in fp32.
///
/// # Errors
/// As [`inference`]; adapters that [`LowRank`] refuses.
pub fn adapters(
    model: &Decoder,
    lora: &LowRank,
    work: Workload,
    labelled: Option<u64>,
    choices: &Choices,
) -> Result<StepCosts, Error> {
    let flops = lora::flops::step(model, lora, work, labelled, &recomputation())?;
    swiglu(model, work, choices)?;
    let backward = flops.backward.causal + flops.recomputed.causal;
    let reading = reading_seconds(model, work, choices)?;
    let block = |kind: AttentionKind, without: bool| {
        flat_bytes(&quantized::block_bytes(model, &choices.recipe, kind, without)?)
    };
    let layer = |kind: AttentionKind| -> Result<Layer, Error> {
        let tensors = lora.tensors(model, kind)?;
        let learning = region(&tensors, LowRank::WIDE)?;
        let read = read_bytes(model, choices.part(work).tokens()?, block(kind, false)?)?;
        let shapes = lora.shapes(model, kind)?;
        let extents = shapes.iter().map(|shape| Extent::of_adapter(shape));
        let state = choices.optimizer.state_bytes_of(extents, LowRank::WIDE)?;
        Ok(Layer {
            slot_bytes: sum("bytes of a layer", [block(kind, choices.experts.is_some())?, learning])?,
            trainable_bytes: learning,
            gradient_bytes: learning,
            state_bytes: state,
            reducing_bytes: 0,
            trainable: sum("parameters of a layer's adapters", tensors)?,
            forward_seconds: choices
                .training_seconds(
                    choices.share(layer_flops(&flops, model, flops.forward.causal, 1)),
                    1.0,
                    read,
                )
                .max(reading),
            backward_seconds: choices
                .training_seconds(choices.share(layer_flops(&flops, model, backward, 1)), 2.0, read)
                .max(reading),
            kept: None,
        })
    };
    let head = HeadOptions { on_cpu: lora.on_cpu, ..head_options(work, labelled, choices, false) };
    let mut working = training_working(model, work, choices, &head, Trained::Adapters(lora))?;
    let rows = lora.token_rows.parameters(model)?;
    let row_bytes = LowRank::WIDE.bytes(rows)?;
    if lora.token_rows.in_embedding > 0 {
        // The gradient of the looked-up rows, without those of other tokens, and in the dtype of the trained rows.
        let wide = LowRank::WIDE
            .bytes(product("numbers of an input", &[choices.part(work).tokens()?, model.hidden])?)?;
        working.embedding_bytes = sum("bytes of the embedding's backward", [2 * working.input_bytes, wide])?;
    }
    let fixed = Fixed {
        weight_bytes: sum(
            "bytes beside the layers",
            [quantized::outer_bytes(model, &choices.recipe)?, lora.frozen_bytes(model)?, row_bytes],
        )?,
        gradient_bytes: row_bytes,
        head_gradient_bytes: if lora.token_rows.in_head > 0 { row_bytes } else { 0 },
        state_bytes: {
            let shapes = [lora.token_rows.in_embedding, lora.token_rows.in_head]
                .map(|count| [count, model.hidden])
                .into_iter()
                .filter(|[count, _]| *count > 0)
                .collect::<Vec<_>>();
            let extents = shapes.iter().map(|shape| Extent { shape, is_hidden: false });
            choices.optimizer.state_bytes_of(extents, LowRank::WIDE)?
        },
        trainable: rows,
        // The frozen output matrix has no gradient.
        seconds: choices.training_seconds(
            choices.share(2.0 * outer_flops(&flops) as f64),
            2.0,
            output_bytes(model, choices)?,
        ),
        ..Fixed::default()
    };
    Ok(StepCosts { layers: in_order(&layer, model, &choices.recipe)?, fixed, working, training: true })
}

/// Returns the same step with every layer resident under an activation plan, in the order of forward, for
/// [`Method::Resident`](super::Method::Resident) without recomputation.
///
/// # Errors
/// As [`inference`]; a plan of another length.
pub fn with_activation_plan(
    costs: StepCosts,
    model: &Decoder,
    lora: Option<&LowRank>,
    work: Workload,
    choices: &Choices,
    plan: &[LayerPlan],
) -> Result<StepCosts, Error> {
    if plan.len() != costs.layers.len() {
        return Err(Error::Shape {
            what: format!("an activation plan of {} entries for {} layers", plan.len(), costs.layers.len()),
            remedy: "give one for each layer".into(),
        });
    }
    let blocks = blocks_of(model, work, choices, lora.map_or(Trained::Everything, Trained::Adapters))?;
    let mut costs = costs;
    // Nothing before the first adapter has a gradient.
    let mut input = lora.is_none_or(|lora| lora.token_rows.in_embedding > 0);
    for (number, (layer, &layer_plan)) in costs.layers.iter_mut().zip(plan).enumerate() {
        let kind = model.attention_of(number as u64);
        let Some((_, block)) = blocks.iter().find(|(other, _)| *other == kind) else { continue };
        let KeptPasses { kept, forward, mut backward } = kept_passes(block, layer_plan, number == 0, input)?;
        input = block.records(input);
        // Casts with and without a graph are two: the second run of a trained layer makes those with one, which stay.
        if choices.recipe.casts && lora.is_none() && layer_plan != LayerPlan::KeepAll {
            let casts = cast_bytes(model, choices, layer_plan)?;
            layer.gradient_bytes = sum("bytes of gradients and casts", [layer.gradient_bytes, casts])?;
            backward = sum("bytes of a backward", [backward, casts])?;
        }
        layer.kept = Some(LayerKept { bytes: kept, forward_bytes: forward, backward_bytes: backward });
    }
    Ok(costs)
}

/// Returns the tensors that a layer in the middle of the model keeps from its forward to its backward, if it keeps everything; of layers that
/// differ one that keeps most.
///
/// # Errors
/// As [`inference`].
pub fn kept_tensors(
    model: &Decoder,
    lora: Option<&LowRank>,
    work: Workload,
    choices: &Choices,
) -> Result<Vec<Item>, Error> {
    let trained = lora.map_or(Trained::Everything, Trained::Adapters);
    let all = blocks_of(model, work, choices, trained)?.into_iter().map(|(_, block)| block.kept(true));
    Ok(all.max_by_key(|items| items.iter().map(|item| item.bytes).sum::<u64>()).unwrap_or_default())
}

fn swiglu(model: &Decoder, work: Workload, choices: &Choices) -> Result<(), Error> {
    if model.family.is_swiglu() {
        return model.check_passes(work.sequence, choices.attention_kernel);
    }
    Err(Error::Shape {
        what: format!("the working memory of {}'s forward is not modelled", model.family.model_type()),
        remedy: "give a model of the family qwen2 or llama, or sizes that were measured".into(),
    })
}

/// Recomputes whole layers.
fn recomputation() -> Recomputation {
    Recomputation { checkpoint: Recompute::Full, ..Recomputation::default() }
}

fn head_options(work: Workload, labelled: Option<u64>, choices: &Choices, trained: bool) -> HeadOptions<'_> {
    let Choices { recipe, norm, loss, further_tiles, .. } = *choices;
    // On a CPU the head computes in the dtype of its weight, and the norm before it keeps its input.
    let (recipe, norm) =
        if recipe.casts { (const { &Recipe::FP32 }, NormKernel::Fused) } else { (&choices.recipe, norm) };
    let work = choices.part(work);
    // The labels of a row may all be in one part.
    let labelled = labelled.map(|labelled| labelled.min(work.tokens().unwrap_or(u64::MAX)));
    HeadOptions { work, labelled, recipe, norm, loss, trained, on_cpu: false, further_tiles }
}

/// The most that blocks of any kind take.
fn passes_of(
    model: &Decoder,
    work: Workload,
    choices: &Choices,
    trained: Trained<'_>,
) -> Result<Passes, Error> {
    let mut most = Passes::default();
    for (_, block) in blocks_of(model, work, choices, trained)? {
        most = most.max(passes(&block)?);
    }
    Ok(most)
}

/// A block of each kind.
fn blocks_of(
    model: &Decoder,
    work: Workload,
    choices: &Choices,
    trained: Trained<'_>,
) -> Result<Vec<(AttentionKind, Block)>, Error> {
    let (mut blocks, work) = (Vec::new(), choices.part(work));
    for (kind, _) in model.attention_kinds() {
        let options = BlockOptions {
            tokens: work.tokens()?,
            rows: work.batch,
            attention: kind,
            recipe: &choices.recipe,
            norm: choices.norm,
            trained,
            gradients: true,
            documents: choices.documents,
            sequence_ranks: choices.sequence_ranks,
            widens: choices.widens,
            tile_bytes: choices.tile_bytes,
            flash_workspace: choices.flash_workspace,
            mlp_tile: choices.mlp_tile,
        };
        blocks.push((kind, Block::new(model, &options)?));
    }
    Ok(blocks)
}

fn training_working(
    model: &Decoder,
    work: Workload,
    choices: &Choices,
    head: &HeadOptions<'_>,
    trained: Trained<'_>,
) -> Result<WorkingMemory, Error> {
    let passes = passes_of(model, work, choices, trained)?;
    let narrow = input_bytes(model, work, choices)?;
    Ok(WorkingMemory {
        input_bytes: narrow,
        inputs_on_host: choices.inputs_on_host,
        forward_bytes: passes.forward,
        recomputation_bytes: sum("bytes of a recomputation", [passes.keeping, narrow])?,
        backward_bytes: passes.recomputed,
        head_bytes: head::training_bytes(model, head)?,
        constant_bytes: constant_bytes(model, head, choices)?,
        kept: Some(LayerKept {
            bytes: passes.kept,
            forward_bytes: sum("bytes of a forward", [passes.keeping, narrow])?,
            backward_bytes: passes.backward,
        }),
        ..WorkingMemory::default()
    })
}

/// Elements of each tensor of a block.
fn block(model: &Decoder, kind: AttentionKind) -> Result<Vec<u64>, Error> {
    model.block_tensors_of(kind)?.iter().map(|tensor| tensor.elements()).collect()
}

fn region(tensors: &[u64], dtype: Dtype) -> Result<u64, Error> {
    let bytes: Result<Vec<u64>, Error> = tensors.iter().map(|&elements| dtype.bytes(elements)).collect();
    flat_bytes(&bytes?)
}

fn outer_parameters(model: &Decoder) -> Result<u64, Error> {
    Ok(model.parameters()? - model.all_block_parameters()?)
}

/// Returns the bytes of the output matrix.
fn output_bytes(model: &Decoder, choices: &Choices) -> Result<u64, Error> {
    quantized::output_bytes(model, &choices.recipe)
}

fn input_bytes(model: &Decoder, work: Workload, choices: &Choices) -> Result<u64, Error> {
    let bytes = choices.recipe.residual.storage_bits() / 8;
    product("bytes of a layer's input", &[choices.part(work).tokens()?, model.hidden, bytes])
}

fn outer_flops(flops: &StepFlops) -> u128 {
    let outer = flops.rows.iter().filter(|row| matches!(row.part, Part::Output | Part::Projector));
    outer.map(|row| row.forward.causal).sum()
}

/// Returns a layer's share of the FLOPs `all`, without those of `outer_passes` forwards of the products outside of layers.
fn layer_flops(flops: &StepFlops, model: &Decoder, all: u128, outer_passes: u128) -> f64 {
    (all - outer_passes * outer_flops(flops)) as f64 / model.layers as f64
}

#[cfg(test)]
mod tests;
