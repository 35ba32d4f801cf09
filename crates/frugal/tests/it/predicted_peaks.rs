//! Predicted peaks against the allocator's: models, lengths, methods and ways to run a step. The counts are the whole process's, so no
//! other test may run at the same time.

mod in_backward;
mod in_blocks;
mod not_predicted;
mod of_pairs;
mod of_teachers;
mod on_gpu;

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{Job, Placement, Tier};
use accounting::lora::LowRank;
use accounting::offload::OptimizerPlace;
use frugal::config::{
    ActivationPlan, Compute, Config, Dtype, LossHeadKind, MasterWeights, ObjectiveKind, OffloadConfig,
    OptimizerRule, Recomputed,
};
use frugal::planning::{self, DataShape, KnownRates, WeightFormat};
use frugal::{Recipe, runtime};
use kernels::quantized::blocks;
use lora::{LoraConfig, TokenIndices};
use models::hugging_face::{self, Folder};
use models::{DecoderConfig, Llama};
use runtime::device::pinned_bytes;
use runtime::memory::{Region, live_bytes};
use tch::{Device, Kind};
use training::masked_rows::Arrangement::{self, Packed, PaddingFree};
use training::masked_rows::{Grouping, Layout, MaskedBatches, MaskedRow};

/// The share of the measured peak by which a prediction may be wrong.
const TOLERANCE: f64 = 0.05;

/// What a case has besides its model.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    kind: Kind,
    /// What is special about the adapters.
    adapters: Option<fn(&mut LoraConfig)>,
    /// Rows of a batch, tokens of the longest row, and how rows lie.
    rows: usize,
    length: usize,
    arrangement: Arrangement,
    accumulation: usize,
    placement: fn(layers: usize) -> Placement,
    at_once: Option<usize>,
    mixed: bool,
    /// Whether weights of 16 bits are rounded stochastically, without master weights.
    stochastic: bool,
    /// Whether offloaded layers keep their inputs in host memory.
    inputs_on_host: bool,
    /// The level of the MLPs.
    mlp: Option<&'static str>,
    /// Whether adapted projections run as on a GPU.
    on_gpu: bool,
    /// Tokens whose logits exist at a time.
    chunk: i64,
    /// What is learned. The rows of pairs are neighbours.
    objective: ObjectiveKind,
    rule: OptimizerRule,
    /// Other settings.
    further: fn(&mut Config),
}

fn keep(layers: usize) -> Placement {
    Placement::Resident(vec![LayerPlan::KeepAll; layers])
}

fn mixed(layers: usize) -> Placement {
    let of = |layer| match layer % 4 {
        0 => LayerPlan::RecomputeAll,
        1 => LayerPlan::RecomputeMlp,
        2 => LayerPlan::RecomputeAttention,
        _ => LayerPlan::KeepAll,
    };
    Placement::Resident((0..layers).map(of).collect())
}

fn products(layers: usize) -> Placement {
    Placement::Resident(vec![LayerPlan::RecomputeElementwise; layers])
}

fn recompute(layers: usize) -> Placement {
    Placement::Resident(vec![LayerPlan::RecomputeAll; layers])
}

fn files(_: usize) -> Placement {
    in_files(Vec::new())
}

fn files_and_all_activations(layers: usize) -> Placement {
    in_files((0..layers).collect())
}

fn files_and_some_activations(layers: usize) -> Placement {
    in_files((1..layers - 1).collect())
}

fn in_files(keep: Vec<usize>) -> Placement {
    Placement::Offloaded {
        tier: Tier::File,
        ring: 2,
        resident: vec![1],
        keep,
        inputs_on_host: false,
        optimizer: OptimizerPlace::Device,
    }
}

fn trained_files(layers: usize) -> Placement {
    trained(Tier::File, (2..layers).collect())
}

fn host(_: usize) -> Placement {
    Placement::Offloaded {
        tier: Tier::Host,
        ring: 2,
        resident: vec![1],
        keep: Vec::new(),
        inputs_on_host: false,
        optimizer: OptimizerPlace::Device,
    }
}

fn trained_host(_: usize) -> Placement {
    trained(Tier::Host, Vec::new())
}

