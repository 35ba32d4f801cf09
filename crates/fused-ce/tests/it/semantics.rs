//! Autograd semantics: repeated backward, upstream gradients, frozen inputs, in-place changes.

use expect_test::expect;
use fused_ce::{
    Adapter, Chunk, Denominator, Gradients, Inputs, LinearCrossEntropy, LogSumExp, Output, Reduction, Result,
    Targets,
};
use runtime::autograd::{GradMode, Keep, backward, backward_with, grad, set_grad};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::naive;

pub(crate) const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
pub(crate) const N: i64 = 12;
pub(crate) const H: i64 = 5;
pub(crate) const V: i64 = 9;
pub(crate) const MODES: [Gradients; 2] = [Gradients::Forward, Gradients::Backward];
const GRAPH: Keep = Keep { graph: true, derivative: false };

pub(crate) fn operands(seed: u64, kind: Kind) -> [Tensor; 3] {
    let mut generator = Generator::new(seed).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, F64).unwrap().to_kind(kind);
    let targets = (Tensor::arange(N, (Kind::Int64, Device::Cpu)) * 4).remainder(V);
    let _ = targets.narrow(0, 3, 4).fill_(-100);
    [normal(&[N, H]), normal(&[V, H]), targets]
}

pub(crate) fn leaf(tensor: &Tensor) -> Tensor {
    tensor.copy().set_requires_grad(true)
}

pub(crate) fn options(gradients: Gradients) -> LinearCrossEntropy {
    LinearCrossEntropy { gradients, chunk: Some(Chunk::Tokens(3)), ..LinearCrossEntropy::default() }
}

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    let error = (found - expected).abs().max().double_value(&[]);
    assert!(error <= 1e-12 * (1.0 + expected.abs().max().double_value(&[])), "{what}: {error:e}");
}

#[test]
fn backward_repeats_while_the_graph_is_retained() {
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
        for gradients in MODES {
            for upstream in [1.0, 3.0] {
                let [x, w, targets] = operands(1, kind);
                let (x, w) = (leaf(&x), leaf(&w));
                let loss = options(gradients).loss(&x, &w, &targets).unwrap();
                let upstream = loss.full_like(upstream);
                let mut runs = Vec::new();
                for keep in [GRAPH, GRAPH, GRAPH, Keep::default()] {
                    backward_with(&[&loss], &[Some(&upstream)], keep).unwrap();
                    runs.push([x.grad().copy(), w.grad().copy()]);
                    // As `zero_grad` of an optimizer: the caller may write into its gradients.
                    let _ = x.grad().zero_();
                    let _ = w.grad().zero_();
                }
                for run in &runs {
                    assert!(run[0].equal(&runs[0][0]) && run[1].equal(&runs[0][1]), "{kind:?} {gradients:?}");
                }
                assert!(runs[0][1].abs().max().double_value(&[]) > 0.0);
                let error = backward(&[&loss]).unwrap_err().to_string();
                assert!(error.contains("second time") || error.contains("released"), "{error}");
            }
        }
    }
}

#[test]
fn gradients_accumulate_over_backwards_and_losses() {
    for gradients in MODES {
        let [x, w, targets] = operands(2, Kind::Double);
        let (x, w) = (leaf(&x), leaf(&w));
        let loss = options(gradients).loss(&x, &w, &targets).unwrap();
        let [once_x, once_w]: [Tensor; 2] = grad(&[&loss], &[None], &[&x, &w], GRAPH)
            .unwrap()
            .into_iter()
            .map(|gradient| gradient.unwrap().copy())
            .collect::<Vec<_>>()
            .try_into()
            .unwrap();
        backward_with(&[&loss], &[None], GRAPH).unwrap();
        backward_with(&[&loss], &[None], GRAPH).unwrap();
        backward(&[&loss]).unwrap();
        assert_close(&x.grad(), &(once_x * 3.0), "x");
        assert_close(&w.grad(), &(once_w * 3.0), "w");
    }
}

