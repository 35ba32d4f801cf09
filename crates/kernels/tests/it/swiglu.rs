//! The gated product as a node of the graph, against libtorch's operators in f64.

use kernels::swiglu::silu_mul;
use runtime::autograd::{self, Keep};
use runtime::memory::{Region, live_bytes, track_cpu};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];

fn random(seed: u64, shape: &[i64], kind: Kind) -> Tensor {
    let x = Generator::new(seed).unwrap().normal(shape, (Kind::Double, Device::Cpu)).unwrap();
    (x * 3.0).to_kind(kind)
}

/// The product, and the requested gradients of both inputs.
fn run(
    product: impl Fn(&Tensor, &Tensor) -> Tensor,
    gate: &Tensor,
    up: &Tensor,
    upstream: &Tensor,
) -> Vec<Tensor> {
    let leaf = |x: &Tensor| x.detach().set_requires_grad(true);
    let (gate, up) = (leaf(gate), leaf(up));
    let y = product(&gate, &up);
    let gradients = autograd::grad(&[&y], &[Some(upstream)], &[&gate, &up], Keep::default()).unwrap();
    [y.detach()].into_iter().chain(gradients.into_iter().flatten()).collect()
}

/// The share of the tolerance that the worst element uses: an absolute and a relative error of `tolerance`.
fn share(found: &Tensor, exact: &Tensor, tolerance: f64) -> f64 {
    let (found, exact) = (found.to_kind(Kind::Double), exact.to_kind(Kind::Double));
    if found.numel() == 0 {
        return 0.0;
    }
    ((&found - &exact).abs() / ((exact.abs() + 1.0) * tolerance)).max().double_value(&[])
}

fn eager(gate: &Tensor, up: &Tensor) -> Tensor {
    gate.silu() * up
}

fn ours(gate: &Tensor, up: &Tensor) -> Tensor {
    silu_mul(gate, up).unwrap()
}

#[test]
fn every_layout_matches_the_operator_chain_in_f64() {
    let whole = random(1, &[6, 5, 2 * 37], Kind::Double);
    let (gate, up) = (whole.narrow(2, 0, 37), whole.narrow(2, 37, 37));
    let square = random(2, &[41, 41], Kind::Double);
    let expanded = random(3, &[1, 41], Kind::Double).expand([41, 41], false);
    let column = random(4, &[41, 1], Kind::Double).expand([41, 41], false);
    let (vector, number) = (random(5, &[130], Kind::Double), random(6, &[], Kind::Double));
    let large = [random(7, &[40, 4096], Kind::Double), random(8, &[40, 4096], Kind::Double)];
    let transposed = square.tr();
    for (a, b) in [
        (&gate, &up),
        (&square, &transposed),
        (&transposed, &expanded),
        (&square, &column),
        (&square, &square),
        (&vector, &vector),
        (&number, &number),
        (&large[0], &large[1]),
    ] {
        for upstream in
            [Tensor::ones([] as [i64; 0], tch::kind::DOUBLE_CPU).expand(a.size(), false), a.tanh()]
        {
            let (found, exact) = (run(ours, a, b, &upstream), run(eager, a, b, &upstream));
            for (found, exact) in found.iter().zip(&exact) {
                let share = share(found, exact, 1e-14);
                assert!(share <= 1.0, "{:?}: {share} of the tolerance", a.size());
            }
        }
    }
}

/// The tolerance of bf16 and fp16 is half a unit in the last place of the result, and what fp32 rounds besides.
#[test]
fn errors_of_every_dtype_are_its_rounding() {
    for (kind, tolerance) in
        [(Kind::Float, 6e-7), (Kind::Double, 1e-14), (Kind::BFloat16, 3.92e-3), (Kind::Half, 4.9e-4)]
    {
        for shape in [[1, 1], [3, 65], [7, 300], [40, 4096]] {
            let [gate, up, upstream] = [1, 2, 3].map(|seed| random(seed, &shape, kind));
            let wide = [&gate, &up, &upstream].map(|x| x.to_kind(Kind::Double));
            let found = run(ours, &gate, &up, &upstream);
            let exact = run(eager, &wide[0], &wide[1], &wide[2]);
            for (which, (found, exact)) in found.iter().zip(&exact).enumerate() {
                assert_eq!(found.kind(), kind);
                // 1 + g·(1 − σ) cancels near g = −1.28, so the error is measured against the terms, not their sum.
                let terms = (&wide[2] * &wide[1]).abs();
                let allowed = (exact.abs() + terms + 1.0) * tolerance;
                let error = (found.to_kind(Kind::Double) - exact).abs();
                let share = (error / allowed).max().double_value(&[]);
                assert!(share <= 1.0, "{kind:?} {shape:?}, result {which}: {share} of the tolerance");
            }
        }
    }
}

#[test]
fn low_precision_results_are_rounded_once() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let [gate, up, upstream] = [1, 2, 3].map(|seed| random(seed, &[50, 60], kind));
        let wide = [&gate, &up, &upstream].map(|x| x.to_kind(Kind::Float));
        let (narrow, wide) = (run(ours, &gate, &up, &upstream), run(ours, &wide[0], &wide[1], &wide[2]));
        for (narrow, wide) in narrow.iter().zip(&wide) {
            assert_eq!(narrow, &wide.to_kind(kind), "{kind:?}");
        }
    }
}

