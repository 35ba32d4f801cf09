//! Rows that ranks divide among them, on paper: memory and time of Llama-3-8B with long rows over 2 to 64 GPUs, beside published figures.

use accounting::decoder_flops::Workload;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::model::Sizes;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{Method, OptimizerPlace, Rates, Setup, Start, simulate};
use accounting::quantity::grouped;
use accounting::scale::{Division, Exchange, Step, Work, step};
use accounting::sharding::Layout;
use accounting::{Decoder, Error, hardware, presets, sequence_parallel};
use report::{Case, Environment, Metric, Record};

use super::record;
use super::scale::H100;

const EXPERIMENT: &str = "accounting-sequence";
const LENGTHS: [u64; 2] = [131_072, 1_048_576];
const COUNTS: [u64; 6] = [2, 4, 8, 16, 32, 64];
/// Layers on the device at a time in ZeRO-3.
const SLOTS: u64 = 3;

/// Qwen3-4B over four H100 with Ulysses, as the authors of its integration measured it.
const QWEN: [(u64, f64); 3] = [(8192, 22.8e9), (65_536, 50.5e9), (98_304, 66.0e9)];
/// The longest row of Llama-8B on 80 GB, with inputs of layers and optimizer state in host memory.
const LONGEST: [(u64, f64); 2] = [(8, 3.7e6), (32, 15e6)];

/// A predicted training of one row by `ranks`, recomputed layer by layer.
struct Predicted {
    peak: u64,
    step: Step,
}

/// Predicts the training of one row of `tokens` in each group of `parts` of `gpus`.
fn predict(model: &Decoder, tokens: u64, [gpus, parts]: [u64; 2], loss: Loss) -> Result<Predicted, Error> {
    // The model as it is extended to such rows, whose table of rotary angles is longer.
    let model = &Decoder::new(Sizes { context: model.context.max(tokens), ..Sizes::clone(model) })?;
    let card = hardware::find("h100")?;
    let recipe = Recipe::BF16_MASTER;
    let work = Workload { batch: 1, sequence: tokens };
    let choices = Choices {
        flops: RATE,
        bandwidth: card.bandwidth,
        recipe,
        loss,
        flash_workspace: true,
        sequence_ranks: parts,
        ..Choices::default()
    };
    let costs = sizes::training(model, work, &choices)?;
    let layout = Layout::of_decoder(model, &recipe, ZeroStage::Three, gpus)?;
    let sharded = layout.costs(costs.clone(), &recipe, Optimizer::AdamW, SLOTS)?;
    let setup = Setup {
        method: Method::Resident { recompute: true },
        resident: Vec::new(),
        optimizer: OptimizerPlace::Device,
    };
    let rates = Rates::of_memory(card.bandwidth, card.bandwidth, card.bandwidth);
    let peak = simulate(&sharded, &rates, &setup, Start::Warm)?.device.total;
    let layer = costs.layers.first().copied().unwrap_or_default();
    let exchanged = sequence_parallel::sent_bytes(model, work, recipe.compute, parts)?;
    let work = Work {
        layers: model.layers,
        forward: layer.forward_seconds,
        backward: layer.backward_seconds,
        outside: costs.fixed.seconds,
        optimizer: 0.0,
        weights: layer.slot_bytes as f64,
        gradients: layer.gradient_bytes as f64,
        outside_weights: costs.fixed.weight_bytes as f64,
        outside_gradients: costs.fixed.gradient_bytes as f64,
        exchange: Exchange { ranks: parts, bytes: exchanged as f64, passes: 3.0 },
    };
    let step = step(&work, Division { stage: ZeroStage::Three, shard: gpus, replicas: 1 }, &H100);
    Ok(Predicted { peak, step })
}

/// The loss in tiles of tokens.
const TILES: Loss = Loss::LinearCrossEntropy { tokens: 4096, whole: 0 };

/// FLOP/s that products of an H100 reach.
const RATE: f64 = 550e12;

/// The longest row, in steps of 1024 tokens, whose training takes at most `available` bytes of each GPU.
fn longest(model: &Decoder, gpus: u64, available: u64) -> Result<u64, Error> {
    let fits = |tokens: u64| Ok::<_, Error>(predict(model, tokens, [gpus; 2], TILES)?.peak <= available);
    let (mut least, mut most) = (1, 1 << 15);
    while most - least > 1 {
        let middle = (least + most) / 2;
        if fits(middle * 1024)? { least = middle } else { most = middle }
    }
    Ok(least * 1024)
}

pub(crate) fn divided_rows(environment: &Environment) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    let mut put = |case: &Case, metric| records.push(record(EXPERIMENT, case, metric, environment));
    let (llama, card) = (presets::find("llama-3-8b")?, hardware::find("h100")?);
    for tokens in LENGTHS {
        for gpus in COUNTS {
            // Not more ranks than heads.
            let parts = gpus.min(llama.heads);
            let Predicted { peak, step } = predict(&llama, tokens, [gpus, parts], TILES)?;
            let seconds = step.seconds();
            let case = Case::new()
                .with("shows", "steps")
                .with("tokens", grouped(tokens.into()))
                .with("gpus", gpus)
                .with("parts", parts);
            let rate = tokens as f64 / (parts as f64 * seconds);
            put(&case, Metric::exact("peak_bytes", "B", peak as f64));
            put(&case, Metric::exact("peak_of_memory", "ratio", peak as f64 / card.memory as f64));
            put(&case, Metric::exact("step_seconds", "s", seconds));
            put(&case, Metric::exact("tokens_per_second_per_gpu", "tokens/s", rate));
            put(&case, Metric::exact("exchange_share", "ratio", step.exchange / seconds));
            put(&case, Metric::exact("exposed_share", "ratio", step.exposed() / seconds));
        }
    }
    let source = "Hugging Face, Ulysses Sequence Parallelism, March 2026";
    let qwen = presets::find("qwen3-4b")?;
    for (tokens, published) in QWEN {
        let peak = |loss| Ok::<_, Error>(predict(&qwen, tokens, [4; 2], loss)?.peak as f64);
        let (eager, tiles) = (peak(Loss::Eager)?, peak(TILES)?);
        let case = Case::new()
            .with("shows", "published")
            .with("what", "Qwen3-4B over 4 H100")
            .with("tokens", grouped(tokens.into()))
            .with("source", source);
        put(&case, Metric::exact("published_peak_bytes", "B", published));
        put(&case, Metric::exact("eager_peak_bytes", "B", eager));
        put(&case, Metric::exact("eager_over_published", "ratio", eager / published));
        put(&case, Metric::exact("fused_peak_bytes", "B", tiles));
    }
    for (gpus, published) in LONGEST {
        let predicted = longest(&llama, gpus, card.memory)? as f64;
        let case = Case::new()
            .with("shows", "longest")
            .with("gpus", gpus)
            .with("source", "arXiv:2506.13996, checkpoints and optimizer state in host memory");
        put(&case, Metric::exact("published_tokens", "count", published));
        put(&case, Metric::exact("predicted_tokens", "count", predicted));
    }
    Ok(records)
}