#[test]
fn any_upstream_gradient_scales_the_gradients() {
    for gradients in MODES {
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            for upstream in [1.0, 3.0, 0.0, -0.125, 65536.0] {
                let [x, w, targets] = operands(3, Kind::Double);
                let options = LinearCrossEntropy { reduction, ..options(gradients) };
                let run = |how: fn(&Inputs<'_>, &LinearCrossEntropy) -> Result<Output>| {
                    let (x, w) = (leaf(&x), leaf(&w));
                    let loss = how(&Inputs::new(&x, &w, &targets), &options).unwrap().loss;
                    backward_with(&[&loss], &[Some(&loss.full_like(upstream))], Keep::default()).unwrap();
                    [x.grad(), w.grad()]
                };
                let (found, expected) = (run(|inputs, options| options.run(inputs)), run(naive::run));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, &format!("{gradients:?} {reduction:?} {upstream}"));
                }
            }
        }
    }
}

#[test]
fn changing_a_saved_input_is_an_error() {
    let names =
        ["hidden", "weight", "bias", "class weights", "token weights", "denominator", "distributions"];
    for gradients in MODES {
        for (place, name) in names.into_iter().enumerate() {
            let [x, w, targets] = operands(4, Kind::Double);
            let (x, w, b) = (leaf(&x), leaf(&w), leaf(&Tensor::ones([V], F64)));
            let changed = [Tensor::ones([V], F64), Tensor::ones([N], F64), Tensor::from(3.0f64)];
            let even = Tensor::full([N, V], 1.0 / V as f64, F64);
            let inputs = Inputs {
                targets: if place == 6 { Targets::Distributions(&even) } else { Targets::Classes(&targets) },
                bias: Some(&b),
                class_weights: Some(&changed[0]),
                token_weights: Some(&changed[1]),
                denominator: Some(Denominator::Tensor(&changed[2])),
                ..Inputs::new(&x, &w, &targets)
            };
            let loss = options(gradients).run(&inputs).unwrap().loss;
            {
                let _no_grad = tch::no_grad_guard();
                let tensor = [&x, &w, &b, &changed[0], &changed[1], &changed[2], &even][place];
                let _ = tensor.shallow_clone().g_mul_scalar_(2.0);
            }
            let result = backward(&[&loss]);
            match gradients {
                // The gradients are computed already.
                Gradients::Forward => result.unwrap(),
                Gradients::Backward => {
                    let error = result.unwrap_err().to_string();
                    assert!(
                        error.contains("inplace operation") || error.contains("in place"),
                        "{name}: {error}"
                    );
                }
            }
        }
    }
}

/// Returns the FLOPs of forward and backward; only products count.
fn flops(inputs: &Inputs<'_>, options: &LinearCrossEntropy, record: bool) -> [u64; 2] {
    let _mode = if record { GradMode::on() } else { GradMode::off() };
    let counter = Counter::on_this_thread().unwrap();
    let loss = options.run(inputs).unwrap().loss;
    let forward = counter.finish().unwrap();
    assert!(forward.unknown.is_empty(), "{forward}");
    let counter = Counter::on_this_thread().unwrap();
    if record {
        let loss = if loss.dim() > 0 { loss.sum(Kind::Float) } else { loss };
        backward(&[&loss]).unwrap();
    }
    let backward = counter.finish().unwrap();
    assert!(backward.unknown.is_empty(), "{backward}");
    [forward, backward].map(|counts| counts.total.flops.dense)
}

