//! Adam in one pass, compared with libtorch's fused kernel bit for bit, and with the formula in f64.

use expect_test::expect;
use kernels::adam::{AdamStep, AdamTensors, adam, bytes_moved};
use kernels::processor::{Simd, simd};
use runtime::ops::optimizer::{AdamW, AdamWTensors, fused_adam_, fused_adamw_};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};

/// A parameter with its moments.
struct State {
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
}

impl State {
    fn of(master: &Tensor) -> Self {
        Self { master: master.copy(), exp_avg: master.zeros_like(), exp_avg_sq: master.zeros_like() }
    }

    fn tensors<'a>(&'a self, gradient: &'a Tensor, weight: Option<&'a Tensor>) -> AdamTensors<'a> {
        let Self { master, exp_avg, exp_avg_sq } = self;
        AdamTensors { gradient, master, exp_avg, exp_avg_sq, weight }
    }

    /// The same by libtorch: a cast of the gradient, then the fused kernel; `step` counts the steps.
    fn libtorch(&self, gradient: &Tensor, step: &AdamStep) {
        let mut gradient = gradient.copy();
        if let Some(factor) = step.gradient_factor {
            let _ = gradient.f_mul_scalar_(factor).unwrap();
        }
        let gradient = gradient.to_kind(Kind::Float);
        let count = Tensor::full([] as [i64; 0], step.step as f64 - 1.0, kind::FLOAT_CPU);
        let tensors = AdamWTensors {
            params: &[&self.master],
            grads: &[&gradient],
            exp_avgs: &[&self.exp_avg],
            exp_avg_sqs: &[&self.exp_avg_sq],
            steps: &[&count],
        };
        let AdamStep { lr, beta1, beta2, eps, weight_decay, .. } = *step;
        let options = AdamW { lr, beta1, beta2, weight_decay, eps, maximize: false };
        let fused = if step.decoupled { fused_adamw_ } else { fused_adam_ };
        fused(&tensors, options, None).unwrap();
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = tensor.to_kind(Kind::Float).try_into().unwrap();
    // The bits of a NaN depend on the order of an instruction's operands.
    values.iter().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

/// Panics at the first element that is not the same number.
fn same(ours: &Tensor, theirs: &Tensor, what: &str) {
    let (ours, theirs) = (bits(ours), bits(theirs));
    assert_eq!(ours.len(), theirs.len());
    if let Some(at) = (0..ours.len()).find(|&at| ours[at] != theirs[at]) {
        let [a, b] = [ours[at], theirs[at]].map(f32::from_bits);
        panic!("{what}: element {at} of {} is {a:e} and libtorch's {b:e}", ours.len());
    }
}

fn random(generator: &mut Generator, length: i64, kind: Kind) -> Tensor {
    // Magnitudes over many orders, to exercise each rounding.
    let x = generator.normal(&[length], kind::FLOAT_CPU).unwrap();
    let scale = generator.normal(&[length], kind::FLOAT_CPU).unwrap() * 4.0;
    (x * scale.exp()).to_kind(kind)
}

/// Runs some steps of one case with both, and compares them after each.
fn check(length: i64, gradients: Kind, weights: Option<Kind>, options: AdamStep, steps: u64) {
    let mut generator = Generator::new(length as u64 + 1).unwrap();
    let start = random(&mut generator, length, Kind::Float);
    let (ours, theirs) = (State::of(&start), State::of(&start));
    let weight = weights.map(|kind| Tensor::zeros([length], (kind, Device::Cpu)));
    for number in 1..=steps {
        let gradient = random(&mut generator, length, gradients);
        let before = gradient.copy();
        let step = AdamStep { step: number, ..options };
        adam(&ours.tensors(&gradient, weight.as_ref()), &step).unwrap();
        theirs.libtorch(&gradient, &step);
        let what = |part: &str| format!("{part}, {gradients:?}, {step:?}");
        same(&ours.exp_avg, &theirs.exp_avg, &what("exp_avg"));
        same(&ours.exp_avg_sq, &theirs.exp_avg_sq, &what("exp_avg_sq"));
        same(&ours.master, &theirs.master, &what("master"));
        if let Some(weight) = &weight {
            same(weight, &theirs.master.to_kind(weight.kind()), &what("weight"));
        }
        assert_eq!(bits(&gradient), bits(&before), "the gradient is only read");
    }
}

/// Whether bits can be compared: they are those of libtorch's kernel for AVX2, which needs such a processor.
fn comparable() -> bool {
    if matches!(simd(), Simd::Avx2 | Simd::Avx512) {
        return true;
    }
    eprintln!("skipped: libtorch's kernel rounds elsewhere without AVX2");
    false
}

#[test]
fn every_length_matches_libtorch_bit_for_bit() {
    if !comparable() {
        return;
    }
    for length in 0..=200 {
        for (decoupled, weight_decay) in [(true, 0.01), (false, 0.01), (true, 0.0)] {
            let options = AdamStep { decoupled, weight_decay, ..AdamStep::default() };
            check(length, Kind::Float, None, options, 2);
            check(length, Kind::BFloat16, Some(Kind::BFloat16), options, 2);
        }
    }
}

#[test]
fn every_option_matches_libtorch_bit_for_bit() {
    if !comparable() {
        return;
    }
    for (gradients, weights) in [
        (Kind::Float, None),
        (Kind::Float, Some(Kind::BFloat16)),
        (Kind::BFloat16, None),
        (Kind::BFloat16, Some(Kind::BFloat16)),
        (Kind::Half, Some(Kind::Half)),
        (Kind::BFloat16, Some(Kind::Half)),
    ] {
        for (decoupled, weight_decay) in [(true, 0.1), (false, 0.1), (true, 0.0), (false, 0.0)] {
            for gradient_factor in [None, Some(0.3), Some(1.0)] {
                for (beta1, beta2) in [(0.9, 0.999), (0.3, 0.9), (0.5, 0.5), (0.0, 0.0)] {
                    let defaults = AdamStep::default();
                    let options =
                        AdamStep { decoupled, weight_decay, gradient_factor, beta1, beta2, ..defaults };
                    check(333, gradients, weights, options, 5);
                }
            }
        }
    }
    let unusual = AdamStep { lr: 0.37, eps: 1e-3, weight_decay: 0.9, ..AdamStep::default() };
    check(1000, Kind::Float, None, unusual, 5);
}

#[test]
fn many_tasks_and_late_steps_match_libtorch_bit_for_bit() {
    if !comparable() {
        return;
    }
    for length in [65_535, 65_536 + 1, 3 * 65_536 + 1234 + 5] {
        check(length, Kind::Float, None, AdamStep::default(), 3);
        let clipped = AdamStep { gradient_factor: Some(0.77), ..AdamStep::default() };
        check(length, Kind::BFloat16, Some(Kind::BFloat16), clipped, 3);
    }
    // The bias correction of a late step, and of one beyond fp32's whole numbers.
    for number in [1000, 100_003, (1 << 24) + 1] {
        let mut generator = Generator::new(number).unwrap();
        let (start, gradient) =
            (random(&mut generator, 100, Kind::Float), random(&mut generator, 100, Kind::Float));
        let (ours, theirs) = (State::of(&start), State::of(&start));
        let step = AdamStep { beta2: 0.999_99, step: number, ..AdamStep::default() };
        adam(&ours.tensors(&gradient, None), &step).unwrap();
        theirs.libtorch(&gradient, &step);
        same(&ours.master, &theirs.master, "a late step");
    }
}

#[test]
fn special_values_match_libtorch() {
    if !comparable() {
        return;
    }
    let special =
        [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, 1e-40, -1e-45, 1e30, f32::MAX, f32::MIN];
    // Each value in a full block, in a vector after it, and in the last elements.
    for length in [10, 37, 64] {
        for gradients in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for decoupled in [true, false] {
                let values: Vec<f32> = (0..length).map(|i| special[i % special.len()]).collect();
                let gradient = Tensor::from_slice(&values).to_kind(gradients);
                let start: Vec<f32> = (0..length).map(|i| special[(i / 3) % special.len()]).collect();
                let start = Tensor::from_slice(&start);
                let (ours, theirs) = (State::of(&start), State::of(&start));
                let weight = start.to_kind(Kind::BFloat16);
                for number in 1..=2 {
                    let step = AdamStep { decoupled, step: number, ..AdamStep::default() };
                    adam(&ours.tensors(&gradient, Some(&weight)), &step).unwrap();
                    theirs.libtorch(&gradient, &step);
                    same(&ours.exp_avg, &theirs.exp_avg, "exp_avg");
                    same(&ours.exp_avg_sq, &theirs.exp_avg_sq, "exp_avg_sq");
                    same(&ours.master, &theirs.master, "master");
                    same(&weight, &theirs.master.to_kind(Kind::BFloat16), "weight");
                }
            }
        }
    }
}

