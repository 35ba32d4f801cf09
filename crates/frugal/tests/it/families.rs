//! Every technique with every family of decoders: the loss and gradients of the model without it, or an error that names why not.
//! The models are those of the tests of `models`, packed rows longer than their windows.

use std::collections::BTreeMap;
use std::path::PathBuf;

use frugal::models;
use fused_ce::LinearCrossEntropy;
use lora::{LoraConfig, Names};
use models::hugging_face::Folder;
use models::module::{Context, Input, LanguageModel, parameters};
use models::{Documents, Llama};
use offload::{Method, OffloadConfig};
use runtime::autograd::{backward, set_grad};
use swiglu_ckpt::CheckpointLevel;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};

const FAMILIES: [&str; 19] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_some",
    "qwen3_5",
    "qwen3_5_equal",
    "qwen3_5_moe",
    "gpt_oss",
    "mistral",
    "smollm3",
    "granite",
    "olmo2",
    "gemma3",
    "gemma2",
    "gemma4",
    "gemma4_k_eq_v",
    "phi3",
    "phi3_long",
];

fn load(name: &str) -> Llama {
    let cases = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/families");
    Folder::open(&PathBuf::from(cases).join(name)).unwrap().load(Some(Kind::Float), Device::Cpu).unwrap()
}

/// The loss and the gradient of each trained parameter.
type Step = (f64, BTreeMap<String, Tensor>);

/// Two packed rows, of documents shorter and longer than the windows of 5.
fn step(model: &dyn LanguageModel) -> Step {
    let lengths = [[9usize, 3, 8], [4, 15, 1]];
    let tokens = (Tensor::arange(40, (Kind::Int64, Device::Cpu)) * 7).remainder(37).view([2, 20]);
    let positions: Vec<i64> = lengths.iter().flatten().flat_map(|&length| 0..length as i64).collect();
    let positions = Tensor::from_slice(&positions).view([2, 20]);
    let documents = Documents::new(&lengths, Device::Cpu).unwrap();
    let context = Context { documents: Some(&documents), training: true, ..Context::default() };
    let input = Input { tokens: &tokens, positions: Some(&positions), context };
    let labels = (&tokens + 5).remainder(40);
    let loss = model.loss(&input, &labels).unwrap().sum;
    backward(&[&loss]).unwrap();
    let mut gradients = BTreeMap::new();
    for (name, tensor) in parameters(model) {
        if tensor.grad().defined() {
            gradients.insert(name, tensor.grad().copy());
            set_grad(tensor, None).unwrap();
        }
    }
    (loss.double_value(&[]), gradients)
}

/// Compares two steps; without a tolerance, bit for bit.
fn check(what: &str, found: &Step, expected: &Step, tolerance: Option<f64>) {
    let Some(tolerance) = tolerance else {
        assert_eq!(found.0.to_bits(), expected.0.to_bits(), "{what}: loss");
        assert_eq!(found.1, expected.1, "{what}: gradients");
        return;
    };
    assert!((found.0 / expected.0 - 1.0).abs() <= tolerance, "{what}: loss {} {}", found.0, expected.0);
    let names = |step: &Step| step.1.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    let norm = |x: &Tensor| x.norm().double_value(&[]);
    let least = 1e-3 * expected.1.values().map(norm).fold(0.0, f64::max);
    for (name, gradient) in &found.1 {
        let expected = &expected.1[name];
        let distance = norm(&(gradient - expected)) / norm(expected).max(least);
        assert!(distance <= tolerance, "{what}: {name} {distance}");
    }
}

#[test]
fn activation_plans_and_offloading_give_the_same_bits() {
    for name in FAMILIES {
        let expected = step(&load(name));
        for plan in LayerPlan::ALL {
            let mut model = load(name);
            let layers = model.decoder_config().num_hidden_layers as usize;
            Activations::install(&mut model, &vec![plan; layers]).unwrap();
            check(&format!("{name}, {plan:?}"), &step(&model), &expected, None);
        }
        // The first method is for inference only.
        for method in Method::ALL.into_iter().filter(|&method| method != Method::OneLayer) {
            let mut model = load(name);
            OffloadConfig { method, ..OffloadConfig::default() }.install(&mut model).unwrap();
            check(&format!("{name}, {method:?}"), &step(&model), &expected, None);
        }
    }
}

#[test]
fn the_fused_loss_has_the_scale_and_the_cap_of_the_logits() {
    for name in FAMILIES {
        let (plain, mut model) = (load(name), load(name));
        LinearCrossEntropy::default().install(&mut model).unwrap();
        check(name, &step(&model), &step(&plain), Some(1e-5));
        let hidden = Tensor::randn([1, 3, plain.decoder_config().hidden_size], (Kind::Float, Device::Cpu));
        let logits = |model: &Llama| model.head().logits(&hidden, &Context::default()).unwrap();
        let distance = (logits(&model) - logits(&plain)).abs().max().double_value(&[]);
        assert!(distance <= 1e-6, "{name}: {distance}");
    }
    let cap = LinearCrossEntropy { softcap: Some(50.0), ..LinearCrossEntropy::default() };
    let error = cap.install(&mut load("gemma2")).unwrap_err().to_string();
    assert_eq!(
        error,
        "linear cross-entropy: softcap is 50, and the model limits its logits to 5; leave the option out"
    );
}

#[test]
fn recomputed_mlps_equal_the_plain_ones_or_are_refused() {
    for name in FAMILIES {
        let (plain, mut model) = (load(name), load(name));
        let biased = plain.decoder_config().mlp_bias;
        match CheckpointLevel::InputOnly.install(&mut model) {
            Ok(_) => check(name, &step(&model), &step(&plain), Some(1e-5)),
            Err(error) if name.contains("moe") || name == "gpt_oss" => {
                assert!(error.to_string().contains("the model has one of its own"), "{error}");
            }
            Err(error) if name.starts_with("gemma") => {
                assert!(error.to_string().contains("has a GELU as its gate"), "{error}");
            }
            Err(error) => assert!(biased && error.to_string().contains("has biases"), "{name}: {error}"),
        }
    }
}

#[test]
fn adapters_train_under_every_plan() {
    for name in FAMILIES {
        let all = LoraConfig {
            target_modules: Some(Names::Pattern("all-linear".to_owned())),
            r: 2,
            ..LoraConfig::default()
        };
        let adapted = || {
            let mut model = load(name);
            LoraConfig { seed: 3, ..all.clone() }.install(&mut model).unwrap();
            model
        };
        let expected = step(&adapted());
        let mut model = adapted();
        let layers = model.decoder_config().num_hidden_layers as usize;
        Activations::install(&mut model, &vec![LayerPlan::RecomputeAll; layers]).unwrap();
        check(name, &step(&model), &expected, None);
    }
}
