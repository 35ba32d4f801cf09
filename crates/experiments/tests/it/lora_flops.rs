//! A step that trains adapters has the FLOPs that `accounting` predicts, to the last one.

use accounting::Decoder;
use accounting::decoder_flops::{Recomputation, Workload};
use accounting::lora::{self as predicted, ExpertTargets, LowRank, Targets, TokenRows};
use accounting::recompute::Recompute;
use decoder::{ClampedSwiglu, Family, LayerType, LinearAttention, Mixture};
use fused_ce::LinearCrossEntropy;
use lora::{LoraConfig, Names, TokenIndices};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel};
use models::{DecoderConfig, Llama};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind};
use training::activations::{Activations, LayerPlan};

const BATCH: i64 = 2;
const SEQUENCE: i64 = 24;
const LABELLED: i64 = 10;
const RANK: i64 = 4;

fn llama() -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: SEQUENCE,
        ..DecoderConfig::llama(90, 32, 56, 3, 4)
    }
}

/// A Qwen3 with three of four experts for each token.
fn mixture() -> DecoderConfig {
    let mixture = Mixture {
        experts: 4,
        per_token: 3,
        intermediate_size: 24,
        shared: None,
        clamped: None,
        normalizes: true,
        step: 1,
        dense_layers: Vec::new(),
    };
    DecoderConfig { family: Family::Qwen3Moe, mixture: Some(mixture), ..llama() }
}

/// gpt-oss: experts with biases, windows that are shorter than a row in layers 0 and 2, and sinks.
fn gpt_oss() -> DecoderConfig {
    let qwen3 = mixture();
    let clamped = Some(ClampedSwiglu::default());
    let mixture = qwen3.mixture.clone().map(|mixture| Mixture { clamped, ..mixture });
    DecoderConfig {
        family: Family::GptOss,
        intermediate_size: 24,
        attention_bias: true,
        mixture,
        sliding_window: Some(5),
        layer_types: vec![LayerType::Sliding, LayerType::Full, LayerType::Sliding],
        ..qwen3
    }
}

/// A Qwen3.5: linear attention in layers 0 and 1, gated attention in layer 2, an ordinary MLP.
fn qwen35() -> DecoderConfig {
    let linear = LinearAttention { key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 8, window: 4 };
    DecoderConfig {
        family: Family::Qwen35,
        head_dim: 16,
        partial_rotary_factor: 0.25,
        linear_attention: Some(linear),
        layer_types: vec![LayerType::Linear, LayerType::Linear, LayerType::Full],
        ..llama()
    }
}

/// The same with three of four experts for each token, and one for all.
fn qwen35_moe() -> DecoderConfig {
    let shared = Some(20);
    let mixture = mixture().mixture.map(|mixture| Mixture { shared, ..mixture });
    DecoderConfig { family: Family::Qwen35Moe, mixture, ..qwen35() }
}

/// Adapters of projections.
fn of_projections(names: &str) -> LoraConfig {
    let targets = names.split(',').map(|name| format!("{name}_proj")).collect();
    LoraConfig { r: RANK, target_modules: Some(Names::List(targets)), ..LoraConfig::default() }
}

fn low_rank(targets: Targets) -> LowRank {
    LowRank { rank: RANK as u64, targets, ..LowRank::default() }
}

/// Compares a step of a model with these adapters, with kept and with recomputed layers.
fn check(what: &str, config: &DecoderConfig, adapter: &LoraConfig, lora: &LowRank) {
    for full in [false, true] {
        let mut model = Llama::new(config, (Kind::Float, Device::Cpu)).unwrap();
        let _adapters = LoraConfig { seed: 1, ..adapter.clone() }.install(&mut model).unwrap();
        LinearCrossEntropy::default().install(&mut model).unwrap();
        let plan = if full { LayerPlan::RecomputeAll } else { LayerPlan::KeepAll };
        let layers = config.num_hidden_layers as usize;
        let _plan = Activations::install(&mut model, &vec![plan; layers]).unwrap();

        let options = (Kind::Double, Device::Cpu);
        let drawn = Generator::new(2).unwrap().uniform(&[BATCH, SEQUENCE], (0.0, 90.0), options).unwrap();
        let tokens = drawn.to_kind(Kind::Int64);
        let labels = tokens.copy();
        let _ = labels.narrow(1, 0, SEQUENCE - LABELLED / BATCH).fill_(IGNORE_INDEX);
        let context = Context { training: true, ..Context::default() };

        let counter = Counter::on_this_thread().unwrap();
        let hidden = model.hidden(&Input { context, ..Input::new(&tokens) }).unwrap();
        let loss = model.head().loss(&hidden, &labels, &context).unwrap().sum;
        runtime::autograd::backward(&[&loss]).unwrap();
        let counts = counter.finish().unwrap();

        let checkpoint = if full { Recompute::Full } else { Recompute::None };
        let expected = predicted::flops::step(
            &Decoder::from_config(config).unwrap(),
            lora,
            Workload { batch: BATCH as u64, sequence: SEQUENCE as u64 },
            Some(LABELLED as u64),
            &Recomputation { checkpoint, ..Recomputation::default() },
        )
        .unwrap();
        let hardware = expected.hardware().unwrap();
        let flops = counts.total.flops;
        assert_eq!(
            (u128::from(flops.dense), u128::from(flops.causal)),
            (hardware.dense, hardware.causal),
            "{what}, recomputed {full}: {expected:#?}\n{counts}"
        );
        assert_eq!(counts.unknown, Vec::<String>::new());
    }
}

