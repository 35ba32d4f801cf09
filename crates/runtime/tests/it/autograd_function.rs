//! The guarantees of `runtime::autograd` for hand-written functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use runtime::autograd::{self, Backward, Forward, Function, GradMode, GradcheckConfig, Keep, gradcheck};
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor, kind};

const F64: (Kind, Device) = kind::DOUBLE_CPU;

/// y = a·b, with everything observable from outside.
#[derive(Clone, Default)]
struct Product {
    drops: Arc<AtomicUsize>,
    backwards: Arc<AtomicUsize>,
    fail: Option<&'static str>,
    panic: bool,
}

struct Counted(Product);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.drops.fetch_add(1, Ordering::SeqCst);
    }
}

impl Function for Counted {
    fn name(&self) -> &'static str {
        "product"
    }

    fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        ctx.save(inputs[0]);
        ctx.save(inputs[1]);
        Ok(vec![inputs[0].f_mul(inputs[1])?])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        self.0.backwards.fetch_add(1, Ordering::SeqCst);
        if let Some(message) = self.0.fail {
            return Err(Error::invalid("product", message));
        }
        assert!(!self.0.panic, "the product is broken");
        let grad = grads[0].as_ref().expect("the only output got a gradient");
        let saved = ctx.take_saved();
        let gradient = |index: usize, other: usize| -> Result<Option<Tensor>> {
            Ok(if ctx.needs_input_grad(index) { Some(grad.f_mul(&saved[other])?) } else { None })
        };
        Ok(vec![gradient(0, 1)?, gradient(1, 0)?])
    }
}

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, F64).set_requires_grad(true)
}

fn product(function: &Product, a: &Tensor, b: &Tensor) -> Tensor {
    let [y] = autograd::apply(Counted(function.clone()), &[a, b]).unwrap();
    y
}

fn drops(function: &Product) -> usize {
    function.drops.load(Ordering::SeqCst)
}

#[test]
fn only_needed_gradients_are_computed_and_they_are_correct() {
    for (a_needs, b_needs) in [(true, true), (true, false), (false, true)] {
        let (a, b) = (leaf(&[3]).set_requires_grad(a_needs), leaf(&[3]).set_requires_grad(b_needs));
        let y = product(&Product::default(), &a, &b);
        assert!(y.requires_grad());
        autograd::backward(&[&y.sum(Kind::Double)]).unwrap();
        assert_eq!(a.grad().defined(), a_needs);
        assert_eq!(b.grad().defined(), b_needs);
        if a_needs {
            assert_eq!(a.grad(), b.detach());
        }
        if b_needs {
            assert_eq!(b.grad(), a.detach());
        }
    }
}

#[test]
fn no_node_is_created_without_recording_or_need() {
    let function = Product::default();
    let (a, b) = (leaf(&[3]), leaf(&[3]));
    let y = {
        let _no_grad = GradMode::off();
        product(&function, &a, &b)
    };
    assert!(!y.requires_grad());
    assert_eq!(drops(&function), 1, "the function is dropped at once");
    assert!(!product(&function, &a.detach(), &b.detach()).requires_grad());
}

#[test]
fn a_function_is_dropped_if_backward_never_runs() {
    let function = Product::default();
    let (a, b) = (leaf(&[3]), leaf(&[3]));
    let y = product(&function, &a, &b);
    assert_eq!(drops(&function), 0);
    drop(y);
    assert_eq!(drops(&function), 1);
}

#[test]
fn backward_runs_again_through_a_retained_graph_and_fails_after_release() {
    let function = Product::default();
    let (a, b) = (leaf(&[3]), leaf(&[3]));
    let loss = product(&function, &a, &b).sum(Kind::Double);
    let keep = Keep { graph: true, ..Keep::default() };
    autograd::backward_with(&[&loss], &[None], keep).unwrap();
    autograd::backward_with(&[&loss], &[None], keep).unwrap();
    assert_eq!(a.grad(), b.detach() * 2.0);
    autograd::backward(&[&loss]).unwrap();
    assert_eq!(drops(&function), 1, "release drops the function");
    let error = autograd::backward(&[&loss]).unwrap_err().to_string();
    assert!(error.contains("second time") && error.contains("retain_graph"), "{error}");
    assert_eq!(function.backwards.load(Ordering::SeqCst), 3);
}

