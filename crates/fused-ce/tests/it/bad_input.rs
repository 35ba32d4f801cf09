//! Invalid inputs are refused, with these messages.

use expect_test::{Expect, expect};
use fused_ce::{Adapter, Denominator, Inputs, LinearCrossEntropy, LogSumExp, Targets};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The message of an error.
fn words<T>(result: fused_ce::Result<T>) -> String {
    result.err().unwrap().to_string()
}

fn zeros(size: &[i64]) -> Tensor {
    Tensor::zeros(size, F32)
}

fn learned(size: &[i64]) -> Tensor {
    zeros(size).set_requires_grad(true)
}

/// Runs valid inputs changed by `change`: six tokens of width 4, eleven classes.
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

/// A valid tensor and invalid ones.
struct Tensors {
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    class: Tensor,
    token: Tensor,
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
        // A device without memory, if libtorch has it.
        let on_meta = |tensor: &Tensor| tensor.f_to_device(Device::Mps).ok();
        let (hidden, weight) = (zeros(&[2, 3, 4]), zeros(&[11, 4]));
        Self {
            elsewhere: on_meta(&weight).zip(on_meta(&targets)).map(|(weight, targets)| [weight, targets]),
            hidden,
            weight,
            class: zeros(&[11]),
            token: zeros(&[2, 3]),
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
fn mismatched_shapes_are_refused() {
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
        expect![
            "linear cross-entropy: `token_weights` has shape [11]; expected [2, 3], the shape of the targets"
        ],
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
fn mismatched_dtypes_are_refused() {
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
fn mismatched_devices_are_refused() {
    let tensors = Tensors::new();
    // Without a second device only the message is tested, beside it.
    if let Some([weight, targets]) = &tensors.elsewhere {
        let loss = LinearCrossEntropy::default();
        let inputs = Inputs::new(&tensors.hidden, weight, &tensors.targets);
        assert!(words(loss.run(&inputs)).contains("`weight` is on"));
        let inputs = Inputs::new(&tensors.hidden, &tensors.weight, targets);
        assert!(words(loss.run(&inputs)).contains("`targets` is on"));
    }
}

#[test]
fn an_undefined_tensor_is_refused() {
    check(
        |i, t, _| i.hidden = &t.undefined,
        expect!["linear cross-entropy: `hidden` is an undefined tensor; pass a tensor with values"],
    );
    check(
        |i, t, _| i.weight = &t.undefined,
        expect!["linear cross-entropy: `weight` is an undefined tensor; pass a tensor with values"],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.undefined),
        expect!["linear cross-entropy: `targets` is an undefined tensor; pass a tensor with values"],
    );
    check(
        |i, t, _| i.bias = Some(&t.undefined),
        expect!["linear cross-entropy: `bias` is an undefined tensor; pass a tensor with values"],
    );
    check(
        |i, t, _| i.denominator = Some(Denominator::Tensor(&t.undefined)),
        expect!["linear cross-entropy: `denominator` is an undefined tensor; pass a tensor with values"],
    );
}

#[test]
fn a_target_outside_the_vocabulary_is_named_with_its_index() {
    check(
        |i, t, _| i.targets = Targets::Classes(&t.outside),
        expect![
            "linear cross-entropy: target 11 at position 4 is outside the vocabulary of 11 (0 to 10) and is not the ignore index -100; use the tokenizer of the model, or set the ignore index"
        ],
    );
    check(
        |i, t, _| i.targets = Targets::Classes(&t.below),
        expect![
            "linear cross-entropy: target -1 at position 2 is outside the vocabulary of 11 (0 to 10) and is not the ignore index -100; use the tokenizer of the model, or set the ignore index"
        ],
    );
    // A shift does not hide an invalid target.
    check(
        |i, t, o| {
            i.targets = Targets::Classes(&t.outside);
            o.shift = 2;
        },
        expect![
            "linear cross-entropy: target 11 at position 4 is outside the vocabulary of 11 (0 to 10) and is not the ignore index -100; use the tokenizer of the model, or set the ignore index"
        ],
    );
    // With another ignore index, a class may be ignored and −100 is invalid.
    check(
        |_, _, o| o.ignore_index = 3,
        expect![
            "linear cross-entropy: target -100 at position 3 is outside the vocabulary of 11 (0 to 10) and is not the ignore index 3; use the tokenizer of the model, or set the ignore index"
        ],
    );
}

#[test]
fn inputs_that_would_silently_get_no_gradient_are_refused() {
    check(
        |i, t, _| i.token_weights = Some(&t.learned_tokens),
        expect![
            "linear cross-entropy: `token_weights` requires a gradient, but is not differentiated; detach it"
        ],
    );
    check(
        |i, t, _| i.class_weights = Some(&t.learned_classes),
        expect![
            "linear cross-entropy: `class_weights` requires a gradient, but is not differentiated; detach it"
        ],
    );
    check(
        |i, t, _| i.targets = Targets::Distributions(&t.learned_even),
        expect!["linear cross-entropy: `targets` requires a gradient, but is not differentiated; detach it"],
    );
    check(
        |i, t, _| i.denominator = Some(Denominator::Tensor(&t.learned_scalar)),
        expect![
            "linear cross-entropy: `denominator` requires a gradient, but is not differentiated; detach it"
        ],
    );
    // Without gradient recording no gradient can be missing.
    let _no_grad = runtime::autograd::GradMode::off();
    let t = Tensors::new();
    let inputs =
        Inputs { token_weights: Some(&t.learned_tokens), ..Inputs::new(&t.hidden, &t.weight, &t.targets) };
    LinearCrossEntropy::default().run(&inputs).unwrap();
}

#[test]
fn nan_logits_give_a_nan_loss() {
    let t = Tensors::new();
    let x = t.hidden.copy();
    let _ = x.get(0).get(0).fill_(f64::NAN);
    let options = LinearCrossEntropy { log_sum_exp: LogSumExp::Value, ..LinearCrossEntropy::default() };
    let output = options.run(&Inputs::new(&x, &t.weight, &t.targets)).unwrap();
    assert!(output.loss.double_value(&[]).is_nan());
    let nan = output.log_sum_exp.unwrap().isnan().sum(Kind::Int64).int64_value(&[]);
    assert_eq!(nan, 1);
}
