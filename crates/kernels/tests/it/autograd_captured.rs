//! Outputs of a function or segment that other code also holds: a captured tensor, an input, the same tensor twice. The tensor is
//! unchanged, gradients are those of the plain graph, and nothing leaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::linear::product;
use runtime::Result;
use runtime::autograd::{
    self, Backward, Checkpoint, Forward, Function, GradMode, Keep, checkpoint, gradcheck,
};
use tch::{Kind, Tensor, kind};

const RETAIN: Checkpoint = Checkpoint { recompute: true, preserve_random_state: true, retain_products: true };

/// Counts its drops, to observe the drop of a closure that holds one.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The captured tensors of segments, and the input.
struct World {
    x: Tensor,
    weight: Tensor,
    constant: Tensor,
    index: Tensor,
}

impl World {
    fn new() -> Self {
        let values = |start: f64| Tensor::arange(4, kind::DOUBLE_CPU) * 0.25 + start;
        Self {
            x: values(-0.5).reshape([2, 2]).set_requires_grad(true),
            weight: values(0.75).reshape([2, 2]).set_requires_grad(true),
            constant: values(2.0).reshape([2, 2]),
            index: Tensor::from_slice(&[3i64, 1]),
        }
    }

    fn clones(&self) -> Self {
        Self {
            x: self.x.shallow_clone(),
            weight: self.weight.shallow_clone(),
            constant: self.constant.shallow_clone(),
            index: self.index.shallow_clone(),
        }
    }

    /// Checks that every tensor is still the same leaf.
    fn is_untouched(&self) -> bool {
        let leaves =
            [&self.x, &self.weight, &self.constant, &self.index].iter().all(|tensor| tensor.is_leaf());
        let trained = [&self.x, &self.weight].iter().all(|tensor| tensor.requires_grad());
        leaves && trained && !self.constant.requires_grad() && !self.index.requires_grad()
    }
}

type Body = fn(&World, &Tensor) -> Result<Vec<Tensor>>;

/// Runs a body; the outputs that it lacks are whole numbers, which have no gradient.
fn three_outputs(body: Body, world: &World, x: &Tensor) -> Result<[Tensor; 3]> {
    let mut outputs = body(world, x)?;
    outputs.resize_with(3, || Tensor::from(1i64));
    Ok(outputs.try_into().unwrap())
}

/// The possible outputs of a segment.
const BODIES: [(&str, Body); 11] = [
    ("a captured weight", |world, _| Ok(vec![world.weight.shallow_clone()])),
    ("a captured weight beside a result", |world, x| {
        Ok(vec![x.f_matmul(&world.weight)?, world.weight.shallow_clone()])
    }),
    ("a captured weight twice", |world, _| {
        Ok(vec![world.weight.shallow_clone(), world.weight.shallow_clone()])
    }),
    ("a view of a captured weight", |world, _| Ok(vec![world.weight.f_narrow(0, 1, 1)?])),
    ("a captured constant", |world, x| Ok(vec![x.f_sin()?, world.constant.shallow_clone()])),
    ("a captured constant twice", |world, x| {
        Ok(vec![x.f_sin()?, world.constant.shallow_clone(), world.constant.shallow_clone()])
    }),
    ("a captured index", |world, x| Ok(vec![x.f_sin()?, world.index.shallow_clone()])),
    ("the input", |_, x| Ok(vec![x.shallow_clone()])),
    ("the input twice", |_, x| Ok(vec![x.shallow_clone(), x.shallow_clone()])),
    ("a result twice", |_, x| {
        let y = x.f_sin()?;
        Ok(vec![y.shallow_clone(), y])
    }),
    ("a product that may be kept", |world, x| {
        let y = product(x, &world.weight, None)?;
        Ok(vec![y.shallow_clone(), world.weight.shallow_clone(), y.f_sin()?])
    }),
];

/// Σ (i + 2)·yᵢ over the floating outputs, each weighted on its own.
fn loss(outputs: &[Tensor]) -> Tensor {
    outputs
        .iter()
        .enumerate()
        .filter(|(_, y)| y.kind() == Kind::Double)
        .map(|(i, y)| (y.square() * (i + 2) as f64).sum(Kind::Double))
        .reduce(|a, b| a + b)
        .unwrap()
}

/// Both gradients; zeros if there is none.
fn gradients(world: &World) -> [Tensor; 2] {
    [&world.x, &world.weight].map(|leaf| {
        let gradient = leaf.grad();
        if gradient.defined() { gradient } else { leaf.detach().zeros_like() }
    })
}

/// A way to run a body.
type Run = fn(Body, &World, Dropped) -> Result<[Tensor; 3]>;

