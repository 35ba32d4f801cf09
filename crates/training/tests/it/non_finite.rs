//! A loss or gradient that is not finite changes no weight, whatever the optimizer, with and without clipping.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use models::module::{LanguageModel, parameters, trainable};
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::autograd::{GradientHook, set_grad};
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::clip::NonFinite;
use training::observer::Collect;
use training::optimizer::{
    AdaGrad, Adam, AdamW, DeviceOptimizer, Group, Implementation, Momentum, Nesterov, Optimizer, RmsProp,
    Rule, Sgd, StepDecision, StepSettings, ZeroGrad,
};
use training::scaler::NoScaler;
use training::trainer::{StopReason, TrainerConfig};
use training::{Error, Trainer};

const ALL: [Implementation; 3] = [Implementation::ForLoop, Implementation::Foreach, Implementation::Fused];

fn rules() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(Sgd),
        Box::new(Momentum::default()),
        Box::new(Nesterov::default()),
        Box::new(AdaGrad::default()),
        Box::new(RmsProp::default()),
        Box::new(Adam::default()),
        Box::new(AdamW::default()),
    ]
}

/// Two parameters of different dtypes; the last element of the second one's gradient is `last`.
fn stepped(
    optimizer: &mut DeviceOptimizer,
    settings: StepSettings,
    last: f64,
    loss: f64,
) -> training::Result<bool> {
    optimizer.begin(settings)?;
    let parameters: Vec<Tensor> =
        optimizer.groups()[0].parameters.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
    for tensor in &parameters {
        set_grad(tensor, Some(&tensor.detach().full_like(0.5)))?;
    }
    let _ = parameters[1].grad().get(4).fill_(last);
    optimizer.watch_loss(&Tensor::from(loss).reshape([1]));
    let decision = optimizer.unscale_and_clip(&mut NoScaler)?;
    Optimizer::take_step(optimizer, &decision)?;
    Optimizer::zero_grad(optimizer, ZeroGrad::ToNone)?;
    let StepDecision::Host { skip, overflow: false, .. } = decision else { panic!("{decision:?}") };
    Ok(skip)
}

#[test]
fn every_optimizer_skips_or_refuses_what_is_not_finite() {
    for implementation in ALL {
        for rule in rules() {
            let name = rule.name();
            let [a, b] = [Kind::Float, Kind::BFloat16]
                .map(|kind| Tensor::ones([5], (kind, Device::Cpu)).set_requires_grad(true));
            let named =
                [("a", &a), ("b", &b)].map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
            let optimizer = DeviceOptimizer::boxed(rule, vec![Group::new(named, 0.1)]).unwrap();
            let mut optimizer = optimizer.with_implementation(implementation).with_master_weights();
            let values = |tensors: [&Tensor; 2]| {
                tensors.map(|tensor| Vec::<f64>::try_from(tensor.detach().to_kind(Kind::Double)).unwrap())
            };
            for clip in [None, Some(1.0)] {
                let settings = |non_finite| StepSettings { clip, non_finite, ..StepSettings::default() };
                let (before, state) = (values([&a, &b]), optimizer.state());
                for (last, loss) in
                    [(f64::NAN, 1.0), (f64::INFINITY, 1.0), (f64::NEG_INFINITY, 1.0), (0.5, f64::NAN)]
                {
                    let case = format!("{name} {implementation:?} {clip:?}: {last}, loss {loss}");
                    assert!(
                        stepped(&mut optimizer, settings(NonFinite::Skip), last, loss).unwrap(),
                        "{case}"
                    );
                    let error = stepped(&mut optimizer, settings(NonFinite::Fail), last, loss).unwrap_err();
                    Optimizer::abandon(&mut optimizer, ZeroGrad::ToNone).unwrap();
                    let expected = match (loss.is_nan(), clip) {
                        (true, _) => "the loss is NaN",
                        (_, None) => "a gradient is infinite or NaN (of `b` first)",
                        (_, Some(_)) if last.is_nan() => "the gradients' norm is NaN (of `b` first)",
                        _ => "the gradients' norm is inf (of `b` first)",
                    };
                    assert!(error.to_string().contains(expected), "{case}: {error}");
                    assert_eq!(values([&a, &b]), before, "{case}");
                    assert_eq!(optimizer.state(), state, "{case}");
                }
                // Squares that overflow are no infinities, and neither changes what is finite.
                let large = if clip.is_some() { 0.5 } else { 1e30 };
                assert!(!stepped(&mut optimizer, settings(NonFinite::Fail), large, 1.0).unwrap(), "{name}");
                assert_ne!(values([&a, &b]), before, "{name}");
            }
            let ignored = StepSettings { non_finite: NonFinite::Ignore, ..StepSettings::default() };
            assert!(!stepped(&mut optimizer, ignored, f64::NAN, f64::NAN).unwrap());
            assert!(values([&a, &b])[1][4].is_nan(), "{name} {implementation:?}: as PyTorch does");
        }
    }
}

const DATA: Synthetic = Synthetic {
    seed: 5,
    vocabulary: 16,
    rows: 4,
    length: 12,
    noise: 1,
    batches: None,
    device: Device::Cpu,
    position: 0,
};

