//! Layers that are used more than once before a step, gradients that other code holds or adds, and concurrent and successive
//! backwards: the bits of the plain model, or an error.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use expect_test::expect;
use models::module::{
    Input, LanguageModel, ModuleMapper, Projection, map_modules, parameters, tensors, trainable,
};
use models::{Linear, Llama, Result};
use offload::{HookPoint, HostAdamW, HostAdamWConfig, Method, OffloadConfig, TestHook};
use runtime::autograd::{Keep, backward, backward_with, set_grad};
use tch::{Kind, Tensor};
use training::clip::NonFinite;
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer, StepSettings, ZeroGrad};

use crate::support::{FLOAT, alone, batch, tiny, ways};

fn loss(model: &Llama, number: u64) -> Tensor {
    let tokens = batch(60, number);
    model.loss(&Input::new(&tokens), &tokens).unwrap().sum
}

fn values(model: &Llama) -> Vec<(String, Tensor)> {
    parameters(model).into_iter().map(|(name, tensor)| (name, tensor.detach().copy())).collect()
}

fn gradients(model: &Llama) -> Vec<(String, Tensor)> {
    trainable(model).into_iter().map(|(name, tensor)| (name, tensor.grad().copy())).collect()
}

fn clear(model: &Llama) {
    trainable(model).into_iter().for_each(|(_, tensor)| set_grad(tensor, None).unwrap());
}

fn assert_equal(expected: &[(String, Tensor)], found: &[(String, Tensor)], case: &str) {
    assert_eq!(expected.len(), found.len(), "{case}");
    for ((name, expected), (other, found)) in expected.iter().zip(found) {
        assert_eq!(name, other);
        assert!(expected.equal(found), "{case}: {name}");
    }
}

fn weight(model: &Llama, name: &str) -> Tensor {
    trainable(model).into_iter().find(|(known, _)| known == name).unwrap().1.shallow_clone()
}

fn l2(model: &Llama, names: &[&str]) -> Tensor {
    let square = |name: &&str| weight(model, name).square().sum(Kind::Float) * 0.1;
    names.iter().map(square).reduce(|a, b| a + b).unwrap()
}

const WEIGHTS: [&str; 3] =
    ["layers.0.mlp.up_proj.weight", "layers.3.input_layernorm.weight", "layers.4.self_attn.q_proj.bias"];

/// The sources of a step's gradients.
fn backwards(model: &Llama, how: usize) -> runtime::Result<()> {
    match how {
        // Two losses, one graph.
        0 => backward(&[&(loss(model, 1) + loss(model, 2))]),
        // A graph that is used twice.
        1 => {
            let loss = loss(model, 1);
            backward_with(&[&loss], &[None], Keep { graph: true, ..Keep::default() })?;
            backward(&[&loss])
        }
        // Two forwards before the first backward.
        2 => {
            let (first, second) = (loss(model, 1), loss(model, 2));
            backward(&[&first])?;
            backward(&[&second])
        }
        // A forward without a backward, dropped or kept.
        3 => {
            drop(loss(model, 3));
            let (used, unused) = (loss(model, 1), loss(model, 2));
            backward(&[&used])?;
            drop(unused);
            Ok(())
        }
        // Weights of layers in the loss itself, after the model and before it.
        4 => {
            let loss = loss(model, 1);
            backward(&[&(loss + l2(model, &WEIGHTS))])
        }
        _ => {
            let term = l2(model, &WEIGHTS);
            backward(&[&(loss(model, 1) + term)])
        }
    }
}

#[test]
fn gradients_match_the_plain_model_in_any_order() {
    let _alone = alone();
    for how in 0..6 {
        let model = tiny();
        backwards(&model, how).unwrap();
        let expected = gradients(&model);
        for (name, options) in ways(5) {
            let mut model = tiny();
            let offload = options.install(&mut *model).unwrap();
            for pass in 0..2 {
                clear(&model);
                backwards(&model, how).unwrap();
                offload.check_on_host().unwrap();
                assert_equal(&expected, &gradients(&model), &format!("{name}, {how}, pass {pass}"));
            }
        }
    }
}