#[test]
fn dtypes_promote_as_in_libtorch_and_gradients_have_the_inputs_dtypes() {
    for a in KINDS {
        for b in KINDS {
            let (gate, up) = (random(1, &[2, 3], a), random(2, &[2, 3], b));
            let promoted = (&gate * &up).kind();
            let upstream = Tensor::ones([2, 3], (promoted, Device::Cpu));
            let found = run(ours, &gate, &up, &upstream);
            assert_eq!(found.iter().map(Tensor::kind).collect::<Vec<_>>(), [promoted, a, b]);
        }
    }
}

#[test]
fn only_tensors_needed_by_backward_are_saved_once() {
    const BYTES: u64 = 300 * 400 * 4;
    track_cpu().unwrap();
    let live = || live_bytes(Device::Cpu).unwrap();
    let tensor = || Tensor::ones([300, 400], (Kind::Float, Device::Cpu));
    let leaf = tensor().set_requires_grad(true);
    // Which of the two need a gradient, and how many matrices are live besides the product.
    for (gate_needed, up_needed, kept) in
        [(true, true, 2), (true, false, 2), (false, true, 1), (false, false, 0)]
    {
        let input = |needed: bool| if needed { &leaf * 1.0 } else { tensor() };
        let before = live();
        let (gate, up) = (input(gate_needed), input(up_needed));
        let region = Region::start(Device::Cpu).unwrap();
        let product = silu_mul(&gate, &up).unwrap();
        assert_eq!(region.finish().unwrap().peak_above_start(), BYTES, "the product alone");
        drop((gate, up));
        assert_eq!(live() - before, (1 + kept) * BYTES, "{gate_needed} {up_needed}");
        drop(product);
        assert_eq!(live(), before);
    }
    let before = live();
    let both = &leaf * 1.0;
    let product = silu_mul(&both, &both).unwrap();
    drop(both);
    assert_eq!(live() - before, 2 * BYTES, "the product and its one input");
    drop(product);

    // One gradient overwrites the upstream one if nothing else uses it.
    let (gate, up) = (&leaf * 1.0, tensor());
    let product = silu_mul(&gate, &up).unwrap() * 1.0;
    let upstream = tensor();
    let region = Region::start(Device::Cpu).unwrap();
    let found = autograd::grad(&[&product], &[Some(&upstream)], &[&gate], Keep::default()).unwrap();
    let peak = region.finish().unwrap().peak_above_start();
    assert!(peak <= BYTES + 64, "{peak} B: the upstream gradient, and scalars");
    drop(found);
}

#[test]
fn a_shared_gradient_is_not_overwritten() {
    let gate = Tensor::zeros([9], tch::kind::FLOAT_CPU).set_requires_grad(true);
    let up = Tensor::ones([9], tch::kind::FLOAT_CPU);
    let (a, b) = (ours(&gate, &up), ours(&gate, &up));
    // Both nodes get the same upstream tensor, and the caller holds it too.
    let upstream = Tensor::full([9], 3.0, tch::kind::FLOAT_CPU);
    let found = autograd::grad(&[&(a + b)], &[Some(&upstream)], &[&gate], Keep::default()).unwrap();
    assert_eq!(found[0].as_ref().unwrap(), &Tensor::full([9], 3.0, tch::kind::FLOAT_CPU));
    assert_eq!(upstream, Tensor::full([9], 3.0, tch::kind::FLOAT_CPU));
}

#[test]
fn equal_runs_give_equal_bits_with_any_number_of_threads() {
    for kind in KINDS {
        for shape in [[3000, 129], [5, 40_000]] {
            let [gate, up, upstream] = [1, 2, 3].map(|seed| random(seed, &shape, kind));
            let once = || run(ours, &gate, &up, &upstream);
            let threads = tch::get_num_threads();
            let first = once();
            assert_eq!(first, once());
            tch::set_num_threads(1);
            let alone = once();
            tch::set_num_threads(threads);
            assert_eq!(first, alone);
        }
    }
}

#[test]
fn mismatched_inputs_are_refused_with_the_remedy() {
    let t = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu));
    let cases = [
        (
            t(&[3, 4], Kind::Float),
            t(&[3, 1], Kind::Float),
            "fused swiglu: gate is [3, 4] and up [3, 1]; expected one shape",
        ),
        (
            t(&[3], Kind::Float),
            t(&[3], Kind::Int64),
            "fused swiglu: `up` is Int64; expected Float, Double, BFloat16 or Half: convert it with `to_kind`",
        ),
        (Tensor::new(), t(&[3], Kind::Float), "fused swiglu: `gate` is undefined"),
        (
            t(&[3], Kind::Float).to_sparse(None, None::<&[i64]>, None),
            t(&[3], Kind::Float),
            "fused swiglu: `gate` is sparse or MKL-DNN's; make it dense with `to_dense`",
        ),
    ];
    for (gate, up, message) in cases {
        assert_eq!(silu_mul(&gate, &up).unwrap_err().to_string(), message);
    }
}

#[test]
fn changing_an_input_before_backward_is_an_error() {
    let leaf = random(1, &[4], Kind::Float).set_requires_grad(true);
    let mut gate = &leaf * 1.0;
    let product = ours(&gate, &leaf);
    let _ = gate.fill_(0.0);
    let error = autograd::backward(&[&product.sum(Kind::Float)]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}