fn trained(tier: Tier, keep: Vec<usize>) -> Placement {
    let (ring, resident, inputs_on_host) = (2, vec![1], false);
    Placement::Offloaded { tier, ring, resident, keep, inputs_on_host, optimizer: OptimizerPlace::Host }
}

fn plain(_: &mut LoraConfig) {}

fn dora(config: &mut LoraConfig) {
    config.use_dora = true;
}

fn dora_alone(config: &mut LoraConfig) {
    (config.use_dora, config.lora_dropout) = (true, 0.0);
}

fn pissa(config: &mut LoraConfig) {
    config.init_lora_weights = serde_json::json!("pissa");
}

fn olora_and_dora(config: &mut LoraConfig) {
    (config.use_dora, config.init_lora_weights) = (true, serde_json::json!("olora"));
}

fn token_rows(config: &mut LoraConfig) {
    config.trainable_token_indices = Some(TokenIndices::Embedding(vec![10, 3, 60, 61, 62, 250]));
}

const ADAPTED: Case = Case {
    name: "adapters",
    kind: Kind::Float,
    adapters: Some(plain),
    rows: 4,
    length: 64,
    arrangement: Arrangement::Padded,
    accumulation: 1,
    placement: keep,
    at_once: None,
    mixed: false,
    stochastic: false,
    inputs_on_host: false,
    mlp: None,
    on_gpu: false,
    chunk: 64,
    objective: ObjectiveKind::NextToken,
    rule: OptimizerRule::AdamW,
    further: |_| {},
};
const FULL: Case = Case { name: "full", adapters: None, ..ADAPTED };
const FULL_BF16: Case = Case { kind: Kind::BFloat16, length: 40, ..FULL };

const DORA: Case = Case { name: "DoRA", adapters: Some(dora), ..ADAPTED };
const ROWS: Case = Case { name: "rows of tokens", adapters: Some(token_rows), ..ADAPTED };
const PISSA: Case = Case { name: "PiSSA", adapters: Some(pissa), ..ADAPTED };

