//! Rows that ranks divide among them: the hidden states of one process, in every family and with every technique, and its losses and
//! gradients up to the order of sums.

use std::time::Duration;

use expect_test::expect;
use frugal::Error;
use frugal::models::module::{self, Context, Input, LanguageModel};
use frugal::models::{DecoderConfig, Documents, Gpt2, Gpt2Config, Llama, SequenceShard};
use frugal::runtime::autograd;
use frugal::runtime::collectives::{Group, GroupConfig, ReduceConfig, Store};
use frugal::runtime::random::Generator;
use frugal::sharding::Mesh;
use frugal::training::trainer::Overflow;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use testing::ranks::Ranks;

use crate::pairs::{Outcome, Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};
use crate::techniques_over_ranks::DIVIDED as STAGES;

const VOCABULARY: i64 = 40;
/// Tokens of a row, which two and four ranks divide.
const LENGTH: i64 = 16;
/// Documents of two rows: parts of the ranks begin within some of them.
const DOCUMENTS: [&[usize]; 2] = [&[3, 9, 4], &[16]];

/// Models with four heads over two key heads, so that four ranks need each key head twice.
fn models() -> Vec<(&'static str, Box<dyn LanguageModel>)> {
    let decoder = |family: &str, fields: Value| -> Box<dyn LanguageModel> {
        let mut file = json!({
            "model_type": family, "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        });
        fields.as_object().unwrap().iter().for_each(|(name, value)| file[name] = value.clone());
        let config: DecoderConfig = serde_json::from_value(file).unwrap();
        Box::new(Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap())
    };
    let gpt2 = Gpt2Config {
        vocabulary: VOCABULARY,
        max_sequence: 32,
        hidden: 16,
        heads: 4,
        layers: 2,
        ..Gpt2Config::small()
    };
    // Rows of 16 tokens are beyond the original 12 positions.
    let longrope = json!({ "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0] });
    vec![
        ("llama", decoder("llama", json!({}))),
        ("mistral, a window", decoder("mistral", json!({ "sliding_window": 5 }))),
        ("gemma 2, caps", decoder("gemma2", json!({ "sliding_window": 5, "query_pre_attn_scalar": 8 }))),
        ("qwen 3, norms of heads", decoder("qwen3", json!({}))),
        (
            "gpt-oss, sinks and experts",
            decoder(
                "gpt_oss",
                json!({ "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5 }),
            ),
        ),
        (
            "phi 3, long rope",
            decoder(
                "phi3",
                json!({ "rope_scaling": longrope, "original_max_position_embeddings": 12, "pad_token_id": 0 }),
            ),
        ),
        (
            "gemma 4, shared keys",
            decoder(
                "gemma4_text",
                json!({
                    "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
                    "sliding_window": 5,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                }),
            ),
        ),
        ("gpt-2", Box::new(Gpt2::new(&gpt2, (Kind::Float, Device::Cpu)).unwrap())),
    ]
}

/// What one process computes: hidden states, and gradients by name.
struct Whole {
    hidden: Tensor,
    gradients: Vec<(String, Tensor)>,
}

fn rows() -> (Tensor, Tensor) {
    let count = 2 * LENGTH;
    let tokens: Vec<i64> = (0..count).map(|at| (7 * at + 5 * at * at + 3) % VOCABULARY).collect();
    let labels: Vec<i64> =
        (0..count).map(|at| if at % 7 == 0 { -100 } else { (3 * at + 1) % VOCABULARY }).collect();
    let of = |values: &[i64]| Tensor::from_slice(values).view([2, LENGTH]);
    (of(&tokens), of(&labels))
}

fn positions(is_packed: bool) -> Tensor {
    let of_row =
        |documents: &[usize]| documents.iter().flat_map(|length| 0..*length as i64).collect::<Vec<_>>();
    let rows: Vec<i64> = match is_packed {
        true => DOCUMENTS.iter().flat_map(|documents| of_row(documents)).collect(),
        false => [of_row(&[LENGTH as usize]), of_row(&[LENGTH as usize])].concat(),
    };
    Tensor::from_slice(&rows).view([2, LENGTH])
}

/// Runs forward and backward of the rows, or of a rank's part of them.
fn compute(model: &dyn LanguageModel, is_packed: bool, shard: Option<&SequenceShard>) -> Whole {
    let documents = is_packed.then(|| Documents::new(&DOCUMENTS, Device::Cpu).unwrap());
    let (tokens, labels) = rows();
    let range = shard.map_or(0..LENGTH, SequenceShard::range);
    let part = |rows: &Tensor| rows.narrow(1, range.start, range.end - range.start).contiguous();
    let (tokens, labels, positions) = (part(&tokens), part(&labels), part(&positions(is_packed)));
    let positions = (is_packed || shard.is_some()).then_some(&positions);
    let context =
        Context { documents: documents.as_ref(), training: true, sequence: shard, ..Context::default() };
    let input = Input { tokens: &tokens, positions, context };
    let hidden = tch::no_grad(|| model.hidden(&input).unwrap());
    module::parameters(model).iter().for_each(|(_, parameter)| parameter.shallow_clone().zero_grad());
    let loss = model.loss(&input, &labels).unwrap().sum;
    autograd::backward(&[&loss]).unwrap();
    let gradients = module::parameters(model).into_iter().map(|(name, parameter)| (name, parameter.grad()));
    let gradients = gradients.filter(|(_, gradient)| gradient.defined());
    Whole { hidden, gradients: gradients.map(|(name, gradient)| (name, gradient.copy())).collect() }
}

fn noise(model: &dyn LanguageModel) {
    let mut generator = Generator::new(3).unwrap();
    for (_, parameter) in module::parameters(model) {
        let noise = generator.normal(&parameter.size(), (Kind::Float, Device::Cpu)).unwrap() * 0.2;
        tch::no_grad(|| parameter.shallow_clone().copy_(&noise));
    }
}

/// A rank's process runs this test alone.
#[test]
fn a_rank_of_each_family() {
    testing::ranks::rank(|sizes: Vec<usize>, launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        let world = Group::new(&store, "world", GroupConfig::default()).unwrap();
        for size in sizes {
            if world.rank() < size {
                let ranks: Vec<usize> = (0..size).collect();
                families(&world.subgroup(&format!("{size} ranks"), &ranks).unwrap());
            }
            world.barrier("the next number").unwrap();
        }
    });
}

fn families(ranks: &Group) {
    for (name, model) in models() {
        noise(model.as_ref());
        for is_packed in [false, true] {
            let whole = compute(model.as_ref(), is_packed, None);
            let shard = SequenceShard::new(ranks, LENGTH).unwrap();
            let part = compute(model.as_ref(), is_packed, Some(&shard));
            let range = shard.range();
            let expected = whole.hidden.narrow(1, range.start, range.end - range.start);
            let case = format!("{name}, packed: {is_packed}, rank {} of {}", ranks.rank(), ranks.size());
            close(&part.hidden, &expected, &format!("{case}, hidden states"));
            assert_eq!(part.gradients.len(), whole.gradients.len(), "{case}");
            for ((tensor, sum), (_, expected)) in part.gradients.iter().zip(&whole.gradients) {
                let sum = sum.contiguous();
                ranks.all_reduce(&sum, ReduceConfig::default(), tensor).unwrap();
                close(&sum, expected, &format!("{case}, {tensor}"));
            }
        }
    }
}

/// Products of another number of rows may round otherwise.
#[track_caller]
fn close(computed: &Tensor, expected: &Tensor, case: &str) {
    let largest = (computed - expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    assert!(largest <= 1e-5 * scale, "{case}: {largest} of {scale}");
}

#[test]
fn every_family_computes_the_hidden_states_of_one_process() {
    Ranks::new("sequence_over_ranks::a_rank_of_each_family", 4).run(&[2, 4]);
}

/// A stage and a family.
const CROSSED: [(usize, Family); 3] = [(0, Family::Llama), (0, Family::Gpt2), (1, Family::Llama)];
/// Two ranks for each row. Four ranks then compute two micro-batches at a time.
const DIVIDED: Technique = Technique {
    name: "rows divided among two ranks",
    group: "sequence",
    promise: Promise::Within(1e-5),
    set: |config, _| config.training.sequence_parallel_size = 2,
};

/// And in each of two replicas two ranks for each row.
const IN_REPLICAS: Technique = Technique {
    set: |config, family| {
        (DIVIDED.set)(config, family);
        config.optimizer.replicas = 2;
    },
    ..DIVIDED
};

/// A rank's process runs this test alone.
#[test]
#[allow(
    clippy::print_stdout,
    clippy::result_large_err,
    reason = "what a rank prints is its result; a test's errors are few"
)]
fn a_rank_of_each_technique() {
    testing::ranks::rank(|case: usize, launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        let world = Group::new(&store, "world", GroupConfig::default()).unwrap();
        let (stage, family) = CROSSED[case];
        let stage = &STAGES[stage];
        for technique in &TECHNIQUES {
            let name = format!("{}, {family:?}, {}", stage.name, technique.name);
            let divided_as = |ranks: Mesh, rows: &Technique| {
                let mesh = ranks.with_sequence(2).unwrap();
                // A rank that is refused leaves while another one still connects.
                mesh.sequence().unwrap().barrier("connected").unwrap();
                run_over(family, &[stage, technique, rows], Some(mesh), Overflow::Skip)
            };
            let divided = |ranks: Mesh| divided_as(ranks, &DIVIDED);
            let of_four = world.duplicate(&format!("{name}, four")).unwrap();
            let first = world.rank() / 2 * 2;
            let of_two = world.subgroup(&format!("{name}, from {first}"), &[first, first + 1]).unwrap();
            let with = match divided((&of_two).into()) {
                Err(error @ Error::Conflict { .. }) => {
                    println!("{name}: {error}");
                    continue;
                }
                with => with.unwrap_or_else(|error| panic!("{name}: {error}")),
            };
            let four = divided((&of_four).into()).unwrap();
            check(&name, "four ranks", Promise::Bits, (&four, &with), Rounding::Fp32);
            let replicas = of_four.duplicate(&format!("{name}, replicas")).unwrap();
            let replicas = divided_as(Mesh::new(&replicas, 2).unwrap(), &IN_REPLICAS);
            check(&name, "two replicas", Promise::Bits, (&replicas.unwrap(), &with), Rounding::Fp32);
            let options = GroupConfig { nccl_stand_in: true, ..GroupConfig::default() };
            let devices = of_two.reconnect(&format!("{name}, devices, from {first}"), options).unwrap();
            let over_devices = divided(Mesh::over_devices(&of_two, &devices, 1).unwrap()).unwrap();
            check(&name, "devices", Promise::Bits, (&over_devices, &with), Rounding::Fp32);
            // Dropout of LoRA and noise of embeddings draw other numbers for each part.
            if technique.group == "noise" {
                continue;
            }
            let alone = run_over(family, &[stage, technique], Some((&Group::alone()).into()), Overflow::Skip);
            let rounding = if technique.group == "precision" { Rounding::Low } else { Rounding::Fp32 };
            check(&name, "whole rows", Promise::Within(2e-5), (&with, &alone.unwrap()), rounding);
        }
    });
}

#[track_caller]
fn check(name: &str, other: &str, promise: Promise, (a, b): (&Outcome, &Outcome), rounding: Rounding) {
    let different = broken(promise, a, b, rounding);
    assert!(different.is_none(), "{name}, {other}: {different:?}");
}

#[test]
fn every_technique_goes_with_divided_rows_or_is_refused_by_name() {
    let cases = (0..CROSSED.len()).map(|case| {
        let printed = Ranks::new("sequence_over_ranks::a_rank_of_each_technique", 4).run(&case);
        assert!(printed.iter().all(|lines| *lines == printed[0]));
        printed[0].clone()
    });
    // The other refusals are those of whole rows, whose reasons `techniques_over_ranks` has.
    let refused = cases.map(|lines| lines.join("\n")).collect::<Vec<_>>();
    assert_eq!(
        refused[0].replace("Llama", "Gpt2"),
        refused[1],
        "what is refused depends on the techniques alone"
    );
    expect![[r#"
        stage 2, Llama, activation plan: `activations.plan = "plan"` and `training.sequence_parallel_size = 2` cannot be combined: each rank would choose its own plan by its own measurements, and recomputed attention needs all of them; use `activations.plan = "keep"`, "every-k" or "recompute"
        stage 2, Llama, offload, overlap: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, Llama, offload, function: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, Llama, offload, checkpointing: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, Llama, offload, a resident layer: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, Llama, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        stage 2, Llama, layers and optimizer in files: `offload` and 2 ranks cannot be combined: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; use `optimizer.zero_stage = 3`, or leave `offload` out
        stage 2, Llama, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        stage 3, Llama, recompute elementwise: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, Llama, recompute MLPs: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, Llama, recompute attention: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, Llama, offload inputs: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, Llama, activation plan: `activations` and 2 ranks cannot be combined: a divided layer keeps all its activations, or its input alone; use `activations.plan = "keep"`, "every-k" or "recompute" with `activations.recompute = "layer"`, or `optimizer.zero_stage = 2`
        stage 3, Llama, offload, function: `offload.method` and 2 ranks cannot be combined: layers are gathered into the ring's slots; use `offload.method = "overlap"`
        stage 3, Llama, offload, checkpointing: `offload.method` and 2 ranks cannot be combined: layers are gathered into the ring's slots; use `offload.method = "overlap"`
        stage 3, Llama, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        stage 3, Llama, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`"#]].assert_eq(&[refused[0].as_str(), refused[2].as_str()].join("\n"));
}