#[test]
fn an_in_place_change_of_a_saved_tensor_is_an_error() {
    let (a, b) = (leaf(&[3]), Tensor::ones([3], F64));
    let y = product(&Product::default(), &a, &b);
    let _ = b.shallow_clone().fill_(7.0);
    let error = autograd::backward(&[&y.sum(Kind::Double)]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
    assert!(!error.contains("frame #"), "{error}");
}

#[test]
fn a_forward_that_changes_its_input_is_an_error() {
    struct Careless;
    impl Function for Careless {
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            ctx.save(inputs[0]);
            let _ = inputs[0].shallow_clone().f_add_scalar_(1.0)?;
            Ok(vec![inputs[0].f_sin()?])
        }
        fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(grads)
        }
    }
    let hidden = leaf(&[3]) * 1.0;
    let error = autograd::apply_any(Careless, &[&hidden]).unwrap_err().to_string();
    assert_eq!(error, "forward of `Careless` changed input 0 in place; work on a copy of it");
}

#[test]
fn a_saved_view_of_an_output_does_not_leak_the_function() {
    struct Viewed(Arc<AtomicUsize>);
    impl Drop for Viewed {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    impl Function for Viewed {
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            let y = inputs[0].f_exp()?;
            ctx.save(&y.f_narrow(0, 0, 2)?);
            Ok(vec![y])
        }
        fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(grads)
        }
    }
    let drops = Arc::new(AtomicUsize::new(0));
    let [y] = autograd::apply(Viewed(drops.clone()), &[&leaf(&[3])]).unwrap();
    drop(y);
    assert_eq!(drops.load(Ordering::SeqCst), 1);

    // A change of the output is a change of what was saved.
    let [y] = autograd::apply(Viewed(drops), &[&leaf(&[3])]).unwrap();
    {
        let _no_grad = GradMode::off();
        let _ = y.shallow_clone().fill_(0.0);
    }
    let error = autograd::backward(&[&y.sum(Kind::Double)]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn an_error_or_a_panic_in_backward_is_returned_by_the_call() {
    let cases = [
        (Product { fail: Some("no luck"), ..Product::default() }, "backward of `product`: product: no luck"),
        (
            Product { panic: true, ..Product::default() },
            "backward of `product`: panicked: the product is broken",
        ),
    ];
    for (function, message) in cases {
        let (a, b) = (leaf(&[3]), leaf(&[3]));
        let y = product(&function, &a, &b);
        assert_eq!(autograd::backward(&[&y.sum(Kind::Double)]).unwrap_err().to_string(), message);
        drop(y);
        assert_eq!(drops(&function), 1);

        // The same through tch's own entry.
        let loss = product(&function, &a, &b).sum(Kind::Double);
        let error = Error::from(loss.f_backward().unwrap_err()).to_string();
        assert_eq!(error, message);
    }
}

#[test]
fn a_wrong_number_of_gradients_is_an_error() {
    struct Short;
    impl Function for Short {
        fn forward(&mut self, _: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![inputs[0] + inputs[1]])
        }
        fn backward(&self, _: &mut Backward, _: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![None])
        }
    }
    let [y] = autograd::apply(Short, &[&leaf(&[2]), &leaf(&[2])]).unwrap();
    let error = autograd::backward(&[&y.sum(Kind::Double)]).unwrap_err().to_string();
    assert_eq!(error, "backward of `Short`: backward: it returned 1 gradients for 2 inputs");
}