fn segment(options: Checkpoint, body: Body, world: &World, dropped: Dropped) -> Result<[Tensor; 3]> {
    let inside = world.clones();
    let run = move |[x]: [&Tensor; 1]| {
        let _ = &dropped;
        three_outputs(body, &inside, x)
    };
    options.run(run, [&world.x])
}

fn nested(
    outer: Checkpoint,
    inner: Checkpoint,
    body: Body,
    world: &World,
    dropped: Dropped,
) -> Result<[Tensor; 3]> {
    let inside = world.clones();
    let run = move |[x]: [&Tensor; 1]| {
        let _ = &dropped;
        let innermost = inside.clones();
        inner.run(move |[x]| three_outputs(body, &innermost, x), [x])
    };
    outer.run(run, [&world.x])
}

const PLAIN: Checkpoint = Checkpoint { recompute: true, preserve_random_state: true, retain_products: false };

const RUNS: [(&str, Run); 6] = [
    ("a segment", |body, world, dropped| segment(PLAIN, body, world, dropped)),
    ("a segment that keeps its products", |body, world, dropped| segment(RETAIN, body, world, dropped)),
    ("a segment in a segment", |body, world, dropped| nested(PLAIN, PLAIN, body, world, dropped)),
    ("a keeping segment in a segment", |body, world, dropped| nested(PLAIN, RETAIN, body, world, dropped)),
    ("a segment in a keeping segment", |body, world, dropped| nested(RETAIN, PLAIN, body, world, dropped)),
    ("a keeping segment in a keeping segment", |body, world, dropped| {
        nested(RETAIN, RETAIN, body, world, dropped)
    }),
];

#[test]
fn segments_do_not_change_returned_tensors_and_give_the_plain_gradients() {
    for (what, body) in BODIES {
        let plain = World::new();
        autograd::backward(&[&loss(&body(&plain, &plain.x).unwrap())]).unwrap();
        for (how, run) in RUNS {
            let world = World::new();
            let drops = Arc::new(AtomicUsize::new(0));
            let y = run(body, &world, Dropped(drops.clone())).unwrap();
            assert!(world.is_untouched(), "{what} from {how}");
            autograd::backward(&[&loss(&y)]).unwrap();
            assert!(world.is_untouched(), "{what} from {how}, after backward");
            assert_eq!(gradients(&world), gradients(&plain), "{what} from {how}");
            drop(y);
            assert_eq!(drops.load(Ordering::SeqCst), 1, "{what} from {how} is dropped");

            // Also without a backward, while the captured tensors exist.
            let drops = Arc::new(AtomicUsize::new(0));
            drop(run(body, &world, Dropped(drops.clone())).unwrap());
            assert_eq!(drops.load(Ordering::SeqCst), 1, "{what} from {how} is dropped without a backward");
        }
    }
}

#[test]
fn a_captured_tensor_with_history_keeps_it() {
    let world = World::new();
    let hidden = &world.weight * 3.0;
    let inside = hidden.shallow_clone();
    let [y] = checkpoint(move |[_]| Ok([inside.shallow_clone()]), [&world.x]).unwrap();
    drop(y);
    // Its graph is unchanged.
    autograd::backward(&[&hidden.sum(Kind::Double)]).unwrap();
    assert_eq!(world.weight.grad(), Tensor::full([2, 2], 3.0, kind::DOUBLE_CPU));
    assert!(!world.x.grad().defined());
}

/// Returns the outputs of `body`; its backward records which upstream gradients arrived.
struct Returns {
    captured: Vec<Tensor>,
    saved: bool,
    undifferentiable: Option<usize>,
    arrived: Arc<std::sync::Mutex<Vec<Option<f64>>>>,
    dropped: Dropped,
    body: fn(&[Tensor], &Tensor) -> Vec<Tensor>,
}

impl Function for Returns {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let outputs = (self.body)(&self.captured, inputs[0]);
        if self.saved {
            outputs.iter().for_each(|output| ctx.save(output));
        }
        if let Some(index) = self.undifferentiable {
            ctx.mark_non_differentiable(index);
        }
        Ok(outputs)
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let _held = &self.dropped;
        let sums =
            grads.iter().map(|grad| grad.as_ref().map(|grad| grad.sum(Kind::Double).double_value(&[])));
        *self.arrived.lock().unwrap() = sums.collect();
        assert!(ctx.saved().iter().all(|saved| saved.size() == [2, 2]));
        Ok(vec![Some(Tensor::ones([2, 2], kind::DOUBLE_CPU))])
    }
}

