//! Loss scalers: unscaling, several optimizers, and calls out of order.

use amp::{
    DynamicGradScaler, DynamicRule, DynamicScale, DynamicScalerConfig, Error, ScaleRule, StaticGradScaler,
    StaticRule,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};
use training::optimizer::{DeviceOptimizer, Group, Sgd};

/// The message of an error.
fn words<T>(result: amp::Result<T>) -> String {
    result.err().unwrap().to_string()
}

fn leaf(values: &[f32]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn sgd(parameters: &[&Tensor]) -> DeviceOptimizer {
    let named = parameters.iter().enumerate();
    let named: Vec<_> = named.map(|(index, w)| (format!("w{index}"), w.shallow_clone())).collect();
    DeviceOptimizer::new(Sgd, vec![Group::new(named, 0.5)]).unwrap()
}

fn gradient(w: &Tensor, values: &[f32]) {
    runtime::autograd::set_grad(w, Some(&Tensor::from_slice(values))).unwrap();
}

fn values(t: &Tensor) -> Vec<f32> {
    Vec::try_from(t.detach()).unwrap()
}

fn dynamic() -> DynamicGradScaler {
    DynamicGradScaler::new(DynamicScalerConfig { init_scale: 8.0, ..DynamicScalerConfig::default() }).unwrap()
}

#[test]
fn a_scaled_backward_gives_the_unscaled_step() {
    let make = || leaf(&[3.0, -1.5, 0.25]);
    let (scaled, plain) = (make(), make());
    let (mut ours, mut theirs) = (sgd(&[&scaled]), sgd(&[&plain]));
    let mut scaler = dynamic();
    for _ in 0..3 {
        // Two micro-batches with the same scale.
        for factor in [1.0, 0.5] {
            let loss = |w: &Tensor| (w.square() * factor).sum(Kind::Float);
            runtime::autograd::backward(&[&scaler.scale(&loss(&scaled)).unwrap()]).unwrap();
            runtime::autograd::backward(&[&loss(&plain)]).unwrap();
        }
        assert!(scaler.step("w", &mut ours).unwrap());
        theirs.step().unwrap();
        assert!(!scaler.update().unwrap());
        // Scaling by a power of two is exact.
        assert_eq!(values(&scaled), values(&plain));
        for w in [&scaled, &plain] {
            runtime::autograd::set_grad(w, None).unwrap();
        }
    }
}

#[test]
fn only_the_overflowing_optimizer_skips_its_step() {
    let (a, b) = (leaf(&[1.0]), leaf(&[1.0, 1.0]));
    let (mut first, mut second) = (sgd(&[&a]), sgd(&[&b]));
    let mut scaler = dynamic();
    gradient(&a, &[8.0]);
    gradient(&b, &[8.0, f32::NAN]);
    assert!(scaler.step("first", &mut first).unwrap());
    assert!(!scaler.step("second", &mut second).unwrap());
    assert!(scaler.update().unwrap());
    assert_eq!((values(&a), values(&b)), (vec![0.5], vec![1.0, 1.0]));
    assert_eq!(scaler.rule().scale(), 4.0);
}

#[test]
fn clipping_uses_unscaled_gradients_and_their_norm() {
    let (w, frozen) = (leaf(&[0.0, 0.0]), leaf(&[1.0]));
    let mut optimizer = sgd(&[&w, &frozen]);
    let mut scaler = StaticGradScaler::new(1024.0).unwrap();
    gradient(&w, &[3.0 * 1024.0, 4.0 * 1024.0]);
    let grads = optimizer.gradients().unwrap();
    assert_eq!(grads.len(), 1, "a parameter without a gradient takes no part");
    let unscaled = scaler.unscale_("w", &grads, true).unwrap();
    assert_eq!(unscaled.norm.unwrap().double_value(&[]), 5.0);
    training::clip::clip_(&grads, 1.0, training::clip::NonFinite::Fail).unwrap();
    assert!(scaler.step("w", &mut optimizer).unwrap());
    let moved = values(&w);
    assert!((moved[0] + 0.3).abs() < 1e-6 && (moved[1] + 0.4).abs() < 1e-6, "{moved:?}");
    assert_eq!(values(&frozen), [1.0]);
}

#[test]
fn calls_out_of_order_fail_before_any_change() {
    let w = leaf(&[1.0]);
    let mut optimizer = sgd(&[&w]);
    let mut scaler = dynamic();
    assert!(words(scaler.update()).contains("no optimizer has stepped since the last update"));

    gradient(&w, &[8.0]);
    let grads = optimizer.gradients().unwrap();
    scaler.unscale_("w", &grads, false).unwrap();
    let unscaled = scaler.unscale_("w", &grads, false);
    assert!(words(unscaled).contains("the gradients of optimizer `w` are unscaled already"));
    assert_eq!(values(&w.grad()), [1.0], "divided once");
    // Unscaling without a step does not allow an update.
    assert!(words(scaler.update()).contains("no optimizer has stepped since the last update"));
    assert!(scaler.step("w", &mut optimizer).unwrap());
    let stepped = "optimizer `w` has stepped since the last update";
    assert!(words(scaler.step("w", &mut optimizer)).contains(stepped));
    assert!(words(scaler.unscale_("w", &grads, false)).contains(stepped));
    assert_eq!(values(&w), [0.5], "stepped once");
    assert!(!scaler.update().unwrap());

    let half = [Tensor::ones([2], (Kind::Half, Device::Cpu))];
    let unscaled = scaler.unscale_("half", &half, false);
    assert!(words(unscaled).contains("gradient 0 of optimizer `half` is fp16"));
    // An error does not change the scaler.
    assert!(scaler.unscale_("half", &grads, false).is_ok());
}

#[test]
fn invalid_scale_factors_are_refused() {
    let good = DynamicScalerConfig::default();
    for (options, name) in [
        (DynamicScalerConfig { init_scale: 0.0, ..good }, "init_scale"),
        (DynamicScalerConfig { init_scale: f32::NAN, ..good }, "init_scale"),
        (DynamicScalerConfig { growth_factor: 1.0, ..good }, "growth_factor"),
        (DynamicScalerConfig { growth_factor: f64::INFINITY, ..good }, "growth_factor"),
        (DynamicScalerConfig { backoff_factor: 1.0, ..good }, "backoff_factor"),
        (DynamicScalerConfig { backoff_factor: 0.0, ..good }, "backoff_factor"),
        (DynamicScalerConfig { growth_interval: 0, ..good }, "growth_interval"),
        (DynamicScalerConfig { hysteresis: 0, ..good }, "hysteresis"),
        (DynamicScalerConfig { min_scale: -1.0, ..good }, "min_scale"),
        (DynamicScalerConfig { max_scale: 1.0, min_scale: 2.0, ..good }, "max_scale"),
        (DynamicScalerConfig { init_scale: 4.0, max_scale: 2.0, ..good }, "init_scale"),
    ] {
        let error = DynamicGradScaler::new(options).unwrap_err();
        assert!(error.is_invalid_argument(), "{name}: {error}");
        assert!(error.to_string().starts_with(&format!("gradient scaler: `{name}` is ")), "{name}: {error}");
    }
    for scale in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        assert!(words(StaticGradScaler::new(scale)).starts_with("gradient scaler: `scale` is "));
    }
}