const CASES: [Case; 71] = [
    ADAPTED,
    Case { name: "adapters, short", length: 24, rows: 2, ..ADAPTED },
    Case { name: "adapters, bf16", kind: Kind::BFloat16, ..ADAPTED },
    Case { name: "adapters, fp16", kind: Kind::Half, ..ADAPTED },
    Case {
        name: "adapters, fp16, recomputed",
        kind: Kind::Half,
        placement: recompute,
        length: 100,
        ..ADAPTED
    },
    Case { name: "adapters, packed", arrangement: Packed(64), length: 25, ..ADAPTED },
    Case { name: "adapters, without padding", arrangement: PaddingFree, ..ADAPTED },
    Case {
        name: "adapters, without padding, two rows at a time",
        arrangement: PaddingFree,
        at_once: Some(2),
        ..ADAPTED
    },
    Case { name: "adapters, two rows at a time", at_once: Some(2), ..ADAPTED },
    Case { name: "adapters, recomputed", placement: recompute, ..ADAPTED },
    Case { name: "adapters, mixed plan", placement: mixed, accumulation: 2, ..ADAPTED },
    Case { name: "adapters, layers in files", placement: files, ..ADAPTED },
    Case { name: "adapters, layers in host memory", placement: host, ..ADAPTED },
    Case { name: "adapters, layers in files, all kept", placement: files_and_all_activations, ..ADAPTED },
    Case {
        name: "adapters, layers in files, some kept",
        placement: files_and_some_activations,
        length: 100,
        ..ADAPTED
    },
    Case {
        name: "adapters, layers and inputs in host memory",
        placement: host,
        inputs_on_host: true,
        length: 100,
        ..ADAPTED
    },
    Case {
        name: "adapters, layers in files, some kept, other inputs in host memory",
        placement: files_and_some_activations,
        inputs_on_host: true,
        length: 100,
        ..ADAPTED
    },
    ROWS,
    Case { name: "rows of tokens, bf16, recomputed", kind: Kind::BFloat16, placement: recompute, ..ROWS },
    Case { name: "rows of tokens, mixed plan, accumulated", placement: mixed, accumulation: 2, ..ROWS },
    Case { name: "rows of tokens, layers in files", placement: files, ..ROWS },
    DORA,
    Case {
        name: "DoRA, packed, no dropout",
        adapters: Some(dora_alone),
        arrangement: Packed(64),
        length: 25,
        ..DORA
    },
    Case { name: "DoRA, bf16", kind: Kind::BFloat16, ..DORA },
    Case { name: "DoRA, bf16, no dropout", kind: Kind::BFloat16, adapters: Some(dora_alone), ..DORA },
    Case { name: "DoRA, mixed plan", placement: mixed, accumulation: 2, ..DORA },
    Case { name: "DoRA, products kept, bf16", placement: products, kind: Kind::BFloat16, ..DORA },
    Case {
        name: "DoRA, layers in files, some kept",
        placement: files_and_some_activations,
        length: 100,
        ..DORA
    },
    Case { name: "DoRA, mixed precision, mixed plan", mixed: true, placement: mixed, ..DORA },
    Case { name: "DoRA and OLoRA", adapters: Some(olora_and_dora), ..DORA },
    PISSA,
    Case { name: "PiSSA, bf16, recomputed", kind: Kind::BFloat16, placement: recompute, ..PISSA },
    Case { name: "PiSSA, products kept", placement: products, ..PISSA },
    Case { name: "PiSSA, layers in files", placement: files, ..PISSA },
    FULL,
    Case { name: "full, accumulated", accumulation: 3, ..FULL },
    Case { name: "full, recomputed", placement: recompute, length: 100, ..FULL },
    Case { name: "full, bf16, rounded stochastically", stochastic: true, ..FULL_BF16 },
    Case { name: "full, fp16", kind: Kind::Half, ..FULL_BF16 },
    Case { name: "full, fp16, rounded stochastically", kind: Kind::Half, stochastic: true, ..FULL_BF16 },
    Case { name: "full, one row at a time", at_once: Some(1), placement: mixed, ..FULL },
    Case { name: "full, layers in files", placement: trained_files, ..FULL },
    Case { name: "full, layers in files, accumulated", placement: trained_files, accumulation: 2, ..FULL },
    Case { name: "full, layers in host memory", placement: trained_host, ..FULL },
    Case {
        name: "full, layers and inputs in host memory",
        placement: trained_host,
        inputs_on_host: true,
        ..FULL
    },
    Case {
        name: "full, layers in host memory, accumulated",
        placement: trained_host,
        accumulation: 2,
        ..FULL
    },
    Case { name: "adapters, 8-bit AdamW", rule: OptimizerRule::AdamW8bit, ..ADAPTED },
    Case { name: "adapters, Lion, recomputed", rule: OptimizerRule::Lion, placement: recompute, ..ADAPTED },
    Case { name: "full, 8-bit AdamW", rule: OptimizerRule::AdamW8bit, ..FULL },
    Case { name: "full, bf16, 8-bit AdamW", rule: OptimizerRule::AdamW8bit, ..FULL_BF16 },
    Case {
        name: "full, bf16, rounded stochastically, 8-bit AdamW",
        rule: OptimizerRule::AdamW8bit,
        stochastic: true,
        ..FULL_BF16
    },
    Case { name: "full, Lion, recomputed", rule: OptimizerRule::Lion, placement: recompute, ..FULL },
    Case { name: "adapters, Muon", rule: OptimizerRule::Muon, ..ADAPTED },
    Case { name: "adapters, Adafactor", rule: OptimizerRule::Adafactor, ..ADAPTED },
    Case { name: "full, Muon", rule: OptimizerRule::Muon, ..FULL },
    Case {
        name: "full, Muon, recomputed, short",
        rule: OptimizerRule::Muon,
        placement: recompute,
        length: 24,
        ..FULL
    },
    Case { name: "full, bf16, Muon", rule: OptimizerRule::Muon, ..FULL_BF16 },
    Case { name: "full, Adafactor, short", rule: OptimizerRule::Adafactor, length: 24, ..FULL },
    Case { name: "full, bf16, Adafactor", rule: OptimizerRule::Adafactor, ..FULL_BF16 },
    Case { name: "full, MLPs keep their input", mlp: Some("input-only"), ..FULL },
    Case { name: "full, tiled MLPs", mlp: Some(TILED), length: 100, ..FULL },
    Case {
        name: "full, tiled MLPs, recomputed",
        mlp: Some(TILED),
        placement: recompute,
        length: 100,
        ..FULL
    },
    Case { name: "full, tiled MLPs, mixed plan", mlp: Some(TILED), placement: mixed, length: 100, ..FULL },
    Case {
        name: "full, bf16, MLPs keep their input, recomputed",
        mlp: Some("input-only"),
        placement: recompute,
        ..FULL_BF16
    },
    Case { name: "full, bf16, tiled MLPs, recomputed", mlp: Some(TILED), placement: recompute, ..FULL_BF16 },
    Case {
        name: "full, tiled MLPs, layers and inputs in host memory",
        mlp: Some(TILED),
        placement: trained_host,
        inputs_on_host: true,
        length: 100,
        ..FULL
    },
    Case { name: "adapters, mixed precision", mixed: true, accumulation: 2, ..ADAPTED },
    Case { name: "adapters, mixed precision, mixed plan", mixed: true, placement: mixed, ..ADAPTED },
    Case { name: "full, mixed precision", mixed: true, ..FULL },
    Case { name: "full, mixed precision, mixed plan", mixed: true, placement: mixed, length: 100, ..FULL },
    Case { name: "full, mixed precision, products kept", mixed: true, placement: products, ..FULL },
];

