//! Tests that four implementations of one loss agree.

#![expect(clippy::print_stdout, reason = "errors are printed beside their bounds")]

use expect_test::expect;
use experiments::fused_ce::baselines::Implementation;
use fused_ce::{Chunk, Reduction};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

fn operands(kind: Kind) -> [Tensor; 3] {
    let mut generator = Generator::new(8).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (kind, Device::Cpu)).unwrap();
    let targets = Tensor::from_slice2(&[[3i64, -100, 10, 0, 7], [-100, 2, 2, -100, 9]]);
    [normal(&[2, 5, 6]), normal(&[11, 6]), targets]
}

#[test]
fn all_implementations_agree() {
    let [x, w, labels] = operands(Kind::Double);
    let nothing = labels.full_like(-100);
    for targets in [&labels, &nothing] {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            for chunk in
                [None, Some(Chunk::Tokens(1)), Some(Chunk::Tokens(3)), Some(Chunk::Budget(11 * 8 * 4))]
            {
                for upstream in [1.0, -2.5] {
                    let results = Implementation::ALL.map(|implementation| {
                        let (x, w) = (x.copy().set_requires_grad(true), w.copy().set_requires_grad(true));
                        let loss = implementation.loss([&x, &w, targets], None, reduction, chunk).unwrap();
                        runtime::autograd::backward(&[&(&loss * upstream)]).unwrap();
                        [loss.detach(), x.grad(), w.grad()]
                    });
                    for (name, actual) in Implementation::ALL.iter().zip(&results) {
                        for (actual, expected) in actual.iter().zip(&results[0]) {
                            assert_eq!(actual.size(), expected.size(), "{name}");
                            let error = (actual - expected).abs().max().double_value(&[]);
                            assert!(error <= 1e-12, "{name} {reduction:?} {chunk:?}: {error:e}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_is_pytorchs_cross_entropy() {
    let [x, w, targets] = operands(Kind::Double);
    let loss = Implementation::Naive.loss([&x, &w, &targets], None, Reduction::Mean, None).unwrap();
    let logits = x.matmul(&w.tr()).reshape([10, 11]);
    // −log softmax at the target by hand, over the seven labelled positions.
    let (mut sum, labels) = (0.0, Vec::<i64>::try_from(targets.reshape([-1])).unwrap());
    for (place, &label) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
        let row: Vec<f64> = Vec::try_from(logits.get(place as i64)).unwrap();
        sum += row.iter().map(|z| z.exp()).sum::<f64>().ln() - row[label as usize];
    }
    assert!((loss.double_value(&[]) - sum / 7.0).abs() <= 1e-12);
}

#[test]
fn a_budget_below_a_row_of_logits_is_refused() {
    let [x, w, targets] = operands(Kind::Float);
    let budget = Some(Chunk::Budget(43));
    let refused = Implementation::ChunkedRecompute.loss([&x, &w, &targets], None, Reduction::Mean, budget);
    expect!["linear cross-entropy: a budget of 43 bytes is less than the 44 bytes of one row of 11 logits; increase it, or set a number of tokens"]
        .assert_eq(&refused.unwrap_err().to_string());
}

/// `fused-ce` avoids this: a sum in bf16 loses more with each chunk.
#[test]
fn a_sum_in_the_weights_own_dtype_loses_more_with_each_chunk() {
    const TOKENS: i64 = 1024;
    let mut generator = Generator::new(11).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, w) = (normal(&[TOKENS, 48]), normal(&[257, 48]) * 0.2);
    let (x, w) = (x.to_kind(Kind::BFloat16), w.to_kind(Kind::BFloat16));
    let targets = (Tensor::arange(TOKENS, (Kind::Int64, Device::Cpu)) * 17).remainder(257);
    let of_weight = |implementation: Implementation, kind: Kind, chunk: i64| {
        let (x, w) =
            (x.to_kind(kind).set_requires_grad(true), w.to_kind(kind).copy().set_requires_grad(true));
        let chunk = Some(Chunk::Tokens(chunk));
        let loss = implementation.loss([&x, &w, &targets], None, Reduction::Mean, chunk).unwrap();
        runtime::autograd::backward(&[&loss]).unwrap();
        w.grad().to_kind(Kind::Double)
    };
    let exact = of_weight(Implementation::Naive, Kind::Double, TOKENS);
    let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
    let errors = [1, 64, TOKENS].map(|chunks| {
        let actual = of_weight(Implementation::GradInForward, Kind::BFloat16, TOKENS / chunks);
        norm(&(actual - &exact)) / norm(&exact)
    });
    println!("grad-in-forward in bf16: {errors:?} in 1, 64 and {TOKENS} chunks");
    assert!(errors[1] > 2.0 * errors[0] && errors[2] > 2.0 * errors[1], "{errors:?}");
}

#[test]
fn names_are_read_as_they_are_printed() {
    for one in Implementation::ALL {
        assert_eq!(one.to_string().parse::<Implementation>().unwrap(), one);
    }
    expect!["linear cross-entropy: unknown implementation `liger`; expected one of naive, chunked-recompute, grad-in-forward, linear-cross-entropy, linear-cross-entropy-rounded, linear-cross-entropy-rounded-logits"]
        .assert_eq(&"liger".parse::<Implementation>().unwrap_err().to_string());
}
