//! Views that libtorch resolves lazily, as inputs and as upstream gradients, and in-place changes of results: as with libtorch's operators.

use kernels::attention::{CausalOptions, SingleQueryOptions, causal_attention, single_query_attention};
use kernels::dropout::Mask;
use kernels::matmul::{matvec, mm};
use kernels::nf4::{self, Scales};
use kernels::norm::{self, Norm, Options, add_norm, layer_norm, rms_norm};
use kernels::quantized;
use kernels::rope::RotaryTable;
use kernels::swiglu::silu_mul;
use runtime::autograd::{Keep, grad};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

type Operation = Box<dyn Fn(&[Tensor]) -> runtime::Result<Tensor>>;

struct Case {
    name: &'static str,
    sizes: Vec<Vec<i64>>,
    operation: Operation,
}

fn case(
    name: &'static str,
    sizes: &[&[i64]],
    operation: impl Fn(&[Tensor]) -> runtime::Result<Tensor> + 'static,
) -> Case {
    Case { name, sizes: sizes.iter().map(|size| size.to_vec()).collect(), operation: Box::new(operation) }
}

fn kept(keep: norm::Keep) -> Options {
    Options { keep, ..Options::default() }
}

/// Operations with gradients.
fn cases() -> Vec<Case> {
    let table = RotaryTable::new(16, 8, 1e4, Device::Cpu).unwrap();
    let weight = Generator::new(5).unwrap().normal(&[24, 16], (Kind::Float, Device::Cpu)).unwrap();
    let weight = nf4::quantize(&weight, Scales::Nested).unwrap();
    let (heads, keys): (&[i64], &[i64]) = (&[2, 4, 5, 16], &[2, 2, 5, 16]);
    vec![
        case("layer norm", &[&[3, 5, 16], &[16], &[16]], |x| {
            layer_norm(&x[0], Some(&x[1]), Some(&x[2]), kept(norm::Keep::Input))
        }),
        case("layer norm, output kept", &[&[3, 5, 16], &[16], &[16]], |x| {
            layer_norm(&x[0], Some(&x[1]), Some(&x[2]), kept(norm::Keep::Output))
        }),
        case("RMS norm", &[&[3, 5, 16], &[16]], |x| rms_norm(&x[0], Some(&x[1]), kept(norm::Keep::Input))),
        case("norm of a sum", &[&[3, 5, 16], &[3, 5, 16], &[16]], |x| {
            let (y, sum) = add_norm(Norm::Rms, &x[0], &x[1], Some(&x[2]), None, Options::default())?;
            Ok(y.f_add(&sum)?)
        }),
        case("SiLU product", &[&[3, 5, 16], &[3, 5, 16]], |x| silu_mul(&x[0], &x[1])),
        case("rotary embedding", &[&[2, 5, 4, 16], &[2, 5, 2, 16]], move |x| {
            let (q, k) = table.rotate(&x[0], &x[1], None)?;
            Ok(Tensor::f_cat(&[q, k], 2)?)
        }),
        case("causal attention", &[heads, keys, keys], |x| {
            causal_attention(&x[0], &x[1], &x[2], CausalOptions::default())
        }),
        case("nf4 linear", &[&[3, 5, 16]], move |x| quantized::linear(&x[0], &weight, None)),
    ]
}

