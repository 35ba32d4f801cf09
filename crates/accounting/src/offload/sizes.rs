//! Jobs of known models: bytes from this crate's formulas, seconds from FLOPs.
//!
//! A layer's flat buffer has one region for each dtype and trainability ([`flat_bytes`]): a frozen base with adapters has one
//! in the base's dtype and one in fp32. The memory of the passes is computed operation by operation (`passes`), for the
//! families Qwen2 and Llama. Seconds are the larger of the causal FLOPs divided by one rate and of the weights' bytes divided
//! by the device's memory bandwidth (once in forward, once more for each product of a backward), the same for every layer;
//! measurements should replace them.

use super::flat_bytes;
use super::job::{Fixed, Job, Kept, Layer, Working};
use crate::activation_plan::layer_costs;
use crate::decoder_flops::{self, Recomputation, StepFlops, Workload};
use crate::exact::{product, sum};
use crate::lora::{self, LowRank};
use crate::memory::logits::Loss;
use crate::memory::optimizer::Optimizer;
use crate::memory::recipe::Recipe;
use crate::memory::{kv_cache, total};
use crate::model::{Decoder, Part};
use crate::passes::block::{Block, BlockOptions, KeptPasses, Passes, Trained, kept_passes, passes};
use crate::passes::head::{self, FIXED, HeadOptions, outside};
use crate::recompute::{NormKernel, Recompute};
use crate::{Dtype, Error};

pub use crate::passes::head::Logits;

/// Further settings that decide a job's sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choices {
    /// FLOP/s that products reach.
    pub flops: f64,
    /// Bytes per second of the device's memory, which bounds a step of few tokens.
    pub bandwidth: f64,
    /// Number formats.
    pub recipe: Recipe,
    /// The optimizer of what learns.
    pub optimizer: Optimizer,
    /// How the loss is computed.
    pub loss: Loss,
    /// How an RMSNorm is computed.
    pub norm: NormKernel,
    /// Which tokens' logits an inference computes.
    pub logits: Logits,
    /// Bytes that the device's libraries keep for matrix products; 0 on a CPU.
    pub product_workspaces: u64,
}

impl Default for Choices {
    /// 100 TFLOP/s, 1 TB/s, everything in bf16 with fp32 master weights of what learns, AdamW, a loss in tiles of 1024
    /// tokens, the logits of every token.
    fn default() -> Self {
        Self {
            flops: 100e12,
            bandwidth: 1e12,
            recipe: Recipe::BF16_MASTER,
            optimizer: Optimizer::AdamW,
            loss: Loss::LinearCrossEntropy { tokens: 1024 },
            norm: NormKernel::default(),
            logits: Logits::default(),
            product_workspaces: 0,
        }
    }
}

impl Choices {
    /// Seconds of products with these FLOPs that go over weights so many times.
    fn seconds(&self, flops: f64, passes: f64, weight_bytes: u64) -> f64 {
        (flops / self.flops).max(passes * weight_bytes as f64 / self.bandwidth)
    }
}

/// Returns the job of a forward that keeps nothing and ends in logits.
///
/// # Errors
/// A family without SwiGLU, an empty workload, counts beyond 64 bits; a rate that is not positive is found by
/// [`simulate`](super::simulate).
pub fn inference(model: &Decoder, work: Workload, choices: &Choices) -> Result<Job, Error> {
    swiglu(model)?;
    let flops = decoder_flops::step(model, work, &Recomputation::default())?;
    let tensors = block(model)?;
    let slot_bytes = region(&tensors, choices.recipe.parameters)?;
    let weight_bytes = choices.recipe.parameters.bytes(outer_parameters(model)?)?;
    let layer = Layer {
        slot_bytes,
        forward_seconds: choices.seconds(
            layer_flops(&flops, model, flops.forward.causal, 1),
            1.0,
            slot_bytes,
        ),
        ..Layer::default()
    };
    let head = head_options(work, None, choices, false);
    let working = Working {
        input_bytes: input_bytes(model, work, choices)?,
        forward_bytes: passes_of(model, work, choices, Trained::Nothing)?.forward,
        head_bytes: head::inference_bytes(model, &head, choices.logits)?,
        constant_bytes: constant_bytes(model, &head, choices)?,
        ..Working::default()
    };
    Ok(Job {
        layers: repeat(layer, model)?,
        fixed: Fixed {
            weight_bytes,
            seconds: choices.seconds(outer_flops(&flops) as f64, 1.0, output_bytes(model, choices)?),
            ..Fixed::default()
        },
        working,
        training: false,
    })
}