#[test]
fn the_host_steps_a_layer_when_all_its_gradients_arrived() {
    let _alone = alone();
    for how in 0..5 {
        let model = tiny();
        let mut optimizer =
            DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&*model), 1e-2)]).unwrap();
        backwards(&model, how).unwrap();
        optimizer.step().unwrap();
        let expected = values(&model);
        for (name, options) in ways(5) {
            for clip in [None, Some(1e9)] {
                let mut model = tiny();
                let offload = options.install(&mut *model).unwrap();
                let groups = vec![Group::new(trainable(&*model), 1e-2)];
                let mut optimizer =
                    HostAdamW::new(&offload, groups, AdamW::default(), HostAdamWConfig::default()).unwrap();
                optimizer.begin(StepSettings { clip, ..StepSettings::default() }).unwrap();
                backwards(&model, how).unwrap();
                optimizer.step().unwrap();
                assert_equal(&expected, &values(&model), &format!("{name}, {how}, {clip:?}"));
            }
        }
    }
}

/// Gives two layers one projection.
struct Share(Option<Tensor>);

impl ModuleMapper for Share {
    fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> Result<()> {
        if !["layers.1.mlp.up_proj", "layers.3.mlp.up_proj"].contains(&name) {
            return Ok(());
        }
        let weight = tensors(slot.as_ref())[0].tensor.shallow_clone();
        let weight = self.0.get_or_insert(weight).shallow_clone();
        *slot = Box::new(Linear { weight, bias: None });
        Ok(())
    }
}

/// A weight of two layers gets one step, with the gradients of both.
#[test]
fn a_weight_that_layers_share_is_stepped_once() {
    let _alone = alone();
    let shared = || {
        let mut model = tiny();
        map_modules(&mut *model, &mut Share(None)).unwrap();
        model
    };
    let model = shared();
    assert_eq!(trainable(&*model).len() + 1, trainable(&*tiny()).len());
    let mut optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&*model), 1e-2)]).unwrap();
    for step in 0..3 {
        backward(&[&loss(&model, step)]).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
    }
    let expected = values(&model);
    for (name, options) in ways(5) {
        for (clip, overlap) in [(None, false), (None, true), (Some(1e9), true)] {
            for non_finite in [NonFinite::Fail, NonFinite::Skip, NonFinite::Ignore] {
                let mut model = shared();
                let offload = options.install(&mut *model).unwrap();
                let groups = vec![Group::new(trainable(&*model), 1e-2)];
                let host = HostAdamWConfig { overlap, ..HostAdamWConfig::default() };
                let mut optimizer = HostAdamW::new(&offload, groups, AdamW::default(), host).unwrap();
                for step in 0..3 {
                    optimizer.begin(StepSettings { clip, non_finite, ..StepSettings::default() }).unwrap();
                    backward(&[&loss(&model, step)]).unwrap();
                    optimizer.step().unwrap();
                }
                offload.synchronize().unwrap();
                assert_equal(&expected, &values(&model), &format!("{name}, {clip:?}, {non_finite:?}"));
            }
        }
    }
}

fn with_host_adam_w(body: impl FnOnce(&Llama, &mut HostAdamW)) {
    with_host_adam_w_of("", body);
}

fn with_host_adam_w_of(start: &str, body: impl FnOnce(&Llama, &mut HostAdamW)) {
    let _alone = alone();
    let mut model = tiny();
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    let some = trainable(&*model).into_iter().filter(|(name, _)| name.starts_with(start));
    let mut optimizer =
        HostAdamW::new(&offload, vec![Group::new(some, 1e-2)], AdamW::default(), HostAdamWConfig::default())
            .unwrap();
    body(&model, &mut optimizer);
}

#[test]
fn more_micro_batches_than_announced_are_an_error() {
    with_host_adam_w(|model, optimizer| {
        backward(&[&loss(model, 1)]).unwrap();
        let tokens = batch(60, 2);
        let error = model.loss(&Input::new(&tokens), &tokens).unwrap_err().to_string();
        expect!["offload: optimizer: `layers.0` was updated during backward, but other parameters were not yet; call `HostAdamW::step` before the next forward, or announce more micro-batches with `HostAdamW::begin`"].assert_eq(&error);
        optimizer.step().unwrap();
        backward(&[&loss(model, 2)]).unwrap();
        optimizer.step().unwrap();
    });
}