/// Operations without gradients.
fn plain_cases() -> Vec<Case> {
    let weight = Generator::new(5).unwrap().normal(&[96, 64], (Kind::Float, Device::Cpu)).unwrap();
    let quantized = nf4::quantize(&weight, Scales::Float).unwrap();
    vec![
        case("attention of one query", &[&[2, 4, 16], &[2, 2, 5, 16], &[2, 2, 5, 16]], |x| {
            single_query_attention(&x[0], &x[1], &x[2], SingleQueryOptions::default())
        }),
        case("dropout", &[&[3, 5, 16]], |x| Mask { rate: 0.5, seed: 3.into() }.apply(&x[0], 2.0)),
        case("product", &[&[40, 48], &[48, 64]], |x| mm(&x[0], &x[1])),
        case("matrix-vector product", &[&[2, 64], &[96, 64], &[96]], |x| {
            Ok(matvec(&x[0], &x[1], Some(&x[2]))?.unwrap_or_else(|| x[0].linear(&x[1], Some(&x[2]))))
        }),
        case("nf4 matrix-vector product", &[&[2, 64], &[96]], move |x| {
            Ok(matvec(&x[0], &quantized, Some(&x[1]))?.unwrap())
        }),
        case("nf4 quantized", &[&[96, 64]], |x| {
            quantized::dequantize(&nf4::quantize(&x[0], Scales::Nested)?, Kind::Float)
        }),
        case("norm, forward", &[&[3, 5, 16], &[16], &[16]], |x| {
            let y =
                norm::forward(Norm::Layer, &x[0], None, Some(&x[1]), Some(&x[2]), Options::default(), true)?;
            Ok(y.y)
        }),
    ]
}

/// The same values: negated lazily; with the last two dimensions' memory exchanged; with gaps.
fn views(x: &Tensor) -> Vec<(&'static str, Tensor)> {
    let spaced = Tensor::f_stack(&[x, &x.zeros_like()], -1).unwrap().select(-1, 0);
    let mut views = vec![("negated", x.neg().internal_neg_view()), ("spaced", spaced)];
    if x.dim() > 1 {
        views.push(("transposed", x.transpose(-1, -2).contiguous().transpose(-1, -2)));
    }
    views
}

fn results(case: &Case, inputs: &[Tensor], upstream: Option<&Tensor>) -> Vec<Tensor> {
    let name = case.name;
    let Some(upstream) = upstream else {
        return vec![(case.operation)(inputs).unwrap_or_else(|error| panic!("{name}: {error}"))];
    };
    let inputs: Vec<Tensor> = inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
    let y = (case.operation)(&inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
    let of: Vec<&Tensor> = inputs.iter().collect();
    let found = grad(&[&y], &[Some(upstream)], &of, Keep::default());
    let found = found.unwrap_or_else(|error| panic!("{name}, backward: {error}"));
    std::iter::once(y.detach()).chain(found.into_iter().map(Option::unwrap)).collect()
}

fn check(case: &Case, size: &[Vec<i64>], with_gradients: bool) {
    let mut generator = Generator::new(7).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let inputs: Vec<Tensor> = size.iter().map(|size| normal(size)).collect();
    let y = (case.operation)(&inputs).unwrap();
    let upstream = with_gradients.then(|| normal(&y.size()));
    let expected = results(case, &inputs, upstream.as_ref());
    let same = |how: &str, found: &[Tensor], expected: &[Tensor]| {
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let close = found.allclose(expected, 1e-5, 1e-6, false);
            assert!(close, "{}, {how}: result {index}", case.name);
        }
    };
    for (at, input) in inputs.iter().enumerate() {
        for (how, view) in views(input) {
            let mut inputs: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
            inputs[at] = view;
            same(&format!("input {at} {how}"), &results(case, &inputs, upstream.as_ref()), &expected);
        }
    }
    let Some(upstream) = upstream else { return };
    for (how, view) in views(&upstream) {
        same(&format!("upstream {how}"), &results(case, &inputs, Some(&view)), &expected);
    }
    // The gradient of a sum, and its negation.
    let one = Tensor::ones([1], (Kind::Float, Device::Cpu));
    let ones = results(case, &inputs, Some(&upstream.ones_like()));
    let expanded = one.expand(y.size(), false);
    same("upstream expanded", &results(case, &inputs, Some(&expanded)), &ones);
    let negated = one.neg().internal_neg_view().expand(y.size(), false);
    same("upstream expanded and negated", &results(case, &inputs, Some(&negated)), &ones);
}