/// What is there during the whole step beside weights and layers.
fn constant_bytes(model: &Decoder, head: &HeadOptions<'_>, choices: &Choices) -> Result<u64, Error> {
    let items = total(&outside(model, head)?[..FIXED])?;
    sum("bytes beside the layers", [items, choices.product_workspaces])
}

/// Returns the job of generating up to `new` tokens after prompts of `prompt`: its memory is that of reading the prompts, with
/// a KV cache for all tokens; its time is that of one more token per row.
///
/// # Errors
/// As [`inference`].
pub fn generation(model: &Decoder, prompt: Workload, new: u64, choices: &Choices) -> Result<Job, Error> {
    let choices = Choices { logits: Logits::LastToken, ..*choices };
    let reading = inference(model, prompt, &choices)?;
    let tokens = sum("tokens of a row", [prompt.sequence, new])?.min(model.context);
    let cached = Workload { sequence: tokens, ..prompt };
    let cache = kv_cache::bytes(model, cached, choices.recipe.compute)?;
    let constant_bytes = sum("bytes beside the layers", [reading.working.constant_bytes, cache])?;
    Ok(Job {
        working: Working { constant_bytes, ..reading.working },
        ..inference(model, Workload { sequence: 1, ..prompt }, &choices)?
    })
}

/// Returns the job of training the whole model.
///
/// # Errors
/// As [`inference`].
pub fn training(model: &Decoder, work: Workload, choices: &Choices) -> Result<Job, Error> {
    swiglu(model)?;
    let recipe = choices.recipe;
    let flops = decoder_flops::step(model, work, &recomputation())?;
    let tensors = block(model)?;
    let numbers = sum("parameters of a layer", tensors.iter().copied())?;
    let weights = region(&tensors, recipe.parameters)?;
    let states = |tensors: Vec<u64>| {
        let numbers = sum("parameters", tensors.iter().copied())?;
        let master = recipe.master.map_or(Ok(0), |dtype| dtype.bytes(numbers))?;
        let state =
            choices.optimizer.state_bytes_of(tensors.into_iter().map(|one| (1, one)), recipe.state)?;
        sum("bytes of the optimizer's state", [master, state])
    };
    let outer = outer_parameters(model)?;
    let backward = flops.backward.causal + flops.recomputed.causal;
    let layer = Layer {
        slot_bytes: weights,
        trainable_bytes: weights,
        gradient_bytes: region(&tensors, recipe.gradients)?,
        state_bytes: states(tensors)?,
        trainable: numbers,
        forward_seconds: choices.seconds(layer_flops(&flops, model, flops.forward.causal, 1), 1.0, weights),
        backward_seconds: choices.seconds(layer_flops(&flops, model, backward, 2), 3.0, weights),
        kept: None,
    };
    let head = head_options(work, None, choices, true);
    let working = training_working(model, work, choices, &head, Trained::Everything)?;
    let matrix = product("parameters of the output", &[model.vocabulary, model.hidden])?;
    let early = sum("parameters of the head", [matrix, model.hidden])?;
    let fixed = Fixed {
        weight_bytes: recipe.parameters.bytes(outer)?,
        gradient_bytes: recipe.gradients.bytes(outer)?,
        head_gradient_bytes: recipe.gradients.bytes(early)?,
        state_bytes: states(vec![outer])?,
        trainable: outer,
        seconds: choices.seconds(3.0 * outer_flops(&flops) as f64, 3.0, output_bytes(model, choices)?),
    };
    let working = Working {
        // The hidden states' gradient, and the embedding's own beside that of a tied head.
        embedding_bytes: sum(
            "bytes of the embedding's backward",
            [working.input_bytes, if model.tied { recipe.gradients.bytes(matrix)? } else { 0 }],
        )?,
        ..working
    };
    Ok(Job { layers: repeat(layer, model)?, fixed, working, training: true })
}

