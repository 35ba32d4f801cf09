//! Fused elementwise expressions: values, gradients, special values, layouts, dtypes.

use proptest::prelude::*;
use runtime::autograd::{self, GradcheckOptions, Keep, gradcheck};
use runtime::fused::elementwise::{Elementwise, Expr};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

/// A function of two numbers: on symbols, and as libtorch's operators.
type Symbolic = for<'g> fn(Expr<'g>, Expr<'g>) -> Expr<'g>;
type Composed = fn(&Tensor, &Tensor) -> Tensor;
struct Case {
    name: &'static str,
    ours: Symbolic,
    theirs: Composed,
    /// Whether it wants positive numbers.
    positive: bool,
}

fn table() -> Vec<Case> {
    let case = |name, ours: Symbolic, theirs: Composed| Case { name, ours, theirs, positive: false };
    let positive = |name, ours: Symbolic, theirs: Composed| Case { name, ours, theirs, positive: true };
    vec![
        case("add", |a, b| a + b, |a, b| a + b),
        case("add a constant", |a, _| 1.5 + a, |a, _| a + 1.5),
        case("subtract", |a, b| a - b, |a, b| a - b),
        case("subtract from a constant", |a, _| 1.5 - a, |a, _| 1.5 - a),
        case("multiply", |a, b| a * b, |a, b| a * b),
        case("multiply by itself", |a, _| a * a, |a, _| a * a),
        positive("divide", |a, b| a / b, |a, b| a / b),
        positive("divide a constant", |a, _| 2.0 / a, |a, _| 2.0 / a),
        case("negate", |a, _| -a, |a, _| -a),
        positive("recip", |a, _| a.recip(), |a, _| a.reciprocal()),
        positive("sqrt", |a, _| a.sqrt(), |a, _| a.sqrt()),
        positive("rsqrt", |a, _| a.rsqrt(), |a, _| a.rsqrt()),
        case("exp", |a, _| a.exp(), |a, _| a.exp()),
        positive("ln", |a, _| a.ln(), |a, _| a.log()),
        case("tanh", |a, _| a.tanh(), |a, _| a.tanh()),
        case("erf", |a, _| a.erf(), |a, _| a.erf()),
        case("sigmoid", |a, _| a.sigmoid(), |a, _| a.sigmoid()),
        case("silu", |a, _| a.silu(), |a, _| a.silu()),
        case("relu", |a, _| a.relu(), |a, _| a.relu()),
        case("gelu", |a, _| a.gelu(), |a, _| a.gelu("none")),
        case("gelu tanh", |a, _| a.gelu_tanh(), |a, _| a.gelu("tanh")),
        case("abs", |a, _| a.abs(), |a, _| a.abs()),
        case("square", |a, _| a.square(), |a, _| a.square()),
        case("power 5", |a, _| a.powi(5), |a, _| a.pow_tensor_scalar(5)),
        positive("power −3", |a, _| a.powi(-3), |a, _| a.pow_tensor_scalar(-3)),
        case("power 0", |a, _| a.powi(0) + a, |a, _| a.pow_tensor_scalar(0) + a),
        case("max", |a, b| a.max(b), |a, b| a.maximum(b)),
        case("min", |a, b| a.min(b), |a, b| a.minimum(b)),
        case("clamp", |a, _| a.clamp(-0.5, 0.75), |a, _| a.clamp(-0.5, 0.75)),
        case("where <", |a, b| a.lt(b).select(a * b, b), |a, b| (a * b).where_self(&a.lt_tensor(b), b)),
        case("where ≤", |a, b| a.le(0.0).select(a, b), |a, b| a.where_self(&a.le(0.0), b)),
        case("where >", |a, b| a.gt(b).select(a, b * 2.0), |a, b| a.where_self(&a.gt_tensor(b), &(b * 2.0))),
        case("where ≥", |a, b| a.ge(0.25).select(b, a), |a, b| b.where_self(&a.ge(0.25), a)),
        case("where =", |a, b| a.equals(b).select(a, -b), |a, b| a.where_self(&a.eq_tensor(b), &-b)),
        case("where ≠", |a, b| a.differs(b).select(a, -b), |a, b| a.where_self(&a.ne_tensor(b), &-b)),
    ]
}

