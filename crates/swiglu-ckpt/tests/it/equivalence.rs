//! Every level computes the same function and the same gradients.

use runtime::autograd::{self, GradcheckConfig, Keep, gradcheck};
use runtime::random::Generator;
use swiglu_ckpt::{CheckpointLevel, SwigluMlp, swiglu};
use tch::{Device, Kind, Tensor};

/// At most seven tokens in a tile of the small shapes below, whatever the dtype: most cases have several tiles, the last
/// one shorter.
const TILED: CheckpointLevel = CheckpointLevel::InputOnlyTiled { bytes: 7 * (3 * 40 + 3 * 24) * 4 };
const UNTILED: [CheckpointLevel; 4] = [
    CheckpointLevel::SaveAll,
    CheckpointLevel::SaveGateUp,
    CheckpointLevel::SaveOne,
    CheckpointLevel::InputOnly,
];

fn levels() -> impl Iterator<Item = CheckpointLevel> {
    UNTILED.into_iter().chain([TILED])
}

/// x, W, V, U with the size of a trained layer's values.
fn arguments(
    generator: &mut Generator,
    leading: &[i64],
    hidden: i64,
    features: i64,
    kind: Kind,
) -> [Tensor; 4] {
    let mut draw = |shape: &[i64], scale: f64| {
        let drawn = generator.normal(shape, (Kind::Double, Device::Cpu)).unwrap();
        (drawn * scale).to_kind(kind).set_requires_grad(true)
    };
    let x: Vec<i64> = leading.iter().copied().chain([hidden]).collect();
    let (h, f) = ((hidden as f64).powf(-0.5), (features as f64).powf(-0.5));
    [draw(&x, 1.0), draw(&[hidden, features], h), draw(&[hidden, features], h), draw(&[features, hidden], f)]
}

fn plain(arguments: &[Tensor; 4]) -> Tensor {
    let [x, w, v, u] = arguments;
    (x.matmul(w).silu() * x.matmul(v)).matmul(u)
}

fn twins(arguments: &[Tensor; 4], needs: [bool; 4]) -> [Tensor; 4] {
    std::array::from_fn(|i| arguments[i].detach().copy().set_requires_grad(needs[i]))
}

/// The same irregular values for every output of one shape. Not random: the generator is shared by tests that run at once.
fn upstream(output: &Tensor) -> Tensor {
    let index = Tensor::arange(output.numel() as i64, (Kind::Double, Device::Cpu));
    (((index + 1.0) * 12.9898).sin() * 2.0).to_kind(output.kind()).view_as(output)
}

/// Output and the gradients of what needs one, from an upstream gradient.
fn run(arguments: &[Tensor; 4], output: Tensor) -> Vec<Tensor> {
    let upstream = upstream(&output);
    if output.requires_grad() {
        autograd::backward_with(&[&output], &[Some(&upstream)], Keep::default()).unwrap();
    }
    let grads = arguments.iter().filter(|a| a.requires_grad()).map(Tensor::grad);
    [output.detach()].into_iter().chain(grads).collect()
}

fn ours(arguments: &[Tensor; 4], level: CheckpointLevel) -> Tensor {
    let [x, w, v, u] = arguments;
    swiglu(x, w, v, u, level).unwrap()
}