/// Returns the job of training adapters of a frozen base, with `labelled` labelled tokens (`None`: all). Adapters, their
/// gradients and their state are in fp32.
///
/// # Errors
/// As [`inference`]; what [`LowRank`] refuses.
pub fn adapters(
    model: &Decoder,
    lora: &LowRank,
    work: Workload,
    labelled: Option<u64>,
    choices: &Choices,
) -> Result<Job, Error> {
    let flops = lora::flops::step(model, lora, work, labelled, &recomputation())?;
    let tensors = lora.tensors(model)?;
    let learning = region(&tensors, LowRank::WIDE)?;
    let frozen = region(&block(model)?, choices.recipe.parameters)?;
    let state = choices.optimizer.state_bytes_of(tensors.iter().map(|&one| (1, one)), LowRank::WIDE)?;
    let backward = flops.backward.causal + flops.recomputed.causal;
    let layer = Layer {
        slot_bytes: sum("bytes of a layer", [frozen, learning])?,
        trainable_bytes: learning,
        gradient_bytes: learning,
        state_bytes: state,
        trainable: sum("parameters of a layer's adapters", tensors)?,
        forward_seconds: choices.seconds(layer_flops(&flops, model, flops.forward.causal, 1), 1.0, frozen),
        backward_seconds: choices.seconds(layer_flops(&flops, model, backward, 1), 2.0, frozen),
        kept: None,
    };
    let head = HeadOptions { on_cpu: lora.on_cpu, ..head_options(work, labelled, choices, false) };
    let working = training_working(model, work, choices, &head, Trained::Adapters(lora))?;
    let fixed = Fixed {
        weight_bytes: choices.recipe.parameters.bytes(outer_parameters(model)?)?,
        // No gradient of the frozen output matrix.
        seconds: choices.seconds(2.0 * outer_flops(&flops) as f64, 2.0, output_bytes(model, choices)?),
        ..Fixed::default()
    };
    Ok(Job { layers: repeat(layer, model)?, fixed, working, training: true })
}

/// Returns the same step with every layer resident under an activation plan, in the order of forward, for
/// [`Method::Resident`](super::Method::Resident) without recomputation.
///
/// # Errors
/// As [`inference`]; a plan of another length.
pub fn with_activation_plan(
    job: Job,
    model: &Decoder,
    lora: Option<&LowRank>,
    work: Workload,
    choices: &Choices,
    plan: &[layer_costs::Kept],
) -> Result<Job, Error> {
    if plan.len() != job.layers.len() {
        return Err(Error::Shape {
            what: format!("an activation plan of {} entries for {} layers", plan.len(), job.layers.len()),
            remedy: "give one for each layer".into(),
        });
    }
    let block = block_of(model, work, choices, lora.map_or(Trained::Everything, Trained::Adapters))?;
    let mut job = job;
    for (number, (layer, &way)) in job.layers.iter_mut().zip(plan).enumerate() {
        let KeptPasses { held, forward, backward } = kept_passes(&block, way, number == 0)?;
        layer.kept = Some(Kept { bytes: held, forward_bytes: forward, backward_bytes: backward });
    }
    Ok(job)
}

fn swiglu(model: &Decoder) -> Result<(), Error> {
    if model.family.is_swiglu() {
        return Ok(());
    }
    Err(Error::Shape {
        what: format!("the working memory of {}'s forward is not modelled", model.family.name()),
        remedy: "give a model of the family qwen2 or llama, or sizes that were measured".into(),
    })
}

/// Whole layers are recomputed.
fn recomputation() -> Recomputation {
    Recomputation { checkpoint: Recompute::Full, ..Recomputation::default() }
}

fn head_options(work: Workload, labelled: Option<u64>, choices: &Choices, trained: bool) -> HeadOptions<'_> {
    let Choices { recipe, norm, loss, .. } = choices;
    HeadOptions { work, labelled, recipe, norm: *norm, loss: *loss, trained, on_cpu: false }
}

fn passes_of(
    model: &Decoder,
    work: Workload,
    choices: &Choices,
    trained: Trained<'_>,
) -> Result<Passes, Error> {
    passes(&block_of(model, work, choices, trained)?)
}

fn block_of(
    model: &Decoder,
    work: Workload,
    choices: &Choices,
    trained: Trained<'_>,
) -> Result<Block, Error> {
    let tokens = work.tokens()?;
    let options =
        BlockOptions { tokens, recipe: &choices.recipe, norm: choices.norm, trained, gradients: true };
    Block::new(model, &options)
}