#[test]
fn unneeded_products_are_not_computed() {
    let [n, h, v]: [i64; 3] = [96, 40, 130];
    let mut generator = Generator::new(5).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, w) = (normal(&[n, h]), normal(&[v, h]));
    let all = Tensor::arange(n, (Kind::Int64, Device::Cpu));
    let half = all.where_self(&all.remainder(2).eq(0), &Tensor::from(-100i64));
    let none = all.full_like(-100);
    let product = (2 * n * h * v) as u64;
    for (targets, numerator) in [(&all, 2), (&half, 1), (&none, 0)] {
        let unit = product * numerator / 2;
        for kind in [Kind::Float, Kind::BFloat16] {
            for chunk in [Chunk::Tokens(1000), Chunk::Tokens(20)] {
                let run = |x_needs: bool, w_needs: bool, record: bool, options: LinearCrossEntropy| {
                    let options = LinearCrossEntropy { chunk: Some(chunk), ..options };
                    let (x, w) = (x.to_kind(kind).copy(), w.to_kind(kind).copy());
                    let (x, w) = (x.set_requires_grad(x_needs), w.set_requires_grad(w_needs));
                    let counts =
                        flops(&Inputs::new(&x, &w, targets), &options, record && (x_needs || w_needs));
                    assert_eq!(
                        (x.grad().defined(), w.grad().defined()),
                        (x_needs && record, w_needs && record)
                    );
                    counts
                };
                let plain = LinearCrossEntropy::default;
                let again = || LinearCrossEntropy { gradients: Gradients::Backward, ..plain() };
                let each = || LinearCrossEntropy { reduction: Reduction::None, ..plain() };
                let differentiable =
                    || LinearCrossEntropy { log_sum_exp: LogSumExp::Differentiable, ..plain() };
                assert_eq!(run(true, true, false, plain()), [unit, 0], "evaluation");
                assert_eq!(run(false, false, true, plain()), [unit, 0], "nothing to learn");
                assert_eq!(run(true, false, true, plain()), [2 * unit, 0], "frozen head");
                assert_eq!(run(false, true, true, plain()), [2 * unit, 0], "frozen hidden states");
                assert_eq!(run(true, true, true, plain()), [3 * unit, 0], "both");
                for waits in [again(), each(), differentiable()] {
                    assert_eq!(run(true, true, true, waits.clone()), [unit, 3 * unit], "both, in backward");
                    let frozen_head = match waits.reduction {
                        Reduction::None => [2 * unit, 0],
                        _ => [unit, 2 * unit],
                    };
                    assert_eq!(
                        run(true, false, true, waits.clone()),
                        frozen_head,
                        "frozen head, in backward"
                    );
                    assert_eq!(run(false, true, true, waits), [unit, 2 * unit], "frozen states, in backward");
                }
            }
        }
    }
}

/// Whether an input needs a gradient is recorded in forward and checked again in backward.
#[test]
fn a_gradient_that_this_backward_does_not_use_is_not_computed() {
    let [x, w, targets] = operands(6, Kind::Float);
    let (x, w) = (leaf(&x), leaf(&w));
    let loss = options(Gradients::Backward).loss(&x, &w, &targets).unwrap();
    let counter = Counter::on_this_thread().unwrap();
    let found = grad(&[&loss], &[None], &[&x], Keep::default()).unwrap();
    // Eight labelled rows: the logits again, and the gradient of the hidden states.
    assert_eq!(counter.finish().unwrap().total.flops.dense, (2 * 2 * 8 * H * V) as u64);
    assert!(found[0].is_some() && !w.grad().defined());
}

#[test]
fn nan_affects_its_own_row_only_and_ignored_rows_are_not_read() {
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
        let [x, w, targets] = operands(9, kind);
        for gradients in MODES {
            let clean = options(gradients).loss(&x, &w, &targets).unwrap();
            for place in [0, 3] {
                let dirty = x.copy();
                let _ = dirty.get(place).fill_(f64::NAN);
                let ignored = place == 3;
                let each = LinearCrossEntropy {
                    reduction: Reduction::None,
                    log_sum_exp: LogSumExp::Value,
                    entropy: true,
                    ..options(gradients)
                };
                let output = each.run(&Inputs::new(&dirty, &w, &targets)).unwrap();
                for values in [Some(output.loss), output.log_sum_exp, output.entropy].into_iter().flatten() {
                    let nan: Vec<i64> = Vec::try_from(values.isnan().nonzero().reshape([-1])).unwrap();
                    assert_eq!(nan, if ignored { vec![] } else { vec![place] }, "{kind:?} {gradients:?}");
                }
                let (leaf_x, leaf_w) = (leaf(&dirty), leaf(&w));
                let loss = options(gradients).loss(&leaf_x, &leaf_w, &targets).unwrap();
                backward(&[&loss]).unwrap();
                let any_nan = |tensor: &Tensor| tensor.isnan().any().int64_value(&[]) == 1;
                if ignored {
                    assert!(loss.equal(&clean));
                    assert!(!any_nan(&leaf_x.grad()) && !any_nan(&leaf_w.grad()));
                    assert_eq!(leaf_x.grad().get(3).abs().max().double_value(&[]), 0.0);
                } else {
                    assert!(any_nan(&loss) && any_nan(&leaf_w.grad()) && any_nan(&leaf_x.grad().get(0)));
                    // The gradients of the other rows are unaffected.
                    assert!(!any_nan(&leaf_x.grad().narrow(0, 1, N - 1)));
                }
            }
        }
    }
}