fn compiled(case: &Case) -> Elementwise<2> {
    let ours = case.ours;
    Elementwise::new(move |[a, b]| ours(a, b))
}

fn random(seed: u64, shape: &[i64], positive: bool, kind: Kind) -> Tensor {
    let x = Generator::new(seed).unwrap().normal(shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(kind);
    if positive { x.abs() + 0.25 } else { x }
}

fn leaf(x: &Tensor) -> Tensor {
    x.detach().set_requires_grad(true)
}

/// Value and gradients of both at once.
fn run(f: impl Fn(&[Tensor]) -> Tensor, inputs: &[&Tensor], upstream: Option<&Tensor>) -> Vec<Tensor> {
    let leaves: Vec<Tensor> = inputs.iter().map(|x| leaf(x)).collect();
    let y = f(&leaves);
    let ones = upstream.map_or_else(|| y.detach().ones_like(), Tensor::copy);
    let references: Vec<&Tensor> = leaves.iter().collect();
    let mut found = vec![y.detach()];
    let gradients = autograd::grad(&[&y], &[Some(&ones)], &references, Keep::default()).unwrap();
    found.extend(leaves.iter().zip(gradients).map(|(leaf, g)| g.unwrap_or_else(|| leaf.zeros_like())));
    found
}

/// The largest difference, as a share of `tolerance`·(1 + |expected|); NaN and infinities must agree.
fn share(found: &Tensor, expected: &Tensor, tolerance: f64) -> f64 {
    assert_eq!(found.size(), expected.size());
    if found.numel() == 0 {
        return 0.0;
    }
    let wide = |x: &Tensor| Vec::<f64>::try_from(x.detach().to_kind(Kind::Double).flatten(0, -1)).unwrap();
    let pairs = wide(found).into_iter().zip(wide(expected));
    pairs.fold(0.0, |worst: f64, (a, b)| {
        let same = a == b || a.is_nan() && b.is_nan();
        let share = if same { 0.0 } else { (a - b).abs() / (tolerance * (1.0 + b.abs())) };
        worst.max(if share.is_nan() { INF } else { share })
    })
}

#[test]
fn every_operator_is_the_derivative_of_its_forward() {
    for (index, case) in table().iter().enumerate() {
        let shape = [2, 3];
        let seed = 11 + 2 * index as u64;
        let a = leaf(&random(seed, &shape, case.positive, Kind::Double));
        let b = leaf(&random(seed + 1, &shape, case.positive, Kind::Double));
        let f = compiled(case);
        let report =
            gradcheck(|x| Ok(vec![f.apply([&x[0], &x[1]])?]), &[&a, &b], GradcheckOptions::default());
        let report = report.unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert!(report.compared > 0 && report.percent_of_tolerance <= 100.0, "{}: {report}", case.name);
    }
}

#[test]
fn values_and_gradients_are_libtorchs_in_each_dtype_and_at_odd_sizes() {
    for (kind, tolerance) in
        [(Kind::Double, 1e-13), (Kind::Float, 4e-6), (Kind::BFloat16, 1.6e-2), (Kind::Half, 2e-3)]
    {
        for shape in [&[][..], &[1], &[513], &[3, 171], &[2, 5, 103], &[0, 4], &[70, 1000]] {
            for (index, case) in table().iter().enumerate() {
                if shape.last() == Some(&1000) && index % 5 != 0 {
                    continue;
                }
                let (a, b) = (random(3, shape, case.positive, kind), random(4, shape, case.positive, kind));
                let upstream = random(5, shape, false, kind);
                let f = compiled(case);
                let ours = run(|x| f.apply([&x[0], &x[1]]).unwrap(), &[&a, &b], Some(&upstream));
                // The oracle computes in f64 from the same rounded inputs.
                let wide: Vec<Tensor> = [&a, &b, &upstream].iter().map(|x| x.to_kind(Kind::Double)).collect();
                let theirs = run(|x| (case.theirs)(&x[0], &x[1]), &[&wide[0], &wide[1]], Some(&wide[2]));
                for (which, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                    assert_eq!(ours.kind(), kind);
                    let share = share(ours, theirs, tolerance);
                    assert!(
                        share <= 1.0,
                        "{} {kind:?} {shape:?} result {which}: {share} of the tolerance",
                        case.name
                    );
                }
            }
        }
    }
}

#[test]
fn nan_infinities_and_kinks_are_libtorchs() {
    let special = [NAN, INF, -INF, 0.0, -0.0, 1.0, -0.5, 0.75];
    let pairs: Vec<(f64, f64)> = special.iter().flat_map(|&a| special.iter().map(move |&b| (a, b))).collect();
    let (a, b): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let skip = ["multiply by itself", "gelu tanh", "gelu", "silu", "divide", "power 5", "power −3"];
    for kind in [Kind::Double, Kind::Float] {
        let (a, b) = (Tensor::from_slice(&a).to_kind(kind), Tensor::from_slice(&b).to_kind(kind));
        for case in table() {
            // libtorch's own fp32 kernel gives NaN for +∞, where its f64 kernel gives +∞, as here.
            if case.name == "gelu" && kind == Kind::Float {
                continue;
            }
            let f = compiled(&case);
            let ours = run(|x| f.apply([&x[0], &x[1]]).unwrap(), &[&a, &b], None);
            let theirs = run(|x| (case.theirs)(&x[0], &x[1]), &[&a, &b], None);
            for (which, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                // A derivative through infinities depends on how the formula is written.
                if which > 0 && skip.contains(&case.name) {
                    continue;
                }
                let share = share(ours, theirs, 1e-5);
                assert!(share <= 1.0, "{} {kind:?} result {which}:\n{ours:?}\n{theirs:?}", case.name);
            }
        }
    }
}

#[test]
fn vectors_and_numbers_broadcast_and_their_gradients_are_summed() {
    let f = Elementwise::new(|[x, weight, bias, scale]| (x * weight + bias).gelu() * scale);
    let composed = |x: &[Tensor]| (&x[0] * &x[1] + &x[2]).gelu("none") * &x[3];
    // Many rows, few; many columns; one; none. Sums by rows and by blocks of columns.
    for shape in [[2000, 7], [3, 70_001], [700, 600], [64, 2048], [1, 9], [0, 5], [1, 1], [5000, 1]] {
        for (vector, number) in [(vec![shape[1]], vec![]), (vec![1, shape[1]], vec![1])] {
            let x = random(1, &shape, false, Kind::Double);
            let (weight, bias) =
                (random(2, &vector, false, Kind::Double), random(3, &vector, false, Kind::Double));
            let scale = random(4, &number, false, Kind::Double);
            let inputs = [&x, &weight, &bias, &scale];
            let ours = run(|x| f.apply([&x[0], &x[1], &x[2], &x[3]]).unwrap(), &inputs, None);
            let theirs = run(composed, &inputs, None);
            for (ours, theirs) in ours.iter().zip(&theirs) {
                let share = share(ours, theirs, 1e-11);
                assert!(share <= 1.0, "{shape:?} {vector:?}: {share}");
            }
            // fp32 inputs: summed in f64, so as near as the terms are.
            let narrow: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(Kind::Float)).collect();
            let narrow: Vec<&Tensor> = narrow.iter().collect();
            let found = run(|x| f.apply([&x[0], &x[1], &x[2], &x[3]]).unwrap(), &narrow, None);
            for (ours, theirs) in found.iter().zip(&theirs) {
                let share = share(ours, theirs, 2e-4);
                assert!(share <= 1.0, "fp32 {shape:?} {vector:?}: {share}");
            }
        }
    }
}

