//! Adapted layers inside segments that run again, under mixed precision, and over several backward passes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use lora::{LoraLinear, LoraLinearConfig};
use models::module::{Context, Mlp, Module, ModuleMapper, Projection, map_modules, parameters};
use models::{Init, Linear, Swiglu};
use runtime::autograd::{Checkpoint, backward, set_grad};
use runtime::precision::{self, Policy};
use runtime::random::{Generator, RandomState, StepSeeds, step_seed};
use tch::{Device, Kind, Tensor, kind};

/// Dropout draws its seed from the process's shared generator, so tests that replay it run alone.
static GENERATOR: Mutex<()> = Mutex::new(());

const TRAINING: Context<'_> = Context {
    documents: None,
    positions: None,
    extension: None,
    training: true,
    accuracy: false,
    labelled_tokens: None,
    label_weights: None,
    embedding_noise: None,
    balance: None,
    sequence: None,
};

fn layer(dora: bool, options: (Kind, Device)) -> LoraLinear {
    let mut generator = Generator::new(1).unwrap();
    let mut normal = |shape: &[i64]| generator.normal(shape, options).unwrap();
    let linear = Linear { weight: normal(&[24, 16]), bias: Some(normal(&[24])) };
    let options = LoraLinearConfig { r: 4, alpha: 6.0, dropout: 0.5, dora, ..LoraLinearConfig::default() };
    let layer = LoraLinear::new(linear, &options).unwrap();
    let _no_grad = tch::no_grad_guard();
    for (name, tensor) in parameters(&layer) {
        if name.starts_with("lora_B") {
            tensor.shallow_clone().copy_(&generator.normal(&tensor.size(), kind::FLOAT_CPU).unwrap());
        }
    }
    layer
}

fn learned(layer: &impl Module) -> Vec<Tensor> {
    let all = parameters(layer).into_iter().filter(|(name, _)| name.starts_with("lora_"));
    all.map(|(_, tensor)| tensor.shallow_clone()).collect()
}

fn taken(leaves: &[Tensor]) -> Vec<Tensor> {
    let gradients = leaves.iter().map(|leaf| {
        let grad = leaf.grad().copy();
        set_grad(leaf, None).unwrap();
        grad
    });
    gradients.collect()
}

#[test]
fn a_recomputed_segment_has_the_same_dropout_and_gradients() {
    let _alone = GENERATOR.lock().unwrap();
    for dora in [false, true] {
        let layer = Arc::new(Mutex::new(layer(dora, kind::FLOAT_CPU)));
        let x =
            Generator::new(2).unwrap().normal(&[3, 7, 16], kind::FLOAT_CPU).unwrap().set_requires_grad(true);
        let mut leaves = learned(&*layer.lock().unwrap());
        leaves.push(x.shallow_clone());
        let state = RandomState::capture(Device::Cpu).unwrap();
        let run = |options: Checkpoint| {
            let _replay = state.replay().unwrap();
            let inner = layer.clone();
            let segment = move |[x]: [&Tensor; 1]| {
                let inner = inner.lock().unwrap();
                let y = inner.forward(x, &TRAINING)?;
                Ok([y.f_tanh()?])
            };
            let [y] = options.run(segment, [&x]).unwrap();
            // Other draws in between have no effect.
            let _ = Tensor::rand([3], kind::FLOAT_CPU);
            backward(&[&y.square().sum(Kind::Float)]).unwrap();
            (y.detach(), taken(&leaves))
        };
        let expected = run(Checkpoint { recompute: false, ..Checkpoint::default() });
        assert_eq!(run(Checkpoint::default()), expected, "dora {dora}");
        assert_eq!(
            run(Checkpoint { retain_products: true, ..Checkpoint::default() }),
            expected,
            "dora {dora}"
        );
        let elsewhere = Checkpoint { preserve_random_state: false, ..Checkpoint::default() };
        assert_ne!(run(elsewhere).1, expected.1, "without the state the mask is another: dropout is on");
    }
}

#[test]
fn gradients_accumulate_over_passes_and_a_retained_graph() {
    let _alone = GENERATOR.lock().unwrap();
    let layer = layer(false, kind::FLOAT_CPU);
    let leaves = learned(&layer);
    let mut generator = Generator::new(3).unwrap();
    let mut loss = || {
        let x = generator.normal(&[5, 16], kind::FLOAT_CPU).unwrap();
        layer.forward(&x, &TRAINING).unwrap().square().sum(Kind::Float)
    };
    let (first, second) = (loss(), loss());
    let keep = runtime::autograd::Keep { graph: true, derivative: false };
    let mut each = Vec::new();
    for loss in [&first, &second] {
        runtime::autograd::backward_with(&[loss], &[None], keep).unwrap();
        each.push(taken(&leaves));
    }
    backward(&[&first]).unwrap();
    backward(&[&second]).unwrap();
    for (leaf, (a, b)) in leaves.iter().zip(each[0].iter().zip(&each[1])) {
        assert!(leaf.grad().allclose(&(a + b), 1e-6, 1e-6, false));
    }
}

