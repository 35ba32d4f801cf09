//! Lion, Muon, Adafactor and 8-bit AdamW beside every technique, in 16 bits, resumed, and over ranks: each technique keeps its promise, or is
//! refused by name before anything is made.

use expect_test::expect;
use frugal::config::{Dtype, MasterWeights, OffloadConfig, OptimizerPlace, OptimizerRule, ZeroStage};
use frugal::models::module;
use frugal::models::{DecoderConfig, Llama};
use frugal::runtime::random;
use frugal::training::checkpoint::Checkpoints;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::{Config, Error, Recipe};
use tch::{Device, Kind, Tensor};

use crate::pairs::{ROWS, Rounding, base, broken, rows, run};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};

const fn rule(name: &'static str, set: fn(&mut Config, Family)) -> Technique {
    Technique { name, group: "rule", promise: Promise::Nothing, set }
}

const RULES: [Technique; 4] = [
    rule("lion", |config, _| config.optimizer.rule = OptimizerRule::Lion),
    rule("muon", |config, _| config.optimizer.rule = OptimizerRule::Muon),
    rule("adafactor", |config, _| config.optimizer.rule = OptimizerRule::Adafactor),
    rule("adamw8bit", |config, _| config.optimizer.rule = OptimizerRule::AdamW8bit),
];

