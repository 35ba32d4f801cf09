//! Optimizers: weight decay against plain f64 arithmetic, groups, dtypes, layouts, state.

use std::sync::Arc;

use expect_test::expect;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};
use training::optimizer::{
    AdaGrad, Adam, AdamW, DeviceOptimizer, Group, Implementation, Lion, Momentum, Nesterov, RmsProp, Rule,
    Sgd, ZeroGrad,
};

const ALL: [Implementation; 3] = [Implementation::ForLoop, Implementation::Foreach, Implementation::Fused];
const NAMES: [&str; 8] = ["sgd", "momentum", "nesterov", "adagrad", "rms_prop", "adam", "lion", "adam_w"];

fn rule(name: &str) -> Box<dyn Rule> {
    match name {
        "sgd" => Box::new(Sgd),
        "momentum" => Box::new(Momentum { momentum: 0.8 }),
        "nesterov" => Box::new(Nesterov { momentum: 0.8 }),
        "adagrad" => Box::new(AdaGrad { initial_accumulator: 0.1, lr_decay: 0.05, eps: 1e-6 }),
        "rms_prop" => Box::new(RmsProp { alpha: 0.9, eps: 1e-6 }),
        "adam" => Box::new(Adam { beta1: 0.8, beta2: 0.95, eps: 1e-6 }),
        "lion" => Box::new(Lion { beta1: 0.8, beta2: 0.95 }),
        _ => Box::new(AdamW { beta1: 0.8, beta2: 0.95, eps: 1e-6 }),
    }
}

/// The same rule in f64, one number at a time.
#[derive(Clone, Default)]
struct Oracle {
    m: f64,
    v: f64,
    t: i32,
}

impl Oracle {
    fn step(&mut self, name: &str, w: &mut f64, g: f64, lr: f64, decay: f64) {
        self.t += 1;
        let g = if ["adam_w", "lion"].contains(&name) { g } else { g + decay * *w };
        match name {
            "sgd" => *w -= lr * g,
            "momentum" => {
                self.m = 0.8 * self.m + g;
                *w -= lr * self.m;
            }
            "nesterov" => {
                self.m = 0.8 * self.m + g;
                *w -= lr * (g + 0.8 * self.m);
            }
            "adagrad" => {
                self.v = if self.t == 1 { 0.1 } else { self.v } + g * g;
                *w -= lr / (1.0 + f64::from(self.t - 1) * 0.05) * g / (self.v.sqrt() + 1e-6);
            }
            "rms_prop" => {
                self.v = 0.9 * self.v + 0.1 * g * g;
                *w -= lr * g / (self.v.sqrt() + 1e-6);
            }
            "lion" => {
                let update = 0.8 * self.m + 0.2 * g;
                let sign = if update == 0.0 { 0.0 } else { update.signum() };
                *w = *w * (1.0 - lr * decay) - lr * sign;
                self.m = 0.95 * self.m + 0.05 * g;
            }
            _ => {
                if name == "adam_w" {
                    *w *= 1.0 - lr * decay;
                }
                self.m = 0.8 * self.m + 0.2 * g;
                self.v = 0.95 * self.v + 0.05 * g * g;
                let (m, v) = (self.m / (1.0 - 0.8f64.powi(self.t)), self.v / (1.0 - 0.95f64.powi(self.t)));
                *w -= lr * m / (v.sqrt() + 1e-6);
            }
        }
    }
}

/// Gradients that differ from element to element and step to step.
fn gradient(step: i64, shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + step as f64).sin().reshape(shape)
}

fn start(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.3 + 1.0).cos().reshape(shape)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.detach().to_kind(Kind::Double).contiguous().flatten(0, -1)).unwrap()
}

