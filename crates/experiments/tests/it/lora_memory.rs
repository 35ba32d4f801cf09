//! Tests that the prediction of `accounting` for a step that trains adapters is the allocator's count. The counts are the
//! whole process's, so no other test may run at the same time.

use accounting::candidates::{Batch, Candidate, Job, Placement};
use accounting::decoder_flops::Workload;
use accounting::lora::{LowRank, Targets};
use accounting::memory::logits::Loss;
use accounting::memory::recipe::Recipe;
use accounting::model::{Decoder, Family, Sizes};
use accounting::offload::{Rates, sizes::Choices};
use accounting::recompute::NormKernel;
use fused_ce::{Chunk, LinearCrossEntropy};
use lora::LoraConfig;
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use runtime::memory::{Region, live_bytes, track_cpu};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

/// Qwen2.5-0.5B's proportions, a quarter as wide, of few layers and words.
const SIZES: Sizes = Sizes {
    family: Family::Qwen2,
    vocabulary: 1500,
    context: 256,
    embedding: 224,
    hidden: 224,
    layers: 4,
    heads: 14,
    kv_heads: 2,
    head_dim: 16,
    feed_forward: 1216,
    tied: true,
    attention_bias: false,
    mlp_bias: false,
    experts: None,
    linear: None,
    windows: None,
    gemma4: None,
};
const BATCH: i64 = 2;
const SEQUENCE: i64 = 128;
const RANK: i64 = 8;
/// Size of a chunk of logits.
const CHUNK: i64 = 64;

fn config() -> DecoderConfig {
    let size = |n: u64| i64::try_from(n).unwrap();
    DecoderConfig {
        num_key_value_heads: size(SIZES.kv_heads),
        max_position_embeddings: size(SIZES.context),
        ..DecoderConfig::qwen2(
            size(SIZES.vocabulary),
            size(SIZES.hidden),
            size(SIZES.feed_forward),
            size(SIZES.layers),
            size(SIZES.heads),
        )
    }
}

/// The most bytes of a second step, and what of them is there before the step: parameters and optimizer state.
fn measured(names: &[&str], dropout: f64, kind: Kind, full: bool) -> [u64; 2] {
    let device = Device::Cpu;
    let live = || live_bytes(device).unwrap();
    let before = live();
    let mut model = Llama::new(&config(), (kind, device)).unwrap();
    let names: Vec<String> = names.iter().map(|name| format!("{name}_proj")).collect();
    let config = LoraConfig {
        r: RANK,
        lora_dropout: dropout,
        target_modules: Some(lora::Names::List(names)),
        ..LoraConfig::default()
    };
    let _adapters = LoraConfig { seed: 1, ..config.clone() }.install(&mut model).unwrap();
    let loss = LinearCrossEntropy { chunk: Some(Chunk::Tokens(CHUNK)), ..LinearCrossEntropy::default() };
    loss.install(&mut model).unwrap();
    let plan = if full { LayerPlan::RecomputeAll } else { LayerPlan::KeepAll };
    let _plan = Activations::install(&mut model, &vec![plan; SIZES.layers as usize]).unwrap();
    let mut optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-4)]).unwrap();

    let drawn = Generator::new(2).unwrap().uniform(&[BATCH, SEQUENCE], (0.0, 1.0), (Kind::Double, device));
    let tokens = (drawn.unwrap() * SIZES.vocabulary as f64).to_kind(Kind::Int64);
    let labels = tokens.copy();
    let _ = labels.narrow(1, 0, SEQUENCE / 2).fill_(IGNORE_INDEX);
    let context = Context { training: true, ..Context::default() };
    let mut measured = [0; 2];
    for _ in 0..2 {
        let states = live() - before;
        let region = Region::start(device).unwrap();
        let hidden = model.hidden(&Input { context, ..Input::new(&tokens) }).unwrap();
        let loss = model.head().loss(&hidden, &labels, &context).unwrap().sum / (BATCH * SEQUENCE / 2) as f64;
        drop(hidden);
        runtime::autograd::backward(&[&loss]).unwrap();
        drop(loss);
        optimizer.step().unwrap();
        optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
        measured = [region.finish().unwrap().peak - before, states];
    }
    measured
}