fn model() -> Gpt2Like {
    runtime::random::seed(3).unwrap();
    let config = Gpt2LikeConfig {
        vocab_size: 16,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 12,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap()
}

fn trainer(model: Gpt2Like, options: TrainerConfig) -> (Trainer, Collect) {
    let groups = vec![Group::new(trainable(&model), 1e-2)];
    let optimizer = DeviceOptimizer::new(Sgd, groups).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    (trainer, records)
}

/// Makes the gradient of the first parameter NaN in some of the backward passes; the loss stays finite.
fn spoil(model: &dyn LanguageModel, spoiled: impl Fn(u64) -> bool + Send + Sync + 'static) -> GradientHook {
    let (_, first) = parameters(model).swap_remove(0);
    let (own, passes) = (Mutex::new(first.shallow_clone()), AtomicU64::new(0));
    GradientHook::new(first, move || {
        if spoiled(passes.fetch_add(1, Ordering::SeqCst) + 1) {
            let _no_grad = tch::no_grad_guard();
            let _ = own.lock().unwrap().grad().get(0).fill_(f64::NAN);
        }
        Ok(())
    })
    .unwrap()
}

#[test]
fn a_step_that_is_skipped_does_not_end_a_training() {
    for clip in [None, Some(1.0)] {
        let options = TrainerConfig { steps: 4, clip, log_every: 1, ..TrainerConfig::default() };
        let (mut trainer, records) = trainer(model(), options);
        let _hook = spoil(trainer.model.as_ref(), |pass| pass == 2);
        assert_eq!(trainer.run(&mut DATA.clone(), None).unwrap(), StopReason::Completed);
        let records = records.take();
        let skipped: Vec<bool> = records.iter().map(|record| record.skipped).collect();
        assert_eq!(skipped, [false, true, false, false], "{clip:?}");
        assert!(records.iter().all(|record| record.loss.is_finite()));
        let all = parameters(trainer.model.as_ref());
        assert!(all.iter().all(|(_, tensor)| tensor.isfinite().all().int64_value(&[]) == 1));
        assert!(!trainer.has_skipped_all() && trainer.first_non_finite().is_none());
    }
}

#[test]
fn a_training_that_skips_every_step_says_so() {
    let (mut trainer, _) = trainer(model(), TrainerConfig { steps: 3, ..TrainerConfig::default() });
    let _hook = spoil(trainer.model.as_ref(), |_| true);
    trainer.run(&mut DATA.clone(), None).unwrap();
    assert!(trainer.has_skipped_all());
}

#[test]
fn a_failing_step_leaves_everything_as_it_was() {
    let options = TrainerConfig { steps: 4, non_finite: NonFinite::Fail, ..TrainerConfig::default() };
    let (mut trainer, _) = trainer(model(), options);
    let _hook = spoil(trainer.model.as_ref(), |pass| pass == 2);
    trainer.advance(1, &mut DATA.clone(), None).unwrap();
    let before: Vec<Tensor> =
        parameters(trainer.model.as_ref()).iter().map(|(_, tensor)| tensor.detach().copy()).collect();
    let error = trainer.advance(2, &mut DATA.clone(), None).unwrap_err();
    let (first, _) = parameters(trainer.model.as_ref()).swap_remove(0);
    let expected = format!("a gradient is infinite or NaN (of `{first}` first)");
    assert!(error.to_string().contains(&expected) && !matches!(error, Error::Interrupted { .. }), "{error}");
    for ((name, after), before) in parameters(trainer.model.as_ref()).iter().zip(&before) {
        assert!(after.equal(before), "{name}");
    }
    // The third backward is not spoiled.
    trainer.advance(2, &mut DATA.clone(), None).unwrap();
}

#[test]
fn a_weight_that_is_not_finite_ends_a_training_or_an_evaluation_by_name() {
    for bad in [f64::NAN, f64::INFINITY] {
        for frozen in [true, false] {
            let model = model();
            let (name, _) = parameters(&model).swap_remove(3);
            if frozen {
                models::module::freeze(&model, &name.replace('.', r"\."), true).unwrap();
            }
            let spoiled = parameters(&model).swap_remove(3).1.shallow_clone();
            let _ = tch::no_grad(|| spoiled.shallow_clone().view([-1]).get(0).fill_(bad));
            let (mut trainer, records) =
                trainer(model, TrainerConfig { steps: 3, ..TrainerConfig::default() });
            let error = trainer.evaluate(&mut Synthetic { batches: Some(1), ..DATA }).unwrap_err();
            assert!(matches!(&error, Error::NonFiniteWeight { weight, .. } if *weight == name), "{error}");
            if !frozen {
                // Its training ends as any that diverges, or comes to its end and says so.
                trainer.run(&mut DATA.clone(), None).unwrap();
                assert!(trainer.first_non_finite().is_some() && trainer.has_skipped_all());
                assert_eq!(trainer.non_finite_weight().unwrap(), Some(name));
                continue;
            }
            let error = trainer.run(&mut DATA.clone(), None).unwrap_err();
            assert!(matches!(&error, Error::NonFiniteWeight { weight, .. } if *weight == name), "{error}");
            let expected = format!("because `{name}` has an infinity or a NaN");
            assert!(error.to_string().contains(&expected), "{error}");
            assert!(!records.take().is_empty(), "the step was recorded");
        }
    }
}
