//! Steps whose gradients overflow are retried at a lower scale, with the result of a step at the right scale.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use amp::{Autocast, DeviceScaler, DynamicGradScaler, DynamicRule, DynamicScalerConfig, StaticGradScaler};
use models::module::{tensors, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::precision::{Attention, Policy, Product};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};
use training::observer::{Collect, StepRecord};
use training::optimizer::{Adam, DeviceOptimizer, Group};
use training::scaler::GradScaler;
use training::trainer::{Overflow, Trainer, TrainerConfig};

use crate::data::DATA;

/// Dropout uses the generator of the process, which concurrent tests would share.
static ALONE: Mutex<()> = Mutex::new(());

struct Run {
    records: Vec<StepRecord>,
    weights: Vec<Tensor>,
    state: serde_json::Value,
}

fn run(
    steps: u64,
    overflow: Overflow,
    policy: Arc<dyn Policy>,
    scaler: Box<dyn GradScaler>,
) -> training::Result<Run> {
    let config = Gpt2LikeConfig {
        vocab_size: 32,
        embedding_dim: 32,
        hidden_dim: 32,
        num_heads: 4,
        ff_dim: 64,
        max_length: 16,
        dropout: 0.1,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, kind::FLOAT_CPU).unwrap();
    let mut generator = Generator::new(4).unwrap();
    for (name, weight) in trainable(&model).into_iter().filter(|(name, _)| !name.contains("norm")) {
        let drawn = generator.normal(&weight.size(), kind::FLOAT_CPU).unwrap() * 0.2;
        tch::no_grad(|| weight.shallow_clone().copy_(&drawn));
        assert!(weight.requires_grad(), "{name}");
    }
    let optimizer = DeviceOptimizer::new(Adam::default(), vec![Group::new(trainable(&model), 1e-3)])?;
    let options = TrainerConfig { steps, accumulation: 2, overflow, ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options)?;
    trainer.precision = Some(policy);
    trainer.scaler = scaler;
    let notes = Collect::default();
    trainer.observers.push(Box::new(notes.clone()));
    runtime::random::seed(9)?;
    trainer.run(&mut DATA.clone(), None)?;
    let records = notes.take();
    let weights = tensors(trainer.model.as_ref()).iter().map(|named| named.tensor.detach().copy()).collect();
    Ok(Run { records, weights, state: trainer.scaler.state() })
}

fn dynamic(log2: i32) -> Box<dyn GradScaler> {
    let options = DynamicScalerConfig { init_scale: 2f32.powi(log2), ..DynamicScalerConfig::default() };
    Box::new(DynamicGradScaler::new(options).unwrap())
}

fn fp16() -> Arc<dyn Policy> {
    Autocast::new(Kind::Half).unwrap().policy()
}

#[test]
fn a_retried_step_equals_the_step_at_the_right_scale() {
    let _alone = ALONE.lock();
    let high = run(1, Overflow::Retry { most: 64 }, fp16(), dynamic(40)).unwrap();
    let first = &high.records[0];
    assert!(first.retries > 10 && !first.skipped, "{first:?}");
    assert_eq!(first.scale, 2f64.powi(40 - first.retries as i32));

    let right = run(1, Overflow::Skip, fp16(), dynamic(40 - first.retries as i32)).unwrap();
    assert!(!right.records[0].skipped && right.records[0].retries == 0);
    assert_eq!(high.weights, right.weights, "bit for bit, dropout and all");
    assert_eq!(first.loss, right.records[0].loss);

    let left_out = run(6, Overflow::Skip, fp16(), dynamic(40)).unwrap();
    assert!(left_out.records.iter().all(|record| record.skipped), "six steps are not enough to come down");
    let none_lost = run(6, Overflow::Retry { most: 64 }, fp16(), dynamic(40)).unwrap();
    assert!(none_lost.records.iter().all(|record| !record.skipped));
}

#[test]
fn device_decisions_cannot_be_retried() {
    let _alone = ALONE.lock();
    let rule = DynamicRule::new(DynamicScalerConfig::default()).unwrap();
    let scaler = Box::new(DeviceScaler::new(rule, Device::Cpu).unwrap());
    let error = run(1, Overflow::Retry { most: 1 }, fp16(), scaler).err().unwrap().to_string();
    assert!(error.contains("give one that decides on the host"), "{error}");
}

/// A policy that returns NaN in the passes `from..=to`.
#[derive(Debug)]
struct Poison {
    inner: Arc<dyn Policy>,
    pass: AtomicI64,
    bad: (i64, i64),
}

impl Policy for Poison {
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        product: Product<'_>,
    ) -> runtime::Result<Tensor> {
        let y = self.inner.linear(x, weight, bias, product)?;
        let pass = self.pass.load(Ordering::SeqCst);
        if (self.bad.0..=self.bad.1).contains(&pass) { Ok(y.f_mul_scalar(f64::NAN)?) } else { Ok(y) }
    }
    fn matmul(&self, a: &Tensor, b: &Tensor) -> runtime::Result<Tensor> {
        self.inner.matmul(a, b)
    }
    fn attend(&self, qkv: [&Tensor; 3], attention: Attention<'_>) -> runtime::Result<Tensor> {
        self.inner.attend(qkv, attention)
    }
    fn widened_kind(&self, kind: Kind) -> Kind {
        self.inner.widened_kind(kind)
    }
    fn entered(&self) {
        self.pass.fetch_add(1, Ordering::SeqCst);
        self.inner.entered();
    }
    fn left(&self) {
        self.inner.left();
    }
}

#[test]
fn a_batch_that_always_overflows_is_skipped_and_the_scale_recovers() {
    let _alone = ALONE.lock();
    let poison = |bad| Arc::new(Poison { inner: fp16(), pass: 0.into(), bad });
    // Passes 3 to 8 are all attempts at step 3.
    let retried = run(4, Overflow::Retry { most: 5 }, poison((3, 8)), dynamic(10)).unwrap();
    let marks: Vec<_> = retried.records.iter().map(|record| (record.skipped, record.retries)).collect();
    assert_eq!(marks, [(false, 0), (false, 0), (true, 5), (false, 0)]);
    let skipped = run(4, Overflow::Skip, poison((3, 3)), dynamic(10)).unwrap();
    assert_eq!(retried.state, skipped.state);
    assert_eq!(retried.records[3].scale, 512.0);
}

#[test]
fn a_scale_that_does_not_fall_is_not_retried() {
    let _alone = ALONE.lock();
    let fixed = Box::new(StaticGradScaler::new(2f32.powi(40)).unwrap());
    let run = run(2, Overflow::Retry { most: 5 }, fp16(), fixed).unwrap();
    assert!(run.records.iter().all(|record| record.skipped && record.retries == 0));
}
