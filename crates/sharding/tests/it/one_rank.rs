//! What needs no other rank: masters that follow weights, tensors listed twice, gradients that are not finite, and going on after a
//! backward that failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use models::module::{self, LanguageModel};
use models::{DecoderConfig, Llama};
use runtime::autograd::{GradientHook, set_grad};
use runtime::collectives::Group as Ranks;
use sharding::{ShardedOptimizer, ShardingConfig, Stage};
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::clip::NonFinite;
use training::optimizer::{
    Adafactor, AdamW, DeviceOptimizer, Group, Muon, Optimizer, Rule, Sgd, StepDecision, StepSettings,
    ZeroGrad,
};
use training::probe::StepProbe;
use training::scaler::NoScaler;
use training::{Trainer, trainer};

fn leaf(kind: Kind, size: i64) -> Tensor {
    Tensor::ones([size], (kind, Device::Cpu)).set_requires_grad(true)
}

fn named(name: &str, tensor: &Tensor) -> (String, Tensor) {
    (name.to_owned(), tensor.shallow_clone())
}

/// A step with gradients of 1, except for the first, which is `first`.
fn step(
    optimizer: &mut dyn Optimizer,
    settings: StepSettings,
    first: f64,
    loss: f64,
) -> training::Result<bool> {
    optimizer.begin(settings)?;
    let all: Vec<Tensor> = optimizer
        .groups()
        .iter()
        .flat_map(|group| &group.parameters)
        .map(|(_, w)| w.shallow_clone())
        .collect();
    for w in &all {
        set_grad(w, Some(&w.detach().ones_like()))?;
    }
    let _ = all[0].grad().get(0).fill_(first);
    optimizer.reduce()?;
    optimizer.watch_loss(&Tensor::from(loss).reshape([1]));
    let decision = optimizer.unscale_and_clip(&mut NoScaler)?;
    optimizer.take_step(&decision)?;
    optimizer.zero_grad(ZeroGrad::ToNone)?;
    let StepDecision::Host { skip, .. } = decision else { panic!("{decision:?}") };
    Ok(skip)
}

#[test]
fn rules_that_update_whole_tensors_are_refused() {
    let rules: [Box<dyn Rule>; 2] = [Box::new(Muon::default()), Box::new(Adafactor::default())];
    for rule in rules {
        let name = rule.name();
        let w = Tensor::ones([4, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let groups = vec![Group::new(vec![named("w", &w)], 0.1)];
        let ranks = Ranks::alone();
        let error = ShardedOptimizer::boxed(rule, groups, &ranks, ShardingConfig::default()).unwrap_err();
        let expected = format!(
            "sharding: the update of the rule {name} depends on whole tensors, which are divided among ranks; take AdamW, AdamW8bit or Lion, \
             or train in one process"
        );
        assert_eq!(error.to_string(), expected);
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double)).unwrap()
}

/// Plain numbers: what was written, less what the step takes.
#[test]
fn master_copies_follow_weights_that_others_write() {
    for stage in [Stage::One, Stage::Two] {
        let w = leaf(Kind::BFloat16, 3);
        let options = ShardingConfig { stage, master_weights: true, ..ShardingConfig::default() };
        let groups = vec![Group::new(vec![named("w", &w)], 0.125)];
        let mut optimizer = ShardedOptimizer::new(Sgd, groups, &Ranks::alone(), options).unwrap();
        let mut stepped = || {
            assert!(!step(&mut optimizer, StepSettings::default(), 1.0, 1.0).unwrap());
            values(&w)
        };
        assert_eq!(stepped(), [0.875; 3]);
        assert_eq!(stepped(), [0.75; 3]);
        let _ = tch::no_grad(|| w.shallow_clone().fill_(5.0));
        assert_eq!(stepped(), [4.875; 3], "{stage:?}");
        let _ = tch::no_grad(|| w.get(1).fill_(2.0));
        assert_eq!(stepped(), [4.75, 1.875, 4.75], "{stage:?}");
    }
}

#[test]
fn a_tensor_under_two_names_is_refused() {
    let w = leaf(Kind::Float, 3);
    let groups = vec![Group::new(vec![named("w", &w), named("tied", &w)], 0.1)];
    let error = ShardedOptimizer::new(Sgd, groups, &Ranks::alone(), ShardingConfig::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("`w` and `tied` are one tensor"), "{error}");
}

#[test]
fn what_is_not_finite_changes_no_weight() {
    for stage in [Stage::One, Stage::Two] {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
            for clip in [None, Some(10.0)] {
                let (a, b) = (leaf(kind, 5000), leaf(kind, 3));
                let groups = vec![Group::new(vec![named("a", &a), named("b", &b)], 0.125)];
                let options = ShardingConfig { stage, ..ShardingConfig::default() };
                let mut optimizer =
                    ShardedOptimizer::new(AdamW::default(), groups, &Ranks::alone(), options).unwrap();
                let settings = |non_finite| StepSettings { clip, non_finite, ..StepSettings::default() };
                for (first, loss) in [(f64::NAN, 1.0), (f64::INFINITY, 1.0), (1.0, f64::INFINITY)] {
                    let case = format!("{stage:?} {kind:?} {clip:?} {first} {loss}");
                    assert!(step(&mut optimizer, settings(NonFinite::Skip), first, loss).unwrap(), "{case}");
                    let error = step(&mut optimizer, settings(NonFinite::Fail), first, loss).unwrap_err();
                    let expected = if loss.is_finite() { "(of `a` first)" } else { "the loss is inf" };
                    assert!(error.to_string().contains(expected), "{case}: {error}");
                    optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
                    assert!(values(&a).into_iter().chain(values(&b)).all(|value| value == 1.0), "{case}");
                    assert!(optimizer.state().unwrap().is_empty(), "{case}: no step was counted");
                }
                assert!(!step(&mut optimizer, settings(NonFinite::Fail), 1.0, 1.0).unwrap());
                assert!(values(&a).into_iter().chain(values(&b)).all(|value| value < 1.0));
            }
        }
    }
}