#[test]
fn windows_transposes_and_expanded_tensors_are_read_as_they_are() {
    let f = Elementwise::new(|[gate, up]| gate.silu() * up);
    let whole = random(1, &[6, 5, 2 * 37], false, Kind::Double);
    let (gate, up) = (whole.narrow(2, 0, 37), whole.narrow(2, 37, 37));
    let square = random(2, &[41, 41], false, Kind::Double);
    let row = random(3, &[1, 41], false, Kind::Double);
    let column = random(4, &[41, 1], false, Kind::Double).expand([41, 41], false);
    let expanded = row.expand([41, 41], false);
    let transposed = square.tr();
    for (a, b) in [(&gate, &up), (&square, &transposed), (&transposed, &expanded), (&square, &column)] {
        for upstream in [Tensor::ones([1], tch::kind::DOUBLE_CPU).expand(a.size(), false), a.tanh()] {
            let ours = run(|x| f.apply([&x[0], &x[1]]).unwrap(), &[a, b], Some(&upstream));
            let theirs = run(|x| x[0].silu() * &x[1], &[a, b], Some(&upstream));
            ours.iter().zip(&theirs).for_each(|(o, t)| assert!(share(o, t, 1e-13) <= 1.0));
        }
    }
}

#[test]
fn low_precision_is_rounded_once() {
    let f = Elementwise::new(|[x, y]| (x * 3.1 + y).exp().sqrt() - x);
    for kind in [Kind::BFloat16, Kind::Half] {
        let (x, y) = (random(1, &[3000], false, kind), random(2, &[3000], false, kind));
        let wide = f.apply([&x.to_kind(Kind::Float), &y.to_kind(Kind::Float)]).unwrap();
        assert_eq!(f.apply([&x, &y]).unwrap(), wide.to_kind(kind), "{kind:?}");
    }
    // Infinity, NaN, and what rounds up to the next power of two.
    let x = Tensor::from_slice(&[f32::NAN, f32::INFINITY, 1.999_999_9, 3.4e38, -0.0, 1e-40]);
    let copy = Elementwise::new(|[x, y]| x * y);
    let found =
        run(|v| copy.apply([&v[0], &v[1]]).unwrap(), &[&x, &x.ones_like().to_kind(Kind::BFloat16)], None);
    assert_eq!(found[0].kind(), Kind::Float);
    assert_eq!(share(&found[2], &x.to_kind(Kind::BFloat16), 1e-9), 0.0, "{:?}", found[2]);
}

