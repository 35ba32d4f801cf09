//! PyTorch's results for the GPT-2-like model, reproduced with this crate's optimizer, loss and metric.

use std::collections::BTreeMap;
use std::path::PathBuf;

use models::module::{Context, Input, LanguageModel, trainable};
use models::state_dict::load_state_dict;
use models::{Gpt2Like, Gpt2LikeConfig, tensors_file};
use tch::{Device, Kind, Tensor};
use training::DeviceOptimizer;
use training::loss::{LmAccuracy, LmCrossEntropyLoss};
use training::optimizer::{Adam, Group, Implementation, ZeroGrad};

#[test]
fn fixtures_gpt2_like_with_adam_loss_and_accuracy() {
    let folder = std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    );
    let folder = folder.join("gpt2_like");
    let json = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let config: Gpt2LikeConfig = serde_json::from_str(&json).unwrap();
    let options: serde_json::Value = serde_json::from_str(&json).unwrap();
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let adam = Adam {
        beta1: number(&options["betas"][0]),
        beta2: number(&options["betas"][1]),
        eps: number(&options["eps"]),
    };
    let cases = tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu).unwrap();
    let cases: BTreeMap<String, Tensor> = cases.into_iter().collect();
    let weights = cases
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("param.")?.to_owned(), tensor.shallow_clone())));
    let weights: Vec<(String, Tensor)> = weights.collect();

    for implementation in [Implementation::Fused, Implementation::ForLoop] {
        let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
        load_state_dict(&model, &weights, "the fixture").unwrap();
        let group = Group::new(trainable(&model), number(&options["lr"]));
        let mut optimizer =
            DeviceOptimizer::new(adam, vec![group]).unwrap().with_implementation(implementation);
        let (tokens, lengths) = (&cases["tokens"], &cases["lengths"]);
        let mut worst = 0f64;
        for step in 0..tokens.size()[0] {
            let (tokens, lengths) = (tokens.get(step), lengths.get(step));
            let context = Context { training: true, ..Context::default() };
            let logits = model.logits(&Input { context, ..Input::new(&tokens) }).unwrap();
            let loss = LmCrossEntropyLoss::default().with_lengths(&logits, &tokens, &lengths).unwrap();
            let accuracy = LmAccuracy::default().with_lengths(&logits, &tokens, &lengths).unwrap();
            runtime::autograd::backward(&[&loss]).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad(ZeroGrad::ToNone).unwrap();

            worst = worst.max((loss.double_value(&[]) / cases["losses"].double_value(&[step]) - 1.0).abs());
            let (ours, expected) = (accuracy.double_value(&[]), cases["accuracies"].double_value(&[step]));
            // Both are a quotient of two counts, rounded to fp32.
            assert!((ours - expected).abs() < 1e-6, "{implementation:?} step {step}: {ours}, not {expected}");
        }
        let used = worst / 1e-5 * 100.0;
        eprintln!(
            "{implementation:?}: worst relative error of a loss {worst:.1e}, {used:.0} % of the tolerance"
        );
        assert!(worst <= 1e-5, "{implementation:?}: {worst}");
    }
}
