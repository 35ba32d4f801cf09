//! The fused norms: derivatives, dtypes, shapes and strides, against compositions in f64.

use kernels::norm::{self, Keep, Norm, Options, add_norm, layer_norm, recoverable, rms_norm};
use proptest::prelude::*;
use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::ops;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
const NORMS: [Norm; 2] = [Norm::Layer, Norm::Rms];
const KEEPS: [Keep; 2] = [Keep::Input, Keep::Output];

fn normal(generator: &mut Generator, shape: &[i64]) -> Tensor {
    generator.normal(shape, F64).unwrap()
}

/// Weights that an output can be divided by.
fn weights(generator: &mut Generator, width: i64) -> Tensor {
    generator.uniform(&[width], (0.5, 2.0), F64).unwrap()
}

/// The formula, operator by operator.
fn composed(norm: Norm, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Tensor {
    let mean = |t: &Tensor| t.mean_dim([-1i64].as_slice(), true, Kind::Double);
    let x = if norm == Norm::Layer { x - mean(x) } else { x.shallow_clone() };
    let mut y = &x / (mean(&x.square()) + eps).sqrt();
    if let Some(weight) = weight {
        y *= weight;
    }
    if let Some(bias) = bias {
        y += bias;
    }
    y
}

fn worst(a: &Tensor, b: &Tensor) -> f64 {
    let apart = (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs();
    if apart.numel() == 0 { 0.0 } else { apart.max().double_value(&[]) }
}

#[test]
fn derivatives_of_every_combination_match_central_differences() {
    let mut generator = Generator::new(1).unwrap();
    for norm in NORMS {
        for keep in KEEPS {
            for residual in [false, true] {
                for (has_weight, has_bias) in [(false, false), (true, false), (false, true), (true, true)] {
                    let count = 1 + usize::from(residual) + usize::from(has_weight) + usize::from(has_bias);
                    for needs in 1..1u32 << count {
                        let mut inputs = vec![normal(&mut generator, &[3, 2, 5])];
                        if residual {
                            inputs.push(normal(&mut generator, &[3, 2, 5]));
                        }
                        if has_weight {
                            inputs.push(weights(&mut generator, 5));
                        }
                        if has_bias {
                            inputs.push(normal(&mut generator, &[5]));
                        }
                        let inputs: Vec<Tensor> = inputs
                            .into_iter()
                            .enumerate()
                            .map(|(index, input)| input.set_requires_grad(needs >> index & 1 == 1))
                            .collect();
                        let inputs: Vec<&Tensor> = inputs.iter().collect();
                        let f = |inputs: &[Tensor]| {
                            let mut rest = inputs.iter();
                            let x = rest.next().unwrap();
                            let other = if residual { rest.next() } else { None };
                            let weight = if has_weight { rest.next() } else { None };
                            let bias = if has_bias { rest.next() } else { None };
                            let options = Options { eps: 1e-3, keep, output: None };
                            let (y, sum) = match other {
                                Some(other) => {
                                    let (y, sum) = add_norm(norm, x, other, weight, bias, options)?;
                                    (y, Some(sum))
                                }
                                None if norm == Norm::Layer => (layer_norm(x, weight, bias, options)?, None),
                                None if !has_bias => (rms_norm(x, weight, options)?, None),
                                None => {
                                    let zeros = x.zeros_like();
                                    (add_norm(norm, x, &zeros, weight, bias, options)?.0, None)
                                }
                            };
                            // Curved, so that upstream gradients differ from element to element.
                            let mut outputs = vec![y.f_sin()?];
                            outputs.extend(sum.map(|sum| sum.sin()));
                            Ok(outputs)
                        };
                        let options = GradcheckConfig { atol: 1e-7, ..Default::default() };
                        if let Err(error) = gradcheck(f, &inputs, options) {
                            panic!(
                                "{norm:?} {keep:?} residual {residual} weight {has_weight} bias {has_bias} {needs:b}: {error}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Output and gradients of x, weight and bias, given an upstream gradient.
struct Results([Tensor; 4]);

impl Results {
    const NAMES: [&str; 4] = ["y", "x gradient", "weight gradient", "bias gradient"];

    fn of(
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        upstream: &Tensor,
        f: impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor,
    ) -> Self {
        let leaf = |t: &Tensor| t.detach().set_requires_grad(true);
        let (x, weight, bias) = (leaf(x), leaf(weight), leaf(bias));
        let y = f(&x, &weight, &bias);
        runtime::autograd::backward_with(&[&y], &[Some(&upstream.to_kind(y.kind()))], Default::default())
            .unwrap();
        let bias = if bias.grad().defined() { bias.grad() } else { bias.zeros_like() };
        Self([y.detach(), x.grad(), weight.grad(), bias])
    }
}

#[test]
fn low_precision_is_as_accurate_as_libtorch() {
    let mut generator = Generator::new(2).unwrap();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for (rows, width) in [(300, 257), (64, 4096), (1500, 96), (7, 5000)] {
            for norm in NORMS {
                let exact = |t: Tensor| t.to_kind(kind).to_kind(Kind::Double);
                let x = exact(normal(&mut generator, &[rows, width]) * 3.0 + 1.0);
                let upstream = exact(normal(&mut generator, &[rows, width]));
                let (weight, bias) =
                    (exact(weights(&mut generator, width)), exact(normal(&mut generator, &[width])));
                let oracle = Results::of(&x, &weight, &bias, &upstream, |x, w, b| {
                    composed(norm, x, Some(w), (norm == Norm::Layer).then_some(b), 1e-5)
                });
                let low = |t: &Tensor| t.to_kind(kind);
                let theirs =
                    Results::of(&low(&x), &low(&weight), &low(&bias), &upstream, |x, w, b| match norm {
                        Norm::Layer => x.layer_norm([width], Some(w), Some(b), 1e-5, false),
                        Norm::Rms => ops::norm::fused_rms_norm(x, &[width], Some(w), Some(1e-5)).unwrap().0,
                    });
                for keep in KEEPS {
                    let options = Options { eps: 1e-5, keep, output: None };
                    let ours =
                        Results::of(&low(&x), &low(&weight), &low(&bias), &upstream, |x, w, b| match norm {
                            Norm::Layer => layer_norm(x, Some(w), Some(b), options).unwrap(),
                            Norm::Rms => rms_norm(x, Some(w), options).unwrap(),
                        });
                    for i in 0..4 {
                        let scale = oracle.0[i].abs().max().double_value(&[]).max(1e-3);
                        let unit = match kind {
                            Kind::Float => 2f64.powi(-24),
                            Kind::BFloat16 => 2f64.powi(-9),
                            _ => 2f64.powi(-12),
                        };
                        // One and a half units in the last place of the largest value, and up to nine more if a rounded
                        // output was saved.
                        let tolerance = scale * unit * if keep == Keep::Output && i > 0 { 10.5 } else { 1.5 };
                        let (mine, other) =
                            (worst(&ours.0[i], &oracle.0[i]), worst(&theirs.0[i], &oracle.0[i]));
                        assert!(
                            mine <= other + tolerance,
                            "{norm:?} {kind:?} {keep:?} {rows}×{width} {}: {mine:e} from exact, libtorch {other:e}, tolerance \
                             {tolerance:e}",
                            Results::NAMES[i]
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn large_means_and_values_whose_squares_overflow_are_correct() {
    let mut generator = Generator::new(3).unwrap();
    let x = (normal(&mut generator, &[20, 1000]) + 1e4).to_kind(Kind::Float);
    let upstream = normal(&mut generator, &[20, 1000]);
    let (one, zero) = (Tensor::ones([1000], F64), Tensor::zeros([1000], F64));
    let low = |t: &Tensor| t.to_kind(Kind::Float);
    let oracle = Results::of(&x.to_kind(Kind::Double), &one, &zero, &upstream, |x, w, b| {
        composed(Norm::Layer, x, Some(w), Some(b), 1e-5)
    });
    let ours = Results::of(&x, &low(&one), &low(&zero), &upstream, |x, w, b| {
        layer_norm(x, Some(w), Some(b), Options::default()).unwrap()
    });
    for i in 0..4 {
        let apart = worst(&ours.0[i], &oracle.0[i]) / oracle.0[i].abs().max().double_value(&[]);
        assert!(apart < 1e-6, "{}: {apart:e}", Results::NAMES[i]);
    }
    let large = low(&(normal(&mut generator, &[4, 100]) * 1e25));
    for norm in NORMS {
        let y = norm::forward(norm, &large, None, None, None, Options::default(), false).unwrap().y;
        assert!(worst(&y, &composed(norm, &large.to_kind(Kind::Double), None, None, 0.0)) < 1e-5);
    }
    let half = Tensor::full([2, 64], 60000.0, (Kind::Half, Device::Cpu));
    let y = rms_norm(&half, None, Options::default()).unwrap();
    assert!(worst(&y, &Tensor::ones([2, 64], F64)) < 1e-3);
    let nan = Tensor::from_slice(&[1.0f32, f32::NAN, 2.0, 1.0, 2.0, 3.0]).view([2, 3]);
    let y = layer_norm(&nan, None, None, Options::default()).unwrap();
    assert!(
        bool::try_from(y.get(0).isnan().all()).unwrap() && bool::try_from(y.get(1).isfinite().all()).unwrap()
    );
}

#[test]
fn the_input_is_saved_if_the_output_does_not_determine_it() {
    let mut generator = Generator::new(4).unwrap();
    let some = |values: &[f64]| Tensor::from_slice(values);
    for (weight, bias, expected) in [
        (vec![1.0, 0.5, -2.0], vec![0.0, 4.0, -16.0], true),
        (vec![1.0, 0.0, -2.0], vec![0.0; 3], false),
        (vec![1.0, 0.5, -2.0], vec![0.0, 4.1, 0.0], false),
        (vec![1.0, f64::NAN, 1.0], vec![0.0; 3], false),
    ] {
        let (weight, bias) = (some(&weight), some(&bias));
        assert_eq!(recoverable(Some(&weight), Some(&bias), Kind::Double).unwrap(), expected);
        if weight.isnan().any().int64_value(&[]) == 1 {
            continue;
        }
        let x = normal(&mut generator, &[6, 3]);
        let upstream = normal(&mut generator, &[6, 3]);
        let results = |keep| {
            let options = Options { keep, ..Options::default() };
            Results::of(&x, &weight, &bias, &upstream, |x, w, b| {
                layer_norm(x, Some(w), Some(b), options).unwrap()
            })
        };
        let (input, output) = (results(Keep::Input), results(Keep::Output));
        for i in 0..4 {
            assert!(worst(&input.0[i], &output.0[i]) < 1e-12, "{}", Results::NAMES[i]);
        }
    }
    let tiny = Tensor::full([3], 1e-3, F64);
    assert!(recoverable(Some(&tiny), None, Kind::Float).unwrap());
    assert!(!recoverable(Some(&tiny), None, Kind::Half).unwrap());
}

#[test]
fn a_shared_upstream_gradient_is_not_changed() {
    let mut generator = Generator::new(5).unwrap();
    let x = normal(&mut generator, &[9, 33]).set_requires_grad(true);
    for norm in NORMS {
        let once = |x: &Tensor| match norm {
            Norm::Layer => layer_norm(x, None, None, Options::default()).unwrap(),
            Norm::Rms => rms_norm(x, None, Options::default()).unwrap(),
        };
        let upstream = normal(&mut generator, &[9, 33]);
        let before = upstream.copy();
        let y = once(&x);
        x.shallow_clone().zero_grad();
        runtime::autograd::backward_with(&[&y], &[Some(&upstream)], Default::default()).unwrap();
        assert_eq!(upstream, before);
        // Two norms and x itself get the same gradient tensor.
        let (a, b) = (once(&x), once(&x));
        x.shallow_clone().zero_grad();
        backward(&[&((&a + &b + &x) * &before).sum(Kind::Double)]).unwrap();
        let ours = x.grad().copy();
        x.shallow_clone().zero_grad();
        let a = composed(norm, &x, None, None, 1e-5);
        backward(&[&((&a * 2.0 + &x) * &before).sum(Kind::Double)]).unwrap();
        assert!(worst(&ours, &x.grad()) < 1e-12);
        x.shallow_clone().zero_grad();
    }
}

#[test]
fn gradients_do_not_depend_on_the_number_of_threads() {
    let mut generator = Generator::new(6).unwrap();
    let single = |t: Tensor| t.to_kind(Kind::Float);
    let (x, upstream) =
        (single(normal(&mut generator, &[3000, 70])), single(normal(&mut generator, &[3000, 70])));
    let (weight, bias) = (single(weights(&mut generator, 70)), single(normal(&mut generator, &[70])));
    let run = || {
        Results::of(&x, &weight, &bias, &upstream, |x, w, b| {
            layer_norm(x, Some(w), Some(b), Options::default()).unwrap()
        })
    };
    let threads = tch::get_num_threads();
    let first = run();
    for count in [1, 3, threads] {
        tch::set_num_threads(count);
        let again = run();
        for i in 0..4 {
            assert_eq!(first.0[i], again.0[i], "{} with {count} threads", Results::NAMES[i]);
        }
    }
}

#[test]
fn mismatched_tensors_are_refused_with_the_remedy() {
    let x = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
    let weight = Tensor::zeros([3], (Kind::Float, Device::Cpu));
    let words = |result: runtime::Result<Tensor>| result.unwrap_err().to_string();
    let options = Options::default();
    assert_eq!(
        words(rms_norm(&x, Some(&weight), options)),
        "fused norm: weight is Float [3] on Cpu; expected floating-point [4] on Cpu"
    );
    assert_eq!(
        words(rms_norm(&x.to_kind(Kind::Int), None, options)),
        "fused norm: from Int to Int; expected Float, Double, BFloat16 or Half to itself, or BFloat16 or Half to Float"
    );
    assert_eq!(
        words(rms_norm(&x, None, Options { eps: f64::NAN, ..options })),
        "fused norm: eps is NaN; expected a finite number from 0 on"
    );
    assert_eq!(
        words(layer_norm(&x.narrow(1, 0, 0), None, None, options)),
        "fused norm: x is [2, 0]; expected […, width] of width from 1 on"
    );
    assert_eq!(
        words(add_norm(Norm::Rms, &x, &weight, None, None, options).map(|(y, _)| y)),
        "fused norm: residual is Float [3] on Cpu; expected x's Float [2, 4] on Cpu"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn any_shape_stride_and_dtype_is_correct(
        shape in prop::collection::vec(0i64..6, 0..3),
        width in prop_oneof![Just(1i64), 2i64..140, Just(4099)],
        layout in 0..3,
        (kind, output) in prop::sample::select(vec![
            (Kind::Double, Kind::Double), (Kind::Float, Kind::Float), (Kind::BFloat16, Kind::BFloat16),
            (Kind::BFloat16, Kind::Float), (Kind::Half, Kind::Half), (Kind::Half, Kind::Float),
        ]),
        norm in prop::sample::select(NORMS.to_vec()),
        keep in prop::sample::select(KEEPS.to_vec()),
        seed in 0u64..1000,
    ) {
        let mut generator = Generator::new(seed).unwrap();
        let size: Vec<i64> = shape.iter().copied().chain([width]).collect();
        // Dense, every second element, or with the last dimension first in memory.
        let x = match layout {
            0 => normal(&mut generator, &size),
            1 => {
                let double: Vec<i64> = shape.iter().copied().chain([2 * width]).collect();
                normal(&mut generator, &double).slice(-1, 0, None, 2)
            }
            _ => {
                let first: Vec<i64> = [width].into_iter().chain(shape.iter().copied()).collect();
                normal(&mut generator, &first).movedim_int(0, -1)
            }
        };
        let rounded = |t: &Tensor| t.to_kind(kind).to_kind(Kind::Double);
        let x = rounded(&(x * 2.0 + 0.5));
        let (weight, bias) = (rounded(&weights(&mut generator, width)), rounded(&normal(&mut generator, &[width])));
        let upstream = normal(&mut generator, &size).to_kind(output).to_kind(Kind::Double);
        // Large enough that the gradient of a short row does not cancel.
        let eps = 0.5;
        let oracle = Results::of(&x, &weight, &bias, &upstream, |x, w, b| composed(norm, x, Some(w), Some(b), eps));
        let low = |t: &Tensor| t.to_kind(kind);
        let options = Options { eps, keep, output: Some(output) };
        let zeros = low(&x).zeros_like();
        let ours = Results::of(&low(&x), &weight.to_kind(Kind::Double), &bias, &upstream, |x, w, b| match norm {
            Norm::Layer => layer_norm(x, Some(w), Some(b), options).unwrap(),
            Norm::Rms => add_norm(norm, x, &zeros, Some(w), Some(b), options).unwrap().0,
        });
        let unit = |kind| match kind {
            Kind::Double => 2f64.powi(-46),
            Kind::Float => 2f64.powi(-19),
            Kind::BFloat16 => 2f64.powi(-8),
            _ => 2f64.powi(-11),
        };
        for i in 0..4 {
            prop_assert_eq!(ours.0[i].size(), oracle.0[i].size());
            if oracle.0[i].numel() == 0 {
                continue;
            }
            let tolerance = match (i, keep) {
                (0, _) => unit(output),
                (1, Keep::Input) => unit(kind),
                (_, Keep::Input) => unit(output).min(2f64.powi(-19)),
                (_, Keep::Output) => 20.0 * unit(output) + unit(kind),
            };
            let scale = oracle.0[i].abs().max().double_value(&[]) + 1.0;
            let apart = worst(&ours.0[i], &oracle.0[i]) / scale;
            prop_assert!(apart <= tolerance, "{}: {apart:e} of {tolerance:e}", Results::NAMES[i]);
        }
    }
}