#[test]
fn the_default_budget_always_fits_and_large_chunks_are_one_chunk() {
    let [x, w, targets] = operands(10, Kind::Double);
    let with =
        |chunk| LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() }.loss(&x, &w, &targets).unwrap();
    let expected = with(Some(Chunk::Tokens(1)));
    for chunk in [
        None,
        Some(Chunk::Tokens(i64::MAX)),
        Some(Chunk::Budget(u64::MAX)),
        Some(Chunk::Budget(V as u64 * 8)),
    ] {
        assert_close(&with(chunk), &expected, &format!("{chunk:?}"));
    }
}

#[test]
fn a_shift_past_the_end_leaves_nothing_to_predict() {
    let [x, w, targets] = operands(11, Kind::Double);
    let (x, targets) = (x.reshape([3, 4, H]), targets.reshape([3, 4]));
    for (shift, nothing) in [(3, false), (4, true), (i64::MAX, true)] {
        let options =
            LinearCrossEntropy { shift, reduction: Reduction::Sum, ..LinearCrossEntropy::default() };
        let loss = options.loss(&x, &w, &targets).unwrap().double_value(&[]);
        assert_eq!(loss == 0.0, nothing, "{shift}");
    }
}

#[test]
fn any_strides_leading_dimensions_and_single_tokens_work() {
    let [x, w, targets] = operands(12, Kind::Double);
    let expected = options(Gradients::Forward).loss(&x, &w, &targets).unwrap();
    let strided = |tensor: &Tensor| tensor.tr().contiguous().tr();
    let spread = Tensor::stack(&[&targets, &targets.ones_like()], 1).select(1, 0);
    for (name, loss) in [
        ("strides", options(Gradients::Forward).loss(&strided(&x), &strided(&w), &spread)),
        (
            "leading dimensions",
            options(Gradients::Forward).loss(&x.reshape([2, 3, 2, H]), &w, &targets.reshape([2, 3, 2])),
        ),
    ] {
        assert_close(&loss.unwrap(), &expected, name);
    }
    // One token without leading dimensions.
    let leaf_x = leaf(&x.get(0));
    for reduction in [Reduction::Mean, Reduction::None] {
        let options = LinearCrossEntropy { reduction, ..LinearCrossEntropy::default() };
        let loss = options.loss(&leaf_x, &w, &targets.get(0)).unwrap();
        assert!(loss.size().is_empty());
        backward(&[&loss]).unwrap();
        assert_eq!(leaf_x.grad().size(), [H]);
        set_grad(&leaf_x, None).unwrap();
    }
}