#[test]
fn a_graph_from_before_the_step_is_an_error() {
    // With all of the model, libtorch would say of the embedding what the engine says of the layers.
    with_host_adam_w_of("layers.", |model, optimizer| {
        let (first, second) = (loss(model, 1), loss(model, 2));
        backward(&[&first]).unwrap();
        optimizer.step().unwrap();
        let error = backward(&[&second]).unwrap_err().to_string();
        expect!["backward of `OverlapOffloadFunction`: offload: graph: `layers.4` was updated by its optimizer between a forward and its backward, which would compute with other values; run backward before weights are changed, merged or updated, or run the forward again"].assert_eq(&error);
    });
}

/// A term that has saved the weight before the layer's update, without a gradient of it or with one: it would see the new values.
#[test]
fn a_graph_that_has_saved_a_weight_refuses_its_update() {
    for detached in [true, false] {
        with_host_adam_w(|model, _| {
            let w = weight(model, WEIGHTS[0]);
            let w = if detached { w.detach() } else { w };
            let p = Tensor::ones(w.size(), FLOAT).set_requires_grad(true);
            let other = (&w * &p).sum(Kind::Float);
            let error = backward(&[&(loss(model, 1) + other)]).unwrap_err().to_string();
            assert!(error.contains("has been modified by an inplace operation"), "{error}");
        });
        // With all gradients before the first update it is right: the gradient of p is w.
        with_host_adam_w(|model, optimizer| {
            optimizer.begin(StepSettings::default()).unwrap();
            let w = weight(model, WEIGHTS[0]);
            let before = w.detach().copy();
            let w = if detached { w.detach() } else { w };
            let p = Tensor::ones(w.size(), FLOAT).set_requires_grad(true);
            let other = (&w * &p).sum(Kind::Float);
            backward(&[&(loss(model, 1) + other)]).unwrap();
            optimizer.step().unwrap();
            assert!(p.grad().equal(&before));
            assert!(!weight(model, WEIGHTS[0]).detach().equal(&before), "it was updated");
        });
    }
}

/// A term whose gradient arrives after the layer's update, and needs no value of the weight: the layer cannot be updated again.
#[test]
fn a_weight_used_in_the_loss_before_the_model_gets_its_gradient() {
    with_host_adam_w(|model, _| {
        let other = weight(model, WEIGHTS[0]).sum(Kind::Float) * 0.1;
        let error = backward(&[&(other + loss(model, 1))]).unwrap_err().to_string();
        expect!["at the end of backward: offload: optimizer: `layers.0.mlp.up_proj.weight` got another gradient after its layer was updated in the same backward; use the weight in the loss after the model's forward, use the group's weight decay for such a term, or clip (`HostAdamWConfig::clip`), which waits for all gradients"].assert_eq(&error);
    });
}

#[test]
fn two_optimizers_for_one_model_are_refused() {
    let _alone = alone();
    let mut model = tiny();
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    let new = || {
        let groups = vec![Group::new(trainable(&*model), 1e-2)];
        HostAdamW::new(&offload, groups, AdamW::default(), HostAdamWConfig::default())
    };
    let first = new().unwrap();
    let error = new().unwrap_err().to_string();
    expect!["offload: optimizer: these layers already have a `HostAdamW`, which consumes their gradients; drop it first"].assert_eq(&error);
    drop(first);
    new().unwrap();
}

