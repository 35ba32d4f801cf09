//! Invalid options are refused, with these messages.

use std::sync::Arc;

use expect_test::{Expect, expect};
use fused_ce::vocabulary_parallel::{ProcessGroup, ReduceOp, Shard};
use fused_ce::{Adapter, Chunk, Denominator, Inputs, LinearCrossEntropy, Reduction, Targets};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn zeros(size: &[i64]) -> Tensor {
    Tensor::zeros(size, F32)
}

/// Six tokens of width 4, eleven classes, and an adapter.
struct Tensors {
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    a: Tensor,
    b: Tensor,
}

impl Tensors {
    fn new() -> Self {
        let targets = Tensor::from_slice2(&[[1i64, 0, 10], [-100, 3, 3]]);
        Self {
            hidden: zeros(&[2, 3, 4]),
            weight: zeros(&[11, 4]),
            targets,
            a: zeros(&[2, 4]),
            b: zeros(&[11, 2]),
        }
    }
}

/// Runs valid inputs changed by `change`.
fn check(change: impl FnOnce(&mut Inputs<'_>, &mut LinearCrossEntropy), expected: Expect) {
    let t = Tensors::new();
    let mut options = LinearCrossEntropy::default();
    let adapter = Some(Adapter { a: &t.a, b: &t.b, scale: 1.0 });
    let mut inputs = Inputs { adapter, ..Inputs::new(&t.hidden, &t.weight, &t.targets) };
    options.run(&inputs).unwrap();
    change(&mut inputs, &mut options);
    expected.assert_eq(&options.run(&inputs).unwrap_err().to_string());
}

#[test]
fn a_chunk_without_tokens_is_refused() {
    check(
        |_, o| o.chunk = Some(Chunk::Budget(43)),
        expect![
            "linear cross-entropy: a budget of 43 bytes is less than the 44 bytes of one row of 11 logits; increase it, or set a number of tokens"
        ],
    );
    check(
        |_, o| o.chunk = Some(Chunk::Budget(0)),
        expect![
            "linear cross-entropy: a budget of 0 bytes is less than the 44 bytes of one row of 11 logits; increase it, or set a number of tokens"
        ],
    );
    check(
        |_, o| o.chunk = Some(Chunk::Tokens(0)),
        expect!["linear cross-entropy: a chunk of 0 tokens; expected at least 1"],
    );
    check(
        |_, o| o.chunk = Some(Chunk::Tokens(-4)),
        expect!["linear cross-entropy: a chunk of -4 tokens; expected at least 1"],
    );
    let t = Tensors::new();
    for chunk in [Chunk::Budget(44), Chunk::Tokens(1)] {
        let options = LinearCrossEntropy { chunk: Some(chunk), ..LinearCrossEntropy::default() };
        let _ = options.loss(&t.hidden, &t.weight, &t.targets).unwrap();
    }
}

#[test]
fn options_outside_their_range_are_refused() {
    check(
        |_, o| o.label_smoothing = -0.1,
        expect!["linear cross-entropy: label_smoothing is -0.1; expected a number in [0, 1]"],
    );
    check(
        |_, o| o.label_smoothing = 1.5,
        expect!["linear cross-entropy: label_smoothing is 1.5; expected a number in [0, 1]"],
    );
    check(
        |_, o| o.label_smoothing = f64::NAN,
        expect!["linear cross-entropy: label_smoothing is NaN; expected a number in [0, 1]"],
    );
    check(
        |_, o| o.z_loss = -1e-4,
        expect!["linear cross-entropy: z_loss is -0.0001; expected a finite number of at least 0"],
    );
    check(
        |_, o| o.z_loss = f64::INFINITY,
        expect!["linear cross-entropy: z_loss is inf; expected a finite number of at least 0"],
    );
    check(
        |_, o| o.scale = 0.0,
        expect!["linear cross-entropy: scale is 0; expected a finite number other than 0"],
    );
    check(
        |_, o| o.scale = f64::NAN,
        expect!["linear cross-entropy: scale is NaN; expected a finite number other than 0"],
    );
    check(
        |_, o| o.softcap = Some(-30.0),
        expect!["linear cross-entropy: softcap is -30; expected a finite number above 0, or none"],
    );
    check(
        |_, o| o.softcap = Some(0.0),
        expect!["linear cross-entropy: softcap is 0; expected a finite number above 0, or none"],
    );
    check(|_, o| o.shift = -1, expect!["linear cross-entropy: shift is -1; expected at least 0"]);
    check(
        |i, _| i.adapter = i.adapter.map(|of| Adapter { scale: f64::INFINITY, ..of }),
        expect!["linear cross-entropy: the adapter's scale is inf; expected a finite number"],
    );
    check(
        |i, _| i.labelled_tokens = Some(7),
        expect!["linear cross-entropy: 7 labelled tokens of 6; expected 0 to 6"],
    );
    check(
        |i, _| i.labelled_tokens = Some(-1),
        expect!["linear cross-entropy: -1 labelled tokens of 6; expected 0 to 6"],
    );
    check(
        |i, _| i.labelled_tokens = Some(4),
        expect![
            "linear cross-entropy: 4 labelled tokens, and 5 targets are not ignored; expected as many, or more"
        ],
    );
}

#[test]
fn exclusive_options_are_refused() {
    let t = Tensors::new();
    let even = Tensor::full([2, 3, 11], 1.0 / 11.0, F32);
    let inputs =
        Inputs { targets: Targets::Distributions(&even), ..Inputs::new(&t.hidden, &t.weight, &t.targets) };
    let options = LinearCrossEntropy { shift: 1, ..LinearCrossEntropy::default() };
    expect!["linear cross-entropy: a shift needs classes as targets; shift the distributions themselves"]
        .assert_eq(&options.run(&inputs).unwrap_err().to_string());
    for reduction in [Reduction::Sum, Reduction::None] {
        let t = Tensors::new();
        let inputs = Inputs {
            denominator: Some(Denominator::Number(3.0)),
            ..Inputs::new(&t.hidden, &t.weight, &t.targets)
        };
        let error =
            LinearCrossEntropy { reduction, ..LinearCrossEntropy::default() }.run(&inputs).unwrap_err();
        let words =
            format!("linear cross-entropy: a denominator needs the reduction Mean; it is {reduction:?}");
        assert_eq!(error.to_string(), words);
    }
    check(
        |i, _| i.denominator = Some(Denominator::Number(0.0)),
        expect!["linear cross-entropy: the denominator is 0; expected a finite number above 0"],
    );
    check(
        |i, _| i.denominator = Some(Denominator::Number(f64::NAN)),
        expect!["linear cross-entropy: the denominator is NaN; expected a finite number above 0"],
    );
    let (x, w, y) = (zeros(&[4]), zeros(&[11, 4]), Tensor::from(1i64));
    let options = LinearCrossEntropy { shift: 1, ..LinearCrossEntropy::default() };
    expect!["linear cross-entropy: a shift needs rows of tokens; the hidden states are [hidden]"]
        .assert_eq(&options.loss(&x, &w, &y).unwrap_err().to_string());
}

#[test]
fn a_shard_outside_the_vocabulary_is_refused() {
    #[derive(Debug)]
    struct Alone;
    impl ProcessGroup for Alone {
        fn all_reduce(&self, _: &mut Tensor, _: ReduceOp) -> runtime::Result<()> {
            Ok(())
        }
    }
    let cases = [
        (
            5,
            15,
            11,
            expect![
                "linear cross-entropy: a shard of 11 rows starting at class 5 exceeds the vocabulary of 15; give each rank its own rows"
            ],
        ),
        (
            -1,
            30,
            11,
            expect![
                "linear cross-entropy: a shard of 11 rows starting at class -1 exceeds the vocabulary of 30; give each rank its own rows"
            ],
        ),
        (
            i64::MAX,
            30,
            11,
            expect![
                "linear cross-entropy: a shard of 11 rows starting at class 9223372036854775807 exceeds the vocabulary of 30; give each rank its own rows"
            ],
        ),
        (
            4,
            15,
            10,
            expect![
                "linear cross-entropy: `widest` is 10, but this shard of 15 classes has 11 rows; set it to the rows of the largest shard on every rank"
            ],
        ),
        (
            4,
            15,
            16,
            expect![
                "linear cross-entropy: `widest` is 16, but this shard of 15 classes has 11 rows; set it to the rows of the largest shard on every rank"
            ],
        ),
    ];
    for (first, vocabulary, widest, expected) in cases {
        let shard = Shard { first, vocabulary, widest, group: Box::new(Alone) };
        check(|i, _| i.shard = Some(Arc::new(shard)), expected);
    }
}
