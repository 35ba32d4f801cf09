//! Means without a token that counts: their value, and which weights have such a mean.

use fused_ce::{Denominator, EmptyMean, Inputs, LinearCrossEntropy, LogSumExp, Reduction};
use runtime::autograd::backward;
use tch::{Device, Kind, Tensor};

use crate::semantics::{F64, H, MODES, N, V, leaf, operands, options};

#[test]
fn the_mean_of_no_tokens_is_zero_or_nan_by_option() {
    for (tokens, ignored) in [(N, true), (0, false)] {
        for gradients in MODES {
            for (empty, reduction, expected) in [
                (EmptyMean::Zero, Reduction::Mean, 0.0),
                (EmptyMean::Nan, Reduction::Mean, f64::NAN),
                (EmptyMean::Zero, Reduction::Sum, 0.0),
                (EmptyMean::Nan, Reduction::Sum, 0.0),
            ] {
                for given in [false, true] {
                    if given && reduction == Reduction::Sum {
                        continue;
                    }
                    let [x, w, _] = operands(7, Kind::Double);
                    let (x, w) = (leaf(&x.narrow(0, 0, tokens)), leaf(&w));
                    let targets = Tensor::full([tokens], -100, (Kind::Int64, Device::Cpu));
                    assert!(ignored || tokens == 0);
                    let options = LinearCrossEntropy {
                        empty_mean: empty,
                        reduction,
                        predictions: true,
                        entropy: true,
                        log_sum_exp: LogSumExp::Value,
                        ..options(gradients)
                    };
                    let denominator = given.then_some(Denominator::Number(4.0));
                    let output =
                        options.run(&Inputs { denominator, ..Inputs::new(&x, &w, &targets) }).unwrap();
                    let expected = if given { 0.0 } else { expected };
                    let loss = output.loss.double_value(&[]);
                    assert_eq!(loss.to_string(), expected.to_string(), "{empty:?} {reduction:?}");
                    assert_eq!(output.correct.unwrap().int64_value(&[]), 0);
                    assert_eq!(output.predictions.unwrap().size(), [tokens]);
                    backward(&[&output.loss]).unwrap();
                    for (leaf, size) in [(&x, [tokens, H]), (&w, [V, H])] {
                        assert_eq!(leaf.grad().size(), size);
                        assert_eq!(
                            leaf.grad().count_nonzero_dim_intlist([0i64, 1].as_slice()).int64_value(&[]),
                            0
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_mean_of_no_tokens_can_match_pytorch() {
    let [x, w, targets] = operands(7, Kind::Double);
    let targets = targets.full_like(-100);
    let theirs =
        x.matmul(&w.tr()).cross_entropy_loss::<Tensor>(&targets, None, tch::Reduction::Mean, -100, 0.0);
    let ours = LinearCrossEntropy { empty_mean: EmptyMean::Nan, ..LinearCrossEntropy::default() };
    let ours = ours.loss(&x, &w, &targets).unwrap();
    assert_eq!(ours.double_value(&[]).to_string(), theirs.double_value(&[]).to_string());
}

#[test]
fn weights_that_sum_to_zero_do_not_divide_by_zero() {
    let [x, w, targets] = operands(8, Kind::Double);
    let (nothing_of_token, nothing_of_class) = (Tensor::zeros([N], F64), Tensor::zeros([V], F64));
    for (token_weights, class_weights) in [
        (Some(&nothing_of_token), None),
        (None, Some(&nothing_of_class)),
        (Some(&nothing_of_token), Some(&nothing_of_class)),
    ] {
        for gradients in MODES {
            for (empty, expected) in [(EmptyMean::Zero, "0"), (EmptyMean::Nan, "NaN")] {
                let (x, w) = (leaf(&x), leaf(&w));
                let options = LinearCrossEntropy { empty_mean: empty, ..options(gradients) };
                let inputs = Inputs { token_weights, class_weights, ..Inputs::new(&x, &w, &targets) };
                let loss = options.run(&inputs).unwrap().loss;
                assert_eq!(loss.double_value(&[]).to_string(), expected);
                backward(&[&loss]).unwrap();
                if empty == EmptyMean::Zero {
                    assert_eq!(w.grad().abs().max().double_value(&[]), 0.0);
                    assert_eq!(x.grad().abs().max().double_value(&[]), 0.0);
                }
            }
        }
    }
}

/// Σ wᵢ·lᵢ / Σ wᵢ, which is what PyTorch divides: two tokens of weights 1 and −1 have a divisor of 0.
#[test]
fn weights_that_cancel_out_divide_by_their_sum() {
    let [x, w, _] = operands(8, Kind::Double);
    let (x, targets) = (x.narrow(0, 0, 2), Tensor::from_slice(&[0i64, 1]));
    let logits = x.matmul(&w.tr());
    let none = tch::Reduction::None;
    let losses = logits.cross_entropy_loss::<Tensor>(&targets, None, none, -100, 0.0);
    let larger = losses.double_value(&[0]) > losses.double_value(&[1]);
    let expected = if larger { f64::INFINITY } else { f64::NEG_INFINITY };
    let opposed = Tensor::from_slice(&[1.0, -1.0]);
    let of_class = Tensor::cat(&[&opposed, &Tensor::ones([V - 2], F64)], 0);
    for (token_weights, class_weights) in [(Some(&opposed), None), (None, Some(&of_class))] {
        for gradients in MODES {
            for empty_mean in [EmptyMean::Zero, EmptyMean::Nan] {
                let options = LinearCrossEntropy { empty_mean, ..options(gradients) };
                let inputs = Inputs { token_weights, class_weights, ..Inputs::new(&x, &w, &targets) };
                assert_eq!(options.run(&inputs).unwrap().loss.double_value(&[]), expected);
            }
        }
    }
    let mean = tch::Reduction::Mean;
    let theirs = logits.cross_entropy_loss(&targets, Some(&of_class), mean, -100, 0.0);
    assert_eq!(theirs.double_value(&[]), expected);
}