#[test]
fn a_gradient_of_the_wrong_shape_is_an_error() {
    struct Wrong;
    impl Function for Wrong {
        fn forward(&mut self, _: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![inputs[0] * 2.0])
        }
        fn backward(&self, _: &mut Backward, _: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(Tensor::zeros([5], F64))])
        }
    }
    let [y] = autograd::apply(Wrong, &[&leaf(&[2])]).unwrap();
    let error = autograd::backward(&[&y.sum(Kind::Double)]).unwrap_err().to_string();
    assert!(error.contains("invalid gradient") && error.contains("[5]") && error.contains("[2]"), "{error}");
}

#[test]
fn a_missing_upstream_gradient_is_none() {
    /// Splits into (x, 3x, count): gradient arrives for the second only.
    struct Split;
    impl Function for Split {
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            ctx.mark_non_differentiable(2);
            Ok(vec![inputs[0] * 1.0, inputs[0] * 3.0, Tensor::from(2.0)])
        }
        fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            assert!(grads[0].is_none() && grads[2].is_none());
            Ok(vec![Some(grads[1].as_ref().unwrap() * 3.0)])
        }
    }
    let x = leaf(&[4]);
    let [one, three, count] = autograd::apply(Split, &[&x]).unwrap();
    assert!(one.requires_grad() && three.requires_grad() && !count.requires_grad());
    autograd::backward(&[&three.sum(Kind::Double)]).unwrap();
    assert_eq!(x.grad(), Tensor::full([4], 3.0, F64));
}

#[test]
fn a_returned_input_gets_the_hand_written_backward() {
    struct Reverse;
    impl Function for Reverse {
        fn forward(&mut self, _: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            Ok(vec![inputs[0].shallow_clone()])
        }
        fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(-grads[0].as_ref().unwrap())])
        }
    }
    let x = leaf(&[4]);
    let [y] = autograd::apply(Reverse, &[&x]).unwrap();
    assert!(!x.grad_fn_is_set(), "the input stays a leaf");
    autograd::backward(&[&y.sum(Kind::Double)]).unwrap();
    assert_eq!(x.grad(), Tensor::full([4], -1.0, F64));
}

trait GradFn {
    fn grad_fn_is_set(&self) -> bool;
}
impl GradFn for Tensor {
    fn grad_fn_is_set(&self) -> bool {
        !self.is_leaf()
    }
}

#[test]
fn a_saved_output_does_not_keep_its_node_alive() {
    struct Exp(Arc<AtomicUsize>);
    impl Drop for Exp {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    impl Function for Exp {
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            let y = inputs[0].f_exp()?;
            ctx.save(&y);
            Ok(vec![y])
        }
        fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(grads[0].as_ref().unwrap() * &ctx.saved()[0])])
        }
    }
    let drops = Arc::new(AtomicUsize::new(0));
    let x = leaf(&[3]);
    let [y] = autograd::apply(Exp(drops.clone()), &[&x]).unwrap();
    autograd::backward_with(&[&y.sum(Kind::Double)], &[None], Keep { graph: true, ..Keep::default() })
        .unwrap();
    assert_eq!(x.grad(), x.detach().exp());
    drop(y);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_second_derivative_is_an_error_unless_declared() {
    struct Cube<const TWICE: bool>;
    impl<const TWICE: bool> Function for Cube<TWICE> {
        const TWICE_DIFFERENTIABLE: bool = TWICE;
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            ctx.save(inputs[0]);
            Ok(vec![inputs[0].f_pow_tensor_scalar(3)?])
        }
        fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            let x = &ctx.saved()[0];
            Ok(vec![Some(grads[0].as_ref().unwrap() * x * x * 3.0)])
        }
    }
    let derivative = Keep { derivative: true, ..Keep::default() };
    let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);

    let [y] = autograd::apply(Cube::<true>, &[&x]).unwrap();
    let first = autograd::grad(&[&y], &[None], &[&x], derivative).unwrap().remove(0).unwrap();
    let second = autograd::grad(&[&first], &[None], &[&x], Keep::default()).unwrap().remove(0).unwrap();
    assert_eq!((first.double_value(&[0]), second.double_value(&[0])), (12.0, 12.0));

    let [y] = autograd::apply(Cube::<false>, &[&x]).unwrap();
    let first = autograd::grad(&[&y], &[None], &[&x], derivative).unwrap().remove(0).unwrap();
    assert_eq!(first.double_value(&[0]), 12.0);
    let error = autograd::grad(&[&first], &[None], &[&x], Keep::default()).unwrap_err().to_string();
    assert!(error.contains("the backward of `Cube` is not differentiable"), "{error}");

    // Also with respect to a tensor that only the upstream gradient depends on.
    let w = Tensor::from_slice(&[5.0]).set_requires_grad(true);
    let [y] = autograd::apply(Cube::<false>, &[&x]).unwrap();
    let y = y * &w;
    let first = autograd::grad(&[&y], &[None], &[&x], derivative).unwrap().remove(0).unwrap();
    let error = autograd::grad(&[&(first + &w)], &[None], &[&w], Keep::default()).unwrap_err().to_string();
    assert!(error.contains("the backward of `Cube` is not differentiable"), "{error}");
}