#[test]
fn a_state_of_another_scaler_is_refused_and_changes_nothing() {
    let mut scaler = dynamic();
    let before = scaler.state();
    for state in [
        StaticGradScaler::new(8.0).unwrap().state(),
        serde_json::Value::Null,
        serde_json::json!({ "kind": "dynamic scaler", "state": { "scale": 1.0 } }),
    ] {
        assert!(words(scaler.load_state(&state)).contains("does not load into a dynamic scaler"), "{state}");
        assert_eq!(scaler.state(), before);
    }
    let error = StaticGradScaler::new(4.0).unwrap().load_state(&StaticGradScaler::new(8.0).unwrap().state());
    assert!(error.unwrap_err().to_string().contains("this run's scale is 4"));
}

#[test]
fn a_state_with_old_names_loads() {
    let former = serde_json::json!({ "kind": "dynamic scaler", "state": {
        "options": {
            "initial": 8.0, "growth": 4.0, "backoff": 0.25, "interval": 7, "least": 0.5, "most": 64.0, "hysteresis": 2
        },
        "now": { "scale": 16.0, "tracker": 3, "bears": 1 },
        "skipped": 5,
        "at_least": 4,
    }});
    let mut scaler = dynamic();
    scaler.load_state(&former).unwrap();
    let options = DynamicScalerConfig {
        init_scale: 8.0,
        growth_factor: 4.0,
        backoff_factor: 0.25,
        growth_interval: 7,
        min_scale: 0.5,
        max_scale: 64.0,
        hysteresis: 2,
    };
    assert_eq!(scaler.rule().options(), &options);
    let current = DynamicScale { scale: 16.0, growth_tracker: 3, hysteresis_tracker: 1 };
    assert_eq!(scaler.rule().current(), current);
    let mut again = dynamic();
    again.load_state(&scaler.state()).unwrap();
    assert_eq!(again.rule(), scaler.rule());
}