#[test]
fn each_output_of_a_function_has_its_own_gradient() {
    let twice: fn(&[Tensor], &Tensor) -> Vec<Tensor> =
        |captured, _| vec![captured[0].shallow_clone(), captured[0].shallow_clone()];
    let input: fn(&[Tensor], &Tensor) -> Vec<Tensor> = |_, x| vec![x.shallow_clone(), x.shallow_clone()];
    let fresh: fn(&[Tensor], &Tensor) -> Vec<Tensor> = |_, x| {
        let y = x.sin();
        vec![y.shallow_clone(), y]
    };
    let world = World::new();
    let cases = [
        ("weight", vec![world.weight.shallow_clone()], twice),
        ("constant", vec![world.constant.shallow_clone()], twice),
        ("input", Vec::new(), input),
        ("result", Vec::new(), fresh),
    ];
    for (what, captured, body) in &cases {
        for saved in [false, true] {
            for undifferentiable in [None, Some(0), Some(1)] {
                let case = format!("{what}, saved: {saved}, without a gradient: {undifferentiable:?}");
                let arrived = Arc::default();
                let drops = Arc::new(AtomicUsize::new(0));
                let function = Returns {
                    captured: captured.iter().map(Tensor::shallow_clone).collect(),
                    saved,
                    undifferentiable,
                    arrived: Arc::clone(&arrived),
                    dropped: Dropped(drops.clone()),
                    body: *body,
                };
                let y: [Tensor; 2] = autograd::apply(function, &[&world.x]).unwrap();
                assert!(world.is_untouched(), "{case}");
                let differentiable: Vec<bool> = (0..2).map(|index| undifferentiable != Some(index)).collect();
                assert_eq!(y.iter().map(Tensor::requires_grad).collect::<Vec<_>>(), differentiable, "{case}");
                let weighted = |index: usize| (&y[index] * (index + 2) as f64).sum(Kind::Double);
                autograd::backward(&[&(weighted(0) + weighted(1))]).unwrap();
                let expected = (0..2)
                    .map(|index| differentiable[index].then_some(4.0 * (index + 2) as f64))
                    .collect::<Vec<_>>();
                assert_eq!(*arrived.lock().unwrap(), expected, "{case}");
                drop(y);
                assert_eq!(drops.load(Ordering::SeqCst), 1, "{case}");
            }
        }
    }
}

#[test]
fn without_a_node_outputs_have_no_history() {
    // Without an alias, gradients of a returned input or captured weight would bypass the function's backward.
    let world = World::new();
    for (what, body) in BODIES {
        let inside = world.clones();
        let y = {
            let _no_grad = GradMode::off();
            checkpoint(move |[x]| three_outputs(body, &inside, x), [&world.x]).unwrap()
        };
        assert!(y.iter().all(|y| !y.requires_grad()), "{what}");
        assert!(world.is_untouched(), "{what}");
    }
}

#[test]
fn an_in_place_change_of_a_returned_weight_is_refused() {
    let world = World::new();
    let weight = world.weight.shallow_clone();
    let [mut y] = checkpoint(move |[_]| Ok([weight.shallow_clone()]), [&world.x]).unwrap();
    let error = y.f_add_(&Tensor::ones([2, 2], kind::DOUBLE_CPU)).unwrap_err().to_string();
    assert!(error.contains("is a view and is being modified inplace"), "{error}");
    assert_eq!(world.weight, World::new().weight);
}

#[test]
fn a_saved_output_that_is_held_elsewhere_is_differentiated_twice() {
    /// y = eˣ, whose derivative is y itself; the caller holds y too.
    struct Exp(Arc<std::sync::Mutex<Option<Tensor>>>);
    impl Function for Exp {
        const TWICE_DIFFERENTIABLE: bool = true;
        fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            let y = inputs[0].f_exp()?;
            ctx.save(&y);
            *self.0.lock().unwrap() = Some(y.shallow_clone());
            Ok(vec![y])
        }
        fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(grads[0].as_ref().unwrap() * &ctx.saved()[0])])
        }
    }
    let x = Tensor::from_slice(&[0.5]).set_requires_grad(true);
    let held = Arc::default();
    let [y] = autograd::apply(Exp(Arc::clone(&held)), &[&x]).unwrap();
    let derivative = Keep { derivative: true, ..Keep::default() };
    let first = autograd::grad(&[&y], &[None], &[&x], derivative).unwrap().remove(0).unwrap();
    let second = autograd::grad(&[&first], &[None], &[&x], Keep::default()).unwrap().remove(0).unwrap();
    assert_eq!(second, x.detach().exp());
    assert!(held.lock().unwrap().as_ref().is_some_and(|held| !held.requires_grad()));

    let report = gradcheck(
        |x| autograd::apply_any(Exp(Arc::default()), &[&x[0]]),
        &[&x],
        autograd::GradcheckConfig::default(),
    );
    assert!(report.unwrap().percent_of_tolerance < 5.0);
}