/// Parameters of mixed dtypes and layouts in two groups, against the oracle.
fn check(name: &str, implementation: Implementation, decay: f64, steps: i64) {
    // Transposed, sliced, double, bf16: each has its own tolerance.
    let leaf = |tensor: Tensor| tensor.set_requires_grad(true);
    let wide = start(&[4, 6]).to_kind(Kind::Float);
    let parameters = [
        ("plain", leaf(start(&[3, 5]).to_kind(Kind::Float)), 2e-6),
        ("transposed", leaf(start(&[4, 3]).to_kind(Kind::Float).transpose(0, 1)), 2e-6),
        ("sliced", leaf(wide.narrow(1, 1, 2)), 2e-6),
        ("double", leaf(start(&[7])), 1e-12),
        ("bf16", leaf(start(&[6]).to_kind(Kind::BFloat16)), 2e-6),
        ("scalar", leaf(start(&[1]).reshape([] as [i64; 0])), 1e-12),
    ];
    let mut expected: Vec<(Vec<f64>, Vec<Oracle>)> = parameters
        .iter()
        .map(|(_, tensor, _)| (values(tensor), vec![Oracle::default(); tensor.numel()]))
        .collect();
    let named: Vec<(String, Tensor)> =
        parameters.iter().map(|(name, tensor, _)| ((*name).to_owned(), tensor.shallow_clone())).collect();
    let (first, second) = (named[..2].to_vec_clone(), named[2..].to_vec_clone());
    let groups = vec![
        Group { name: "first".into(), weight_decay: decay, ..Group::new(first, 0.05) },
        Group { name: "second".into(), ..Group::new(second, 0.02) },
    ];
    let optimizer = DeviceOptimizer::boxed(rule(name), groups).unwrap();
    let mut optimizer = optimizer.with_implementation(implementation).with_master_weights();
    for step in 0..steps {
        optimizer.set_factor(1.0 / (step + 1) as f64).unwrap();
        for (index, (_, tensor, _)) in parameters.iter().enumerate() {
            // A gradient of another layout than its parameter's.
            let grad = gradient(step, &tensor.size()).to_kind(tensor.kind());
            let grad = if grad.dim() == 2 { grad.transpose(0, 1).contiguous().transpose(0, 1) } else { grad };
            runtime::autograd::set_grad(tensor, Some(&grad)).unwrap();
            let (lr, decay) = if index < 2 { (0.05, decay) } else { (0.02, 0.0) };
            let (numbers, oracles) = &mut expected[index];
            for ((w, oracle), g) in numbers.iter_mut().zip(oracles).zip(values(&grad)) {
                oracle.step(name, w, g, lr / (step + 1) as f64, decay);
            }
        }
        optimizer.step().unwrap();
    }
    let state = optimizer.state();
    for ((label, tensor, tolerance), (expected, _)) in parameters.iter().zip(&expected) {
        let master = state.iter().find(|(name, _)| *name == format!("{label}.master"));
        assert_eq!(master.is_some(), *label == "bf16");
        let unrounded = master.map_or(tensor, |(_, master)| master);
        for (have, want) in values(unrounded).iter().zip(expected) {
            let off = (have - want).abs();
            assert!(
                off <= tolerance * want.abs().max(1.0),
                "{name} {implementation:?} {label}: {have} {want}"
            );
        }
        assert_eq!(values(tensor), values(&unrounded.to_kind(tensor.kind())), "rounded once");
    }
    // Memory beside a slice is not changed.
    assert_eq!(values(&wide.narrow(1, 3, 3)), values(&start(&[4, 6]).to_kind(Kind::Float).narrow(1, 3, 3)));
}

trait CloneTensors {
    fn to_vec_clone(&self) -> Vec<(String, Tensor)>;
}

impl CloneTensors for [(String, Tensor)] {
    fn to_vec_clone(&self) -> Vec<(String, Tensor)> {
        self.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
    }
}

#[test]
fn every_rule_matches_its_formula() {
    for name in NAMES {
        for implementation in ALL {
            for decay in [0.0, 0.3] {
                check(name, implementation, decay, 5);
            }
        }
    }
}

fn two(name: &str) -> (Tensor, Tensor, DeviceOptimizer) {
    let leaf = || start(&[4]).to_kind(Kind::Float).set_requires_grad(true);
    let (a, b) = (leaf(), leaf());
    let group = |name: &str, t: &Tensor| Group {
        name: name.into(),
        ..Group::new(vec![(format!("{name}.weight"), t.shallow_clone())], 0.1)
    };
    let optimizer = DeviceOptimizer::boxed(rule(name), vec![group("a", &a), group("b", &b)]).unwrap();
    (a, b, optimizer)
}