#[test]
fn saved_intermediates_are_freed_as_backward_drops_them() {
    const BYTES: u64 = 8 << 20;
    struct Scratch(Arc<AtomicUsize>);
    impl Function for Scratch {
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            ctx.save(&Tensor::f_zeros([BYTES as i64 / 8], F64)?);
            Ok(vec![inputs[0] * 1.0])
        }
        fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            assert!(ctx.may_overwrite_saved());
            let before = runtime::memory::live_bytes(Device::Cpu)?;
            drop(ctx.take_saved());
            let freed = before.saturating_sub(runtime::memory::live_bytes(Device::Cpu)?);
            self.0.store(freed as usize, Ordering::SeqCst);
            Ok(grads)
        }
    }
    runtime::memory::track_cpu().unwrap();
    let freed = Arc::new(AtomicUsize::new(0));
    let [y] = autograd::apply(Scratch(freed.clone()), &[&leaf(&[1])]).unwrap();
    autograd::backward(&[&y.sum(Kind::Double)]).unwrap();
    // Half, so that small allocations do not matter.
    assert!(freed.load(Ordering::SeqCst) as u64 > BYTES / 2, "{freed:?}");
}

#[test]
fn a_chain_of_ten_thousand_nodes_is_destroyed_without_overflow() {
    let x = leaf(&[1]);
    let one = Tensor::ones([1], F64);
    let mut y = x.shallow_clone();
    for _ in 0..10_000 {
        y = product(&Product::default(), &y, &one);
    }
    drop(y);
}

#[test]
fn gradcheck_finds_a_wrong_backward_and_names_the_worst_element() {
    struct Sloppy;
    impl Function for Sloppy {
        fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            ctx.save(inputs[0]);
            Ok(vec![inputs[0].f_square()?])
        }
        fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            let x = &ctx.saved()[0];
            let wrong = x * 2.0 + x.f_eq(3.0)?.to_kind(Kind::Double) * 1e-3;
            Ok(vec![Some(grads[0].as_ref().unwrap() * wrong)])
        }
    }
    let x = Tensor::from_slice(&[1.0, 3.0, 2.0]).set_requires_grad(true);
    let check = |x: &[Tensor]| autograd::apply_any(Sloppy, &[&x[0]]);
    let error = gradcheck(check, &[&x], GradcheckConfig::default()).unwrap_err().to_string();
    assert!(error.contains("d output 0[1] / d input 0[1] is 6.001"), "{error}");

    let right = |x: &[Tensor]| Ok(vec![product(&Product::default(), &x[0], &x[1])]);
    let report = gradcheck(right, &[&leaf(&[2, 3]), &leaf(&[2, 3])], GradcheckConfig::default()).unwrap();
    assert!(report.percent_of_tolerance < 5.0, "{report}");
    assert_eq!(report.compared, 2 * 36);
}