/// Tensors without a group are not affected.
#[test]
fn tensors_without_a_group_keep_their_gradients() {
    let _alone = alone();
    let names = |name: &str| name.ends_with("up_proj.weight");
    let reference = tiny();
    backward(&[&loss(&reference, 1)]).unwrap();
    let expected = gradients(&reference);
    let mut model = tiny();
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    let some = trainable(&*model).into_iter().filter(|(name, _)| names(name));
    let groups = vec![Group::new(some, 1e-2)];
    let mut optimizer =
        HostAdamW::new(&offload, groups, AdamW::default(), HostAdamWConfig::default()).unwrap();
    backward(&[&loss(&model, 1)]).unwrap();
    optimizer.step().unwrap();
    for ((name, expected), (_, tensor)) in expected.iter().zip(trainable(&*model)) {
        let gradient = tensor.grad();
        assert_eq!(gradient.defined(), !names(name), "{name}");
        assert!(!gradient.defined() || expected.equal(&gradient), "{name}");
    }
}

#[test]
fn held_gradients_do_not_change() {
    let _alone = alone();
    for (name, options) in ways(5) {
        let mut model = tiny();
        let _offload = options.install(&mut *model).unwrap();
        let mut kept: Vec<(String, Tensor)> = Vec::new();
        let mut copies = Vec::new();
        for number in 0..3 {
            backward(&[&loss(&model, number)]).unwrap();
            kept.extend(trainable(&*model).into_iter().map(|(name, tensor)| (name, tensor.grad())));
            copies.extend(gradients(&model));
            clear(&model);
        }
        // A view of a gradient keeps it too.
        backward(&[&loss(&model, 3)]).unwrap();
        copies.extend(gradients(&model));
        kept.extend(trainable(&*model).into_iter().map(|(name, tensor)| (name, tensor.grad().detach())));
        clear(&model);
        backward(&[&loss(&model, 4)]).unwrap();
        assert_equal(&copies, &kept, &name);
    }
}

/// Makes the streams late, and breaks one load.
#[derive(Debug, Default)]
struct LateAndBroken {
    loads: AtomicI64,
}

impl TestHook for LateAndBroken {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        if point == HookPoint::Store {
            for turn in 0..100_000u64 {
                black_box(turn);
                if turn % 10_000 == 0 {
                    std::thread::yield_now();
                }
            }
        }
        if point == HookPoint::Load && self.loads.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(runtime::Error::Other("the link is gone".into()));
        }
        Ok(())
    }
}

#[test]
fn a_retained_graph_works_after_a_failed_backward() {
    let _alone = alone();
    let reference = tiny();
    backward(&[&loss(&reference, 1)]).unwrap();
    let expected = gradients(&reference);
    let keep = vec![0, 1, 3, 4];
    let ways = [(Method::Overlap, vec![], 5), (Method::Overlap, keep, 5), (Method::Function, vec![], 7)];
    for (method, keep, loads) in ways {
        let mut model = tiny();
        let test_hook = Arc::new(LateAndBroken { loads: AtomicI64::new(loads) });
        let options = OffloadConfig { method, keep, test_hook: Some(test_hook), ..OffloadConfig::default() };
        let offload = options.install(&mut *model).unwrap();
        let loss = loss(&model, 1);
        let retained = || backward_with(&[&loss], &[None], Keep { graph: true, ..Keep::default() });
        let error = retained().unwrap_err().to_string();
        assert!(error.contains("the link is gone"), "{error}");
        for pass in 0..2 {
            clear(&model);
            retained().unwrap();
            assert_equal(&expected, &gradients(&model), &format!("{}, pass {pass}", method.name()));
            offload.check_on_host().unwrap();
        }
    }
}

#[test]
fn two_threads_can_run_backward_over_one_model() {
    let _alone = alone();
    let reference = tiny();
    for number in [1, 2] {
        backward(&[&loss(&reference, number)]).unwrap();
    }
    let expected = gradients(&reference);
    for (name, options) in ways(5) {
        let mut model = tiny();
        let offload = OffloadConfig { ring: 4, ..options }.install(&mut *model).unwrap();
        for round in 0..5 {
            clear(&model);
            let losses = [loss(&model, 1), loss(&model, 2)];
            let threads = losses.map(|loss| std::thread::spawn(move || backward(&[&loss])));
            for thread in threads {
                thread.join().unwrap().unwrap();
            }
            assert_equal(&expected, &gradients(&model), &format!("{name}, round {round}"));
            offload.check_on_host().unwrap();
        }
    }
}
