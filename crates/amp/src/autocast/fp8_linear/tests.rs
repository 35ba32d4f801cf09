//! The products of a GPU with fp8, forced on a CPU, where libtorch emulates `_scaled_mm`.

use runtime::autograd::Keep;
use runtime::profile::{Counter, Counts};
use tch::kind;

use super::*;

/// Rows, width of x, width of y, bias: multiples of 16, and sizes that are not, such as a vocabulary's.
const SIZES: [(i64, i64, i64, bool); 4] =
    [(32, 48, 16, true), (10, 19, 7, true), (5, 33, 522, false), (1, 1, 1, true)];

/// y and the gradients of x, W and b, by the products of either kind, with the work of both passes.
fn run(native: bool, inputs: &[Option<Tensor>; 3], upstream: &Tensor) -> (Vec<Tensor>, Counts) {
    let leaves =
        inputs.each_ref().map(|input| input.as_ref().map(|input| input.copy().set_requires_grad(true)));
    let counter = Counter::on_this_thread().unwrap();
    let y = linear_by(native, leaves.each_ref().map(Option::as_ref), Kind::BFloat16).unwrap();
    runtime::autograd::backward_with(&[&y], &[Some(upstream)], Keep::default()).unwrap();
    let counts = counter.finish().unwrap();
    let gradients = leaves.iter().flatten().map(Tensor::grad);
    (std::iter::once(y.detach()).chain(gradients).collect(), counts)
}

#[test]
fn products_of_any_size_are_in_fp8() {
    for (rows, inner, outer, bias) in SIZES {
        let inputs = [
            Some(Tensor::randn([rows, inner], kind::FLOAT_CPU)),
            Some(Tensor::randn([outer, inner], kind::FLOAT_CPU) * 0.1),
            bias.then(|| Tensor::randn([outer], kind::FLOAT_CPU)),
        ];
        let upstream = Tensor::randn([rows, outer], kind::FLOAT_CPU).to_kind(Kind::BFloat16);
        let (expected, _) = run(false, &inputs, &upstream);
        let (found, counts) = run(true, &inputs, &upstream);
        let size = (rows, inner, outer, bias);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()), "{size:?}: {index}");
            assert!(found.is_contiguous(), "{size:?}: {index}");
            let off = (found.to_kind(Kind::Float) - expected).abs().max() / expected.abs().max();
            // y is rounded to bf16, and so is the bias that `_scaled_mm` adds; gradients are in fp32.
            let allowed = if index == 0 { 2f64.powi(-7) } else { 1e-6 };
            assert!(off.double_value(&[]) <= allowed, "{size:?}: {index} is off by {off:?}");
        }
        // Nothing but three products, each of the padded sizes.
        let multiplied: Vec<&str> =
            counts.by_op.iter().filter(|op| op.total.flops.dense > 0).map(|op| op.name.as_str()).collect();
        assert_eq!(multiplied, ["aten::_scaled_mm"], "{size:?}: {counts}");
        let padded = [rows, inner, outer].map(|size| (size as u64).next_multiple_of(TILE as u64));
        let product = counts.op("aten::_scaled_mm");
        assert_eq!((product.calls, product.flops.dense), (3, 6 * padded.iter().product::<u64>()), "{size:?}");
    }
}

/// Without fp8 instructions the operands are bf16, and sums fp32: no operand is cast to fp32.
#[test]
fn other_devices_multiply_in_bf16() {
    let inputs = [
        Some(Tensor::randn([64, 48], kind::FLOAT_CPU)),
        Some(Tensor::randn([96, 48], kind::FLOAT_CPU)),
        None,
    ];
    let upstream = Tensor::randn([64, 96], kind::FLOAT_CPU).to_kind(Kind::BFloat16);
    let (_, counts) = run(false, &inputs, &upstream);
    // Each operand is read once at 2 bytes and each result written once at 4.
    let product = counts.op("runtime::mm");
    let (x, w, y) = (64 * 48, 96 * 48, 64 * 96);
    assert_eq!((product.calls, product.bytes), (3, 2 * 2 * (x + w + y) + 4 * (x + w + y)), "{counts}");
}
