//! A step that trains adapters has the FLOPs that `accounting` predicts, to the last one.

use accounting::decoder_flops::{Recomputation, Workload};
use accounting::lora::{self as predicted, LowRank};
use accounting::model::{Decoder, Family, Sizes};
use accounting::recompute::Recompute;
use fused_ce::LinearCrossEntropy;
use lora::{LoraConfig, Names};
use models::module::{Context, IGNORE_INDEX, Input, LanguageModel};
use models::{DecoderConfig, Llama};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind};
use training::activations::{Activations, LayerPlan};

const SIZES: Sizes = Sizes {
    family: Family::Llama,
    vocabulary: 90,
    context: 24,
    embedding: 32,
    hidden: 32,
    layers: 3,
    heads: 4,
    kv_heads: 2,
    head_dim: 8,
    feed_forward: 56,
    tied: false,
    attention_bias: false,
    mlp_bias: false,
    experts: None,
    linear: None,
    windows: None,
};

#[test]
fn a_step_has_exactly_the_predicted_flops() {
    let (batch, sequence, labelled) = (2i64, 24i64, 10i64);
    for names in ["q,k,v,o", "q,v", "k", "o", "gate,up", "down", "q,k,v,o,gate,up,down"] {
        for full in [false, true] {
            let config = DecoderConfig {
                num_key_value_heads: 2,
                max_position_embeddings: sequence,
                ..DecoderConfig::llama(90, 32, 56, 3, 4)
            };
            let mut model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
            let targets = names.split(',').map(|name| format!("{name}_proj")).collect();
            let adapted =
                LoraConfig { r: 4, target_modules: Some(Names::List(targets)), ..LoraConfig::default() };
            let _adapters = LoraConfig { seed: 1, ..adapted.clone() }.install(&mut model).unwrap();
            LinearCrossEntropy::default().install(&mut model).unwrap();
            let plan = if full { LayerPlan::RecomputeAll } else { LayerPlan::KeepAll };
            let _plan = Activations::install(&mut model, &[plan; 3]).unwrap();

            let options = (Kind::Double, Device::Cpu);
            let drawn = Generator::new(2).unwrap().uniform(&[batch, sequence], (0.0, 90.0), options).unwrap();
            let tokens = drawn.to_kind(Kind::Int64);
            let labels = tokens.copy();
            let _ = labels.narrow(1, 0, sequence - labelled / batch).fill_(IGNORE_INDEX);
            let context = Context { training: true, ..Context::default() };

            let counter = Counter::on_this_thread().unwrap();
            let hidden = model.hidden(&Input { context, ..Input::new(&tokens) }).unwrap();
            let loss = model.head().loss(&hidden, &labels, &context).unwrap().sum;
            runtime::autograd::backward(&[&loss]).unwrap();
            let counts = counter.finish().unwrap();

            let checkpoint = if full { Recompute::Full } else { Recompute::None };
            let expected = predicted::flops::step(
                &Decoder::new(SIZES).unwrap(),
                &LowRank { rank: 4, targets: names.parse().unwrap(), ..LowRank::default() },
                Workload { batch: batch as u64, sequence: sequence as u64 },
                Some(labelled as u64),
                &Recomputation { checkpoint, ..Recomputation::default() },
            )
            .unwrap();
            let hardware = expected.hardware().unwrap();
            let flops = counts.total.flops;
            assert_eq!(
                (u128::from(flops.dense), u128::from(flops.causal)),
                (hardware.dense, hardware.causal),
                "{names}, recomputed {full}: {expected:#?}\n{counts}"
            );
            assert_eq!(counts.unknown, Vec::<String>::new());
        }
    }
}