#[test]
fn results_match_the_formula_in_f64() {
    const LENGTH: i64 = 1003;
    let mut generator = Generator::new(5).unwrap();
    let normal = |generator: &mut Generator| generator.normal(&[LENGTH], kind::FLOAT_CPU).unwrap();
    for (decoupled, gradient_factor) in [(true, None), (false, Some(0.5))] {
        let start = normal(&mut generator);
        let state = State::of(&start);
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double)).unwrap();
        let (mut p, mut m, mut v) = (values(&start), vec![0.0; 1003], vec![0.0; 1003]);
        for number in 1..=5 {
            let gradient = normal(&mut generator);
            let options = AdamStep { decoupled, gradient_factor, step: number, ..AdamStep::default() };
            adam(&state.tensors(&gradient, None), &options).unwrap();
            let AdamStep { lr, beta1, beta2, eps, weight_decay: decay, .. } = options;
            let correction = |beta: f64| 1.0 - beta.powi(number as i32);
            for (i, g) in values(&gradient).into_iter().enumerate() {
                let mut g = g * gradient_factor.unwrap_or(1.0);
                if decoupled {
                    p[i] -= lr * decay * p[i];
                } else {
                    g += decay * p[i];
                }
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                let (first, second) = (m[i] / correction(beta1), v[i] / correction(beta2));
                p[i] -= lr * first / (second.sqrt() + eps);
            }
        }
        // Each step has some roundings at the parameter's magnitude, and an update of a thousandth of it.
        let worst = |ours: &Tensor, oracle: &[f64], scale: f64| {
            let apart = values(ours).iter().zip(oracle).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart <= 5.0 * f64::from(f32::EPSILON) * scale, "{apart:e} of {scale}");
        };
        worst(&state.master, &p, p.iter().fold(0.0, |most: f64, x| most.max(x.abs())));
        worst(&state.exp_avg, &m, 1.0);
        worst(&state.exp_avg_sq, &v, 0.05);
    }
}