fn training_working(
    model: &Decoder,
    work: Workload,
    choices: &Choices,
    head: &HeadOptions<'_>,
    trained: Trained<'_>,
) -> Result<Working, Error> {
    let passes = passes_of(model, work, choices, trained)?;
    let narrow = input_bytes(model, work, choices)?;
    Ok(Working {
        input_bytes: narrow,
        forward_bytes: passes.forward,
        backward_bytes: passes.recomputed,
        head_bytes: head::training_bytes(model, head)?,
        constant_bytes: constant_bytes(model, head, choices)?,
        kept: Some(Kept {
            bytes: passes.kept,
            forward_bytes: sum("bytes of a forward", [passes.keeping, narrow])?,
            backward_bytes: passes.backward,
        }),
        ..Working::default()
    })
}

/// Elements of each tensor of a block.
fn block(model: &Decoder) -> Result<Vec<u64>, Error> {
    model.block_tensors()?.iter().map(|tensor| tensor.elements()).collect()
}

fn region(tensors: &[u64], dtype: Dtype) -> Result<u64, Error> {
    let bytes: Result<Vec<u64>, Error> = tensors.iter().map(|&elements| dtype.bytes(elements)).collect();
    flat_bytes(&bytes?)
}

fn outer_parameters(model: &Decoder) -> Result<u64, Error> {
    let blocks = product("parameters of all layers", &[model.layers, model.block_parameters()?])?;
    Ok(model.parameters()? - blocks)
}

/// Bytes of the output matrix.
fn output_bytes(model: &Decoder, choices: &Choices) -> Result<u64, Error> {
    let elements = product("parameters of the output", &[model.vocabulary, model.hidden])?;
    choices.recipe.parameters.bytes(elements)
}

fn input_bytes(model: &Decoder, work: Workload, choices: &Choices) -> Result<u64, Error> {
    let bytes = choices.recipe.residual.storage_bits() / 8;
    product("bytes of a layer's input", &[work.tokens()?, model.hidden, bytes])
}

fn outer_flops(flops: &StepFlops) -> u128 {
    let outer = flops.rows.iter().filter(|row| matches!(row.part, Part::Output | Part::Projector));
    outer.map(|row| row.forward.causal).sum()
}

/// A layer's share of `all`, of which the outer products' forward `outer_passes` times is none.
fn layer_flops(flops: &StepFlops, model: &Decoder, all: u128, outer_passes: u128) -> f64 {
    (all - outer_passes * outer_flops(flops)) as f64 / model.layers as f64
}

