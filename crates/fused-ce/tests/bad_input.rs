//! What is refused, and in which words.

use std::sync::Arc;

use expect_test::{Expect, expect};
use fused_ce::vocabulary_parallel::{Group, Reduce, Shard};
use fused_ce::{
    Adapter, Chunk, Denominator, Error, Inputs, LinearCrossEntropy, LogSumExp, Reduction, Targets,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn zeros(size: &[i64]) -> Tensor {
    Tensor::zeros(size, F32)
}

fn learned(size: &[i64]) -> Tensor {
    zeros(size).set_requires_grad(true)
}

/// Runs with `change` made to inputs that fit: six tokens of width 4, eleven classes.
fn check(
    change: impl for<'a> FnOnce(&mut Inputs<'a>, &'a Tensors, &mut LinearCrossEntropy),
    expected: Expect,
) {
    let tensors = Tensors::new();
    let mut options = LinearCrossEntropy::default();
    let mut inputs = Inputs::new(&tensors.hidden, &tensors.weight, &tensors.targets);
    options.run(&inputs).unwrap();
    change(&mut inputs, &tensors, &mut options);
    expected.assert_eq(&options.run(&inputs).unwrap_err().to_string());
}

/// What fits, and what does not.
struct Tensors {
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    class: Tensor,
    token: Tensor,
    even: Tensor,
    a: Tensor,
    b: Tensor,
    scalar: Tensor,
    learned_tokens: Tensor,
    learned_classes: Tensor,
    learned_even: Tensor,
    learned_scalar: Tensor,
    double: Tensor,
    whole: Tensor,
    halves: Tensor,
    outside: Tensor,
    below: Tensor,
    narrow: Tensor,
    nothing: Tensor,
    undefined: Tensor,
    elsewhere: Option<[Tensor; 2]>,
}

impl Tensors {
    fn new() -> Self {
        let targets = Tensor::from_slice2(&[[1i64, 0, 10], [-100, 3, 3]]);
        let outside = targets.copy();
        let _ = outside.get(1).get(1).fill_(11);
        let below = targets.copy();
        let _ = below.get(0).get(2).fill_(-1);
        // A device without memory of its own, where the library has it.
        let on_meta = |tensor: &Tensor| tensor.f_to_device(Device::Mps).ok();
        let (hidden, weight) = (zeros(&[2, 3, 4]), zeros(&[11, 4]));
        Self {
            elsewhere: on_meta(&weight).zip(on_meta(&targets)).map(|(weight, targets)| [weight, targets]),
            hidden,
            weight,
            class: zeros(&[11]),
            token: zeros(&[2, 3]),
            even: Tensor::full([2, 3, 11], 1.0 / 11.0, F32),
            a: zeros(&[2, 4]),
            b: zeros(&[11, 2]),
            scalar: zeros(&[]),
            learned_tokens: learned(&[2, 3]),
            learned_classes: learned(&[11]),
            learned_even: learned(&[2, 3, 11]),
            learned_scalar: learned(&[]),
            double: zeros(&[11, 4]).to_kind(Kind::Double),
            whole: zeros(&[2, 3, 4]).to_kind(Kind::Int64),
            halves: targets.to_kind(Kind::Int),
            outside,
            below,
            narrow: zeros(&[11, 5]),
            nothing: zeros(&[0, 4]),
            undefined: Tensor::new(),
            targets,
        }
    }
}

#[test]
fn shapes_that_do_not_fit() {
    check(
        |i, t, _| i.weight = &t.narrow,
        expect![
            "linear cross-entropy: `weight` has shape [11, 5]; expected [vocabulary, 4] for hidden states [2, 3, 4]"
        ],
    );
    check(
        |i, t, _| i.weight = &t.class,
        expect!["linear cross-entropy: `weight` has shape [11]; expected [vocabulary, hidden]"],
    );
    check(
        |i, t, _| i.weight = &t.nothing,
        expect![
            "linear cross-entropy: `weight` has shape [0, 4]; expected a vocabulary and a hidden size of at least 1"
        ],
    );
    check(
        |i, t, _| i.hidden = &t.scalar,
        expect!["linear cross-entropy: `hidden` has shape []; expected […, hidden]"],
    );
    check(
        |i, t, _| i.hidden = &t.weight,
        expect![
            "linear cross-entropy: `targets` has shape [2, 3]; expected [11], one class for each hidden state"
        ],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.scalar),
        expect![
            "linear cross-entropy: `targets` has shape []; expected [2, 3], one class for each hidden state"
        ],
    );
    check(
        |i, t, _| i.targets = Targets::Distributions(&t.token),
        expect![
            "linear cross-entropy: `targets` has shape [2, 3]; expected [2, 3, 11], a distribution for each token"
        ],
    );
    check(
        |i, t, _| i.bias = Some(&t.token),
        expect!["linear cross-entropy: `bias` has shape [2, 3]; expected [11]"],
    );
    check(
        |i, t, _| i.class_weights = Some(&t.token),
        expect!["linear cross-entropy: `class_weights` has shape [2, 3]; expected [11]"],
    );
    check(
        |i, t, _| i.token_weights = Some(&t.class),
        expect!["linear cross-entropy: `token_weights` has shape [11]; expected [2, 3], as the targets"],
    );
    check(
        |i, t, _| i.adapter = Some(Adapter { a: &t.b, b: &t.b, scale: 1.0 }),
        expect![
            "linear cross-entropy: `adapter.a` has shape [11, 2]; expected [11, 4], with a rank of at least 1"
        ],
    );
    check(
        |i, t, _| i.adapter = Some(Adapter { a: &t.a, b: &t.a, scale: 1.0 }),
        expect![
            "linear cross-entropy: `adapter.b` has shape [2, 4]; expected [11, 2], with a rank of at least 1"
        ],
    );
    check(
        |i, t, _| i.adapter = Some(Adapter { a: &t.nothing, b: &t.b, scale: 1.0 }),
        expect![
            "linear cross-entropy: `adapter.a` has shape [0, 4]; expected [0, 4], with a rank of at least 1"
        ],
    );
    check(
        |i, t, _| i.denominator = Some(Denominator::Tensor(&t.class)),
        expect!["linear cross-entropy: `denominator` has shape [11]; expected one element"],
    );
}

