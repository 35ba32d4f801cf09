//! Blocks that compute x·w: one that runs twice, and one whose update is late.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use models::Result;
use models::module::{Block, Context, Module, Visitor, VisitorMut, parameters, trainable};
use offload::{HookPoint, HostAdamW, HostAdamWConfig, OffloadConfig, TestHook};
use runtime::autograd::backward;
use tch::Tensor;
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer, StepSettings};

use crate::support::{FLOAT, alone, ways};

/// x·w.
#[derive(Debug)]
struct Times(Tensor);

impl Module for Times {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("weight", &self.0);
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        visitor.parameter("weight", &mut self.0)
    }
}

impl Block for Times {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Ok(x * &self.0)
    }
}

#[derive(Debug)]
struct Model(Vec<Box<dyn Block>>);

impl Module for Model {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        self.0.iter().enumerate().for_each(|(number, block)| visitor.part(&format!("h.{number}"), &**block));
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        self.0
            .iter_mut()
            .enumerate()
            .try_for_each(|(number, block)| visitor.block(&format!("h.{number}"), block))
    }
}

fn number(value: f64) -> Tensor {
    Tensor::full([1], value, FLOAT).set_requires_grad(true)
}

fn times(weights: &[f64]) -> Model {
    Model(weights.iter().map(|&weight| Box::new(Times(number(weight))) as Box<dyn Block>).collect())
}

/// Weights of a model whose blocks are each run twice, one behind the other, and stepped.
#[test]
fn a_block_can_run_twice() {
    let run = |model: &Model| {
        let mut y = number(5.0);
        for block in model.0.iter().chain(&model.0) {
            y = block.forward(&y, &Context::default()).unwrap();
        }
        backward(&[&y]).unwrap();
    };
    let values = |model: &Model| -> Vec<f32> {
        parameters(model).iter().map(|(_, tensor)| tensor.double_value(&[0]) as f32).collect()
    };
    let model = times(&[2.0, 3.0, 0.5]);
    let mut optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 0.1)]).unwrap();
    run(&model);
    optimizer.step().unwrap();
    let expected = values(&model);
    for (name, options) in ways(3) {
        let mut model = times(&[2.0, 3.0, 0.5]);
        let offload = options.install(&mut model).unwrap();
        let groups = vec![Group::new(trainable(&model), 0.1)];
        let mut optimizer =
            HostAdamW::new(&offload, groups, AdamW::default(), HostAdamWConfig::default()).unwrap();
        run(&model);
        optimizer.step().unwrap();
        assert_eq!(values(&model), expected, "{name}");
    }
}

/// Delays the second layer's step until it is released.
#[derive(Debug)]
struct Holds {
    updates: AtomicI64,
    gate: parking_lot::Mutex<std::sync::mpsc::Receiver<()>>,
}

impl TestHook for Holds {
    fn at(&self, point: HookPoint) -> runtime::Result<()> {
        if point == HookPoint::Update && self.updates.fetch_sub(1, Ordering::Relaxed) == 0 {
            let _ = self.gate.lock().recv();
        }
        Ok(())
    }
}

#[test]
fn a_late_update_delays_only_its_own_layer() {
    let _alone = alone();
    let (open, gate) = std::sync::mpsc::channel();
    let mut model = times(&[2.0, 3.0, 0.5, 4.0]);
    let test_hook = Arc::new(Holds { updates: AtomicI64::new(1), gate: parking_lot::Mutex::new(gate) });
    let options = OffloadConfig { test_hook: Some(test_hook), ring: 2, ..OffloadConfig::default() };
    let offload = options.install(&mut model).unwrap();
    // Clipped, layers step from the first to the last, after the backward.
    let host = HostAdamWConfig { overlap: true, ..HostAdamWConfig::default() };
    let groups = vec![Group::new(trainable(&model), 0.1)];
    let mut optimizer = HostAdamW::new(&offload, groups, AdamW::default(), host).unwrap();
    optimizer.begin(StepSettings { clip: Some(1.0), ..StepSettings::default() }).unwrap();
    let mut y = number(5.0);
    for block in &model.0 {
        y = block.forward(&y, &Context::default()).unwrap();
    }
    backward(&[&y]).unwrap();
    optimizer.step().unwrap();
    // This would deadlock.
    let _no_grad = tch::no_grad_guard();
    let first = model.0[0].forward(&number(1.0), &Context::default()).unwrap();
    assert_ne!(first.double_value(&[0]), 2.0, "the first layer is stepped");
    open.send(()).unwrap();
    let second = model.0[1].forward(&number(1.0), &Context::default()).unwrap();
    assert_ne!(second.double_value(&[0]), 3.0, "and the second, once its step is taken");
    offload.synchronize().unwrap();
}