#[test]
fn a_step_has_exactly_the_predicted_flops() {
    for names in ["q,k,v,o", "q,v", "k", "o", "gate,up", "down", "q,k,v,o,gate,up,down"] {
        check(names, &llama(), &of_projections(names), &low_rank(names.parse().unwrap()));
    }
}

/// Rows of a tied head are the embedding's; of others each part may have some.
#[test]
fn rows_of_tokens_add_the_products_of_the_head() {
    let tokens = vec![70i64, 3, 88];
    let count = tokens.len() as u64;
    let by_module = |names: &[&str]| {
        TokenIndices::ByModule(names.iter().map(|name| ((*name).to_owned(), tokens.clone())).collect())
    };
    let both = TokenRows { trained: 2 * count, in_embedding: count, in_head: count };
    let cases = [
        (true, TokenIndices::Embedding(tokens.clone()), TokenRows { trained: count, ..both }),
        (false, by_module(&["embed_tokens", "lm_head"]), both),
        (false, by_module(&["embed_tokens"]), TokenRows { trained: count, in_head: 0, ..both }),
        (false, by_module(&["lm_head"]), TokenRows { trained: count, in_embedding: 0, ..both }),
    ];
    for (tied, indices, token_rows) in cases {
        for names in ["q,v", "down"] {
            let config = DecoderConfig { tie_word_embeddings: tied, ..llama() };
            let adapter =
                LoraConfig { trainable_token_indices: Some(indices.clone()), ..of_projections(names) };
            let lora = LowRank { token_rows, ..low_rank(names.parse().unwrap()) };
            check(&format!("{names}, {token_rows:?}"), &config, &adapter, &lora);
        }
    }
}

#[test]
fn adapters_of_a_mixture_have_exactly_the_predicted_flops() {
    for (family, config) in
        [("Qwen3-MoE", mixture()), ("gpt-oss", gpt_oss()), ("Qwen3.5's mixture", qwen35_moe())]
    {
        for names in ["q,k,v,o", "o"] {
            let what = format!("{family}, {names}");
            check(&what, &config, &of_projections(names), &low_rank(names.parse().unwrap()));
        }
        for (names, parameters) in [
            ("", &["gate_up_proj", "down_proj"][..]),
            ("", &["gate_up_proj"]),
            ("", &["down_proj"]),
            ("q,v", &["gate_up_proj", "down_proj"]),
        ] {
            let projections = match names {
                "" => LoraConfig { target_modules: Some(Names::List(Vec::new())), ..of_projections("q") },
                names => of_projections(names),
            };
            let adapter = LoraConfig {
                target_parameters: Some(
                    parameters.iter().map(|name| format!("mlp.experts.{name}")).collect(),
                ),
                ..projections
            };
            let experts: ExpertTargets = parameters.join(",").parse().unwrap();
            let targets = if names.is_empty() { Targets::NONE } else { names.parse().unwrap() };
            let lora = LowRank { experts, ..low_rank(targets) };
            check(&format!("{family}, {names} and {parameters:?}"), &config, &adapter, &lora);
            let decoder = Decoder::from_config(&config).unwrap();
            assert_eq!(lora.parameters(&decoder).unwrap(), adapter.trainable_parameters(&config).unwrap());
        }
    }
}

/// Layers before the first one that learns have no backward; adapters of linear attention are on its layers alone.
#[test]
fn adapters_of_linear_attention_have_exactly_the_predicted_flops() {
    for (family, config) in [("Qwen3.5", qwen35()), ("its mixture", qwen35_moe())] {
        for names in ["q,k,v,o", "in_proj_qkv,in_proj_z,out", "out", "q,gate,down", "in_proj_a,in_proj_b,up"]
        {
            let targets = names.split(',').map(|name| match name.starts_with("in_") {
                true => name.to_owned(),
                false => format!("{name}_proj"),
            });
            let adapter =
                LoraConfig { target_modules: Some(Names::List(targets.collect())), ..of_projections("q") };
            let lora = low_rank(names.parse().unwrap());
            check(&format!("{family}, {names}"), &config, &adapter, &lora);
            let decoder = Decoder::from_config(&config).unwrap();
            assert_eq!(lora.parameters(&decoder).unwrap(), adapter.trainable_parameters(&config).unwrap());
        }
    }
}