#[test]
fn dtypes_promote_as_libtorchs() {
    use Kind::{BFloat16, Double, Float, Half};
    let f = Elementwise::new(|[a, b]| a + b);
    let shapes: [(&[i64], &[i64]); 4] = [(&[2, 3], &[2, 3]), (&[2, 3], &[3]), (&[2, 3], &[]), (&[], &[])];
    for (of_a, of_b) in shapes {
        for a in [Double, Float, BFloat16, Half] {
            for b in [Double, Float, BFloat16, Half] {
                let (a, b) = (Tensor::ones(of_a, (a, Device::Cpu)), Tensor::ones(of_b, (b, Device::Cpu)));
                assert_eq!(f.apply([&a, &b]).unwrap().kind(), (&a + &b).kind(), "{a:?} {b:?}");
            }
        }
    }
}

#[test]
fn only_what_the_derivative_reads_is_kept_and_none_twice() {
    let gated = Elementwise::new(|[x, gate, bias]| x * gate.sigmoid() + bias);
    assert_eq!(gated.keeps([true, true, true]), [true, true, false]);
    assert_eq!(gated.keeps([true, false, true]), [false, true, false]);
    assert_eq!(gated.keeps([false, false, true]), [false, false, false]);
    assert_eq!(Elementwise::new(|[x, y]| x - y * 2.0).keeps([true, true]), [false, false]);
}