/// The most that libtorch takes for itself in a product, where it packs the operands into AMX's tiles; 0 where it does not.
fn packing(kind: Kind) -> u64 {
    let device = Device::Cpu;
    let hidden = Tensor::randn([CHUNK, SIZES.hidden as i64], (kind, device));
    let matrix = Tensor::randn([SIZES.vocabulary as i64, SIZES.hidden as i64], (kind, device));
    let region = Region::start(device).unwrap();
    let product = hidden.matmul(&matrix.tr());
    let after = live_bytes(device).unwrap();
    let took = region.finish().unwrap().peak - after;
    drop(product);
    if took > 0 { 3 * SIZES.vocabulary * SIZES.hidden * kind.elt_size_in_bytes() as u64 } else { 0 }
}

fn predicted(targets: Targets, dropout: bool, kind: Kind, full: bool) -> Candidate {
    let work = Workload { batch: BATCH as u64, sequence: SEQUENCE as u64 };
    let choices = Choices {
        recipe: if kind == Kind::Float { Recipe::FP32 } else { Recipe::BF16_FP32_STATE },
        norm: NormKernel::Output,
        loss: Loss::LinearCrossEntropy { tokens: CHUNK as u64, whole: 0 },
        ..Choices::default()
    };
    let lora = LowRank { rank: RANK as u64, targets, dropout, on_cpu: true, ..LowRank::default() };
    let batch = Batch::new(work, Some((BATCH * SEQUENCE) as u64 / 2));
    let rates = Rates::of_memory(1e9, 1e9, 1e9);
    let job = Job::new(Decoder::new(SIZES).unwrap(), Some(lora), choices, batch, rates);
    let plan = if full { LayerPlan::RecomputeAll } else { LayerPlan::KeepAll };
    job.evaluate(Placement::Resident(vec![plan; SIZES.layers as usize]), None).unwrap()
}

#[test]
fn the_peak_of_a_step_is_the_one_predicted() {
    track_cpu().unwrap();
    let attention: &[&str] = &["q", "k", "v", "o"];
    let all: &[&str] = &["q", "k", "v", "o", "gate", "up", "down"];
    // Each pair of settings is met.
    let (fp32, bf16) = (Kind::Float, Kind::BFloat16);
    for (names, dropout, others) in [
        (attention, 0.0, [(fp32, false), (bf16, true)]),
        (attention, 0.1, [(fp32, true), (bf16, false)]),
        (all, 0.0, [(fp32, true), (bf16, false)]),
        (all, 0.1, [(fp32, false), (bf16, true)]),
    ] {
        let targets = names.join(",").parse().unwrap();
        for (kind, full) in others {
            let case = format!("{names:?}, dropout {dropout}, {kind:?}, recomputed {full}");
            let [peak, states] = measured(names, dropout, kind, full);
            let expected = predicted(targets, dropout > 0.0, kind, full).peak;
            let packing = packing(kind);
            let share = |measured: u64, expected: u64| measured as f64 / expected as f64 - 1.0;
            let within = share(peak, expected.total) > -0.05 && share(peak, expected.total + packing) < 0.05;
            assert!(within, "{case}: {peak} of {expected:?}");
            // The base is as large as the rest: what comes and goes is to be right by itself. A block that runs again has
            // three or four more [n, d] at hand than the prediction counts (its output, and what hands gradients over).
            let stay =
                ["fixed weights", "resident layers", "optimizer state"].map(|part| expected.bytes(part));
            let stay: u64 = stay.into_iter().sum();
            let moving = |packing: u64| share(peak - states, expected.total - stay + packing);
            let allowed = if full { 0.2 } else { 0.1 };
            let within = moving(0) > -allowed && moving(packing) < allowed;
            assert!(within, "{case}: {}, {} of {expected:?}", moving(0), peak - states);
        }
    }
}