#[test]
fn every_technique_keeps_its_promise_beside_every_rule_or_is_refused_by_name() {
    let mut refused = Vec::new();
    let mut failures = Vec::new();
    for rule in &RULES {
        let alone = run(Family::Wide, &[rule]).unwrap_or_else(|error| panic!("{}: {error}", rule.name));
        for technique in &TECHNIQUES {
            match run(Family::Wide, &[rule, technique]) {
                Err(error @ Error::Conflict { .. }) => {
                    refused.push(format!("{}, {}: {error}", rule.name, technique.name));
                }
                Err(error) => failures.push(format!("{}, {}: {error}", rule.name, technique.name)),
                Ok(with) => {
                    let low = technique.group == "precision";
                    let rounding = if low { Rounding::Low } else { Rounding::Fp32 };
                    if let Some(found) = broken(technique.promise, &with, &alone, rounding) {
                        failures.push(format!("{}, {}: {found}", rule.name, technique.name));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    expect![[r#"
        lion, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        lion, layers and optimizer in files: `optimizer.place = "host"` and `optimizer.rule = "lion"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        lion, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        muon, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        muon, layers and optimizer in files: `optimizer.place = "host"` and `optimizer.rule = "muon"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        muon, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        adafactor, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        adafactor, layers and optimizer in files: `optimizer.place = "host"` and `optimizer.rule = "adafactor"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        adafactor, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`
        adamw8bit, offload to files: `offload.tier = "file"` with full fine-tuning and `optimizer.place = "device"` cannot be combined: the optimizer's state of trained layers in files is in files, too; use `optimizer.place = "host"`, train an adapter, or use `offload.tier = "host"`
        adamw8bit, layers and optimizer in files: `optimizer.place = "host"` and `optimizer.rule = "adamw8bit"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        adamw8bit, optimizer on the host: `optimizer.place = "host"` and weights on the device cannot be combined: the update on the host is that of offloaded layers; add `offload`, or use `optimizer.place = "device"`"#]].assert_eq(&refused.join("\n"));
}

/// A training of all weights in a dtype, as `set` changes it.
fn config(rule: &Technique, set: impl Fn(&mut Config)) -> Config {
    let mut config = base();
    (rule.set)(&mut config, Family::Wide);
    (config.optimizer.lr, config.optimizer.weight_decay) = (1e-3, 0.1);
    set(&mut config);
    config
}

fn data() -> MaskedBatches {
    let layout = Layout { batch: ROWS, shuffle: Some(1), ..Layout::default() };
    MaskedBatches::new(rows(false), layout, Device::Cpu).unwrap()
}

/// Trains for four steps; with a folder, from the checkpoints there, written every second step. Returns weights and state.
fn trained(config: &Config, kind: Kind, folder: Option<&std::path::Path>) -> Vec<(String, Tensor)> {
    random::seed(3).unwrap();
    let model = Llama::new(&DecoderConfig::llama(61, 64, 72, 3, 2), (kind, Device::Cpu)).unwrap();
    let prepared = Recipe::new(config).unwrap().apply(Box::new(model)).unwrap();
    let (mut trainer, _handles) = prepared.trainer(4).unwrap();
    let mut data = data();
    if let Some(folder) = folder {
        trainer.options.checkpoint_every = Some(2);
        trainer.checkpoints = Some(Checkpoints::open(folder, 9).unwrap());
        trainer.resume(&mut data).unwrap();
    }
    trainer.run(&mut data, None).unwrap();
    let weights = module::tensors(trainer.model.as_ref());
    let weights = weights.into_iter().map(|named| (named.name, named.tensor.detach().copy()));
    let state = trainer.optimizer.state().unwrap();
    weights.chain(state.into_iter().map(|(name, tensor)| (name, tensor.copy()))).collect()
}

/// Ways of weights to take small updates.
const WEIGHTS: [(Kind, MasterWeights); 3] = [
    (Kind::Float, MasterWeights::Auto),
    (Kind::BFloat16, MasterWeights::Always),
    (Kind::BFloat16, MasterWeights::Stochastic),
];

/// The checkpoint of step 2 is what a run that was killed after it left.
#[test]
fn a_training_of_every_rule_resumes_to_the_same_bits() {
    for rule in &RULES {
        for (kind, master_weights) in WEIGHTS {
            let config = config(rule, |config| config.optimizer.master_weights = master_weights);
            let folder = tempfile::tempdir().unwrap();
            let whole = trained(&config, kind, Some(folder.path()));
            std::fs::remove_dir_all(folder.path().join("step-000000000004")).unwrap();
            let resumed = trained(&config, kind, Some(folder.path()));
            assert!(whole == resumed, "{}, {kind:?}, {master_weights:?}", rule.name);
            let expected = if rule.name == "adamw8bit" { Kind::Uint8 } else { Kind::Float };
            assert!(whole.iter().any(|(_, tensor)| tensor.kind() == expected), "{}", rule.name);
        }
    }
}

/// With the optimizer where the layers are between their passes.
#[test]
fn offloaded_layers_have_the_bits_of_resident_ones_in_16_bits() {
    for rule in &RULES {
        for (kind, master_weights) in WEIGHTS {
            let set = |config: &mut Config| config.optimizer.master_weights = master_weights;
            let resident = trained(&config(rule, set), kind, None);
            let offloaded = config(rule, |config| {
                set(config);
                config.offload = Some(OffloadConfig { ring: 2, ..OffloadConfig::default() });
            });
            assert!(
                trained(&offloaded, kind, None) == resident,
                "{}, {kind:?}, {master_weights:?}",
                rule.name
            );
        }
    }
}

/// Words that a user meets.
#[test]
fn what_a_rule_does_not_go_with_is_refused_by_name() {
    let mut lines = Vec::new();
    for rule in &RULES {
        let host = config(rule, |config| {
            config.offload = Some(OffloadConfig::default());
            config.optimizer.place = OptimizerPlace::Host;
        });
        let wide = config(rule, |config| config.model.dtype = Some(Dtype::Float64));
        lines.extend([host, wide].iter().filter_map(|config| Some(Recipe::new(config).err()?.to_string())));
        for stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
            let ranks = config(rule, |config| {
                config.training.accumulation = 2;
                config.optimizer.zero_stage = stage;
            });
            lines.extend(Recipe::new(&ranks).unwrap().check_ranks(2).err().map(|error| error.to_string()));
        }
    }
    expect![[r#"
        `optimizer.place = "host"` and `optimizer.rule = "lion"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        `optimizer.place = "host"` and `optimizer.rule = "muon"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        `optimizer.rule = "muon"` and 2 ranks cannot be combined: the update of a weight depends on all others of its tensor, which ranks divide; use `optimizer.rule = "adamw"`, "adamw8bit" or "lion", or train in one process
        `optimizer.rule = "muon"` and 2 ranks cannot be combined: the update of a weight depends on all others of its tensor, which ranks divide; use `optimizer.rule = "adamw"`, "adamw8bit" or "lion", or train in one process
        `optimizer.rule = "muon"` and 2 ranks cannot be combined: the update of a weight depends on all others of its tensor, which ranks divide; use `optimizer.rule = "adamw"`, "adamw8bit" or "lion", or train in one process
        `optimizer.place = "host"` and `optimizer.rule = "adafactor"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        `optimizer.rule = "adafactor"` and 2 ranks cannot be combined: the update of a weight depends on all others of its tensor, which ranks divide; use `optimizer.rule = "adamw"`, "adamw8bit" or "lion", or train in one process
        `optimizer.rule = "adafactor"` and 2 ranks cannot be combined: the update of a weight depends on all others of its tensor, which ranks divide; use `optimizer.rule = "adamw"`, "adamw8bit" or "lion", or train in one process
        `optimizer.rule = "adafactor"` and 2 ranks cannot be combined: the update of a weight depends on all others of its tensor, which ranks divide; use `optimizer.rule = "adamw"`, "adamw8bit" or "lion", or train in one process
        `optimizer.place = "host"` and `optimizer.rule = "adamw8bit"` cannot be combined: the host computes AdamW only; use `optimizer.rule = "adamw"`, or `optimizer.place = "device"`
        `optimizer.rule = "adamw8bit"` and `model.dtype = "float64"` cannot be combined: moments of 8 bits are computed in float32; use `optimizer.rule = "adamw"`, or `model.dtype = "float32"`
        `optimizer.rule = "adamw8bit"` with `optimizer.zero_stage = 3` and 2 ranks cannot be combined: layers are divided within the blocks of 256 numbers that share a scale; use `optimizer.zero_stage = 2`, or `optimizer.rule = "lion"` or "adamw""#]].assert_eq(&lines.join("\n"));
}