#[test]
fn several_outputs_share_a_pass_and_each_may_lack_a_gradient() {
    let both = Elementwise::<2, 2>::many(|[x, y]| [x * y, (x * y).tanh() + x]);
    let (x, y) = (random(1, &[5, 7], false, Kind::Double), random(2, &[5, 7], false, Kind::Double));
    let composed = |x: &Tensor, y: &Tensor| [x * y, (x * y).tanh() + x];
    for used in [vec![0], vec![1], vec![0, 1]] {
        let sum = |outputs: [Tensor; 2]| {
            let parts: Vec<Tensor> = used.iter().map(|&index: &usize| outputs[index].square()).collect();
            parts.iter().skip(1).fold(parts[0].shallow_clone(), |sum, part| sum + part)
        };
        let ours = run(|v| sum(both.apply_all([&v[0], &v[1]]).unwrap()), &[&x, &y], None);
        let theirs = run(|v| sum(composed(&v[0], &v[1])), &[&x, &y], None);
        ours.iter().zip(&theirs).for_each(|(o, t)| assert!(share(o, t, 1e-13) <= 1.0));
    }
}

#[test]
fn a_gradient_that_others_see_is_not_overwritten() {
    let double = Elementwise::new(|[x]| x * 2.0);
    let x = leaf(&random(1, &[9], false, Kind::Float));
    let (a, b) = (double.apply([&x]).unwrap(), double.apply([&x]).unwrap());
    // Both nodes get the same upstream tensor, and the caller holds it too.
    let upstream = Tensor::full([9], 3.0, tch::kind::FLOAT_CPU);
    let found = autograd::grad(&[&(a + b)], &[Some(&upstream)], &[&x], Keep::default()).unwrap();
    assert_eq!(found[0].as_ref().unwrap(), &Tensor::full([9], 12.0, tch::kind::FLOAT_CPU));
    assert_eq!(upstream, Tensor::full([9], 3.0, tch::kind::FLOAT_CPU));
}

#[test]
fn equal_runs_give_equal_bits_with_any_number_of_threads() {
    let f = Elementwise::new(|[x, bias, scale]| (x + bias).gelu() * scale);
    for shape in [[3000, 129], [5, 40_000]] {
        let inputs = [
            random(1, &shape, false, Kind::Float),
            random(2, &[shape[1]], false, Kind::Float),
            random(3, &[], false, Kind::Float),
        ];
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let once = || run(|x| f.apply([&x[0], &x[1], &x[2]]).unwrap(), &inputs, None);
        let threads = tch::get_num_threads();
        let first = once();
        assert_eq!(first, once());
        tch::set_num_threads(1);
        let alone = once();
        tch::set_num_threads(threads);
        assert_eq!(first, alone);
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_remedy() {
    let f = Elementwise::new(|[a, b]| a + b);
    let t = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu));
    let cases = [
        (
            t(&[3, 4], Kind::Float),
            t(&[2, 5], Kind::Float),
            "fused elementwise: the inputs are [[3, 4], [2, 5]], which do not broadcast to one shape",
        ),
        (
            t(&[3, 4], Kind::Float),
            t(&[3, 1], Kind::Float),
            "fused elementwise: input 1 is [3, 1] and the result [3, 4]; expected that shape, [4] for the last dimension, or \
             one number: `expand` it",
        ),
        (
            t(&[3], Kind::Float),
            t(&[3], Kind::Int64),
            "fused elementwise: input 1 is Int64; expected Float, Double, BFloat16 or Half: convert it with `to_kind`",
        ),
        (t(&[3], Kind::Float), Tensor::new(), "fused elementwise: input 1 is undefined"),
    ];
    for (a, b, message) in cases {
        assert_eq!(f.apply([&a, &b]).unwrap_err().to_string(), message);
    }
    let none = Elementwise::<0, 0>::many(|[]| []);
    let message = "fused elementwise: the expression has no input, so its result has no shape; give it one";
    assert_eq!(none.apply_all([]).unwrap_err().to_string(), message);
    let sparse = t(&[3], Kind::Float).to_sparse(None, None::<&[i64]>, None);
    assert!(
        f.apply([&t(&[3], Kind::Float), &sparse]).unwrap_err().to_string().contains("not dense on the CPU")
    );
}

