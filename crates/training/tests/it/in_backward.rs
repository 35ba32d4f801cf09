//! Updates during backward: the bits of updates after it, no gradient left, and refusals.

use models::module::{parameters, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::autograd::backward;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::Trainer;
use training::batches::Synthetic;
use training::clip::NonFinite;
use training::observer::Collect;
use training::optimizer::{
    Adafactor, AdamW, AdamW8bit, DeviceOptimizer, Group, Lion, Muon, Optimizer, OptimizerInBackward, Rule,
    StepSettings, ZeroGrad,
};
use training::scaler::{GradScaler, NoScaler, UnscaleResult};
use training::trainer::TrainerConfig;

const STEPS: u64 = 4;

fn rules() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(AdamW::default()),
        Box::new(AdamW8bit::default()),
        Box::new(Lion::default()),
        Box::new(Adafactor::default()),
        Box::<Muon>::default(),
    ]
}

fn data() -> Synthetic {
    Synthetic {
        seed: 5,
        vocabulary: 80,
        rows: 4,
        length: 12,
        noise: 1,
        batches: None,
        device: Device::Cpu,
        position: 0,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rounding {
    Nearest,
    Stochastic,
    Master,
}

fn trainer(
    (number, kind, rounding): (usize, Kind, Rounding),
    accumulation: usize,
    in_backward: bool,
) -> (Trainer, Collect) {
    runtime::random::seed(3).unwrap();
    let config = Gpt2LikeConfig {
        vocab_size: 80,
        embedding_dim: 64,
        hidden_dim: 64,
        num_heads: 2,
        ff_dim: 96,
        max_length: 12,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, (kind, Device::Cpu)).unwrap();
    let rule = rules().swap_remove(number);
    let groups = match rule.name() {
        "muon" => Muon::groups(trainable(&model), 1e-2, 0.1, AdamW::default()),
        _ => Group::by_dimension(trainable(&model), 1e-2, 0.1),
    };
    let optimizer = DeviceOptimizer::boxed(rule, groups).unwrap();
    let optimizer = match rounding {
        Rounding::Nearest => optimizer,
        Rounding::Stochastic => optimizer.with_stochastic_rounding(11),
        Rounding::Master => optimizer.with_master_weights(),
    };
    let optimizer: Box<dyn Optimizer> = match in_backward {
        true => Box::new(OptimizerInBackward::new(optimizer).unwrap()),
        false => Box::new(optimizer),
    };
    let options = TrainerConfig {
        steps: STEPS,
        accumulation,
        clip: None,
        non_finite: NonFinite::Fail,
        log_every: 1,
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(Box::new(model), optimizer, options).unwrap();
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    (trainer, records)
}

#[test]
fn the_bits_are_those_of_updates_after_backward() {
    for number in 0..rules().len() {
        let cases = [
            (Kind::Float, Rounding::Nearest),
            (Kind::BFloat16, Rounding::Stochastic),
            (Kind::BFloat16, Rounding::Master),
        ];
        for (kind, rounding) in cases {
            for accumulation in [1, 2] {
                let run = |in_backward| {
                    let case = (number, kind, rounding);
                    let (mut trainer, records) = trainer(case, accumulation, in_backward);
                    trainer.run(&mut data(), None).unwrap();
                    let losses: Vec<f64> = records.take().iter().map(|record| record.loss).collect();
                    let weights = parameters(trainer.model.as_ref());
                    let weights: Vec<Tensor> =
                        weights.iter().map(|(_, tensor)| tensor.detach().copy()).collect();
                    let mut state = trainer.optimizer.state().unwrap();
                    state.sort_by(|a, b| a.0.cmp(&b.0));
                    (losses, weights, state)
                };
                let (during, after) = (run(true), run(false));
                let name = format!("{} {kind:?} {rounding:?} × {accumulation}", rules()[number].name());
                assert_eq!(during.0.len(), STEPS as usize, "{name}");
                assert_eq!(during.0, after.0, "{name}");
                assert!(during.1.iter().zip(&after.1).all(|(a, b)| a.equal(b)), "{name}");
                assert_eq!(during.2.len(), after.2.len(), "{name}");
                for ((of_during, a), (of_after, b)) in during.2.iter().zip(&after.2) {
                    assert!(of_during == of_after && a.equal(b), "{name}: {of_during}");
                }
            }
        }
    }
}

/// Two leaves under AdamW, whose updates run during backward.
fn leaves(values: [f32; 2]) -> ([Tensor; 2], OptimizerInBackward) {
    let leaves = values.map(|value| Tensor::from_slice(&[value, 1.0]).set_requires_grad(true));
    let named = [("a", &leaves[0]), ("b", &leaves[1])];
    let named = named.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
    let optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(named, 0.1)]).unwrap();
    (leaves, OptimizerInBackward::new(optimizer).unwrap())
}

fn settings(micro_batches: u64) -> StepSettings {
    StepSettings { micro_batches, non_finite: NonFinite::Fail, ..StepSettings::default() }
}

#[test]
fn a_gradient_is_freed_by_its_last_addition() {
    let ([a, b], mut optimizer) = leaves([2.0, 3.0]);
    optimizer.begin(settings(2)).unwrap();
    let loss = || (&a * &b).sum(Kind::Float);
    backward(&[&loss()]).unwrap();
    assert!(a.grad().defined() && b.grad().defined() && optimizer.has_gradient(&a).unwrap());
    assert_eq!(a.double_value(&[0]), 2.0);
    backward(&[&loss()]).unwrap();
    assert!(!a.grad().defined() && !b.grad().defined() && optimizer.has_gradient(&a).unwrap());
    assert!(a.double_value(&[0]) < 2.0);
    let decision = optimizer.unscale_and_clip(&mut NoScaler).unwrap();
    optimizer.take_step(&decision).unwrap();
    optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
    assert!(!optimizer.has_gradient(&a).unwrap());
    assert!((a.double_value(&[0]) - 1.9).abs() < 1e-6, "{a}");
}

#[test]
fn a_parameter_with_fewer_gradients_than_micro_batches_is_updated_at_the_end() {
    let ([a, b], mut optimizer) = leaves([2.0, 3.0]);
    optimizer.begin(settings(2)).unwrap();
    backward(&[&(&a * &b).sum(Kind::Float)]).unwrap();
    backward(&[&a.sum(Kind::Float)]).unwrap();
    assert!(!a.grad().defined() && b.grad().defined());
    let decision = optimizer.unscale_and_clip(&mut NoScaler).unwrap();
    optimizer.take_step(&decision).unwrap();
    assert!(b.double_value(&[0]) < 3.0, "{b}");
}

#[test]
fn a_gradient_that_is_not_finite_is_not_used() {
    // The root's derivative at 0 is infinite, and the loss is not.
    let ([a, b], mut optimizer) = leaves([2.0, 0.0]);
    let before = [&a, &b].map(|leaf| leaf.detach().copy());
    optimizer.begin(settings(1)).unwrap();
    let error = backward(&[&(&a.square() + b.sqrt()).sum(Kind::Float)]).unwrap_err().to_string();
    assert!(error.contains("a gradient is infinite or NaN (of `b` first)"), "{error}");
    let is_unchanged = a.equal(&before[0]);
    assert!(b.equal(&before[1]));
    assert_eq!(optimizer.abandon(ZeroGrad::ToNone).unwrap(), is_unchanged);

    // A loss that is not finite changes nothing.
    let ([a, b], mut optimizer) = leaves([f32::INFINITY, 3.0]);
    let before = [&a, &b].map(|leaf| leaf.detach().copy());
    optimizer.begin(settings(1)).unwrap();
    backward(&[&(&a.square() * &b.square()).sum(Kind::Float)]).unwrap_err();
    assert!(a.equal(&before[0]) && b.equal(&before[1]));
    assert!(optimizer.abandon(ZeroGrad::ToNone).unwrap());
}

#[test]
fn a_second_gradient_after_the_update_is_refused() {
    let ([a, b], mut optimizer) = leaves([2.0, 3.0]);
    optimizer.begin(settings(1)).unwrap();
    backward(&[&(&a * &b).sum(Kind::Float)]).unwrap();
    let error = backward(&[&a.sum(Kind::Float)]).unwrap_err().to_string();
    assert!(error.contains("`a`") && error.contains("got another gradient after its update"), "{error}");
    assert!(!optimizer.abandon(ZeroGrad::ToNone).unwrap());
}

/// A scaler that changes nothing.
#[derive(Debug)]
struct Enabled;

impl GradScaler for Enabled {
    fn scale(&self, loss: &Tensor) -> training::Result<Tensor> {
        Ok(loss.shallow_clone())
    }

    fn unscale_(&mut self, _: &[Tensor], _: bool) -> training::Result<UnscaleResult> {
        Ok(UnscaleResult::default())
    }

    fn update(&mut self, _: bool) -> training::Result<()> {
        Ok(())
    }

    fn current(&self) -> f64 {
        1.0
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn load_state(&mut self, _: &Value) -> training::Result<()> {
        Ok(())
    }
}

#[test]
fn what_needs_all_gradients_is_refused_by_name() {
    let (_, mut optimizer) = leaves([2.0, 3.0]);
    let refusals = [
        optimizer.begin(StepSettings { clip: Some(1.0), ..settings(1) }),
        optimizer.begin(StepSettings { non_finite: NonFinite::Skip, ..settings(1) }),
        optimizer.check(&mut Enabled),
    ];
    let refusals = refusals.map(|refusal| refusal.unwrap_err().to_string());
    for (refusal, what) in
        refusals.iter().zip(["a maximum gradient norm", "steps that are skipped", "a loss scaler"])
    {
        assert!(refusal.contains(what), "{refusal}");
    }
}
