//! The choice by injected measurements, and the measurement itself on the CPU, whose attention ignores the order.

use std::cell::Cell;

use runtime::random::RandomState;
use tch::kind;

use super::*;

fn operands() -> [Tensor; 3] {
    let heads = |heads: i64| Tensor::randn([2, heads, 40, 16], kind::FLOAT_CPU);
    [heads(4), heads(2), heads(2)]
}

fn attend(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_scaled_dot_product_attention(q, k, v, None::<&Tensor>, 0.0, true, None, true)?)
}

#[test]
fn the_fastest_backend_is_measured_once_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache").join("attention.txt");
    let calls = Cell::new(0);
    let choose = |key: &str, seconds: &[(Backend, f64)]| {
        kept_or_measured(Some(file.clone()), key, || {
            calls.set(calls.get() + 1);
            Ok(seconds.to_vec())
        })
        .unwrap()
    };
    let measured = [(Backend::CuDnn, 3e-3), (Backend::Flash, 2e-3), (Backend::Efficient, 4e-3)];
    assert_eq!(choose("a GPU, head 64", &measured), Some(Backend::Flash));
    assert_eq!(
        choose("a GPU, head 128", &[(Backend::CuDnn, 1e-3), (Backend::Flash, 2e-3)]),
        Some(Backend::CuDnn)
    );
    assert_eq!(calls.get(), 2);
    // The file has it, whatever another measurement would give.
    assert_eq!(choose("a GPU, head 64", &[(Backend::Efficient, 1.0)]), Some(Backend::Flash));
    assert_eq!(calls.get(), 2);
    // None takes the class: nothing is kept.
    assert_eq!(choose("a GPU, head 512", &[]), None);
    let text = std::fs::read_to_string(&file).unwrap();
    assert_eq!(text, "a GPU, head 64: flash\na GPU, head 128: cudnn\n");
    // A damaged line is measured again and replaced.
    std::fs::write(&file, "a GPU, head 64: flesh\nanything\n").unwrap();
    assert_eq!(choose("a GPU, head 64", &measured), Some(Backend::Flash));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "anything\na GPU, head 64: flash\n");
    // Without a cache folder every process measures.
    assert_eq!(kept_or_measured(None, "key", || Ok(measured.to_vec())).unwrap(), Some(Backend::Flash));
}

#[test]
fn a_class_is_what_decides_the_time() {
    let [q, k, _] = operands();
    let class = Class::on(0, [&q, &k], false).unwrap();
    assert_eq!((class.head, class.lengths, class.group), (16, [64, 64], 2));
    let longer = Tensor::zeros([1, 4, 64, 16], kind::FLOAT_CPU);
    assert_eq!(Class::on(0, [&longer, &longer.narrow(1, 0, 2)], false).unwrap(), class);
    for other in [
        Class::on(1, [&q, &k], false),
        Class::on(0, [&q, &k], true),
        Class::on(0, [&q, &q], false),
        Class::on(0, [&q.to_kind(Kind::Half), &k], false),
        Class::on(0, [&q.narrow(2, 0, 8), &k], false),
        Class::on(0, [&q.narrow(3, 0, 8), &k], false),
    ] {
        assert_ne!(other.unwrap(), class);
    }
    assert_eq!(
        class.key_with("NVIDIA H200", "580.95.05", "2.13.0"),
        "NVIDIA H200, driver 580.95.05, libtorch 2.13.0, Float, head 16, 64 queries, 64 keys, group 2, causal"
    );
    // On the CPU, and for dtypes with one kernel, there is no choice.
    assert_eq!(Class::of([&q, &k, &k], Call::default()).unwrap(), None);
}

#[test]
fn a_measurement_leaves_no_trace() {
    let [q, k, v] = operands();
    let before = (order().unwrap(), RandomState::capture(Device::Cpu).unwrap());
    let seen = std::cell::RefCell::new(Vec::new());
    let recorded = |q: &Tensor, k: &Tensor, v: &Tensor| {
        seen.borrow_mut().push(order().unwrap()[0]);
        attend(q, k, v)
    };
    // The flash kernel is the only one of the candidates that the CPU has.
    let seconds = measured([&q, &k, &v], Call::default(), &recorded).unwrap();
    assert!(matches!(seconds[..], [(Backend::Flash, time)] if time > 0.0), "{seconds:?}");
    assert_eq!(*seen.borrow(), vec![Backend::Flash; RUNS.0 + 1]);
    assert!(order().unwrap() == before.0 && RandomState::capture(Device::Cpu).unwrap() == before.1);
    // An operand of a graph gets no gradient, and a failure excludes its backend.
    let leaf = q.copy().set_requires_grad(true);
    drop(measured([&(&leaf * 2.0), &k, &v], Call::default(), &attend).unwrap());
    assert!(!leaf.grad().defined());
    let fails = |_: &Tensor, _: &Tensor, _: &Tensor| Err(Error::invalid(NAME, "no plan"));
    assert_eq!(measured([&q, &k, &v], Call::default(), &fails).unwrap(), []);
    assert_eq!(order().unwrap(), before.0);
}

#[test]
fn the_variable_names_a_backend() {
    assert_eq!(parse_forced(None), Ok(Forced::No));
    assert_eq!(parse_forced(Some("cudnn")), Ok(Forced::Backend(Backend::CuDnn)));
    assert_eq!(parse_forced(Some("libtorch")), Ok(Forced::Libtorch));
    assert_eq!(
        parse_forced(Some("math")).unwrap_err(),
        "FRUGAL_ATTENTION is `math`; expected `cudnn`, `flash`, `efficient` or `libtorch`"
    );
}