#[test]
fn dtypes_that_do_not_fit() {
    check(
        |i, t, _| i.hidden = &t.whole,
        expect![
            "linear cross-entropy: `hidden` is Int64; expected Float, Double, BFloat16 or Half; convert it with `to_kind`"
        ],
    );
    check(
        |i, t, _| i.weight = &t.double,
        expect!["linear cross-entropy: `weight` is Double; expected Float; convert it with `to_kind`"],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.halves),
        expect!["linear cross-entropy: `targets` is Int; expected Int64 classes; convert it with `to_kind`"],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.token),
        expect![
            "linear cross-entropy: `targets` is Float; expected Int64 classes; convert it with `to_kind`"
        ],
    );
    let double = zeros(&[11]).to_kind(Kind::Double);
    let of_tokens = zeros(&[2, 3]).to_kind(Kind::BFloat16);
    let even = zeros(&[2, 3, 11]).to_kind(Kind::BFloat16);
    let a = zeros(&[2, 4]).to_kind(Kind::BFloat16);
    let t = Tensors::new();
    let plain = Inputs::new(&t.hidden, &t.weight, &t.targets);
    let cases = [
        (
            Inputs { bias: Some(&double), ..plain.clone() },
            expect!["linear cross-entropy: `bias` is Double; expected Float; convert it with `to_kind`"],
        ),
        (
            Inputs { class_weights: Some(&double), ..plain.clone() },
            expect![
                "linear cross-entropy: `class_weights` is Double; expected Float; convert it with `to_kind`"
            ],
        ),
        (
            Inputs { token_weights: Some(&of_tokens), ..plain.clone() },
            expect![
                "linear cross-entropy: `token_weights` is BFloat16; expected Float; convert it with `to_kind`"
            ],
        ),
        (
            Inputs { targets: Targets::Distributions(&even), ..plain.clone() },
            expect!["linear cross-entropy: `targets` is BFloat16; expected Float; convert it with `to_kind`"],
        ),
        (
            Inputs { adapter: Some(Adapter { a: &a, b: &t.b, scale: 1.0 }), ..plain.clone() },
            expect![
                "linear cross-entropy: `adapter.a` is BFloat16; expected Float; convert it with `to_kind`"
            ],
        ),
    ];
    for (inputs, expected) in cases {
        expected.assert_eq(&LinearCrossEntropy::default().run(&inputs).unwrap_err().to_string());
    }
}