/// Several batches with one denominator equal one batch.
#[test]
fn an_explicit_denominator_makes_batches_one_step() {
    let [x, w, targets] = operands(13, Kind::Double);
    let whole = leaf(&w);
    let loss = options(Gradients::Forward).loss(&x, &whole, &targets).unwrap();
    backward(&[&loss]).unwrap();
    let labelled = targets.ge(0).sum(Kind::Double);
    for tensor in [false, true] {
        let parts = leaf(&w);
        let mut sum = 0.0;
        for (start, count) in [(0, 4), (4, 1), (5, 7)] {
            let denominator = match tensor {
                true => Denominator::Tensor(&labelled),
                false => Denominator::Number(labelled.double_value(&[])),
            };
            let (x, targets) = (x.narrow(0, start, count), targets.narrow(0, start, count));
            let inputs = Inputs { denominator: Some(denominator), ..Inputs::new(&x, &parts, &targets) };
            let loss = options(Gradients::Forward).run(&inputs).unwrap().loss;
            backward(&[&loss]).unwrap();
            sum += loss.double_value(&[]);
        }
        assert!((sum - loss.double_value(&[])).abs() <= 1e-12);
        assert_close(&parts.grad(), &whole.grad(), "the weight's gradient over three batches");
    }
}

/// Four chunks with three products each; the first chunk overwrites the sum, so nothing is zeroed.
#[test]
fn the_first_chunk_writes_the_weights_gradient() {
    let [x, w, _] = operands(17, Kind::Double);
    let (x, w) = (leaf(&x), leaf(&w));
    let targets = Tensor::arange(N, (Kind::Int64, Device::Cpu)).remainder(V);
    let counter = Counter::on_this_thread().unwrap();
    let loss = options(Gradients::Forward).loss(&x, &w, &targets).unwrap();
    let counts = counter.finish().unwrap();
    let zeroed = ["aten::zero_", "aten::fill_"].map(|name| counts.op(name).calls);
    assert_eq!(zeroed, [0, 0], "{counts}");
    // The statistics of each chunk start at 0: far fewer bytes than a gradient.
    assert!(counts.op("aten::zeros").bytes < (V * H * 8) as u64, "{counts}");
    assert_eq!((counts.op("aten::mm").calls, counts.op("aten::addmm_").calls), (9, 3));
    backward(&[&loss]).unwrap();
}

/// Only A and B are trained; the gradient of the frozen weight is not computed.
#[test]
fn an_adapter_on_a_frozen_head_is_trained_alone() {
    let [x, w, targets] = operands(14, Kind::Double);
    let mut generator = Generator::new(15).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, F64).unwrap();
    let (a, b) = (leaf(&normal(&[2, H])), leaf(&normal(&[V, 2])));
    let inputs =
        Inputs { adapter: Some(Adapter { a: &a, b: &b, scale: 0.5 }), ..Inputs::new(&x, &w, &targets) };
    let loss = options(Gradients::Forward).run(&inputs).unwrap().loss;
    backward(&[&loss]).unwrap();
    assert!(a.grad().defined() && b.grad().defined() && !w.grad().defined() && !x.grad().defined());
    let merged = leaf(&(&w + b.detach().matmul(&a.detach()) * 0.5));
    let expected = options(Gradients::Forward).loss(&x, &merged, &targets).unwrap();
    backward(&[&expected]).unwrap();
    assert_close(&loss, &expected, "loss");
    assert_close(&a.grad(), &(b.detach().tr().matmul(&merged.grad()) * 0.5), "A");
    assert_close(&b.grad(), &(merged.grad().matmul(&a.detach().tr()) * 0.5), "B");
}

#[test]
fn a_second_derivative_is_refused() {
    let words = expect![
        "the backward of `linear cross-entropy` is not differentiable, so a second derivative through it does not exist; declare TWICE_DIFFERENTIABLE where its backward uses differentiable operators only"
    ];
    for gradients in MODES {
        let [x, w, targets] = operands(16, Kind::Double);
        let (x, w) = (leaf(&x), leaf(&w));
        let loss = options(gradients).loss(&x, &w, &targets).unwrap();
        let first = grad(&[&loss], &[None], &[&x], Keep { graph: true, derivative: true })
            .unwrap()
            .remove(0)
            .unwrap();
        let error =
            grad(&[&first.sum(Kind::Double)], &[None], &[&w], Keep::default()).unwrap_err().to_string();
        words.assert_eq(&error);
    }
}