#[test]
fn an_input_that_changes_before_backward_is_an_error() {
    let square = Elementwise::new(|[x]| x.square());
    let leaf = leaf(&random(1, &[4], false, Kind::Float));
    let mut x = &leaf * 1.0;
    let y = square.apply([&x]).unwrap();
    let _ = x.fill_(0.0);
    let error = autograd::backward(&[&y.sum(Kind::Float)]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

/// A tree over two inputs, whose values and derivatives stay moderate.
#[derive(Clone, Debug)]
enum Tree {
    Input(bool),
    Constant(f64),
    Of(usize, Box<Tree>, Box<Tree>),
}

const FUNCTIONS: [(Symbolic, Composed); 14] = [
    (|a, b| a + b, |a, b| a + b),
    (|a, b| a - b, |a, b| a - b),
    (|a, b| a.tanh() * b.tanh(), |a, b| a.tanh() * b.tanh()),
    (|a, b| a / (b.square() + 1.0), |a, b| a / (b.square() + 1.0)),
    (|a, _| a.sigmoid(), |a, _| a.sigmoid()),
    (|a, _| a.gelu(), |a, _| a.gelu("none")),
    (|a, _| a.gelu_tanh(), |a, _| a.gelu("tanh")),
    (|a, _| (a.tanh() * 2.0).exp(), |a, _| (a.tanh() * 2.0).exp()),
    (|a, _| (a.abs() + 0.5).ln(), |a, _| (a.abs() + 0.5).log()),
    (|a, _| (a.square() + 0.1).rsqrt(), |a, _| (a.square() + 0.1).rsqrt()),
    (|a, b| a.max(b), |a, b| a.maximum(b)),
    (|a, b| a.lt(b).select(a, b * 0.5), |a, b| a.where_self(&a.lt_tensor(b), &(b * 0.5))),
    (|a, b| a.clamp(-1.0, 1.0) - b.silu(), |a, b| a.clamp(-1.0, 1.0) - b.silu()),
    (|a, b| a.tanh().powi(3) + b.erf(), |a, b| a.tanh().pow_tensor_scalar(3) + b.erf()),
];

impl Tree {
    fn symbolic<'g>(&self, x: Expr<'g>, y: Expr<'g>) -> Expr<'g> {
        match self {
            Self::Input(first) => {
                if *first {
                    x
                } else {
                    y
                }
            }
            Self::Constant(value) => x * 0.0 + *value,
            Self::Of(index, a, b) => FUNCTIONS[*index].0(a.symbolic(x, y), b.symbolic(x, y)),
        }
    }

    fn composed(&self, x: &Tensor, y: &Tensor) -> Tensor {
        match self {
            Self::Input(first) => if *first { x } else { y }.shallow_clone(),
            Self::Constant(value) => x * 0.0 + *value,
            Self::Of(index, a, b) => FUNCTIONS[*index].1(&a.composed(x, y), &b.composed(x, y)),
        }
    }
}

fn trees() -> impl Strategy<Value = Tree> {
    let leaves = prop_oneof![
        4 => any::<bool>().prop_map(Tree::Input),
        1 => (-2.0..2.0).prop_map(Tree::Constant),
    ];
    leaves.prop_recursive(6, 48, 2, |inner| {
        (0..FUNCTIONS.len(), inner.clone(), inner)
            .prop_map(|(index, a, b)| Tree::Of(index, Box::new(a), Box::new(b)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn random_expressions_are_libtorchs_composition(tree in trees(), seed in 0u64..1000, columns in 1i64..40) {
        let f = Elementwise::new(|[x, y]| tree.symbolic(x, y));
        let (x, y) = (random(seed, &[3, columns], false, Kind::Double), random(seed + 1, &[columns], false, Kind::Double));
        // Both inputs take part, so that the composition has the pass's shape.
        let whole = |z: Tensor, x: &Tensor, y: &Tensor| z + (x + y) * 0.0;
        let ours = run(|v| whole(f.apply([&v[0], &v[1]]).unwrap(), &v[0], &v[1]), &[&x, &y], None);
        let theirs = run(|v| whole(tree.composed(&v[0], &v[1]), &v[0], &v[1]), &[&x, &y], None);
        for (which, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let share = share(ours, theirs, 1e-10);
            prop_assert!(share <= 1.0, "result {which}: {share} of the tolerance");
        }
    }
}