fn largest_error(a: &Tensor, b: &Tensor) -> f64 {
    if a.numel() == 0 {
        0.0
    } else {
        (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
    }
}

/// Several tiles are what the tests of the tiled level are about.
#[test]
fn the_small_shapes_are_really_tiled() {
    let CheckpointLevel::InputOnlyTiled { bytes } = TILED else { unreachable!() };
    for (element, tokens) in [(8, 30), (4, 30), (2, 30)] {
        let most = bytes / (3 * 40 * element);
        assert!(most < tokens, "{most} tokens fit one tile of {element}-byte elements");
    }
}

#[test]
fn fused_storage_has_both_weights_side_by_side() {
    let mut generator = Generator::new(8).unwrap();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let [x, w, v, u] = arguments(&mut generator, &[3, 10], 24, 40, kind);
        for level in levels() {
            for needs in [
                [true; 4],
                [false, true, true, false],
                [true, false, false, true],
                [false, false, false, true],
            ] {
                let separate = twins(&[x.copy(), w.copy(), v.copy(), u.copy()], needs);
                let expected = run(&separate, ours(&separate, level));
                let both = Tensor::cat(&[w.detach(), v.detach()], 1).set_requires_grad(needs[1]);
                let (x, u) = (twins(&[x.copy(), w.copy(), v.copy(), u.copy()], needs), both);
                let [x, _, _, down] = x;
                let mlp =
                    SwigluMlp::from_fused_weights(u.shallow_clone(), down.shallow_clone(), level).unwrap();
                let y = mlp.forward(&x).unwrap();
                let upstream = upstream(&y);
                autograd::backward_with(&[&y], &[Some(&upstream)], Keep::default()).unwrap();
                let mut found = vec![y.detach()];
                for (need, tensor) in [(needs[0], &x), (needs[1], &u), (needs[3], &down)] {
                    if !need {
                        continue;
                    }
                    let grad = tensor.grad();
                    if std::ptr::eq(tensor, &u) {
                        found.extend([grad.narrow(1, 0, 40), grad.narrow(1, 40, 40)]);
                    } else {
                        found.push(grad);
                    }
                }
                assert_eq!(found.len(), expected.len());
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    // A view of a larger matrix may be summed in another order than a contiguous matrix.
                    let tolerance = match kind {
                        Kind::Double => 1e-12,
                        Kind::Float => 1e-5,
                        _ => 2e-2,
                    };
                    let close = found.allclose(expected, tolerance, tolerance, false);
                    assert!(close, "{level} {kind:?} {needs:?}, result {index}");
                }
            }
        }
    }
}

#[test]
fn the_assignments_check_passes() {
    // 4 × 256 tokens, H = 768, F = 2304, weights as PyTorch's linear layers draw them, gradients of the sum, and the
    // assignment's `torch.allclose(.., atol=1e-4)`, which allows a relative 1e-5 beside.
    let mut generator = Generator::new(0).unwrap();
    let mut weight = |rows: i64, columns: i64| {
        let bound = (rows as f64).powf(-0.5);
        let drawn = generator.uniform(&[rows, columns], (-bound, bound), (Kind::Float, Device::Cpu));
        drawn.unwrap().set_requires_grad(true)
    };
    let weights = [weight(768, 768 * 3), weight(768, 768 * 3), weight(768 * 3, 768)];
    let x = generator.normal(&[4, 256, 768], (Kind::Float, Device::Cpu)).unwrap().set_requires_grad(true);
    let [w, v, u] = weights;
    let arguments = [x, w, v, u];
    let percent = |found: &Tensor, expected: &Tensor| {
        ((found - expected).abs() / (expected.abs() * 1e-5 + 1e-4)).max().double_value(&[]) * 100.0
    };
    let exact: [Tensor; 4] =
        std::array::from_fn(|i| arguments[i].detach().to_kind(Kind::Double).set_requires_grad(true));
    plain(&exact).sum(Kind::Double).backward();
    for level in UNTILED.into_iter().chain([CheckpointLevel::InputOnlyTiled { bytes: 4 << 20 }]) {
        let arguments = twins(&arguments, [true; 4]);
        let y = ours(&arguments, level);
        let reference = twins(&arguments, [true; 4]);
        let expected = plain(&reference);
        let share = percent(&y.detach(), &expected.detach());
        assert!(share < 100.0, "{level}: output at {share:.1} % of the tolerance");
        autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
        expected.sum(Kind::Float).backward();
        for (index, name) in ["x", "W", "V", "U"].iter().enumerate() {
            let share = percent(&arguments[index].grad(), &reference[index].grad());
            eprintln!("{level}: gradient of {name} at {share:.1} % of the tolerance");
            assert!(share < 100.0, "{level}: gradient of {name} at {share:.1} % of the tolerance");
            // About PyTorch's own distance from the exact gradient, which is stricter than 1e-4: the two sum in
            // different orders, the crate's AVX2 kernels over twice as many terms as its AVX-512 kernels and as MKL's.
            let ours = largest_error(&arguments[index].grad(), &exact[index].grad());
            let theirs = largest_error(&reference[index].grad(), &exact[index].grad());
            assert!(ours <= 5.0 * theirs + 1e-7, "{level}: gradient of {name}: {ours:e} against {theirs:e}");
        }
    }
}