#[test]
fn views_of_flat_buffers_are_updated_on_another_thread() {
    // Offsets of 256 bytes in one buffer for each dtype; bytes beside them must not change.
    let flat = Tensor::full([3 * 1024], 7.0, kind::FLOAT_CPU);
    let low = Tensor::full([2 * 1024], 7.0, (Kind::BFloat16, Device::Cpu));
    let part = |buffer: &Tensor, start: i64| buffer.narrow(0, start, 200);
    let state = State { master: part(&flat, 64), exp_avg: part(&flat, 1088), exp_avg_sq: part(&flat, 2112) };
    let (gradient, weight) = (part(&low, 128), part(&low, 1024));
    let (expected_flat, expected_low) = (flat.copy(), low.copy());
    let expected = State {
        master: part(&expected_flat, 64),
        exp_avg: part(&expected_flat, 1088),
        exp_avg_sq: part(&expected_flat, 2112),
    };
    expected.libtorch(&gradient, &AdamStep::default());
    part(&expected_low, 1024).copy_(&expected.master);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            adam(&state.tensors(&gradient, Some(&weight)), &AdamStep::default()).unwrap();
        });
    });
    if comparable() {
        same(&flat, &expected_flat, "fp32");
        same(&low, &expected_low, "bf16");
    }
}