const DATA: Synthetic = Synthetic {
    seed: 3,
    vocabulary: 61,
    rows: 2,
    length: 12,
    noise: 2,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

/// A training by a sharded optimizer, or for no stage by an ordinary one.
fn open(stage: Option<Stage>) -> Trainer {
    runtime::random::seed(1).unwrap();
    let model = Llama::new(&DecoderConfig::qwen2(61, 24, 56, 3, 2), (Kind::Float, Device::Cpu)).unwrap();
    let parameters = module::trainable(&model);
    let order = parameters.iter().map(|(name, _)| name.clone()).collect();
    let groups = vec![Group::new(parameters, 3e-3)];
    let optimizer: Box<dyn Optimizer> = match stage {
        None => Box::new(DeviceOptimizer::new(AdamW::default(), groups).unwrap()),
        Some(stage) => {
            let options = ShardingConfig { stage, order, bucket_bytes: 2000, ..ShardingConfig::default() };
            Box::new(ShardedOptimizer::new(AdamW::default(), groups, &Ranks::alone(), options).unwrap())
        }
    };
    let options = trainer::TrainerConfig { steps: 4, log_every: 1, ..trainer::TrainerConfig::default() };
    Trainer::new(Box::new(model), optimizer, options).unwrap()
}

fn weights(model: &dyn LanguageModel) -> Vec<(String, Tensor)> {
    module::parameters(model).into_iter().map(|(name, w)| (name, w.detach().copy())).collect()
}

fn assert_equal(expected: &[(String, Tensor)], found: &[(String, Tensor)], case: &str) {
    for ((name, expected), (_, found)) in expected.iter().zip(found) {
        assert!(expected.equal(found), "{case}: {name}");
    }
}

#[test]
fn a_probe_changes_nothing_and_sees_every_gradient() {
    let mut plain = open(None);
    plain.run(&mut DATA.clone(), None).unwrap();
    let expected = weights(plain.model.as_ref());
    for stage in [Stage::One, Stage::Two] {
        for before in 0..3 {
            let (mut trainer, mut data) = (open(Some(stage)), DATA.clone());
            trainer.advance(before, &mut data, None).unwrap();
            for _ in 0..2 {
                let probe = StepProbe::run(&mut trainer, &mut data).unwrap().unwrap();
                assert_eq!(probe.without_gradient, Vec::<String>::new(), "{stage:?} {before}");
            }
            trainer.run(&mut data, None).unwrap();
            assert_equal(&expected, &weights(trainer.model.as_ref()), &format!("{stage:?} {before}"));
        }
    }
}

/// Half of a backward has been reduced by the time that a gradient of the first layer fails.
#[test]
fn a_step_goes_on_after_a_backward_that_failed() {
    let plain = {
        let mut plain = open(None);
        plain.run(&mut DATA.clone(), None).unwrap();
        weights(plain.model.as_ref())
    };
    for stage in [Stage::One, Stage::Two] {
        let folder = tempfile::tempdir().unwrap();
        let (mut trainer, mut data) = (open(Some(stage)), DATA.clone());
        trainer.checkpoints = Some(training::checkpoint::Checkpoints::open(folder.path(), 2).unwrap());
        trainer.options.checkpoint_every = Some(1);
        let fails = Arc::new(AtomicBool::new(false));
        let (name, first) = module::parameters(trainer.model.as_ref()).swap_remove(1);
        let refused = fails.clone();
        let _hook = GradientHook::new(first, move || match refused.load(Ordering::SeqCst) {
            true => Err(runtime::Error::Other("no memory for a gradient".into())),
            false => Ok(()),
        })
        .unwrap();
        trainer.advance(2, &mut data, None).unwrap();
        fails.store(true, Ordering::SeqCst);
        let error = trainer.advance(3, &mut data, None).unwrap_err().to_string();
        assert!(error.contains("no memory for a gradient"), "{name}: {error}");
        fails.store(false, Ordering::SeqCst);
        assert_eq!(trainer.resume(&mut data).unwrap(), Some(2));
        trainer.run(&mut data, None).unwrap();
        assert_equal(&plain, &weights(trainer.model.as_ref()), &format!("{stage:?}"));
    }
}