#[test]
fn untiled_levels_give_the_same_bits_in_fp32() {
    let mut generator = Generator::new(1).unwrap();
    for (leading, hidden, features) in [(vec![2, 33], 96, 200), (vec![512], 128, 384), (vec![1], 8, 8)] {
        let arguments = arguments(&mut generator, &leading, hidden, features, Kind::Float);
        let reference = twins(&arguments, [true; 4]);
        let expected = run(&reference, ours(&reference, CheckpointLevel::SaveAll));
        for level in UNTILED {
            let arguments = twins(&arguments, [true; 4]);
            assert_eq!(run(&arguments, ours(&arguments, level)), expected, "{level}");
        }
    }
}

#[test]
fn gradcheck_in_f64_for_every_level_and_every_pattern_of_needs() {
    let mut generator = Generator::new(2).unwrap();
    let all = arguments(&mut generator, &[2, 3], 4, 5, Kind::Double);
    for level in UNTILED.into_iter().chain([CheckpointLevel::InputOnlyTiled { bytes: 300 }]) {
        for pattern in 1..16 {
            let needs = std::array::from_fn(|i| pattern & (1 << i) != 0);
            let arguments = twins(&all, needs);
            let f = |a: &[Tensor]| {
                let y = swiglu(&a[0], &a[1], &a[2], &a[3], level);
                Ok(vec![y?])
            };
            let report = gradcheck(f, &arguments.each_ref(), GradcheckConfig::default()).unwrap();
            assert!(report.percent_of_tolerance < 10.0, "{level} {needs:?}: {report}");
        }
    }
}