#[test]
fn views_give_the_results_of_their_values() {
    for case in cases() {
        check(&case, &case.sizes.clone(), true);
    }
    for case in plain_cases() {
        check(&case, &case.sizes.clone(), false);
    }
}

/// Without a batch, libtorch calls any strides contiguous.
#[test]
fn empty_batches_take_expanded_and_negated_gradients() {
    for case in cases() {
        let empty = |size: &Vec<i64>| {
            let leading = if size.len() > 1 { 0 } else { size[0] };
            std::iter::once(leading).chain(size[1..].iter().copied()).collect::<Vec<i64>>()
        };
        let sizes: Vec<Vec<i64>> = case.sizes.iter().map(empty).collect();
        let inputs: Vec<Tensor> =
            sizes.iter().map(|size| Tensor::ones(size, (Kind::Float, Device::Cpu))).collect();
        let size = (case.operation)(&inputs).unwrap().size();
        let one = Tensor::ones([1], (Kind::Float, Device::Cpu));
        for upstream in [
            one.expand(&size, false),
            one.neg().internal_neg_view().expand(&size, false),
            one.expand(&size, false).neg().internal_neg_view(),
        ] {
            let found = results(&case, &inputs, Some(&upstream));
            for (found, input) in found[1..].iter().zip(&inputs) {
                assert_eq!(found, &input.zeros_like(), "{}", case.name);
            }
        }
        let expanded: Vec<Tensor> = sizes.iter().map(|size| one.expand(size, false)).collect();
        assert_eq!((case.operation)(&expanded).unwrap().size(), size, "{}", case.name);
    }
}

/// A residual may be added in place. A graph that has saved the result refuses its backward, as libtorch's does.
#[test]
fn results_can_be_changed_in_place() {
    let with_gradients = cases().into_iter().map(|case| (case, true));
    for (case, gradients) in with_gradients.chain(plain_cases().into_iter().map(|case| (case, false))) {
        let ones =
            |size: &Vec<i64>| Tensor::ones(size, (Kind::Float, Device::Cpu)).set_requires_grad(gradients);
        let inputs: Vec<Tensor> = case.sizes.iter().map(ones).collect();
        let mut y = (case.operation)(&inputs).unwrap();
        let expected = &y.detach().copy() + 1.0;
        let one = Tensor::ones([1], (Kind::Float, Device::Cpu));
        let changed = y.f_add_(&one).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert_eq!(changed.detach(), expected, "{}", case.name);
    }
}

/// A dimension of 1 may have any stride, and a mask any layout: libtorch's comparison of a transposed tensor gives a transposed mask.
#[test]
fn attention_takes_heads_of_width_one_and_masks_of_any_layout() {
    let normal = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
    let spaced = |x: &Tensor| Tensor::f_stack(&[x, x], -1).unwrap().select(-1, 0);
    let (q, k, v) = (normal(&[2, 4, 5, 1]), normal(&[2, 2, 5, 1]), normal(&[2, 2, 5, 1]));
    let expected = causal_attention(&q, &k, &v, CausalOptions::default()).unwrap();
    let found = causal_attention(&spaced(&q), &spaced(&k), &spaced(&v), CausalOptions::default()).unwrap();
    assert_eq!(found, expected);
    let q = q.select(2, 4);
    let mask = Tensor::ones([2, 5], (Kind::Bool, Device::Cpu)).tril(3);
    let one = |q: &Tensor, k: &Tensor, mask: &Tensor| {
        let options = SingleQueryOptions { mask: Some(mask), ..SingleQueryOptions::default() };
        single_query_attention(q, k, &v, options).unwrap()
    };
    let expected = one(&q, &k, &mask);
    let transposed = mask.transpose(0, 1).contiguous().transpose(0, 1);
    assert_eq!(one(&spaced(&q), &spaced(&k), &transposed), expected);
    let row = Tensor::ones([5], (Kind::Bool, Device::Cpu)).unsqueeze(0);
    assert_eq!(one(&q, &k, &spaced(&row)), one(&q, &k, &row));
}
