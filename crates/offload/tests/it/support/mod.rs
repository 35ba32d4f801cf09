//! A short training, and its results.
#![allow(dead_code, unreachable_pub, reason = "each test file takes what it needs")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use models::module::{Input, LanguageModel, Module, parameters, tensors, trainable};
use models::{DecoderConfig, Llama};
use offload::{Method, OffloadConfig};
use runtime::autograd::backward;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

pub const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Models and dropout draw from the process's generator: one test at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Five small Qwen2 layers with a tied head.
pub fn tiny() -> Box<Llama> {
    runtime::random::seed(1).unwrap();
    let config = DecoderConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        ..DecoderConfig::qwen2(60, 32, 48, 5, 4)
    };
    Box::new(Llama::new(&config, FLOAT).unwrap())
}

/// `Qwen/Qwen2.5-0.5B`, as its `config.json` has it.
pub fn assignment() -> DecoderConfig {
    DecoderConfig {
        num_key_value_heads: 2,
        tie_word_embeddings: true,
        max_position_embeddings: 4096,
        ..DecoderConfig::qwen2(151_936, 896, 4864, 24, 14)
    }
}

/// Every way to train a model of `layers` layers, with its name: each method, with inputs on the device and on the host, and layers that
/// keep their activations, all or every second.
pub fn ways(layers: usize) -> Vec<(String, OffloadConfig)> {
    let methods = [Method::Checkpointing, Method::Function, Method::Overlap]
        .map(|method| (method.name().to_owned(), OffloadConfig { method, ..OffloadConfig::default() }));
    let keeps = [1, 2].map(|every| {
        let keep: Vec<usize> = (0..layers).step_by(every).collect();
        (format!("activations of {keep:?} kept"), OffloadConfig { keep, ..OffloadConfig::default() })
    });
    let plain: Vec<(String, OffloadConfig)> = methods.into_iter().chain(keeps).collect();
    // Where every layer keeps its activations, no input is kept.
    let on_host = plain.iter().filter(|(_, options)| options.keep.len() < layers).map(|(name, options)| {
        (format!("{name}, inputs on the host"), OffloadConfig { inputs_on_host: true, ..options.clone() })
    });
    let on_host: Vec<(String, OffloadConfig)> = on_host.collect();
    plain.into_iter().chain(on_host).collect()
}

/// The results of a training.
pub struct Trained {
    pub losses: Vec<f64>,
    /// Gradients of the last step, before they were used.
    pub gradients: Vec<(String, Tensor)>,
    pub weights: Vec<(String, Tensor)>,
}

/// Batches `[2, 9]` of tokens, the same for everyone.
pub fn batch(vocabulary: i64, number: u64) -> Tensor {
    let uniform = Generator::new(number).unwrap().uniform(&[2, 9], (0.0, 1.0), FLOAT).unwrap();
    (uniform * vocabulary as f64).to_kind(Kind::Int64).clamp(0, vocabulary - 1)
}

/// Trains `model` for some steps of some micro-batches, offloaded or not.
#[allow(clippy::boxed_local, reason = "every model of these tests is boxed")]
pub fn steps<M: LanguageModel>(
    mut model: Box<M>,
    options: Option<OffloadConfig>,
    steps: u64,
    micro: u64,
) -> Trained {
    let offload = options.map(|options| options.install(&mut *model).unwrap());
    let named: Vec<(String, Tensor)> =
        trainable(&*model).into_iter().map(|(name, tensor)| (name, tensor.shallow_clone())).collect();
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(named, 1e-3)]).unwrap();
    runtime::random::seed(9).unwrap();
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for step in 0..steps {
        for part in 0..micro {
            let tokens = batch(model.vocabulary(), step * micro + part);
            let mut input = Input::new(&tokens);
            input.context.training = true;
            let loss = model.loss(&input, &tokens).unwrap().sum;
            losses.push(loss.double_value(&[]));
            backward(&[&loss]).unwrap();
            if let Some(offload) = &offload {
                offload.check_on_host().unwrap();
            }
        }
        if step + 1 == steps {
            gradients =
                trainable(&*model).into_iter().map(|(name, tensor)| (name, tensor.grad().copy())).collect();
        }
        optimizer.step().unwrap();
        optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
    }
    let weights =
        parameters(&*model).into_iter().map(|(name, tensor)| (name, tensor.detach().copy())).collect();
    Trained { losses, gradients, weights }
}

/// The same losses, gradients and weights, bit for bit.
pub fn compare(expected: &Trained, found: &Trained, case: &str) {
    assert_eq!(expected.losses, found.losses, "{case}: losses");
    assert!(expected.losses.windows(2).any(|pair| pair[0] != pair[1]), "{case}: something is learned");
    for (what, expected, found) in
        [("gradient", &expected.gradients, &found.gradients), ("weight", &expected.weights, &found.weights)]
    {
        assert!(!expected.is_empty());
        assert_eq!(expected.len(), found.len(), "{case}: {what}s");
        for ((name, expected), (other, found)) in expected.iter().zip(found) {
            assert_eq!(name, other, "{case}");
            assert!(expected.equal(found), "{case}: the {what} of {name} differs by {:e}", {
                (expected - found).abs().max().to_kind(Kind::Double).double_value(&[])
            });
        }
    }
}

/// Every tensor of a model with a copy of its bytes.
pub fn snapshot(model: &(impl Module + ?Sized)) -> Vec<(String, Tensor)> {
    let of = |tensor: &Tensor| tensor.detach().contiguous().view([-1]).view_dtype(Kind::Uint8).copy();
    tensors(model).into_iter().map(|named| (named.name, of(named.tensor))).collect()
}

/// Checks that a model's tensors are unchanged, byte for byte.
pub fn assert_intact(before: &[(String, Tensor)], model: &(impl Module + ?Sized), case: &str) {
    let after = snapshot(model);
    assert_eq!(before.len(), after.len(), "{case}");
    for ((name, before), (other, after)) in before.iter().zip(&after) {
        assert_eq!(name, other, "{case}");
        assert!(before.equal(after), "{case}: {name} has changed");
    }
}

/// One loss and its gradients, which are then removed.
pub fn gradients_of(model: &impl LanguageModel, tokens: &Tensor) -> (f64, Vec<(String, Tensor)>) {
    let loss = model.loss(&Input::new(tokens), tokens).unwrap().sum;
    backward(&[&loss]).unwrap();
    let gradients = trainable(model).into_iter().map(|(name, tensor)| {
        let gradient = tensor.grad().copy();
        runtime::autograd::set_grad(tensor, None).unwrap();
        (name, gradient)
    });
    (loss.double_value(&[]), gradients.collect())
}

/// Checks that two results are equal bit for bit.
pub fn assert_same(
    (loss, gradients): &(f64, Vec<(String, Tensor)>),
    found: &(f64, Vec<(String, Tensor)>),
    case: &str,
) {
    assert_eq!(*loss, found.0, "{case}: the loss");
    assert_eq!(gradients.len(), found.1.len(), "{case}");
    for ((name, gradient), (other, found)) in gradients.iter().zip(&found.1) {
        assert_eq!(name, other, "{case}");
        assert!(gradient.equal(found), "{case}: the gradient of {name}");
    }
}