fn repeat(layer: Layer, model: &Decoder) -> Result<Vec<Layer>, Error> {
    /// Maximum number of layers in a simulation.
    const MOST: u64 = 10_000;
    if model.layers > MOST {
        return Err(Error::Shape {
            what: format!("a schedule of {} layers is too long", model.layers),
            remedy: format!("give a model of at most {MOST} layers"),
        });
    }
    Ok(vec![layer; model.layers as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::{Plan, estimate};
    use crate::memory::optimizer::StepKernel;
    use crate::offload::{self, Method, OptimizerPlace, Rates, Setup, Start, simulate};
    use crate::presets;
    use crate::recompute::SwigluLevel;

    const RATES: Rates = Rates { load: 25e9, store: 25e9, host_optimizer: 2e9, device_optimizer: 35e9 };

    /// A layer has 233.06 million parameters, all of them 13.05 GB, embedding and head 2.18 GB; with 1 GB of activations and a
    /// ring of three, 10 GB leave room for 11 resident layers.
    #[test]
    fn qwen_of_7_billion_in_10_gb() {
        let model = presets::find("qwen2.5-7b").unwrap();
        let job = inference(&model, Workload { batch: 1, sequence: 1024 }, &Choices::default()).unwrap();
        let slot = job.layers[0].slot_bytes;
        assert_eq!(slot / 10_000, 46_611);
        assert_eq!(job.layer_bytes().unwrap() / 10_000_000, 1305);
        assert_eq!(job.fixed.weight_bytes / 10_000_000, 217);
        let working = Working { constant_bytes: 1_000_000_000, ..Working::default() };
        let job = Job { working, ..job };
        let peak = |resident| {
            let resident = offload::interleaved(28, resident);
            let method = Method::Overlap { ring: 3 };
            let setup = Setup { method, resident, optimizer: OptimizerPlace::Host };
            simulate(&job, &RATES, &setup, Start::Warm).unwrap().device.total
        };
        assert!(peak(11) <= 10_000_000_000 && peak(12) > 10_000_000_000);
    }

    /// 1.9 tokens per second with everything streamed over 25 GB/s, 1.65 times that with 11 resident layers.
    #[test]
    fn a_token_at_a_time_is_bound_by_the_link() {
        let model = presets::find("qwen2.5-7b").unwrap();
        let job = inference(&model, Workload { batch: 1, sequence: 1 }, &Choices::default()).unwrap();
        let seconds = |resident| {
            let resident = offload::interleaved(28, resident);
            // One slot ahead of the one that computes, and none that could keep a layer.
            let setup =
                Setup { method: Method::Overlap { ring: 2 }, resident, optimizer: OptimizerPlace::Host };
            simulate(&job, &RATES, &setup, Start::Warm).unwrap().seconds
        };
        let rates = [1.0 / seconds(0), seconds(0) / seconds(11)];
        assert!((rates[0] - 1.9).abs() < 0.05 && (rates[1] - 1.65).abs() < 0.05, "{rates:?}");
        // All of 15.2 GB but the embedding's rows, at 1 TB/s.
        let all = seconds(28);
        assert!((all - (13.05e9 + 1.09e9) / 1e12).abs() < 1e-4, "{all}");
    }

    /// All-resident training beside [`estimate`], whose kernels are a framework's and which takes a block's gradients as there from the
    /// beginning: with recomputation the larger one, at the backward of the first block.
    #[test]
    fn a_resident_step_is_the_estimate() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let choices = Choices {
            loss: Loss::LinearCrossEntropy { tokens: 64 },
            norm: NormKernel::Output,
            ..Choices::default()
        };
        for (recompute, sequence) in [(true, 256), (false, 2048)] {
            let work = Workload { batch: 2, sequence };
            let job = training(&model, work, &choices).unwrap();
            let method = Method::Resident { recompute };
            let setup = Setup { method, resident: vec![], optimizer: OptimizerPlace::Device };
            let step = simulate(&job, &RATES, &setup, Start::Warm).unwrap();
            let checkpoint = if recompute { Recompute::Full } else { Recompute::None };
            let plan = Plan {
                work,
                recipe: choices.recipe,
                optimizer: choices.optimizer,
                // Two projections and their product.
                recomputation: Recomputation {
                    checkpoint,
                    swiglu: SwigluLevel::SaveAll,
                    ..Recomputation::default()
                },
                norm: choices.norm,
                loss: choices.loss,
                step: StepKernel::Fused,
                ..Plan::default()
            };
            let wanted = estimate(&model, &plan).unwrap();
            let ratio = step.device.total as f64 / wanted.peak().total as f64;
            assert!((0.95..=1.005).contains(&ratio), "{ratio}: {:?} of {:?}", step.device, wanted.peak());
        }
    }

    #[test]
    fn adapters_by_hand() {
        let model = presets::find("qwen2.5-0.5b").unwrap();
        let choices = Choices { recipe: Recipe::BF16, ..Choices::default() };
        let work = Workload { batch: 2, sequence: 256 };
        let job = adapters(&model, &LowRank::default(), work, None, &choices).unwrap();
        let layer = job.layers[0];
        assert_eq!(layer.trainable * 24, 1_081_344);
        assert_eq!(layer.state_bytes, 8 * layer.trainable);
        // Every tensor is a multiple of 64 numbers.
        assert_eq!(layer.gradient_bytes, 4 * layer.trainable);
        assert_eq!(layer.slot_bytes - layer.trainable_bytes, 2 * model.block_parameters().unwrap());
        assert_eq!(job.fixed.gradient_bytes, 0);
        // 4·P·T with the forward again, attention and adapters beside it, the first layer's a little less.
        let ratio = layer.backward_seconds / layer.forward_seconds;
        assert!((1.95..2.15).contains(&ratio), "{ratio}");
        assert!(inference(&presets::find("gpt2").unwrap(), work, &choices).is_err());
    }
}
