//! Host synchronisations per step: one if the host decides whether to step, none if the device does. The CPU has nothing to
//! wait for, so the test counts reads of values by the host. A trace covers the whole process, so no
//! other test may run at the same time.

use std::path::Path;

use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig};
use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::profile::{Counter, Trace};
use tch::{Device, Kind, Tensor, kind};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::scaler::GradScaler;
use training::trainer::{Trainer, TrainerConfig};

use crate::data::DATA;

/// libtorch's operators that read a value on the host; `item` calls `_local_scalar_dense`.
const ATEN: [&str; 3] = ["aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"];

/// Returns the number of values that `part` read on the host.
fn reads(folder: &Path, part: impl FnOnce()) -> u64 {
    let trace = Trace::start(Default::default()).unwrap();
    let counter = Counter::on_this_thread().unwrap();
    part();
    let own = counter.finish().unwrap().op(runtime::ops::READ).calls;
    let path = folder.join("trace.json");
    trace.save(&path).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |names: &'static [&'static str]| {
        events.iter().filter(move |event| names.iter().any(|name| event["name"] == *name)).map(Span::of)
    };
    // libtorch's optimizer kernel for the CPU reads the step numbers by `item`; the CUDA kernel receives their addresses.
    let kernels: Vec<Span> = named(&["aten::_fused_adam_", "aten::_fused_adamw_"]).collect();
    own + named(&ATEN).filter(|read| !kernels.iter().any(|kernel| kernel.holds(read))).count() as u64
}

/// The time span of an operator, in microseconds.
struct Span {
    thread: u64,
    start: f64,
    end: f64,
}

impl Span {
    fn of(event: &serde_json::Value) -> Self {
        let start = event["ts"].as_f64().unwrap();
        Self { thread: event["tid"].as_u64().unwrap(), start, end: start + event["dur"].as_f64().unwrap() }
    }

    fn holds(&self, other: &Self) -> bool {
        self.thread == other.thread && self.start <= other.start && other.end <= self.end
    }
}

fn by_hand(folder: &Path, count: i64) {
    let leaves = || -> Vec<(String, Tensor)> {
        let leaf = |i: i64| Tensor::ones([1 + i % 3, 4], kind::FLOAT_CPU).set_requires_grad(true);
        (0..count).map(|i| (format!("w{i}"), leaf(i))).collect()
    };
    let parameters = [leaves(), leaves()];
    let mut optimizers = parameters.each_ref().map(|leaves| {
        let owned = leaves.iter().map(|(name, w)| (name.clone(), w.shallow_clone()));
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(owned, 1e-3)]).unwrap()
    });
    let backward = |bad: bool| {
        for (index, (_, w)) in parameters.iter().flatten().enumerate() {
            let grad = if bad && index == 0 { f64::INFINITY } else { 2.0 };
            runtime::autograd::set_grad(w, Some(&w.detach().full_like(grad))).unwrap();
        }
    };
    let make = || DynamicGradScaler::new(DynamicScalerConfig::default()).unwrap();
    let (mut host, mut device) = (make(), make().on_device(Device::Cpu).unwrap());
    let loss = Tensor::from(1f32);
    for bad in [false, true, false] {
        backward(bad);
        // All are unscaled, as before clipping, and then the flags of all are read at once.
        let found = reads(folder, || {
            let _ = host.scale(&loss).unwrap();
            for (name, optimizer) in ["a", "b"].iter().zip(&optimizers) {
                host.unscale_(name, &optimizer.gradients().unwrap(), true).unwrap();
            }
            for (name, optimizer) in ["a", "b"].iter().zip(&mut optimizers) {
                host.step(name, optimizer).unwrap();
            }
            host.update().unwrap();
        });
        assert_eq!(found, 1, "the host decides, {count} parameters");
    }
    for bad in [false, true, false] {
        backward(bad);
        let found = reads(folder, || {
            let _ = device.scale(&loss).unwrap();
            for (name, optimizer) in ["a", "b"].iter().zip(&mut optimizers) {
                device.step(name, optimizer).unwrap();
            }
            device.update().unwrap();
        });
        assert_eq!(found, 0, "the device decides, {count} parameters");
    }
}

fn trainer(scaler: Box<dyn GradScaler>, width: i64) -> Trainer {
    let config = Gpt2LikeConfig {
        vocab_size: 32,
        embedding_dim: width,
        hidden_dim: width,
        num_heads: 2,
        ff_dim: width,
        max_length: 16,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, kind::FLOAT_CPU).unwrap();
    let optimizer =
        DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-3)]).unwrap();
    let options = TrainerConfig {
        steps: 6,
        accumulation: 2,
        clip: Some(1.0),
        log_every: 100,
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    trainer.precision = Some(Autocast::new(Kind::Half).unwrap().policy());
    trainer.scaler = scaler;
    trainer
}

#[test]
fn a_step_synchronises_at_most_once() {
    let folder = tempfile::tempdir().unwrap();
    for count in [1, 50] {
        by_hand(folder.path(), count);
    }
    // The counter finds reads of both kinds.
    let one = Tensor::from(1f32);
    assert_eq!(reads(folder.path(), || assert_eq!(one.double_value(&[]), 1.0)), 1);
    assert_eq!(reads(folder.path(), || drop(runtime::ops::read(&one).unwrap())), 1);

    // In the trainer, the losses of all steps and the decisions of the device are read in one copy at the end.
    const STEPS: u64 = 6;
    let high = DynamicScalerConfig { init_scale: 2f32.powi(40), ..DynamicScalerConfig::default() };
    let scaler = || DynamicGradScaler::new(high).unwrap();
    for (scaler, expected) in [
        (Box::new(scaler()) as Box<dyn GradScaler>, STEPS + 1),
        (Box::new(scaler().on_device(Device::Cpu).unwrap()), 1),
    ] {
        let mut trainer = trainer(scaler, 16);
        let mut data = DATA.clone();
        let found = reads(folder.path(), || {
            trainer.advance(STEPS, &mut data, None).unwrap();
        });
        assert_eq!(found, expected);
        assert!(trainer.scaler.current() < 2f64.powi(40), "steps were left out");
    }
}
