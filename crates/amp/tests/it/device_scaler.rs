//! `DeviceScaler`: the same bits as on the host, skipped steps change nothing, and no host read.

use amp::{
    DeviceRule, DeviceScaler, DynamicGradScaler, DynamicRule, DynamicScalerConfig, Error, ScaleRule,
    StaticGradScaler, StaticRule,
};
use expect_test::expect;
use proptest::prelude::*;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};
use training::optimizer::{Adam, AdamW, DeviceOptimizer, Group, Implementation, Momentum};

/// Bits, so that a NaN equals itself and −0 is not 0.
fn bits(tensor: &Tensor) -> Vec<u64> {
    let values: Vec<f64> = Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

/// The message of an error.
fn message<T>(result: amp::Result<T>) -> String {
    result.err().unwrap().to_string()
}

fn flag(overflow: bool) -> Tensor {
    Tensor::from(overflow)
}

fn state_vector(rule: &impl DeviceRule) -> Tensor {
    Tensor::from_slice(&rule.state_vector())
}

fn options() -> impl Strategy<Value = DynamicScalerConfig> {
    let factors = (1.01f64..9.0, 0.05f64..0.99, 1u32..5, 1u32..4);
    (-20i32..120, factors, 0i32..6, 0i32..6).prop_map(
        |(exponent, (growth_factor, backoff_factor, growth_interval, hysteresis), below, above)| {
            let init_scale = 2f32.powi(exponent) * 1.1;
            DynamicScalerConfig {
                init_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
                hysteresis,
                min_scale: if below == 0 { f32::MIN_POSITIVE } else { init_scale / 2f32.powi(below) },
                max_scale: if above == 0 { f32::MAX } else { init_scale * 2f32.powi(above) },
            }
        },
    )
}

proptest! {
    #[test]
    fn the_device_scale_matches_the_host_scale(
        options in options(),
        overflows in prop::collection::vec(any::<bool>(), 1..120),
    ) {
        let mut host = DynamicRule::new(options).unwrap();
        let mut device = state_vector(&host);
        for overflow in overflows {
            let ends = host.update(overflow).is_err();
            device = host.update_on_device(&device, &flag(overflow)).unwrap();
            prop_assert_eq!(bits(&device), bits(&state_vector(&host)));
            // Both end at the same step.
            let found = Vec::<f64>::try_from(&device).unwrap();
            prop_assert_eq!(host.clone().set_state_vector(&found).is_err(), ends);
        }
    }

    #[test]
    fn a_static_scale_stays_on_the_device(overflows in prop::collection::vec(prop::bool::weighted(0.8), 1..60)) {
        let mut host = StaticRule::new(1000.0).unwrap().with_patience(9);
        let mut device = state_vector(&host);
        for overflow in overflows {
            let ends = host.update(overflow).is_err();
            device = host.update_on_device(&device, &flag(overflow)).unwrap();
            prop_assert_eq!(bits(&device), bits(&state_vector(&host)));
            prop_assert_eq!(host.clone().set_state_vector(&Vec::<f64>::try_from(&device).unwrap()).is_err(), ends);
        }
    }

    /// Against libtorch's own kernel, which has neither bounds nor hysteresis.
    #[test]
    fn the_device_scale_matches_libtorchs(
        overflows in prop::collection::vec(any::<bool>(), 1..100),
        exponent in -20i32..120,
        growth_factor in 1.01f64..9.0,
        backoff_factor in 0.05f64..0.99,
        growth_interval in 1u32..5,
    ) {
        let init_scale = 2f32.powi(exponent);
        let options = DynamicScalerConfig { init_scale, growth_factor, backoff_factor, growth_interval, ..DynamicScalerConfig::default() };
        let rule = DynamicRule::new(options).unwrap();
        let mut ours = state_vector(&rule);
        let (scale, growth_tracker) = (Tensor::from_slice(&[init_scale]), Tensor::from_slice(&[0i32]));
        for overflow in overflows {
            ours = rule.update_on_device(&ours, &flag(overflow)).unwrap();
            let found = Tensor::from_slice(&[f32::from(u8::from(overflow))]);
            let _ = scale.shallow_clone().internal_amp_update_scale_(&growth_tracker, &found, growth_factor, backoff_factor, growth_interval.into());
            prop_assume!(scale.double_value(&[0]) >= f64::from(f32::MIN_POSITIVE));
            let found = (ours.double_value(&[0]), ours.double_value(&[1]));
            prop_assert_eq!(found, (scale.double_value(&[0]), growth_tracker.double_value(&[0])));
        }
    }
}

/// Returns parameters of several shapes, the same for the same seed.
fn leaves(seed: i64, count: i64, kind: Kind) -> Vec<(String, Tensor)> {
    let mut generator = Generator::new(seed as u64).unwrap();
    let leaf = |index: i64| {
        let drawn = generator.normal(&[3 + index % 5, 4], kind::FLOAT_CPU).unwrap();
        (format!("w{index}"), drawn.to_kind(kind).set_requires_grad(true))
    };
    (0..count).map(leaf).collect()
}

/// Sets gradients as after backward from a loss times `scale`.
fn backward(parameters: &[(String, Tensor)], step: u64, scale: f64, bad: bool) {
    let mut generator = Generator::new(100 + step).unwrap();
    for (index, (_, w)) in parameters.iter().enumerate() {
        let drawn = generator.normal(&w.size(), kind::FLOAT_CPU).unwrap();
        let grad = (drawn * scale).to_kind(w.kind());
        if bad && index == parameters.len() / 2 {
            let _ = grad.get(0).fill_(if step.is_multiple_of(2) { f64::NAN } else { f64::INFINITY });
        }
        runtime::autograd::set_grad(w, Some(&grad)).unwrap();
    }
}

type Make = fn(Vec<(String, Tensor)>) -> DeviceOptimizer;

fn optimizers() -> Vec<(&'static str, Kind, Make)> {
    fn group(parameters: Vec<(String, Tensor)>) -> Vec<Group> {
        vec![Group { weight_decay: 0.1, ..Group::new(parameters, 1e-2) }]
    }
    vec![
        ("Adam", Kind::Float, |p| DeviceOptimizer::new(Adam::default(), group(p)).unwrap()),
        ("AdamW", Kind::Float, |p| DeviceOptimizer::new(AdamW::default(), group(p)).unwrap()),
        ("AdamW, fp64", Kind::Double, |p| DeviceOptimizer::new(AdamW::default(), group(p)).unwrap()),
        ("AdamW, bf16", Kind::BFloat16, |p| DeviceOptimizer::new(AdamW::default(), group(p)).unwrap()),
        ("AdamW, bf16 with masters", Kind::BFloat16, |p| {
            DeviceOptimizer::new(AdamW::default(), group(p)).unwrap().with_master_weights()
        }),
    ]
}

/// Returns parameters and all state in bits.
fn everything(parameters: &[(String, Tensor)], optimizer: &DeviceOptimizer) -> Vec<(String, Vec<u64>)> {
    let state = optimizer.state();
    parameters.iter().chain(&state).map(|(name, tensor)| (name.clone(), bits(tensor))).collect()
}

#[test]
fn a_skipped_step_has_no_effect() {
    for (name, kind, optimizer) in optimizers() {
        let parameters = leaves(1, 6, kind);
        let mut optimizer =
            optimizer(parameters.iter().map(|(n, w)| (n.clone(), w.shallow_clone())).collect());
        let mut scaler =
            DynamicGradScaler::new(DynamicScalerConfig::default()).unwrap().on_device(Device::Cpu).unwrap();
        let mut scale = 65536.0;
        let mut take = |step: u64, bad: bool, optimizer: &mut DeviceOptimizer| {
            backward(&parameters, step, scale, bad);
            scaler.step("w", optimizer).unwrap();
            scaler.update().unwrap();
            scale = f64::from(scaler.read().unwrap().scale());
        };
        // Also if the very first step is skipped: the state is that of no step.
        take(0, true, &mut optimizer);
        let weights: Vec<_> = leaves(1, 6, kind).iter().map(|(_, w)| bits(w)).collect();
        assert_eq!(parameters.iter().map(|(_, w)| bits(w)).collect::<Vec<_>>(), weights, "{name}");
        take(1, false, &mut optimizer);
        take(2, false, &mut optimizer);
        let before = everything(&parameters, &optimizer);
        for step in 3..6 {
            take(step, true, &mut optimizer);
            assert_eq!(everything(&parameters, &optimizer), before, "{name}: step {step}");
        }
        let (_, steps) = optimizer.state().into_iter().find(|(name, _)| name == "w0.step").unwrap();
        assert_eq!((steps.kind(), steps.int64_value(&[])), (Kind::Int64, 2), "{name}");
        take(6, false, &mut optimizer);
        let after = everything(&parameters, &optimizer);
        assert!(after.iter().zip(&before).all(|(after, before)| after != before), "{name}: all moves again");
    }
}

#[test]
fn host_and_device_decisions_give_the_same_bits() {
    let bad = |step: u64| [3, 4, 9, 15].contains(&step);
    let dynamic = DynamicScalerConfig { growth_interval: 3, hysteresis: 2, ..DynamicScalerConfig::default() };
    for (name, kind, optimizer) in optimizers() {
        let [host, device] = [0, 1].map(|_| leaves(7, 5, kind));
        let owned = |p: &[(String, Tensor)]| p.iter().map(|(n, w)| (n.clone(), w.shallow_clone())).collect();
        let (mut ours, mut theirs) = (optimizer(owned(&device)), optimizer(owned(&host)));
        let mut on_host = DynamicGradScaler::new(dynamic).unwrap();
        let mut on_device = DeviceScaler::new(DynamicRule::new(dynamic).unwrap(), Device::Cpu).unwrap();
        for step in 0..20 {
            let scale = f64::from(on_host.rule().scale());
            for parameters in [&host, &device] {
                backward(parameters, step, scale, bad(step));
            }
            assert_eq!(on_host.step("w", &mut theirs).unwrap(), !bad(step));
            on_host.update().unwrap();
            on_device.step("w", &mut ours).unwrap();
            on_device.update().unwrap();
            // From one to the other and back, through their states.
            if step % 6 == 5 {
                let (a, b) = (on_host.state(), on_device.state().unwrap());
                assert_eq!(a, b, "{name}: step {step}");
                on_host.load_state(&b).unwrap();
                on_device.load_state(&a).unwrap();
            }
            // An optimizer continues on the host after steps on the device.
            if step == 12 {
                backward(&host, 50, 1.0, false);
                backward(&device, 50, 1.0, false);
                theirs.step().unwrap();
                ours.step().unwrap();
            }
        }
        assert_eq!(everything(&device, &ours), everything(&host, &theirs), "{name}");
        assert_eq!(on_device.read().unwrap(), on_host.rule(), "{name}");
    }
}

/// The kernel, against the rule on the host; two optimizers' flags are combined, and a NaN flag is an overflow.
#[test]
fn on_cuda_the_scale_matches_the_host_scale() {
    if runtime::device::cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    let device = runtime::device::select("cuda").unwrap();
    let flags = [0.0, f32::NAN, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0];
    for (hysteresis, growth_interval, max_scale) in [(1, 2, f32::MAX), (2, 3, 70_000.0), (3, 1, 1e6)] {
        let options = DynamicScalerConfig {
            hysteresis,
            growth_interval,
            max_scale,
            min_scale: 20_000.0,
            ..DynamicScalerConfig::default()
        };
        let mut host = DynamicRule::new(options).unwrap();
        let mut scaler = DeviceScaler::new(host, device).unwrap();
        for flag in flags {
            let overflow = Tensor::from_slice(&[flag]).to_device(device);
            training::scaler::DeviceGradScaler::update(&mut scaler, &overflow).unwrap();
            host.update(flag != 0.0).unwrap();
            assert_eq!(scaler.read().unwrap(), &host);
            let scaled = scaler.scale(&Tensor::ones([1], (Kind::Float, device))).unwrap();
            assert_eq!(scaled.double_value(&[0]), f64::from(host.scale()));
            let mut parameters = [false, flag != 0.0].map(|bad| {
                let gradient =
                    Tensor::full([3], if bad { f64::INFINITY } else { 1.0 }, (Kind::Float, device));
                let w = Tensor::ones([3], (Kind::Float, device)).set_requires_grad(true);
                runtime::autograd::set_grad(&w, Some(&gradient)).unwrap();
                DeviceOptimizer::new(AdamW::default(), vec![Group::new(vec![("w".into(), w)], 0.1)]).unwrap()
            });
            for (name, optimizer) in ["first", "second"].into_iter().zip(&mut parameters) {
                scaler.step(name, optimizer).unwrap();
            }
            let unscaled = parameters[0].gradients().unwrap()[0].double_value(&[0]);
            assert_eq!(unscaled, f64::from((1.0 / f64::from(host.scale())) as f32));
            scaler.update().unwrap();
            host.update(flag != 0.0).unwrap();
            assert_eq!(scaler.read().unwrap(), &host);
        }
        // A restored scale is used, not the one of the last update.
        let start = DeviceScaler::new(DynamicRule::new(options).unwrap(), device).unwrap();
        scaler.load_state(&start.state().unwrap()).unwrap();
        let ones = || Tensor::ones([1], (Kind::Float, device));
        assert_eq!(scaler.scale(&ones()).unwrap().double_value(&[0]), 65536.0);
        let gradient = ones();
        scaler.unscale_("restored", &[gradient.shallow_clone()], false).unwrap();
        assert_eq!(gradient.double_value(&[0]), 1.0 / 65536.0);
    }
}

#[test]
fn only_the_overflowing_optimizer_of_several_skips() {
    let parameters = [leaves(1, 2, Kind::Float), leaves(2, 3, Kind::Float)];
    let [mut first, mut second] = parameters.each_ref().map(|p| {
        let owned: Vec<_> = p.iter().map(|(n, w)| (n.clone(), w.shallow_clone())).collect();
        DeviceOptimizer::new(Adam::default(), vec![Group::new(owned, 0.1)]).unwrap()
    });
    let mut scaler =
        DynamicGradScaler::new(DynamicScalerConfig::default()).unwrap().on_device(Device::Cpu).unwrap();
    backward(&parameters[0], 1, 65536.0, false);
    backward(&parameters[1], 2, 65536.0, true);
    let before = parameters.each_ref().map(|p| bits(&p[0].1));
    scaler.step("first", &mut first).unwrap();
    scaler.step("second", &mut second).unwrap();
    scaler.update().unwrap();
    let after = parameters.each_ref().map(|p| bits(&p[0].1));
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1], before[1]);
    assert_eq!(scaler.read().unwrap().current().scale, 32768.0);
}

