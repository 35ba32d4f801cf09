//! The rungs of the ladder: one loss, four ways.

use std::collections::BTreeSet;

use expect_test::expect;
use fused_ce::{Adapter, Chunk, Empty, Inputs, LinearCrossEntropy, LogSumExp, Reduction, Rung, Targets};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

fn operands(kind: Kind) -> [Tensor; 3] {
    let mut generator = Generator::new(8).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (kind, Device::Cpu)).unwrap();
    let targets = Tensor::from_slice2(&[[3i64, -100, 10, 0, 7], [-100, 2, 2, -100, 9]]);
    [normal(&[2, 5, 6]), normal(&[11, 6]), targets]
}

#[test]
fn all_rungs_agree_on_what_all_of_them_take() {
    let [x, w, labels] = operands(Kind::Double);
    let nothing = labels.full_like(-100);
    for targets in [&labels, &nothing] {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            for chunk in
                [None, Some(Chunk::Tokens(1)), Some(Chunk::Tokens(3)), Some(Chunk::Budget(11 * 8 * 4))]
            {
                for upstream in [1.0, -2.5] {
                    let options = LinearCrossEntropy { reduction, chunk, ..LinearCrossEntropy::default() };
                    let results = Rung::ALL.map(|rung| {
                        let (x, w) = (x.copy().set_requires_grad(true), w.copy().set_requires_grad(true));
                        let loss = rung.run(&Inputs::new(&x, &w, targets), &options).unwrap().loss;
                        runtime::autograd::backward(&[&(&loss * upstream)]).unwrap();
                        [loss.detach(), x.grad(), w.grad()]
                    });
                    for (rung, found) in Rung::ALL.iter().zip(&results) {
                        for (found, expected) in found.iter().zip(&results[0]) {
                            assert_eq!(found.size(), expected.size(), "{rung}");
                            let error = (found - expected).abs().max().double_value(&[]);
                            assert!(error <= 1e-12, "{rung} {options:?}: {error:e}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_rung_is_pytorchs_cross_entropy() {
    let [x, w, targets] = operands(Kind::Double);
    let options = LinearCrossEntropy::default();
    let loss = Rung::Naive.run(&Inputs::new(&x, &w, &targets), &options).unwrap().loss;
    let logits = x.matmul(&w.tr()).reshape([10, 11]);
    // −log softmax at the target by hand, over the seven labelled places.
    let (mut sum, labels) = (0.0, Vec::<i64>::try_from(targets.reshape([-1])).unwrap());
    for (place, &label) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
        let row: Vec<f64> = Vec::try_from(logits.get(place as i64)).unwrap();
        sum += row.iter().map(|z| z.exp()).sum::<f64>().ln() - row[label as usize];
    }
    assert!((loss.double_value(&[]) - sum / 7.0).abs() <= 1e-12);
}

#[test]
fn rungs_say_what_they_do_not_take() {
    let [x, w, targets] = operands(Kind::Float);
    let inputs = Inputs::new(&x, &w, &targets);
    let plain = LinearCrossEntropy::default();
    let (a, b) = (Tensor::zeros([2, 6], tch::kind::FLOAT_CPU), Tensor::zeros([11, 2], tch::kind::FLOAT_CPU));
    let even = Tensor::full([2, 5, 11], 1.0 / 11.0, tch::kind::FLOAT_CPU);
    let bias = Tensor::zeros([11], tch::kind::FLOAT_CPU);
    let with_adapter = Inputs { adapter: Some(Adapter { a: &a, b: &b, scale: 1.0 }), ..inputs.clone() };
    let with_bias = Inputs { bias: Some(&bias), ..inputs.clone() };
    let soft = Inputs { targets: Targets::Distributions(&even), ..inputs.clone() };
    let cases = [
        (
            Rung::ChunkedRecompute,
            &with_adapter,
            plain.clone(),
            expect![
                "linear cross-entropy: `chunked-recompute` does not take slices of the vocabulary or adapters; `linear-cross-entropy` does"
            ],
        ),
        (
            Rung::ChunkedRecompute,
            &inputs,
            LinearCrossEntropy { predictions: true, ..plain.clone() },
            expect![
                "linear cross-entropy: `chunked-recompute` does not take outputs besides the loss; `linear-cross-entropy` does"
            ],
        ),
        (
            Rung::ChunkedRecompute,
            &inputs,
            LinearCrossEntropy { chunk: Some(Chunk::Budget(43)), ..plain.clone() },
            expect![
                "linear cross-entropy: a budget of 43 bytes is below the 44 bytes that one row of 11 logits takes; give at least that, or a number of tokens"
            ],
        ),
        (
            Rung::GradInForward,
            &soft,
            plain.clone(),
            expect![
                "linear cross-entropy: `grad-in-forward` does not take distributions; `linear-cross-entropy` does"
            ],
        ),
    ];
    for (rung, inputs, options, expected) in cases {
        expected.assert_eq(&rung.run(inputs, &options).unwrap_err().to_string());
    }
    let options = [
        LinearCrossEntropy { label_smoothing: 0.1, ..plain.clone() },
        LinearCrossEntropy { z_loss: 0.1, ..plain.clone() },
        LinearCrossEntropy { softcap: Some(30.0), ..plain.clone() },
        LinearCrossEntropy { scale: 2.0, ..plain.clone() },
        LinearCrossEntropy { shift: 1, ..plain.clone() },
        LinearCrossEntropy { reduction: Reduction::None, ..plain.clone() },
        LinearCrossEntropy { empty: Empty::Nan, ..plain.clone() },
        LinearCrossEntropy { log_sum_exp: LogSumExp::Value, ..plain.clone() },
        LinearCrossEntropy { predictions: true, ..plain.clone() },
        LinearCrossEntropy { entropy: true, ..plain.clone() },
    ];
    let with_options = options.iter().map(|options| (&inputs, options));
    let refused = with_options.chain([(&with_adapter, &plain), (&with_bias, &plain)]);
    let words: BTreeSet<String> = refused
        .map(|(inputs, options)| Rung::GradInForward.run(inputs, options).unwrap_err().to_string())
        .collect();
    expect!["linear cross-entropy: `grad-in-forward` does not take anything but classes, an ignore index, and means or sums; `linear-cross-entropy` does"].assert_eq(&words.into_iter().collect::<Vec<_>>().join("\n"));
}

#[test]
fn rungs_are_read_as_they_are_printed() {
    for rung in Rung::ALL {
        assert_eq!(rung.to_string().parse::<Rung>().unwrap(), rung);
    }
    expect!["linear cross-entropy: unknown rung `liger`; expected one of naive, chunked-recompute, grad-in-forward, linear-cross-entropy"]
        .assert_eq(&"liger".parse::<Rung>().unwrap_err().to_string());
}