#[test]
fn any_shape_dtype_and_needed_gradients_are_correct() {
    let mut generator = Generator::new(3).unwrap();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for leading in [vec![], vec![7], vec![0], vec![3, 0], vec![2, 3, 5]] {
            let all = arguments(&mut generator, &leading, 24, 40, kind);
            for pattern in [15, 1, 14, 8, 2, 4, 6, 9, 0] {
                let needs = std::array::from_fn(|i| pattern & (1 << i) != 0);
                // Double rounding aside, a low precision is judged against fp32 as PyTorch's own error is.
                let exact: [Tensor; 4] = std::array::from_fn(|i| {
                    all[i].detach().to_kind(Kind::Double).set_requires_grad(needs[i])
                });
                let exact = run(&exact, plain(&exact));
                let reference = twins(&all, needs);
                let reference = run(&reference, plain(&reference));
                for level in levels() {
                    let arguments = twins(&all, needs);
                    let found = run(&arguments, ours(&arguments, level));
                    assert_eq!(found.len(), exact.len());
                    for (index, ((found, exact), reference)) in
                        found.iter().zip(&exact).zip(&reference).enumerate()
                    {
                        assert_eq!((found.size(), found.kind()), (exact.size(), kind));
                        let (ours, theirs) = (largest_error(found, exact), largest_error(reference, exact));
                        // Relative to the largest value: four roundings in low precision.
                        let slack = match kind {
                            Kind::Double => 1e-12,
                            Kind::Float => 1e-5,
                            Kind::Half => 2e-3,
                            _ => 1.6e-2,
                        } * largest_error(exact, &exact.zeros_like()).max(1.0);
                        assert!(
                            ours <= theirs + slack,
                            "{level} {kind:?} {leading:?} needs {needs:?}, result {index}: {ours:e} against {theirs:e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn non_contiguous_inputs_weights_and_upstream_gradients_are_correct() {
    let mut generator = Generator::new(4).unwrap();
    let [x, w, v, u] = arguments(&mut generator, &[6, 8], 24, 40, Kind::Float);
    let strided = |t: &Tensor| {
        let wide = Tensor::stack(&[t.detach(), t.detach() * 9.0], -1);
        let view = wide.select(-1, 0);
        assert!(!view.is_contiguous());
        view.set_requires_grad(true)
    };
    let transposed = |t: &Tensor| t.detach().tr().contiguous().tr().set_requires_grad(true);
    for level in levels() {
        let expected = twins(&[x.copy(), w.copy(), v.copy(), u.copy()], [true; 4]);
        let expected = run(&expected, ours(&expected, level));
        for arguments in [
            [strided(&x), strided(&w), strided(&v), strided(&u)],
            [
                x.detach().transpose(0, 1).contiguous().transpose(0, 1).set_requires_grad(true),
                transposed(&w),
                transposed(&v),
                transposed(&u),
            ],
        ] {
            let found = run(&arguments, ours(&arguments, level));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.allclose(expected, 1e-5, 1e-5, false), "{level}");
            }
        }
        // The gradient of a sum has strides 0.
        let (a, b) = (
            twins(&[x.copy(), w.copy(), v.copy(), u.copy()], [true; 4]),
            [x.copy(), w.copy(), v.copy(), u.copy()],
        );
        let b = twins(&b, [true; 4]);
        autograd::backward(&[&ours(&a, level).sum(Kind::Float)]).unwrap();
        plain(&b).sum(Kind::Float).backward();
        for (a, b) in a.iter().zip(&b) {
            assert!(a.grad().allclose(&b.grad(), 1e-4, 1e-4, false), "{level}");
        }
    }
}

#[test]
fn backward_through_a_retained_graph_does_not_change_saved_tensors() {
    let mut generator = Generator::new(5).unwrap();
    let all = arguments(&mut generator, &[16], 24, 40, Kind::Float);
    for level in levels() {
        let arguments = twins(&all, [true; 4]);
        let y = ours(&arguments, level).sum(Kind::Float);
        autograd::backward_with(&[&y], &[None], Keep { graph: true, ..Keep::default() }).unwrap();
        let once: Vec<Tensor> = arguments.iter().map(|a| a.grad().copy()).collect();
        autograd::backward(&[&y]).unwrap();
        for (argument, once) in arguments.iter().zip(&once) {
            assert_eq!(argument.grad(), once * 2.0, "{level}");
        }
        assert!(autograd::backward(&[&y]).unwrap_err().to_string().contains("a second time"));
    }
}

#[test]
fn low_precision_gradients_of_weights_are_summed_over_tiles_in_fp32() {
    let mut generator = Generator::new(6).unwrap();
    // Many tiles: a sum in bf16 would lose a bit of the result with each.
    let all = arguments(&mut generator, &[4096], 16, 24, Kind::BFloat16);
    let exact: [Tensor; 4] =
        std::array::from_fn(|i| all[i].detach().to_kind(Kind::Double).set_requires_grad(true));
    let exact = run(&exact, plain(&exact));
    let errors = |level| {
        let arguments = twins(&all, [true; 4]);
        let found = run(&arguments, ours(&arguments, level));
        found.iter().zip(&exact).map(|(f, e)| largest_error(f, e)).collect::<Vec<_>>()
    };
    let (whole, tiled) =
        (errors(CheckpointLevel::InputOnly), errors(CheckpointLevel::InputOnlyTiled { bytes: 2000 }));
    for (index, (whole, tiled)) in whole.iter().zip(&tiled).enumerate() {
        assert!(tiled <= &(whole * 1.1 + 1e-6), "result {index}: {tiled:e} tiled, {whole:e} whole");
    }
}