/// Tiles of a few of the rows' tokens.
const TILED: &str = "input-only-tiled:100KiB";

fn alone(config: &mut LoraConfig) {
    config.lora_dropout = 0.0;
}

fn models() -> [(&'static str, DecoderConfig); 2] {
    let wide = DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: 256,
        tie_word_embeddings: true,
        ..DecoderConfig::qwen2(600, 64, 176, 4, 4)
    };
    let deep = DecoderConfig { max_position_embeddings: 256, ..DecoderConfig::llama(300, 96, 256, 6, 6) };
    [("qwen2", wide), ("llama", deep)]
}

/// Rows of up to `length` tokens. The second half of each counts in the loss.
fn batches(case: &Case) -> MaskedBatches {
    let row = |number: usize| {
        let count = case.length + 1 - number % 5;
        let tokens: Vec<i64> = (0..count).map(|at| ((number * 37 + at * 11) % 290) as i64).collect();
        let labels = (0..).zip(&tokens).map(|(at, id)| if at < count / 2 { -100 } else { *id }).collect();
        MaskedRow::new(tokens, labels)
    };
    let objective = config(case).objective.preference().unwrap();
    let grouping = objective.map_or(Grouping::Rows, |objective| objective.grouping());
    let batch = case.rows / grouping.rows();
    let layout =
        Layout { batch, arrangement: case.arrangement, shuffle: Some(3), grouping, ..Layout::default() };
    MaskedBatches::new((0..6 * case.rows).map(row).collect(), layout, Device::Cpu).unwrap()
}

fn config(case: &Case) -> Config {
    let adapter = case.adapters.map(|set| {
        let mut adapter = LoraConfig {
            r: 8,
            lora_dropout: 0.05,
            target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"].into()),
            ..LoraConfig::default()
        };
        set(&mut adapter);
        adapter
    });
    let mut config = Config { adapter, ..Config::default() };
    (config.training.batch, config.training.accumulation) = (case.rows, case.accumulation);
    config.training.micro_batch_size = case.at_once;
    config.objective.kind = case.objective;
    config.optimizer.rule = case.rule;
    config.model.dtype = match case.kind {
        Kind::BFloat16 => Some(Dtype::Bfloat16),
        Kind::Half => Some(Dtype::Float16),
        blocks::KIND => Some(Dtype::Gguf),
        _ => None,
    };
    if case.stochastic {
        config.optimizer.master_weights = MasterWeights::Stochastic;
    }
    if case.inputs_on_host {
        config.activations.plan = ActivationPlan::Recompute;
        config.activations.recompute = Recomputed::Offload;
        config.offload = Some(OffloadConfig::default());
    }
    config.mlp.level = case.mlp.map(str::to_owned);
    if case.mixed {
        config.precision.compute = Compute::Bf16;
    }
    config.loss.head = LossHeadKind::Fused;
    config.loss.chunk_tokens = Some(case.chunk);
    (case.further)(&mut config);
    config
}