#[test]
fn devices_that_do_not_fit() {
    let tensors = Tensors::new();
    match &tensors.elsewhere {
        Some([weight, targets]) => {
            let loss = LinearCrossEntropy::default();
            let inputs = Inputs::new(&tensors.hidden, weight, &tensors.targets);
            assert!(matches!(loss.run(&inputs), Err(Error::DeviceMismatch { name: "weight", .. })));
            let inputs = Inputs::new(&tensors.hidden, &tensors.weight, targets);
            assert!(matches!(loss.run(&inputs), Err(Error::DeviceMismatch { name: "targets", .. })));
        }
        None => println!("no second device here; the words alone are looked at"),
    }
    let error = Error::DeviceMismatch { name: "weight", found: Device::Cuda(1), expected: Device::Cpu };
    expect!["linear cross-entropy: `weight` is on Cuda(1) and `hidden` on Cpu; move one with `to_device`"]
        .assert_eq(&error.to_string());
}

#[test]
fn a_tensor_that_was_never_made() {
    check(
        |i, t, _| i.hidden = &t.undefined,
        expect!["linear cross-entropy: `hidden` is an undefined tensor; give one with values"],
    );
    check(
        |i, t, _| i.weight = &t.undefined,
        expect!["linear cross-entropy: `weight` is an undefined tensor; give one with values"],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.undefined),
        expect!["linear cross-entropy: `targets` is an undefined tensor; give one with values"],
    );
    check(
        |i, t, _| i.bias = Some(&t.undefined),
        expect!["linear cross-entropy: `bias` is an undefined tensor; give one with values"],
    );
    check(
        |i, t, _| i.denominator = Some(Denominator::Tensor(&t.undefined)),
        expect!["linear cross-entropy: `denominator` is an undefined tensor; give one with values"],
    );
}

#[test]
fn a_target_outside_the_vocabulary_is_named_with_its_place() {
    check(
        |i, t, _| i.targets = Targets::Classes(&t.outside),
        expect![
            "linear cross-entropy: target 11 at place 4 is outside the vocabulary of 11 (0 to 10) and is not the ignore index -100; the tokenizer and the model do not belong together, or the ignore index is another"
        ],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.below),
        expect![
            "linear cross-entropy: target -1 at place 2 is outside the vocabulary of 11 (0 to 10) and is not the ignore index -100; the tokenizer and the model do not belong together, or the ignore index is another"
        ],
    );
    // A shift does not hide it.
    check(
        |i, t, o| {
            i.targets = Targets::Classes(&t.outside);
            o.shift = 2;
        },
        expect![
            "linear cross-entropy: target 11 at place 4 is outside the vocabulary of 11 (0 to 10) and is not the ignore index -100; the tokenizer and the model do not belong together, or the ignore index is another"
        ],
    );
    // What is a class is no target if it is the ignore index, and the usual one is no class if another is given.
    check(
        |_, _, o| o.ignore_index = 3,
        expect![
            "linear cross-entropy: target -100 at place 3 is outside the vocabulary of 11 (0 to 10) and is not the ignore index 3; the tokenizer and the model do not belong together, or the ignore index is another"
        ],
    );
}

