//! Linear layers whose products are those of `kernels::matmul`: values, gradients, second derivatives, segments.

use kernels::linear::product;
use kernels::matmul::MIN_DIMENSION;
use runtime::autograd::{self, Checkpoint, Keep, backward_with};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const ROWS: [i64; 2] = [2, 40];
const WIDTH: i64 = 72;
const OUT: i64 = 48;

/// x, W, b and the gradient of y, in `kind`; the same values each time.
fn operands(kind: Kind) -> [Tensor; 4] {
    let mut generator = Generator::new(11).unwrap();
    let [a, b] = ROWS;
    [vec![a, b, WIDTH], vec![OUT, WIDTH], vec![OUT], vec![a, b, OUT]]
        .map(|shape| generator.normal(&shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(kind))
}

/// y, and the gradients of x, W and b, by `linear` in the operands' dtype.
fn computed(operands: &[Tensor; 4], bias: bool) -> Vec<Tensor> {
    let [x, weight, b, upstream] = operands;
    let leaves = [x, weight, b].map(|tensor| tensor.detach_copy().set_requires_grad(true));
    let y = product(&leaves[0], &leaves[1], bias.then_some(&leaves[2])).unwrap();
    backward_with(&[&y], &[Some(upstream)], Keep::default()).unwrap();
    let gradients = leaves[..2 + usize::from(bias)].iter().map(Tensor::grad);
    std::iter::once(y.detach()).chain(gradients).collect()
}

/// The same by libtorch in fp64, from the operands' rounded values.
fn expected(operands: &[Tensor; 4], bias: bool) -> Vec<Tensor> {
    let [x, weight, b, upstream] =
        operands.each_ref().map(|tensor| tensor.to_kind(Kind::Double).detach_copy());
    let leaves = [x, weight, b].map(|tensor| tensor.set_requires_grad(true));
    let y = leaves[0].linear(&leaves[1], bias.then_some(&leaves[2]));
    backward_with(&[&y], &[Some(&upstream)], Keep::default()).unwrap();
    let gradients = leaves[..2 + usize::from(bias)].iter().map(Tensor::grad);
    std::iter::once(y.detach()).chain(gradients).collect()
}

#[test]
fn products_are_rounded_once() {
    // Half a unit in the last place, and what fp32 sums add to it.
    for (kind, rounding) in [(Kind::Float, 2e-6), (Kind::BFloat16, 1.0 / 256.0), (Kind::Half, 1.0 / 2048.0)] {
        let operands = operands(kind);
        for bias in [true, false] {
            let found = computed(&operands, bias);
            for (index, (found, expected)) in found.iter().zip(expected(&operands, bias)).enumerate() {
                assert_eq!((found.kind(), found.size()), (kind, expected.size()));
                // libtorch sums the bias's gradient.
                let allowed = if index == 3 { 4.0 * rounding } else { rounding };
                let difference = (found.to_kind(Kind::Double) - &expected).abs();
                let over = (difference - expected.abs() * allowed).max().double_value(&[]);
                assert!(over < 2e-5, "{kind:?}, result {index}: {over} above one rounding");
            }
        }
    }
}

#[test]
fn second_derivatives_are_those_of_libtorch() {
    let [x, weight, b, _] = operands(Kind::Double).map(|tensor| tensor.to_kind(Kind::Float));
    let second = |of: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor| -> Vec<Tensor> {
        let leaves = [&x, &weight, &b].map(|tensor| tensor.detach_copy().set_requires_grad(true));
        let y = of(&leaves[0], &leaves[1], &leaves[2]).tanh().sum(Kind::Float);
        let keep = Keep { derivative: true, ..Keep::default() };
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let first = autograd::grad(&[&y], &[None], &inputs, keep).unwrap();
        let norm = first
            .iter()
            .flatten()
            .fold(Tensor::from(0.0f32), |sum, gradient| sum + gradient.square().sum(Kind::Float));
        autograd::backward(&[&norm]).unwrap();
        leaves.iter().map(Tensor::grad).collect()
    };
    let found = second(&|x, weight, b| product(x, weight, Some(b)).unwrap());
    for (found, expected) in found.iter().zip(second(&|x, weight, b| x.linear(weight, Some(b)))) {
        let scale = expected.abs().max().double_value(&[]);
        assert!(scale > 0.01);
        assert!((found - expected).abs().max().double_value(&[]) < 1e-5 * scale);
    }
}

#[test]
fn segments_that_keep_products_have_the_bits_of_no_segment() {
    const RETAIN: Checkpoint =
        Checkpoint { recompute: true, preserve_random_state: true, retain_products: true };
    for kind in [Kind::Float, Kind::BFloat16] {
        // At and below the least dimension, where products are libtorch's.
        for rows in [MIN_DIMENSION, MIN_DIMENSION - 1] {
            let [x, weight, b, upstream] = operands(kind);
            let [x, upstream] = [x, upstream].map(|tensor| tensor.select(0, 0).narrow(0, 0, rows));
            let of = |options: Option<Checkpoint>| -> Vec<Tensor> {
                let leaves = [&x, &weight, &b].map(|tensor| tensor.detach_copy().set_requires_grad(true));
                let owned = [&leaves[1], &leaves[2]].map(Tensor::shallow_clone);
                let y = match options {
                    None => product(&leaves[0].tanh(), &owned[0], Some(&owned[1])).unwrap(),
                    Some(options) => {
                        let body =
                            move |[x]: [&Tensor; 1]| Ok([product(&x.tanh(), &owned[0], Some(&owned[1]))?]);
                        let [y] = options.run(body, [&leaves[0]]).unwrap();
                        y
                    }
                };
                backward_with(&[&y], &[Some(&upstream)], Keep::default()).unwrap();
                std::iter::once(y.detach()).chain(leaves.iter().map(Tensor::grad)).collect()
            };
            assert_eq!(of(None), of(Some(RETAIN)), "{kind:?}, {rows} rows");
        }
    }
}