#[test]
fn changing_a_saved_tensor_is_detected() {
    let state = State::of(&Tensor::ones([4], kind::FLOAT_CPU));
    let x = Tensor::ones([4], kind::FLOAT_CPU).set_requires_grad(true);
    let y = (&x * &state.master).sum(Kind::Float);
    adam(&state.tensors(&Tensor::ones([4], kind::FLOAT_CPU), None), &AdamStep::default()).unwrap();
    let error = runtime::autograd::backward(&[&y]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn a_counter_counts_the_bytes() {
    let state = State::of(&Tensor::ones([100], kind::FLOAT_CPU));
    let low = Tensor::ones([100], (Kind::BFloat16, Device::Cpu));
    let weight = low.copy();
    let tensors = state.tensors(&low, Some(&weight));
    assert_eq!((bytes_moved(&tensors), bytes_moved(&state.tensors(&state.master, None))), (2800, 2800));
    let counter = Counter::on_this_thread().unwrap();
    adam(&tensors, &AdamStep::default()).unwrap();
    assert_eq!(counter.finish().unwrap().total.bytes, 2800);
}

#[test]
fn mismatched_tensors_are_errors() {
    let ones = |size: &[i64], kind: Kind| Tensor::ones(size, (kind, Device::Cpu));
    let state = State::of(&ones(&[4], Kind::Float));
    let float = ones(&[4], Kind::Float);
    let refused = |tensors: AdamTensors, step: AdamStep| adam(&tensors, &step).unwrap_err().to_string();
    let with_gradient = |gradient: &Tensor| refused(state.tensors(gradient, None), AdamStep::default());
    let with_weight = |weight: &Tensor| refused(state.tensors(&float, Some(weight)), AdamStep::default());
    expect!["fused adam: `gradient` is Double; expected one of [Float, BFloat16, Half]"]
        .assert_eq(&with_gradient(&ones(&[4], Kind::Double)));
    expect!["fused adam: `gradient` is Float [2, 2] on Cpu; expected contiguous Float [4] on Cpu"]
        .assert_eq(&with_gradient(&ones(&[2, 2], Kind::Float)));
    expect![
        "fused adam: `gradient` is Float [4] on Cpu, not contiguous; expected contiguous Float [4] on Cpu"
    ]
    .assert_eq(&with_gradient(&ones(&[8], Kind::Float).slice(0, 0, 8, 2)));
    expect![
        "fused adam: `gradient` is Float [4] on Cpu, not contiguous; expected contiguous Float [4] on Cpu"
    ]
    .assert_eq(&with_gradient(&ones(&[1], Kind::Float).expand([4], false)));
    expect!["fused adam: `exp_avg` overlaps `gradient` in memory; give it memory of its own"]
        .assert_eq(&with_gradient(&state.exp_avg));
    expect!["fused adam: `gradient` is undefined"].assert_eq(&with_gradient(&Tensor::new()));
    expect!["fused adam: `weight` is Float; expected one of [BFloat16, Half]; a weight in fp32 is the master itself, so give none"]
        .assert_eq(&with_weight(&float));
    let low = ones(&[4], Kind::BFloat16);
    expect!["fused adam: `weight` overlaps `gradient` in memory; give it memory of its own"]
        .assert_eq(&refused(state.tensors(&low, Some(&low)), AdamStep::default()));
    let with_step = |step: AdamStep| refused(state.tensors(&float, None), step);
    expect!["fused adam: step 0; the first step is 1, as it corrects the bias by 1 − βᵗ"]
        .assert_eq(&with_step(AdamStep { step: 0, ..AdamStep::default() }));
    expect!["fused adam: beta2 is 1; expected one in [0, 1)"]
        .assert_eq(&with_step(AdamStep { beta2: 1.0, ..AdamStep::default() }));
    assert!(with_step(AdamStep { beta1: f64::NAN, ..AdamStep::default() }).contains("beta1 is NaN"));
    // Nothing was written.
    assert_eq!(bits(&state.master), bits(&float));
}
