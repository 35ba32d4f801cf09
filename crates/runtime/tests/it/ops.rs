//! Operators by name and the typed layer over them, against tch and plain arithmetic.

use runtime::ops::attention::backend::{Backend, Call, beginning_with, chosen, order, set_order};
use runtime::ops::attention::{self, Options, Packing};
use runtime::ops::optimizer::{AdamW, AdamWTensors, Unscale, fused_adam_, fused_adamw_};
use runtime::ops::settings::{self, Determinism};
use runtime::ops::{self, Value, amp, foreach, norm};
use tch::{Device, Kind, Tensor, kind};

fn tensor(values: &[f64]) -> Tensor {
    Tensor::from_slice(values)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

fn close(actual: &Tensor, expected: &[f64]) {
    let actual = values(actual);
    assert_eq!(actual.len(), expected.len());
    for (a, e) in actual.iter().zip(expected) {
        assert!((a - e).abs() <= 1e-12 * e.abs().max(1.0), "{actual:?} {expected:?}");
    }
}

#[test]
fn every_kind_of_value_round_trips_through_the_shim() {
    let x = Tensor::arange(6, (Kind::Double, Device::Cpu)).reshape([2, 3]);
    let one = |name, overload, positional: &[Value], named: &[(&str, Value)]| {
        ops::single(ops::call(name, overload, positional, named).unwrap()).unwrap()
    };
    // Scalars of three types, lists of integers, kinds, devices, strings, lists of tensors with and without holes.
    assert_eq!(one("aten::add", "Scalar", &[(&x).into(), 2.into()], &[]), &x + 2);
    assert_eq!(one("aten::mul", "Scalar", &[(&x).into(), 0.5.into()], &[]), &x * 0.5);
    assert_eq!(
        one("aten::sum", "dim_IntList", &[(&x).into(), vec![1].into(), true.into()], &[]).size(),
        [2, 1]
    );
    let zeros = one(
        "aten::zeros",
        "",
        &[vec![2, 2].into()],
        &[("dtype", Kind::Half.into()), ("device", Device::Cpu.into())],
    );
    assert_eq!((zeros.kind(), zeros.size()), (Kind::Half, vec![2, 2]));
    assert_eq!(one("aten::gelu", "", &[(&x).into()], &[("approximate", "tanh".into())]), x.gelu("tanh"));
    assert_eq!(
        one("aten::cat", "", &[vec![x.copy(), x.copy()].into(), 1.into()], &[]),
        Tensor::cat(&[&x, &x], 1)
    );
    let index = Value::OptionalTensorList(vec![None, Some(Tensor::from_slice(&[2i64, 0]))]);
    assert_eq!(
        one("aten::index", "Tensor", &[(&x).into(), index], &[]),
        x.index_select(1, &Tensor::from_slice(&[2i64, 0]))
    );
    // A list of doubles: upsampling factors.
    let image = Tensor::ones([1, 1, 2, 2], (Kind::Float, Device::Cpu));
    let factors = Value::DoubleList(vec![2.0, 2.0]);
    assert_eq!(
        one("aten::upsample_nearest2d", "vec", &[(&image).into(), Value::None, factors], &[]).size(),
        [1, 1, 4, 4]
    );
    // Results that are not one tensor.
    let Ok([Value::TensorList(parts)]) = <[Value; 1]>::try_from(
        ops::call("aten::split", "Tensor", &[(&x).into(), 2.into(), 1.into()], &[]).unwrap(),
    ) else {
        panic!("split gives one list")
    };
    assert_eq!(parts.iter().map(Tensor::size).collect::<Vec<_>>(), [vec![2, 2], vec![2, 1]]);
    let results = ops::call("aten::is_nonzero", "", &[tensor(&[1.0]).into()], &[]).unwrap();
    assert!(matches!(results[..], [Value::Bool(true)]), "{results:?}");
    let results = ops::call("aten::item", "", &[tensor(&[2.5]).into()], &[]);
    assert!(matches!(results.unwrap()[..], [Value::Double(2.5)]));
    // An undefined tensor, and a list of booleans: a layer norm's backward without the weight's gradient.
    let statistics = Tensor::zeros([2, 1], (Kind::Double, Device::Cpu));
    let results = ops::call(
        "aten::native_layer_norm_backward",
        "",
        &[
            (&x).into(),
            (&x).into(),
            vec![3].into(),
            (&statistics).into(),
            (&statistics).into(),
            Value::None,
            Value::None,
            vec![true, false, false].into(),
        ],
        &[],
    )
    .unwrap();
    assert!(matches!(results[..], [Value::Tensor(_), Value::None, Value::None]), "{results:?}");
}

#[test]
fn an_invalid_call_is_an_error_with_the_schema() {
    let x = tensor(&[1.0]);
    type Case = (&'static str, &'static str, Vec<Value>, Vec<(&'static str, Value)>, &'static str);
    let cases: [Case; 9] = [
        (
            "aten::nonsense",
            "",
            vec![],
            vec![],
            "ops::call: there is no operator `aten::nonsense`; names are those of",
        ),
        (
            "aten::is_same_size",
            "Tensor",
            vec![],
            vec![],
            "ops::call: `aten::is_same_size` has no overload `Tensor`, only ``",
        ),
        ("aten::mm\0", "", vec![], vec![], "ops::call: \"aten::mm\\0\" has a NUL character in it"),
        (
            "aten::mm",
            "",
            vec![(&x).into()],
            vec![],
            "ops::call: aten::mm() is missing value for argument 'mat2'. Declaration: aten::mm(Tensor self, Tensor mat2) -> Tensor",
        ),
        (
            "aten::mm",
            "",
            vec![(&x).into(), 3.into()],
            vec![],
            "ops::call: aten::mm() Expected a value of type 'Tensor' for argument 'mat2' but instead found type 'int'.",
        ),
        (
            "aten::mm",
            "",
            vec![(&x).into(), (&x).into(), (&x).into()],
            vec![],
            "ops::call: Expected at most 2 argument(s) for operator 'aten::mm', but received 3 argument(s)",
        ),
        (
            "aten::mm",
            "",
            vec![(&x).into(), (&x).into()],
            vec![("mat3", (&x).into())],
            "ops::call: Unknown keyword argument 'mat3' for operator 'aten::mm'",
        ),
        (
            "aten::zeros",
            "",
            vec![vec![1].into()],
            vec![("device", Device::Mps.into())],
            "ops::call: Mps is neither the CPU nor a CUDA device",
        ),
        ("aten::mm", "", vec![(&x).into(), (&x).into()], vec![], "self must be a matrix"),
    ];
    for (name, overload, positional, named, expected) in cases {
        let error = ops::call(name, overload, &positional, &named).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = ops::call(
        "aten::_cudnn_init_dropout_state",
        "",
        &[0.5.into(), true.into(), 1.into()],
        &[("device", Device::Cpu.into())],
    );
    assert!(
        error
            .unwrap_err()
            .to_string()
            .starts_with("the operator aten::_cudnn_init_dropout_state is not available here: ")
    );
    assert_eq!(
        ops::single(vec![Value::Int(1)]).unwrap_err().to_string(),
        "ops::Value: expected a tensor, got an integer"
    );
    assert_eq!(
        ops::single(vec![]).unwrap_err().to_string(),
        "ops::tensors: expected 1 tensors, the operator gave 0 values"
    );
}

#[test]
fn a_call_by_name_records_its_derivative() {
    let x = tensor(&[1.0, 2.0]).set_requires_grad(true);
    let y = ops::single(ops::call("aten::mul", "Tensor", &[(&x).into(), (&x).into()], &[]).unwrap()).unwrap();
    y.sum(Kind::Double).backward();
    close(&x.grad(), &[2.0, 4.0]);
}

#[test]
fn foreach_changes_every_tensor() {
    let start = || [tensor(&[1.0, 4.0]), tensor(&[9.0])];
    let other = [tensor(&[2.0, 3.0]), tensor(&[4.0])];
    type Change<'a> = &'a dyn Fn(&[Tensor]) -> runtime::Result<()>;
    let factor = tensor(&[3.0]).squeeze();
    let cases: [(Change<'_>, [&[f64]; 2]); 11] = [
        (&|t| foreach::add_(t, &other), [&[3.0, 7.0], &[13.0]]),
        (&|t| foreach::add_scaled_(t, &other, 10.0), [&[21.0, 34.0], &[49.0]]),
        (&|t| foreach::add_scalar_(t, 0.5), [&[1.5, 4.5], &[9.5]]),
        (&|t| foreach::sub_(t, &other), [&[-1.0, 1.0], &[5.0]]),
        (&|t| foreach::mul_scalar_(t, 2.0), [&[2.0, 8.0], &[18.0]]),
        (&|t| foreach::mul_tensor_(t, &factor), [&[3.0, 12.0], &[27.0]]),
        (&|t| foreach::addcmul_(t, &other, &other, 0.5), [&[3.0, 8.5], &[17.0]]),
        (&|t| foreach::addcdiv_(t, &other, &other, 0.5), [&[1.5, 4.5], &[9.5]]),
        (&|t| foreach::lerp_(t, &other, 0.25), [&[1.25, 3.75], &[7.75]]),
        (&|t| foreach::zero_(t), [&[0.0, 0.0], &[0.0]]),
        (&|t| foreach::copy_(t, &other), [&[2.0, 3.0], &[4.0]]),
    ];
    for (change, expected) in cases {
        let tensors = start();
        change(&tensors).unwrap();
        for (tensor, expected) in tensors.iter().zip(expected) {
            close(tensor, expected);
        }
    }
    foreach::mul_scalar_(&[] as &[Tensor], 2.0).unwrap();
    foreach::add_(&[] as &[Tensor], &[] as &[Tensor]).unwrap();
    assert!(foreach::add_(&[] as &[Tensor], &other).is_err());
    let norms = foreach::norm(&[tensor(&[3.0, -4.0]), tensor(&[-2.0])], 2.0).unwrap();
    close(&norms[0], &[5.0]);
    close(&norms[1], &[2.0]);
    close(&foreach::norm(&[tensor(&[3.0, -4.0])], 1.0).unwrap()[0], &[7.0]);
    assert!(foreach::norm(&[] as &[Tensor], 2.0).unwrap().is_empty());
    let error = foreach::add_(&start(), &other[..1]).unwrap_err().to_string();
    assert!(error.contains("same number of tensors"), "{error}");
}

/// AdamW as the paper writes it, in plain numbers.
fn adamw_reference(options: AdamW, grads: &[f64]) -> (f64, f64, f64) {
    let (mut w, mut m, mut v) = (1.5, 0.0, 0.0);
    for (step, g) in (1..).zip(grads) {
        m = options.beta1 * m + (1.0 - options.beta1) * g;
        v = options.beta2 * v + (1.0 - options.beta2) * g * g;
        let (m_hat, v_hat) = (m / (1.0 - options.beta1.powi(step)), v / (1.0 - options.beta2.powi(step)));
        w -= options.lr * options.weight_decay * w;
        w -= options.lr * m_hat / (v_hat.sqrt() + options.eps);
    }
    (w, m, v)
}

#[test]
fn fused_adamw_matches_adamw() {
    let options = AdamW { lr: 0.1, weight_decay: 0.05, ..AdamW::default() };
    let gradients = [0.3, -0.2, 0.7];
    let param = tensor(&[1.5]).set_requires_grad(true);
    let (m, v, step) = (tensor(&[0.0]), tensor(&[0.0]), Tensor::from(0f32));
    for gradient in gradients {
        let grad = tensor(&[gradient * 8.0]);
        let tensors = AdamWTensors {
            params: &[&param],
            grads: &[&grad],
            exp_avgs: &[&m],
            exp_avg_sqs: &[&v],
            steps: &[&step],
        };
        let (scale, finite, infinite) = (Tensor::from(8f32), Tensor::from(0f32), Tensor::from(1f32));
        // A skipped step changes nothing.
        fused_adamw_(&tensors, options, Some(Unscale { scale: Some(&scale), found_inf: &infinite })).unwrap();
        fused_adamw_(&tensors, options, Some(Unscale { scale: Some(&scale), found_inf: &finite })).unwrap();
    }
    let (expected, expected_m, expected_v) = adamw_reference(options, &gradients);
    close(&param.detach(), &[expected]);
    close(&m, &[expected_m]);
    close(&v, &[expected_v]);
    assert_eq!(step.double_value(&[]), 3.0);
}

/// Without decay Adam and AdamW are equal; with it, Adam adds the decay to the gradient, and so to the moments.
#[test]
fn fused_adam_adds_the_decay_to_the_gradient() {
    let options = AdamW { lr: 0.1, weight_decay: 0.05, ..AdamW::default() };
    let param = tensor(&[1.5]);
    let (m, v, step) = (tensor(&[0.0]), tensor(&[0.0]), Tensor::from(0f32));
    let grad = tensor(&[0.3]);
    let tensors = AdamWTensors {
        params: &[&param],
        grads: &[&grad],
        exp_avgs: &[&m],
        exp_avg_sqs: &[&v],
        steps: &[&step],
    };
    fused_adam_(&tensors, options, None).unwrap();
    let decayed = 0.3 + 0.05 * 1.5;
    let (expected, expected_m, expected_v) =
        adamw_reference(AdamW { weight_decay: 0.0, ..options }, &[decayed]);
    close(&param, &[expected]);
    close(&m, &[expected_m]);
    close(&v, &[expected_v]);
}

#[test]
fn fused_adamw_refuses_lists_that_do_not_match() {
    let t = tensor(&[1.0]);
    let tensors =
        AdamWTensors { params: &[&t], grads: &[], exp_avgs: &[&t], exp_avg_sqs: &[&t], steps: &[&t] };
    let error = fused_adamw_(&tensors, AdamW::default(), None).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "fused_adamw_: params, grads, exp_avgs, exp_avg_sqs and steps have [1, 0, 1, 1, 1] tensors"
        ),
        "{error}"
    );
    let step = Tensor::from(4f32);
    let half = t.to_kind(Kind::Half);
    let tensors =
        AdamWTensors { params: &[&t], grads: &[&half], exp_avgs: &[&t], exp_avg_sqs: &[&t], steps: &[&step] };
    fused_adamw_(&tensors, AdamW::default(), None).unwrap_err();
    assert_eq!(step.double_value(&[]), 4.0, "a step that failed is not counted");
}

#[test]
fn unscaling_finds_infinities_and_nan() {
    let (found, inverse) = (Tensor::from_slice(&[0f32]), Tensor::from_slice(&[0.25f32]));
    let grads = [Tensor::from_slice(&[4f32, 8.0]), Tensor::from_slice(&[2f32])];
    amp::non_finite_check_and_unscale_(&grads, &found, &inverse).unwrap();
    close(&grads[0], &[1.0, 2.0]);
    close(&grads[1], &[0.5]);
    assert_eq!(found.double_value(&[0]), 0.0);
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let found = Tensor::from_slice(&[0f32]);
        amp::non_finite_check_and_unscale_(&[Tensor::from_slice(&[1.0, bad])], &found, &inverse).unwrap();
        assert_eq!(found.double_value(&[0]), 1.0);
    }
}

#[test]
fn rms_norm_matches_its_formula_and_derivative() {
    let x = tensor(&[1.0, 2.0, 2.0, 4.0]).reshape([2, 2]).set_requires_grad(true);
    let weight = tensor(&[1.0, 3.0]);
    let (y, rstd) = norm::fused_rms_norm(&x, &[2], Some(&weight), Some(1e-3)).unwrap();
    let inverse = |a: f64, b: f64| 1.0 / ((a * a + b * b) / 2.0 + 1e-3).sqrt();
    let (first, second) = (inverse(1.0, 2.0), inverse(2.0, 4.0));
    close(&y.detach(), &[first, 6.0 * first, 2.0 * second, 12.0 * second]);
    close(&rstd.detach(), &[first, second]);
    y.sum(Kind::Double).backward();
    assert!(x.grad().defined());
}

#[test]
fn the_order_of_attention_backends_is_set_and_read_back() {
    let before = order().unwrap();
    let wanted = beginning_with(Backend::CuDnn, before);
    assert_eq!(wanted[0], Backend::CuDnn);
    let others = |order: [Backend; 5]| -> Vec<Backend> {
        order.into_iter().filter(|backend| *backend != Backend::CuDnn).collect()
    };
    assert_eq!(others(wanted), others(before));
    set_order(wanted).unwrap();
    assert_eq!(order().unwrap(), wanted);
    let mut twice = wanted;
    twice[1] = Backend::CuDnn;
    let error = set_order(twice).unwrap_err().to_string();
    assert!(error.ends_with("expected each backend once"), "{error}");
    assert_eq!(order().unwrap(), wanted, "a refused order changes nothing");
    set_order(before).unwrap();

    let q = Tensor::zeros([1, 4, 8, 16], kind::FLOAT_CPU);
    let call = Call::default();
    assert_eq!(chosen(&q, &q, &q, call).unwrap(), Some(Backend::Flash));
    assert_eq!(chosen(&q, &q, &q, Call { dropout: 0.1, ..call }).unwrap(), Some(Backend::Math));
    for backend in Backend::ALL {
        assert_eq!(Backend::from_name(backend.name()), Some(backend));
    }
}

#[test]
fn varlen_attention_names_its_requirements() {
    let q = Tensor::zeros([5, 2, 4], (Kind::Half, Device::Cpu));
    let starts = Tensor::from_slice(&[0i32, 2, 5]);
    let packing = Packing { cu_seqlens_q: &starts, cu_seqlens_k: &starts, max_seqlen_q: 3, max_seqlen_k: 3 };
    let long = starts.to_kind(Kind::Int64);
    let causal = Options { causal: true, ..Options::default() };
    for (name, attention) in [
        ("flash_attention", attention::flash_attention as fn(_, _, _, _, _) -> _),
        ("efficient_attention", attention::efficient_attention),
    ] {
        let error = |packing, options| -> String {
            let result: runtime::Result<(Tensor, Tensor)> = attention(&q, &q, &q, packing, options);
            result.unwrap_err().to_string()
        };
        assert_eq!(
            error(Some(packing), causal),
            format!(
                "{name} on Cpu is not available here: libtorch has it for CUDA only; on the CPU use scaled_dot_product_attention with a boolean mask"
            )
        );
        assert!(error(None, causal).ends_with("expected [batch, tokens, heads, head]"));
        assert!(
            error(Some(packing), Options { dropout: 1.0, ..causal })
                .contains("dropout 1; expected a probability in [0, 1)")
        );
        assert!(
            error(Some(Packing { cu_seqlens_k: &long, ..packing }), causal)
                .contains("are Int64 [3] on Cpu; expected Int [sequences + 1] on Cpu")
        );
    }
}

#[test]
fn settings_round_trip() {
    let before = settings::num_threads().unwrap();
    settings::set_num_threads(1).unwrap();
    assert_eq!(settings::num_threads().unwrap(), 1);
    settings::set_num_threads(before).unwrap();
    for wrong in [0, usize::MAX] {
        assert!(settings::set_num_threads(wrong).unwrap_err().to_string().starts_with("set_num_threads: "));
    }
    assert!(!settings::is_deterministic().unwrap());
    for on in [Determinism::Require, Determinism::Warn] {
        settings::set_determinism(on).unwrap();
        assert!(settings::is_deterministic().unwrap());
    }
    settings::set_determinism(Determinism::Off).unwrap();
    assert!(!settings::is_deterministic().unwrap());
}

/// What takes no operator for a few elements has the bits and the versions of the operators.
#[test]
fn passes_over_few_elements_have_the_bits_of_operators() {
    tch::manual_seed(3);
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        for size in [&[][..], &[0, 3], &[5], &[2, 3, 7], &[300, 200]] {
            let x = Tensor::randn(size, (Kind::Double, Device::Cpu)).to_kind(kind);
            for factor in [0.3, -1.0, 1e300, f64::NAN] {
                let (mut ours, mut theirs) = (x.copy(), x.copy());
                let before = ours.internal_version();
                ops::scale_(&mut ours, factor).unwrap();
                let _ = theirs.g_mul_scalar_(factor);
                assert!(ours.allclose(&theirs, 0.0, 0.0, true), "{kind:?} {size:?} {factor}");
                assert_eq!(ours.internal_version(), before + 1);
            }
            let Some(&width) = size.last() else { continue };
            let row = Tensor::randn([width], (Kind::Float, Device::Cpu));
            for row in [row.to_kind(kind), row.to_kind(Kind::Half)] {
                let mut rows = x.copy();
                ops::fill_rows_(&mut rows, &row).unwrap();
                assert_eq!(rows, row.to_kind(kind).expand_as(&rows).copy());
            }
        }
    }
    let mut rows = Tensor::zeros([2, 3], kind::FLOAT_CPU);
    assert!(ops::fill_rows_(&mut rows, &Tensor::zeros([2], kind::FLOAT_CPU)).is_err());
    let mut leaf = rows.set_requires_grad(true);
    assert!(ops::scale_(&mut leaf, 2.0).unwrap_err().to_string().contains("leaf"));
}

#[test]
fn products_of_rows_name_the_operand_that_they_do_not_take() {
    let [rows, weight] = [[2, 3, 4].as_slice(), &[4, 5]].map(|size| Tensor::ones(size, kind::FLOAT_CPU));
    let mut out = Tensor::zeros([2, 3, 5], kind::FLOAT_CPU);
    let before = out.internal_version();
    ops::mm_of_rows(&mut out, (&rows, false), (&weight, false), false).unwrap();
    ops::mm_of_rows(&mut out, (&rows, false), (&weight, false), true).unwrap();
    assert_eq!(values(&out), [8.0; 30]);
    assert_eq!(out.internal_version(), before + 2);
    let mut error =
        |a: &Tensor| ops::mm_of_rows(&mut out, (a, false), (&weight, false), false).unwrap_err().to_string();
    assert!(
        error(&rows.transpose(0, 1))
            .contains("expected matrices or contiguous tensors on the CPU, got one of shape [3, 2, 4]")
    );
    assert!(error(&rows.copy().set_requires_grad(true)).contains("an operand requires a gradient"));
    assert!(error(&rows.narrow(2, 0, 3).copy()).contains("mat1 and mat2 shapes cannot be multiplied"));
}