#[test]
fn a_chunk_that_holds_no_token() {
    check(
        |_, _, o| o.chunk = Some(Chunk::Budget(43)),
        expect![
            "linear cross-entropy: a budget of 43 bytes is below the 44 bytes that one row of 11 logits takes; give at least that, or a number of tokens"
        ],
    );
    check(
        |_, _, o| o.chunk = Some(Chunk::Budget(0)),
        expect![
            "linear cross-entropy: a budget of 0 bytes is below the 44 bytes that one row of 11 logits takes; give at least that, or a number of tokens"
        ],
    );
    check(
        |_, _, o| o.chunk = Some(Chunk::Tokens(0)),
        expect!["linear cross-entropy: a chunk of 0 tokens; expected at least 1"],
    );
    check(
        |_, _, o| o.chunk = Some(Chunk::Tokens(-4)),
        expect!["linear cross-entropy: a chunk of -4 tokens; expected at least 1"],
    );
    let t = Tensors::new();
    for chunk in [Chunk::Budget(44), Chunk::Tokens(1)] {
        let options = LinearCrossEntropy { chunk: Some(chunk), ..LinearCrossEntropy::default() };
        let _ = options.loss(&t.hidden, &t.weight, &t.targets).unwrap();
    }
}

#[test]
fn options_outside_their_range() {
    check(
        |_, _, o| o.label_smoothing = -0.1,
        expect!["linear cross-entropy: label_smoothing is -0.1; expected a number in [0, 1]"],
    );
    check(
        |_, _, o| o.label_smoothing = 1.5,
        expect!["linear cross-entropy: label_smoothing is 1.5; expected a number in [0, 1]"],
    );
    check(
        |_, _, o| o.label_smoothing = f64::NAN,
        expect!["linear cross-entropy: label_smoothing is NaN; expected a number in [0, 1]"],
    );
    check(
        |_, _, o| o.z_loss = -1e-4,
        expect!["linear cross-entropy: z_loss is -0.0001; expected a finite number of at least 0"],
    );
    check(
        |_, _, o| o.z_loss = f64::INFINITY,
        expect!["linear cross-entropy: z_loss is inf; expected a finite number of at least 0"],
    );
    check(
        |_, _, o| o.scale = 0.0,
        expect!["linear cross-entropy: scale is 0; expected a finite number other than 0"],
    );
    check(
        |_, _, o| o.scale = f64::NAN,
        expect!["linear cross-entropy: scale is NaN; expected a finite number other than 0"],
    );
    check(
        |_, _, o| o.softcap = Some(-30.0),
        expect!["linear cross-entropy: softcap is -30; expected a finite number above 0, or none"],
    );
    check(
        |_, _, o| o.softcap = Some(0.0),
        expect!["linear cross-entropy: softcap is 0; expected a finite number above 0, or none"],
    );
    check(|_, _, o| o.shift = -1, expect!["linear cross-entropy: shift is -1; expected at least 0"]);
    check(
        |i, t, _| i.adapter = Some(Adapter { a: &t.a, b: &t.b, scale: f64::INFINITY }),
        expect!["linear cross-entropy: the adapter's scale is inf; expected a finite number"],
    );
    check(
        |i, _, _| i.labelled = Some(7),
        expect!["linear cross-entropy: 7 labelled tokens of 6; expected 0 to 6"],
    );
    check(
        |i, _, _| i.labelled = Some(-1),
        expect!["linear cross-entropy: -1 labelled tokens of 6; expected 0 to 6"],
    );
}

#[test]
fn options_that_exclude_each_other() {
    check(
        |i, t, o| {
            i.targets = Targets::Distributions(&t.even);
            o.shift = 1;
        },
        expect!["linear cross-entropy: a shift needs classes as targets; shift the distributions themselves"],
    );
    for reduction in [Reduction::Sum, Reduction::None] {
        let t = Tensors::new();
        let inputs = Inputs {
            denominator: Some(Denominator::Number(3.0)),
            ..Inputs::new(&t.hidden, &t.weight, &t.targets)
        };
        let error =
            LinearCrossEntropy { reduction, ..LinearCrossEntropy::default() }.run(&inputs).unwrap_err();
        let words =
            format!("linear cross-entropy: a denominator is of a mean; the reduction is {reduction:?}");
        assert_eq!(error.to_string(), words);
    }
    check(
        |i, _, _| i.denominator = Some(Denominator::Number(0.0)),
        expect!["linear cross-entropy: the denominator is 0; expected a finite number above 0"],
    );
    check(
        |i, _, _| i.denominator = Some(Denominator::Number(f64::NAN)),
        expect!["linear cross-entropy: the denominator is NaN; expected a finite number above 0"],
    );
    let (x, w, y) = (zeros(&[4]), zeros(&[11, 4]), Tensor::from(1i64));
    let options = LinearCrossEntropy { shift: 1, ..LinearCrossEntropy::default() };
    expect!["linear cross-entropy: a shift needs rows of tokens; the hidden states are [hidden]"]
        .assert_eq(&options.loss(&x, &w, &y).unwrap_err().to_string());
}