fn job(case: &Case, folder: &Folder) -> Job {
    let data = of_teachers::with_teacher(&config(case), DataShape::of(&batches(case), 100).unwrap());
    let rates = KnownRates::nominal(Device::Cpu).unwrap();
    let format = WeightFormat::of(folder, case.kind).unwrap();
    let shape = folder.config();
    let mut job = planning::job(&config(case), shape, (format, Device::Cpu), &data, &rates).unwrap();
    job.lora = job.lora.map(|lora| LowRank { on_cpu: !case.on_gpu, ..lora });
    job
}

fn placement(case: &Case, shape: &DecoderConfig) -> Placement {
    let mut placement = (case.placement)(shape.num_hidden_layers as usize);
    if let Placement::Offloaded { inputs_on_host, .. } = &mut placement {
        *inputs_on_host = case.inputs_on_host;
    }
    placement
}

/// The peak of a third step, above what was live before the model.
fn measured(case: &Case, folder: &Folder) -> u64 {
    let shape = folder.config();
    let _gpu = case.on_gpu.then(frugal::kernels::gpu::assume);
    runtime::random::seed(1).unwrap();
    let before = live_bytes(Device::Cpu).unwrap();
    let pinned = pinned_bytes(Device::Cpu).unwrap().live;
    let placement = placement(case, shape);
    let candidate =
        job(case, folder).evaluate(placement.clone(), case.at_once.map(|rows| rows as u64)).unwrap();
    let config = planning::with_choice(&config(case), &candidate);
    let prepared = Recipe::new(&config).unwrap().open(folder, Device::Cpu).unwrap();
    let prepared = of_teachers::taught(&config, prepared);
    let (mut trainer, handles) = prepared.trainer(3).unwrap();
    if let (Placement::Resident(plan), Some(activations)) = (&placement, &handles.activations) {
        activations.change(plan).unwrap();
    }
    let mut data = batches(case);
    trainer.advance(2, &mut data, None).unwrap();
    let region = Region::start(Device::Cpu).unwrap();
    trainer.advance(3, &mut data, None).unwrap();
    // Of a CPU, host memory of offloaded layers is outside of the allocator.
    let peak = region.finish().unwrap().peak + pinned_bytes(Device::Cpu).unwrap().live - pinned;
    drop((trainer, handles, data));
    peak - before
}

#[test]
fn predicted_peaks_are_those_of_the_allocator() {
    let mut wrong = Vec::new();
    for (model, shape) in models() {
        // Mixed precision does not depend on the family.
        let cases: Vec<Case> = CASES.into_iter().filter(|case| !case.mixed || model == "qwen2").collect();
        wrong.extend(compare(model, &shape, &cases, TOLERANCE));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// [`compare_in`] over a model with initial weights.
fn compare(model: &str, shape: &DecoderConfig, cases: &[Case], tolerance: f64) -> Vec<String> {
    let path = tempfile::tempdir().unwrap();
    let weights = Llama::new(shape, (Kind::Float, Device::Cpu)).unwrap();
    hugging_face::save(&weights, path.path(), hugging_face::SHARD_BYTES).unwrap();
    drop(weights);
    compare_in(model, &Folder::open(path.path()).unwrap(), cases, tolerance)
}

/// Returns the cases whose prediction is wrong by more than a share.
fn compare_in(model: &str, folder: &Folder, cases: &[Case], tolerance: f64) -> Vec<String> {
    runtime::memory::track_cpu().unwrap();
    let mut wrong = Vec::new();
    // Allocations made once per process.
    measured(&ADAPTED, folder);
    for case in cases {
        let placement = placement(case, folder.config());
        let rows = case.at_once.map(|rows| rows as u64);
        let predicted = job(case, folder).evaluate(placement, rows).unwrap().peak;
        let measured = measured(case, folder);
        let off = predicted.total as f64 / measured as f64 - 1.0;
        let line = format!(
            "{model}, {}: {:+.2} %, {} B predicted in the {}, {measured} B measured",
            case.name,
            100.0 * off,
            predicted.total,
            predicted.moment,
        );
        eprintln!("{line}");
        if off.abs() > tolerance {
            wrong.push(format!("{line}: {}", predicted.summary()));
        }
    }
    wrong
}
