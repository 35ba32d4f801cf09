//! The number of chunks does not affect the accuracy of the result.

#![expect(clippy::print_stdout, reason = "errors are printed beside their bounds")]

use fused_ce::{Chunk, Gradients, Inputs, LinearCrossEntropy};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use crate::naive;

const TOKENS: i64 = 1024;
const CHUNKS: [i64; 5] = [1, 2, 7, 64, TOKENS];

fn operands(kind: Kind) -> [Tensor; 3] {
    let mut generator = Generator::new(11).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, w) = (normal(&[TOKENS, 48]), normal(&[257, 48]) * 0.2);
    let targets = (Tensor::arange(TOKENS, (Kind::Int64, Device::Cpu)) * 17).remainder(257);
    [x.to_kind(kind), w.to_kind(kind), targets]
}

/// Loss, ∂/∂x, ∂/∂W.
fn run(operands: &[Tensor; 3], chunks: i64, gradients: Gradients) -> [Tensor; 3] {
    let chunk = Some(Chunk::Tokens((TOKENS + chunks - 1) / chunks));
    let options = LinearCrossEntropy { chunk, gradients, ..LinearCrossEntropy::default() };
    differentiate(operands, |inputs| options.run(inputs).unwrap().loss)
}

fn differentiate([x, w, targets]: &[Tensor; 3], loss: impl Fn(&Inputs<'_>) -> Tensor) -> [Tensor; 3] {
    let (x, w) = (x.copy().set_requires_grad(true), w.copy().set_requires_grad(true));
    let loss = loss(&Inputs::new(&x, &w, targets));
    runtime::autograd::backward(&[&loss]).unwrap();
    [loss.detach(), x.grad(), w.grad()]
}

/// ‖∂W − exact‖/‖exact‖, for each number of chunks.
fn errors_of_weight(kind: Kind, gradients: Gradients) -> [f64; 5] {
    let given = operands(kind);
    let [x, w, targets] = &given;
    let wide = [x.to_kind(Kind::Double), w.to_kind(Kind::Double), targets.shallow_clone()];
    let plain = LinearCrossEntropy::default();
    let [_, _, exact] = differentiate(&wide, |inputs| naive::run(inputs, &plain).unwrap().loss);
    let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
    CHUNKS.map(|chunks| {
        let [_, _, found] = run(&given, chunks, gradients);
        norm(&(found.to_kind(Kind::Double) - &exact)) / norm(&exact)
    })
}

#[test]
fn the_weight_gradients_error_does_not_grow_with_chunks() {
    for gradients in [Gradients::Forward, Gradients::Backward] {
        // bf16 rounds once, at the end. In fp32 each sum is rounded: with one token per chunk that is a sequential sum,
        // which a product splits into parts that depend on the processor.
        for (kind, [factor, of_single_tokens], below) in
            [(Kind::Float, [1.5, 4.0], 2e-6), (Kind::BFloat16, [1.01, 1.01], 4e-3)]
        {
            let errors = errors_of_weight(kind, gradients);
            println!(
                "{kind:?} {gradients:?}: relative error of the weight's gradient {errors:?} in {CHUNKS:?} chunks"
            );
            assert!(errors[0] > 0.0 && errors[0] <= below, "{kind:?}: {errors:?}");
            for (chunks, error) in CHUNKS.into_iter().zip(errors) {
                let factor = if chunks == TOKENS { of_single_tokens } else { factor };
                assert!(error <= factor * errors[0], "{kind:?} {gradients:?} {chunks}: {errors:?}");
            }
        }
    }
}

#[test]
fn a_second_run_gives_the_same_bits() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        let given = operands(kind);
        for gradients in [Gradients::Forward, Gradients::Backward] {
            for chunks in [1, 7, 64] {
                let first = run(&given, chunks, gradients);
                let second = run(&given, chunks, gradients);
                assert!(
                    first.iter().zip(&second).all(|(a, b)| a.equal(b)),
                    "{kind:?} {gradients:?} {chunks}"
                );
            }
        }
    }
}