#[test]
fn dropout_applies_in_training_only() {
    let _alone = GENERATOR.lock().unwrap();
    let layer = layer(false, kind::FLOAT_CPU);
    let x = Tensor::ones([40, 16], kind::FLOAT_CPU);
    let run = |training| layer.forward(&x, &Context { training, ..Context::default() }).unwrap().detach();
    assert_ne!(run(true), run(true));
    assert_eq!(run(false), run(false));
    assert_ne!(run(true), run(true));
}

/// Casts to bf16, as autocast does.
#[derive(Debug)]
struct Low;

impl Policy for Low {
    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        Ok(x.f_to_kind(Kind::BFloat16)?)
    }
    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        Ok(weight.f_to_kind(Kind::BFloat16)?)
    }
}

#[test]
fn a_policy_sets_the_bases_dtype_and_adapters_stay_in_fp32() {
    for dora in [false, true] {
        for base in [Kind::Float, Kind::BFloat16] {
            let layer = layer(dora, (base, Device::Cpu));
            let x = Generator::new(2)
                .unwrap()
                .normal(&[40, 16], kind::FLOAT_CPU)
                .unwrap()
                .set_requires_grad(true);
            let exact = tch::no_grad(|| {
                layer.forward(&x.to_kind(base), &Context::default()).unwrap().to_kind(Kind::Float)
            });
            let _within = precision::enter(Some(Arc::new(Low)));
            let y = layer.forward(&x, &Context::default()).unwrap();
            assert_eq!(y.kind(), Kind::BFloat16);
            let off = (y.to_kind(Kind::Float) - &exact).norm() / exact.norm();
            assert!(off.double_value(&[]) < 1e-2, "dora {dora} {base:?}: {off}");
            backward(&[&y.to_kind(Kind::Float).sum(Kind::Float)]).unwrap();
            assert_eq!(x.grad().kind(), Kind::Float);
            assert!(learned(&layer).iter().all(|tensor| tensor.grad().kind() == Kind::Float));
        }
    }
}

#[test]
fn recomputing_a_segment_under_other_settings_is_refused() {
    let _alone = GENERATOR.lock().unwrap();
    let layer = Arc::new(Mutex::new(layer(false, kind::FLOAT_CPU)));
    let x = Tensor::ones([2, 16], kind::FLOAT_CPU).set_requires_grad(true);
    let forward = || {
        let inner = layer.clone();
        let segment = move |[x]: [&Tensor; 1]| {
            let y = inner.lock().unwrap().forward(x, &TRAINING);
            Ok([y?])
        };
        let [y] = Checkpoint::default().run(segment, [&x]).unwrap();
        y.sum(Kind::Float)
    };
    let y = forward();
    layer.lock().unwrap().merge().unwrap();
    let error = backward(&[&y]).unwrap_err().to_string();
    assert!(
        error.contains(
            "checkpoint: a setting that its layers read (which adapters are active or merged) is another than in the \
             forward; run the backward before it is changed, or change it back"
        ),
        "{error}"
    );
    // The original setting again when the backward runs.
    layer.lock().unwrap().unmerge().unwrap();
    let y = forward();
    layer.lock().unwrap().merge().unwrap();
    layer.lock().unwrap().unmerge().unwrap();
    backward(&[&y]).unwrap();
}

/// On a GPU, backward runs on a thread of the engine, where masks whose base is on the device read it again.
#[test]
fn a_backward_on_another_thread_has_the_masks_of_its_step() {
    let gradients = |elsewhere: bool| {
        let layer = layer(false, kind::FLOAT_CPU);
        let x = Generator::new(2).unwrap().normal(&[3, 7, 16], kind::FLOAT_CPU).unwrap();
        let base = Tensor::from_slice(&[17i64]);
        let step = StepSeeds::enter(17, Some(&base));
        let loss = layer.forward(&x, &TRAINING).unwrap().square().sum(Kind::Float);
        if elsewhere {
            drop(step);
            std::thread::spawn(move || backward(&[&loss]).unwrap()).join().unwrap();
        } else {
            backward(&[&loss]).unwrap();
        }
        taken(&learned(&layer))
    };
    assert_eq!(gradients(true), gradients(false));
}

/// Puts other projections in the place of a module's own.
struct Replace(BTreeMap<&'static str, LoraLinear>);

impl ModuleMapper for Replace {
    fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
        if let Some(layer) = self.0.remove(name) {
            *slot = Box::new(layer);
        }
        Ok(())
    }
}

/// As on a GPU, where projections of one input are one function unless one of them, such as a DoRA, is computed otherwise.
#[test]
fn each_projection_draws_one_seed_beside_one_that_is_computed_alone() {
    let _gpu = kernels::gpu::assume();
    for (up_is_dora, form) in [(false, "one function"), (true, "each alone")] {
        let mut mlp = Swiglu::new(16, 24, false, Init::Constant(0.5), kind::FLOAT_CPU).unwrap();
        let layers = [("gate_proj", false), ("up_proj", up_is_dora)];
        let layers = layers.map(|(name, dora)| (name, layer(dora, kind::FLOAT_CPU)));
        map_modules(&mut mlp, &mut Replace(layers.into())).unwrap();
        let x = Generator::new(2).unwrap().normal(&[5, 16], kind::FLOAT_CPU).unwrap();
        let _step = StepSeeds::enter(3, None);
        let _ = mlp.forward(&x, &TRAINING).unwrap();
        assert_eq!(step_seed().unwrap().call, 2, "{form}");
    }
}