#[test]
fn what_would_silently_get_no_gradient() {
    check(
        |i, t, _| i.token_weights = Some(&t.learned_tokens),
        expect![
            "linear cross-entropy: `token_weights` requires a gradient, and none is computed for it; detach it"
        ],
    );
    check(
        |i, t, _| i.class_weights = Some(&t.learned_classes),
        expect![
            "linear cross-entropy: `class_weights` requires a gradient, and none is computed for it; detach it"
        ],
    );
    check(
        |i, t, _| i.targets = Targets::Distributions(&t.learned_even),
        expect![
            "linear cross-entropy: `targets` requires a gradient, and none is computed for it; detach it"
        ],
    );
    check(
        |i, t, _| i.denominator = Some(Denominator::Tensor(&t.learned_scalar)),
        expect![
            "linear cross-entropy: `denominator` requires a gradient, and none is computed for it; detach it"
        ],
    );
    // Where no gradient is recorded, none can be missing.
    let _no_grad = runtime::autograd::GradMode::off();
    let t = Tensors::new();
    let inputs =
        Inputs { token_weights: Some(&t.learned_tokens), ..Inputs::new(&t.hidden, &t.weight, &t.targets) };
    LinearCrossEntropy::default().run(&inputs).unwrap();
}

#[test]
fn a_slice_outside_the_vocabulary() {
    #[derive(Debug)]
    struct Alone;
    impl Group for Alone {
        fn all_reduce(&self, _: &mut Tensor, _: Reduce) -> runtime::Result<()> {
            Ok(())
        }
    }
    let cases = [
        (
            5,
            15,
            11,
            expect![
                "linear cross-entropy: a slice of 11 rows from 5 on is not within a vocabulary of 15; give each rank its own rows"
            ],
        ),
        (
            -1,
            30,
            11,
            expect![
                "linear cross-entropy: a slice of 11 rows from -1 on is not within a vocabulary of 30; give each rank its own rows"
            ],
        ),
        (
            i64::MAX,
            30,
            11,
            expect![
                "linear cross-entropy: a slice of 11 rows from 9223372036854775807 on is not within a vocabulary of 30; give each rank its own rows"
            ],
        ),
        (
            4,
            15,
            10,
            expect![
                "linear cross-entropy: the largest slice of 15 classes is said to have 10 rows, and this one has 11; give each rank the same number, that of the largest"
            ],
        ),
        (
            4,
            15,
            16,
            expect![
                "linear cross-entropy: the largest slice of 15 classes is said to have 16 rows, and this one has 11; give each rank the same number, that of the largest"
            ],
        ),
    ];
    for (first, vocabulary, widest, expected) in cases {
        let shard = Shard { first, vocabulary, widest, group: Box::new(Alone) };
        check(|i, _, _| i.shard = Some(Arc::new(shard)), expected);
    }
}

#[test]
fn nan_logits_are_a_nan_loss_and_not_an_error() {
    let t = Tensors::new();
    let x = t.hidden.copy();
    let _ = x.get(0).get(0).fill_(f64::NAN);
    let options = LinearCrossEntropy { log_sum_exp: LogSumExp::Value, ..LinearCrossEntropy::default() };
    let output = options.run(&Inputs::new(&x, &t.weight, &t.targets)).unwrap();
    assert!(output.loss.double_value(&[]).is_nan());
    let nan = output.log_sum_exp.unwrap().isnan().sum(Kind::Int64).int64_value(&[]);
    assert_eq!(nan, 1);
}
