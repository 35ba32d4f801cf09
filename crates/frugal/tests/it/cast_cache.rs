//! Casts of offloaded and sharded weights: none is held after its use.

use std::sync::Arc;

use amp::Autocast;
use models::module::{Input, LanguageModel, parameters, trainable};
use models::{DecoderConfig, Llama};
use offload::{Method, OffloadConfig};
use runtime::autograd::backward;
use sharding::{FrozenWeights, Shards};
use tch::{Device, Kind, Tensor};

const LAYERS: usize = 4;

fn model() -> Llama {
    runtime::random::seed(1).unwrap();
    Llama::new(&DecoderConfig::qwen2(60, 32, 48, LAYERS as i64, 4), (Kind::Float, Device::Cpu)).unwrap()
}

/// Bytes of all weights in bf16.
fn bound(model: &Llama) -> u64 {
    parameters(model).iter().map(|(_, tensor)| 2 * tensor.numel() as u64).sum()
}

fn tokens(number: i64) -> Tensor {
    (Tensor::arange(18, (Kind::Int64, Device::Cpu)) * (number + 3)).remainder(60).reshape([2, 9])
}

/// Every way to run layers whose weights are elsewhere.
fn ways() -> Vec<(String, OffloadConfig)> {
    let methods = [Method::Checkpointing, Method::Function, Method::Overlap];
    let mut ways: Vec<(String, OffloadConfig)> = methods
        .map(|method| (method.name().to_owned(), OffloadConfig { method, ..OffloadConfig::default() }))
        .into_iter()
        .collect();
    let keep = (0..LAYERS).collect();
    ways.push(("kept activations".to_owned(), OffloadConfig { keep, ..OffloadConfig::default() }));
    ways.push((
        "a resident layer".to_owned(),
        OffloadConfig { resident: vec![1], ..OffloadConfig::default() },
    ));
    let shards = Shards::new(&runtime::collectives::Group::alone(), FrozenWeights::Sharded).unwrap();
    ways.push((
        "stage 3".to_owned(),
        OffloadConfig { source: Some(Arc::new(shards)), ..OffloadConfig::default() },
    ));
    ways
}

#[test]
fn casts_are_bounded_by_the_model_over_micro_batches() {
    for (name, options) in ways() {
        let mut model = model();
        let most = bound(&model);
        let trained = options.source.is_none();
        if !trained {
            // Without an optimizer nobody takes the gradients of shards.
            models::module::freeze(&model, r"layers\..*", true).unwrap();
        }
        let _offload = options.install(&mut model).unwrap();
        let autocast = Autocast::new(Kind::BFloat16).unwrap();
        let _scope = autocast.enter();
        for number in 0..4 {
            let loss = model.loss(&Input::new(&tokens(number)), &tokens(number)).unwrap().sum;
            backward(&[&loss]).unwrap();
            let held = autocast.statistics().bytes;
            assert!(held <= most, "{name}: {held} bytes after {} micro-batches, of {most}", number + 1);
        }
        assert!(!trained || trainable(&model).iter().all(|(_, tensor)| tensor.grad().defined()), "{name}");
    }
}

#[test]
fn casts_are_bounded_by_the_model_over_forwards() {
    let one_layer =
        ("one layer".to_owned(), OffloadConfig { method: Method::OneLayer, ..OffloadConfig::default() });
    for (name, options) in ways().into_iter().chain([one_layer]) {
        let mut model = model();
        let most = bound(&model);
        let _offload = options.install(&mut model).unwrap();
        let autocast = Autocast::new(Kind::BFloat16).unwrap();
        let (_scope, _no_grad) = (autocast.enter(), tch::no_grad_guard());
        for number in 0..4 {
            let loss = model.loss(&Input::new(&tokens(number)), &tokens(number)).unwrap().sum;
            assert!(loss.double_value(&[]).is_finite());
            let held = autocast.statistics().bytes;
            assert!(held <= most, "{name}: {held} bytes after {} forwards, of {most}", number + 1);
        }
    }
}