#[test]
fn overflow_at_every_scale_ends_the_run() {
    let options = DynamicScalerConfig { init_scale: 2.0, min_scale: 1.0, ..DynamicScalerConfig::default() };
    let mut rule = DynamicRule::new(options).unwrap();
    let end = (1..100).find_map(|step| rule.update(true).err().map(|error| (step, error))).unwrap();
    let (52, Error::Overflowed(message)) = end else { panic!("{end:?}") };
    assert!(message.contains("52 steps in a row"), "{message}");
    assert!(message.contains("at the minimum scale, 1e0"), "{message}");
    // A good step between forgives.
    let mut rule = DynamicRule::new(options).unwrap();
    assert!((1..1000).all(|step| rule.update(step % 40 != 0).is_ok()));

    let mut fixed = StaticRule::new(8.0).unwrap().with_patience(3);
    assert!((0..3).all(|_| fixed.update(true).is_ok()));
    let Err(Error::Overflowed(message)) = fixed.update(true) else { panic!("no error") };
    assert!(
        message.contains("4 steps in a row had infinite or NaN gradients at the static scale 8"),
        "{message}"
    );
}

#[test]
fn hysteresis_tolerates_overflows_until_the_scale_grows() {
    let options = DynamicScalerConfig {
        init_scale: 16.0,
        growth_interval: 2,
        hysteresis: 2,
        ..DynamicScalerConfig::default()
    };
    let mut scale = DynamicScale::new(&options);
    let seen: Vec<f32> = [true, true, true, false, false, true, true]
        .into_iter()
        .map(|overflow| {
            scale.update(overflow, &options);
            scale.scale
        })
        .collect();
    // With a hysteresis of 2 the first overflow does not lower the scale, the next two do; after growth the count starts
    // again.
    assert_eq!(seen, [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 4.0]);
}

proptest! {
    /// Against libtorch's own update, which has neither bounds nor hysteresis.
    #[test]
    fn the_scale_matches_libtorchs(
        overflows in prop::collection::vec(any::<bool>(), 1..200),
        exponent in -20i32..100,
        growth_factor in 1.01f64..9.0,
        backoff_factor in 0.05f64..0.99,
        growth_interval in 1u32..5,
    ) {
        let init_scale = 2f32.powi(exponent);
        let options = DynamicScalerConfig { init_scale, growth_factor, backoff_factor, growth_interval, ..DynamicScalerConfig::default() };
        let mut ours = DynamicScale::new(&options);
        let scale = Tensor::from_slice(&[init_scale]);
        let growth_tracker = Tensor::from_slice(&[0i32]);
        for overflow in overflows {
            ours.update(overflow, &options);
            let found = Tensor::from_slice(&[f32::from(u8::from(overflow))]);
            let _ = scale.shallow_clone().internal_amp_update_scale_(&growth_tracker, &found, growth_factor, backoff_factor, growth_interval.into());
            let theirs = (scale.double_value(&[0]) as f32, growth_tracker.int64_value(&[0]) as u32);
            prop_assume!(theirs.0 >= f32::MIN_POSITIVE);
            prop_assert_eq!((ours.scale, ours.growth_tracker), theirs);
        }
    }
}