/// The version counter lets a graph that saved a parameter, and a cache of casts, detect the change.
#[test]
fn every_step_counts_as_an_in_place_change() {
    for name in ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"] {
        for implementation in ALL {
            let w = start(&[3]).set_requires_grad(true);
            let parameters = vec![("w".to_owned(), w.shallow_clone())];
            let mut optimizer = DeviceOptimizer::boxed(rule(name), vec![Group::new(parameters, 0.1)])
                .unwrap()
                .with_implementation(implementation);
            runtime::autograd::set_grad(&w, Some(&gradient(1, &[3]))).unwrap();
            let before = w.internal_version();
            optimizer.step().unwrap();
            assert!(w.internal_version() > before, "{name} {implementation:?}");
        }
    }
}

#[test]
fn parameters_without_gradient_and_frozen_ones_are_unchanged() {
    for implementation in ALL {
        let (a, b, optimizer) = two("adam");
        let mut optimizer = optimizer.with_implementation(implementation);
        let grad = gradient(0, &[4]).to_kind(Kind::Float);
        runtime::autograd::set_grad(&a, Some(&grad)).unwrap();
        optimizer.step().unwrap();
        assert_eq!(b, start(&[4]).to_kind(Kind::Float));
        let names = |optimizer: &DeviceOptimizer| {
            optimizer.state().into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert_eq!(names(&optimizer), ["a.weight.step", "a.weight.exp_avg", "a.weight.exp_avg_sq"]);
        // b takes its first step when a takes its third: each corrects its bias by its own number of steps.
        optimizer.step().unwrap();
        runtime::autograd::set_grad(&b, Some(&grad)).unwrap();
        optimizer.freeze("a", true).unwrap();
        let before = a.detach().copy();
        optimizer.step().unwrap();
        assert_eq!(a.detach(), before);
        assert_eq!(optimizer.gradients().unwrap().len(), 1);
        optimizer.freeze("a", false).unwrap();
        optimizer.step().unwrap();
        let steps: Vec<i64> = optimizer
            .state()
            .iter()
            .filter(|(name, _)| name.ends_with(".step"))
            .map(|(_, step)| step.int64_value(&[]))
            .collect();
        assert_eq!(steps, [3, 2]);
        assert_ne!(a.detach(), before);

        optimizer.zero_grad(ZeroGrad::ToZeros).unwrap();
        assert_eq!(a.grad(), a.detach().zeros_like());
        optimizer.zero_grad(ZeroGrad::ToNone).unwrap();
        assert!(!a.grad().defined() && !b.grad().defined());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A stopped run whose state is loaded into another continues bit for bit.
    #[test]
    fn state_round_trips(which in 0usize..8, before in 0i64..4, after in 1i64..4, implementation in 0usize..3) {
        let run = |a: &Tensor, b: &Tensor, optimizer: &mut DeviceOptimizer, steps: std::ops::Range<i64>| {
            for step in steps {
                runtime::autograd::set_grad(a, Some(&gradient(step, &[4]).to_kind(Kind::Float))).unwrap();
                if step % 2 == 1 {
                    runtime::autograd::set_grad(b, Some(&gradient(-step, &[4]).to_kind(Kind::Float))).unwrap();
                }
                optimizer.step().unwrap();
            }
        };
        let (a, b, optimizer) = two(NAMES[which]);
        let mut optimizer = optimizer.with_implementation(ALL[implementation]);
        run(&a, &b, &mut optimizer, 0..before);
        let (c, d, other) = two(NAMES[which]);
        let mut other = other.with_implementation(ALL[implementation]);
        tch::no_grad(|| {
            for (to, from) in [(&c, &a), (&d, &b)] {
                to.shallow_clone().copy_(&from.detach());
            }
        });
        if b.grad().defined() {
            runtime::autograd::set_grad(&d, Some(&b.grad())).unwrap();
        }
        other.load_state(&optimizer.state()).unwrap();
        run(&a, &b, &mut optimizer, before..before + after);
        run(&c, &d, &mut other, before..before + after);
        prop_assert_eq!(a.detach(), c.detach());
        prop_assert_eq!(b.detach(), d.detach());
        prop_assert_eq!(optimizer.state(), other.state());
    }
}

#[test]
fn a_mismatched_state_is_refused_completely() {
    let (a, _, mut optimizer) = two("adam");
    runtime::autograd::set_grad(&a, Some(&gradient(0, &[4]).to_kind(Kind::Float))).unwrap();
    optimizer.step().unwrap();
    let before = optimizer.state();
    let state = [
        ("a.weight.step".to_owned(), Tensor::from(3i64)),
        ("a.weight.exp_avg".to_owned(), Tensor::zeros([5], (Kind::Float, Device::Cpu))),
        ("c.weight.exp_avg".to_owned(), Tensor::zeros([4], (Kind::Float, Device::Cpu))),
    ];
    expect![[r#"the optimizer's state does not fit the parameters: missing a.weight.exp_avg_sq; unexpected c.weight.exp_avg; different a.weight.exp_avg (Float [5], expected Float [4])"#]]
        .assert_eq(&optimizer.load_state(&state).unwrap_err().to_string());
    assert_eq!(optimizer.state(), before);
}

#[test]
fn bf16_parameters_lose_small_updates_without_master_copies() {
    let run = |master: bool| {
        let w = Tensor::ones([1], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
        let group = Group::new(vec![("w".into(), w.shallow_clone())], 1e-3);
        let optimizer = DeviceOptimizer::new(Sgd, vec![group]).unwrap();
        let mut optimizer = if master { optimizer.with_master_weights() } else { optimizer };
        for _ in 0..100 {
            runtime::autograd::set_grad(&w, Some(&w.detach().ones_like())).unwrap();
            optimizer.step().unwrap();
        }
        w.double_value(&[0])
    };
    assert_eq!(run(false), 1.0);
    assert!((run(true) - 0.9).abs() < 0.004);
}

/// Plain numbers: what was written, less what the step takes.
#[test]
fn master_copies_follow_weights_that_others_write() {
    for implementation in ALL {
        let w = Tensor::ones([3], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
        let group = || vec![Group::new(vec![("w".into(), w.shallow_clone())], 0.125)];
        let new = || {
            let optimizer = DeviceOptimizer::new(Sgd, group()).unwrap();
            optimizer.with_implementation(implementation).with_master_weights()
        };
        let step = |optimizer: &mut DeviceOptimizer| {
            runtime::autograd::set_grad(&w, Some(&w.detach().ones_like())).unwrap();
            optimizer.step().unwrap();
            values(&w)
        };
        let mut optimizer = new();
        assert_eq!(step(&mut optimizer), [0.875; 3]);
        // Loaded into the same memory, all of it or an element.
        let _ = tch::no_grad(|| w.shallow_clone().fill_(5.0));
        assert_eq!(step(&mut optimizer), [4.875; 3], "{implementation:?}");
        let _ = tch::no_grad(|| w.get(1).fill_(2.0));
        assert_eq!(step(&mut optimizer), [4.75, 1.875, 4.75], "{implementation:?}");
        // Given other memory, as a merge does.
        w.shallow_clone().f_set_data(&Tensor::full([3], 3.0, (Kind::BFloat16, Device::Cpu))).unwrap();
        assert_eq!(step(&mut optimizer), [2.875; 3], "{implementation:?}");
        // Loaded after the state of a checkpoint.
        let mut other = new();
        other.load_state(&optimizer.state()).unwrap();
        let _ = tch::no_grad(|| w.shallow_clone().fill_(9.0));
        assert_eq!(step(&mut other), [8.875; 3], "{implementation:?}");
    }
}

/// A thousandth is less than half of the last digit of 1 in bf16.
#[test]
fn master_copies_keep_their_digits_when_the_same_weights_are_loaded_again() {
    let w = Tensor::ones([1], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
    let group = || vec![Group::new(vec![("w".into(), w.shallow_clone())], 1e-3)];
    let mut optimizer = DeviceOptimizer::new(Sgd, group()).unwrap().with_master_weights();
    for _ in 0..100 {
        runtime::autograd::set_grad(&w, Some(&w.detach().ones_like())).unwrap();
        optimizer.step().unwrap();
        let (weight, state) = (w.detach().copy(), optimizer.state());
        optimizer = DeviceOptimizer::new(Sgd, group()).unwrap().with_master_weights();
        optimizer.load_state(&state).unwrap();
        tch::no_grad(|| w.shallow_clone().copy_(&weight));
    }
    assert!((w.double_value(&[0]) - 0.9).abs() < 0.004);
}

#[test]
fn a_tensor_under_two_names_is_refused() {
    let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let named = |name: &str, tensor: &Tensor| (name.to_owned(), tensor.shallow_clone());
    let one = Group::new(vec![named("w", &w), named("tied", &w)], 0.1);
    let (first, second) = (Group::new(vec![named("w", &w)], 0.1), Group::new(vec![named("tied", &w)], 0.2));
    for groups in [vec![one], vec![first, second]] {
        let error = DeviceOptimizer::new(Sgd, groups).unwrap_err().to_string();
        expect!["optimizer: `w` and `tied` are one tensor, which would be updated twice in each step; list it once"]
            .assert_eq(&error);
    }
    // Another tensor over the same memory has a gradient of its own.
    let other = w.detach().set_requires_grad(true);
    DeviceOptimizer::new(Sgd, vec![Group::new(vec![named("w", &w), named("view", &other)], 0.1)]).unwrap();
}

#[test]
fn invalid_parameters_are_errors() {
    let leaf = || start(&[4]).set_requires_grad(true);
    let group = |tensor: Tensor| Group::new(vec![("w".into(), tensor)], 0.1);
    let mut messages = vec![
        DeviceOptimizer::new(Sgd, vec![]).unwrap_err(),
        DeviceOptimizer::new(Sgd, vec![Group { lr: -1.0, ..group(leaf()) }]).unwrap_err(),
        DeviceOptimizer::new(Sgd, vec![Group { lr: f64::NAN, ..group(leaf()) }]).unwrap_err(),
        DeviceOptimizer::new(Sgd, vec![Group { weight_decay: -0.1, ..group(leaf()) }]).unwrap_err(),
        DeviceOptimizer::new(Adam { beta1: 1.0, ..Adam::default() }, vec![group(leaf())]).unwrap_err(),
        DeviceOptimizer::new(AdamW { beta2: -0.5, ..AdamW::default() }, vec![group(leaf())]).unwrap_err(),
        DeviceOptimizer::new(RmsProp { eps: -1.0, ..RmsProp::default() }, vec![group(leaf())]).unwrap_err(),
        DeviceOptimizer::new(Momentum { momentum: 1.5 }, vec![group(leaf())]).unwrap_err(),
        DeviceOptimizer::new(Sgd, vec![group(leaf()), group(leaf())]).unwrap_err(),
        DeviceOptimizer::new(Sgd, vec![group(leaf() * 2.0)]).unwrap_err(),
        DeviceOptimizer::new(Sgd, vec![group(Tensor::from(1i64))]).unwrap_err(),
        DeviceOptimizer::new(
            Sgd,
            vec![Group { rule: Some(Arc::new(Adam { eps: -1.0, ..Adam::default() })), ..group(leaf()) }],
        )
        .unwrap_err(),
    ];
    let (_, _, mut optimizer) = two("sgd");
    messages.push(optimizer.freeze("c", true).unwrap_err());
    messages.push(optimizer.set_factor(-1.0).unwrap_err());
    let lines: Vec<String> = messages.iter().map(ToString::to_string).collect();
    expect![[r#"
        optimizer: no parameter group; give at least one
        optimizer: the learning rate of group `all` is -1; expected a finite number of at least 0
        optimizer: the learning rate of group `all` is NaN; expected a finite number of at least 0
        optimizer: the weight decay of group `all` is -0.1; expected a finite number of at least 0
        adam: beta1 is 1; expected a number in [0, 1)
        adam_w: beta2 is -0.5; expected a number in [0, 1)
        rms_prop: eps is -1; expected a finite number of at least 0
        momentum: momentum is 1.5; expected a number in [0, 1)
        optimizer: the parameter `w` is listed twice; put it in one group, once
        optimizer: `w` was computed from other tensors; expected a leaf, which accumulates its gradient
        optimizer: `w` is Int64; expected a floating-point tensor of 16, 32 or 64 bits
        adam: eps is -1; expected a finite number of at least 0
        optimizer: no group is called `c`; expected one of a, b
        optimizer: the learning-rate factor is -1; expected a finite number of at least 0"#]]
    .assert_eq(&lines.join("\n"));
}