#[test]
fn optimizers_without_a_fused_kernel_are_refused() {
    let parameters = leaves(3, 2, Kind::Float);
    let owned = || parameters.iter().map(|(n, w)| (n.clone(), w.shallow_clone())).collect::<Vec<_>>();
    let momentum = DeviceOptimizer::new(Momentum::default(), vec![Group::new(owned(), 0.1)]).unwrap();
    let foreach = DeviceOptimizer::new(AdamW::default(), vec![Group::new(owned(), 0.1)])
        .unwrap()
        .with_implementation(Implementation::Foreach);
    let words = [
        expect![
            "optimizer: momentum has no fused kernel, so that it cannot leave a step out on the device; take Adam or AdamW, or a scaler that decides on the host"
        ],
        expect![
            "optimizer: Implementation::Foreach cannot leave a step out on the device; take Implementation::Fused, or a scaler that decides on the host"
        ],
    ];
    for (mut optimizer, words) in [momentum, foreach].into_iter().zip(words) {
        let mut scaler = StaticGradScaler::new(4.0).unwrap().on_device(Device::Cpu).unwrap();
        backward(&parameters, 1, 4.0, false);
        let before = everything(&parameters, &optimizer);
        let error = scaler.step("w", &mut optimizer).unwrap_err();
        words.assert_eq(&error.to_string());
        assert_eq!(everything(&parameters, &optimizer), before);
        // It did not step, so an update is refused.
        assert!(message(scaler.update()).contains("no optimizer has stepped"));
    }
}

#[test]
fn overflow_at_every_scale_ends_the_run_at_the_read() {
    let rule = StaticRule::new(8.0).unwrap().with_patience(3);
    let mut scaler = DeviceScaler::new(rule, Device::Cpu).unwrap();
    let parameters = leaves(3, 2, Kind::Float);
    let owned = parameters.iter().map(|(n, w)| (n.clone(), w.shallow_clone())).collect::<Vec<_>>();
    let mut adam = DeviceOptimizer::new(Adam::default(), vec![Group::new(owned, 0.1)]).unwrap();
    for step in 0..4 {
        backward(&parameters, step, 8.0, true);
        scaler.step("w", &mut adam).unwrap();
        scaler.update().unwrap();
        let read = scaler.read().map(|_| ());
        assert_eq!(
            matches!(&read, Err(Error::Overflowed(words)) if words.contains(" 4 steps in a row")),
            step == 3,
            "{read:?}"
        );
    }
}
