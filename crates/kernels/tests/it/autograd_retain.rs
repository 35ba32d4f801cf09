//! Segments that keep their products: gradients bit for bit, no product computed twice, the documented bytes.

use std::sync::Arc;

use kernels::attention::{ScaledDotProductOptions, scaled_dot_product};
use kernels::linear::product;
use runtime::Result;
use runtime::autograd::retain::kept;
use runtime::autograd::{
    self, Backward, Checkpoint, Forward, Function, Keep, SavedTensorStorage, StoredTensor, backward_with,
    checkpoint,
};
use runtime::profile::Counter;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const RETAIN: Checkpoint = Checkpoint { recompute: true, preserve_random_state: true, retain_products: true };

/// Leaves of the same values each time.
fn leaves(kind: Kind) -> Vec<Tensor> {
    let mut generator = Generator::new(7).unwrap();
    let shapes: [&[i64]; 5] = [&[2, 6, 8], &[24, 8], &[24], &[8, 8], &[8]];
    let leaf = |shape: &&[i64]| {
        let values = generator.normal(shape, (kind, Device::Cpu));
        values.unwrap().set_requires_grad(true)
    };
    shapes.iter().map(leaf).collect()
}

/// The operators of a layer: norm, products with and without bias, attention, an activation, residual sums.
fn layer(x: &Tensor, weights: &[Tensor]) -> Result<Tensor> {
    let qkv = product(&x.f_tanh()?, &weights[0], Some(&weights[1]))?;
    let heads = |part: i64| -> Result<Tensor> {
        Ok(qkv.f_narrow(2, part * 8, 8)?.f_reshape([2, 6, 2, 4])?.f_transpose(1, 2)?)
    };
    let attended =
        scaled_dot_product(&heads(0)?, &heads(1)?, &heads(2)?, ScaledDotProductOptions::default())?;
    let attended = attended.f_transpose(1, 2)?.f_reshape([2, 6, 8])?;
    let x = x.f_add(&product(&attended, &weights[2], None)?)?;
    let inner = product(&x, &weights[2], Some(&weights[3]))?.f_gelu("tanh")?;
    Ok(x.f_add(&inner)?)
}

fn gradients(leaves: &[Tensor]) -> Vec<Tensor> {
    leaves.iter().map(Tensor::grad).collect()
}

fn owned(weights: &[Tensor]) -> Vec<Tensor> {
    weights.iter().map(Tensor::shallow_clone).collect()
}

fn run(options: Checkpoint, leaves: &[Tensor]) -> Tensor {
    let weights = owned(&leaves[1..]);
    let [y] = options.run(move |[x]| Ok([layer(x, &weights)?]), [&leaves[0]]).unwrap();
    y
}

#[test]
fn gradients_equal_those_of_keeping_everything_bit_for_bit() {
    for kind in [Kind::Float, Kind::Double] {
        let (plain, retained) = (leaves(kind), leaves(kind));
        let y = layer(&plain[0], &plain[1..]).unwrap();
        autograd::backward(&[&y.square().sum(kind)]).unwrap();
        let y2 = run(RETAIN, &retained);
        assert_eq!(y, y2);
        autograd::backward(&[&y2.square().sum(kind)]).unwrap();
        assert_eq!(gradients(&plain), gradients(&retained), "{kind:?}");
    }
}

/// Grouped queries over the keys of a mask, with a scale of its own.
#[test]
fn attention_with_a_mask_and_a_scale_is_kept_bit_for_bit() {
    let attend = |[q, k, v]: [&Tensor; 3]| {
        let mask = Tensor::ones([6, 9], (Kind::Bool, Device::Cpu)).tril(3).triu(1);
        let options = ScaledDotProductOptions { mask: Some(&mask), dropout: 0.0, scale: Some(0.3) };
        Ok([scaled_dot_product(q, k, v, options)?])
    };
    for kind in [Kind::Float, Kind::Double] {
        let leaves = || {
            let mut generator = Generator::new(3).unwrap();
            let shapes = [[2i64, 4, 6, 8], [2, 2, 9, 8], [2, 2, 9, 8]];
            let leaf = |shape: &[i64; 4]| {
                generator.normal(shape, (kind, Device::Cpu)).unwrap().set_requires_grad(true)
            };
            shapes.each_ref().map(leaf)
        };
        let (plain, retained) = (leaves(), leaves());
        let [y] = attend(plain.each_ref()).unwrap();
        autograd::backward(&[&y.square().sum(kind)]).unwrap();
        let [y2] = RETAIN.run(attend, retained.each_ref()).unwrap();
        assert_eq!(y, y2);
        autograd::backward(&[&y2.square().sum(kind)]).unwrap();
        assert_eq!(gradients(&plain), gradients(&retained), "{kind:?}");
    }
}

#[test]
fn frozen_parts_get_no_gradient_and_other_gradients_are_unchanged() {
    for frozen in 0..5 {
        let (plain, retained) = (leaves(Kind::Float), leaves(Kind::Float));
        for list in [&plain, &retained] {
            let _ = list[frozen].set_requires_grad(false);
        }
        autograd::backward(&[&layer(&plain[0], &plain[1..]).unwrap().square().sum(Kind::Float)]).unwrap();
        autograd::backward(&[&run(RETAIN, &retained).square().sum(Kind::Float)]).unwrap();
        for (index, (a, b)) in plain.iter().zip(&retained).enumerate() {
            assert_eq!(a.grad().defined(), index != frozen);
            assert_eq!(b.grad().defined(), index != frozen);
            assert!(index == frozen || a.grad() == b.grad(), "leaf {index} with {frozen} frozen");
        }
    }
}

#[test]
fn products_are_not_recomputed() {
    let flops = |options: Checkpoint| {
        let leaves = leaves(Kind::Float);
        let counter = Counter::on_this_thread().unwrap();
        let y = run(options, &leaves);
        let sum = y.sum(Kind::Float);
        autograd::backward(&[&sum]).unwrap();
        counter.finish().unwrap().total.flops.dense
    };
    let kept = flops(Checkpoint { recompute: false, ..Checkpoint::default() });
    assert_eq!(flops(RETAIN), kept);
    assert!(flops(Checkpoint::default()) > kept, "the count sees what is computed again");
}

#[test]
fn backward_runs_twice_through_a_retained_graph() {
    let leaves = leaves(Kind::Double);
    let y = run(RETAIN, &leaves).square().sum(Kind::Double);
    backward_with(&[&y], &[None], Keep { graph: true, derivative: false }).unwrap();
    let once: Vec<Tensor> = gradients(&leaves).iter().map(Tensor::copy).collect();
    autograd::backward(&[&y]).unwrap();
    for (once, twice) in once.iter().zip(gradients(&leaves)) {
        assert_eq!(&(once * 2.0), &twice);
    }
}

#[test]
fn segments_nest_in_either_order() {
    let plain = leaves(Kind::Float);
    let y = layer(&layer(&plain[0], &plain[1..]).unwrap(), &plain[1..]).unwrap();
    autograd::backward(&[&y.square().sum(Kind::Float)]).unwrap();
    for outer in [RETAIN, Checkpoint::default()] {
        for inner in [RETAIN, Checkpoint::default()] {
            let leaves = leaves(Kind::Float);
            let weights = owned(&leaves[1..]);
            let both = move |[x]: [&Tensor; 1]| {
                let inner_weights = owned(&weights);
                let [h] = inner.run(move |[x]| Ok([layer(x, &inner_weights)?]), [x])?;
                Ok([layer(&h, &weights)?])
            };
            let [y] = outer.run(both, [&leaves[0]]).unwrap();
            autograd::backward(&[&y.square().sum(Kind::Float)]).unwrap();
            // Weights are used twice, and the order of the two sums may differ.
            for (expected, found) in gradients(&plain).iter().zip(gradients(&leaves)) {
                assert!(expected.allclose(&found, 1e-5, 1e-6, false), "{outer:?} around {inner:?}");
            }
        }
    }
}

#[test]
fn a_custom_function_keeps_its_products() {
    struct Doubled(Arc<std::sync::atomic::AtomicUsize>);
    impl Function for Doubled {
        fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
            kept(|| {
                self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                Ok(vec![inputs[0].f_mul_scalar(2.0)?])
            })
        }
        fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
            Ok(grads.into_iter().map(|grad| grad.map(|grad| grad * 2.0)).collect())
        }
    }
    for (options, runs) in [(RETAIN, 1), (Checkpoint::default(), 2)] {
        let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
        let seen_by_segment = count.clone();
        let segment = move |[x]: [&Tensor; 1]| {
            let [y] = autograd::apply(Doubled(seen_by_segment.clone()), &[x])?;
            Ok([y.f_sin()?])
        };
        let [y] = options.run(segment, [&x]).unwrap();
        autograd::backward(&[&y.sum(Kind::Double)]).unwrap();
        assert_eq!(count.load(std::sync::atomic::Ordering::SeqCst), runs);
        assert_eq!(x.grad(), (&x * 2.0).cos() * 2.0);
    }
}

#[test]
fn an_in_place_change_of_a_product_is_an_error() {
    let leaves = leaves(Kind::Float);
    let weights = owned(&leaves[1..]);
    let changed = move |[x]: [&Tensor; 1]| {
        let mut y = product(x, &weights[2], None)?;
        let _ = y.f_relu_()?;
        Ok([y])
    };
    let error = RETAIN.run(changed, [&leaves[0]]).unwrap_err().to_string();
    assert!(error.contains("was changed in place inside a segment"), "{error}");
}

#[test]
fn another_number_of_products_is_an_error() {
    for (first, words) in [(true, "fewer"), (false, "more")] {
        let leaves = leaves(Kind::Float);
        let weights = owned(&leaves[1..]);
        let runs = std::sync::atomic::AtomicUsize::new(0);
        let uneven = move |[x]: [&Tensor; 1]| {
            let again = (runs.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0) == first;
            let y = product(x, &weights[2], None)?;
            Ok([if again { product(&y, &weights[2], None)? } else { y }])
        };
        let [y] = RETAIN.run(uneven, [&leaves[0]]).unwrap();
        let error = autograd::backward(&[&y.sum(Kind::Float)]).unwrap_err().to_string();
        assert!(error.contains(&format!("computed {words} products in backward")), "{error}");
    }
}

/// Keeps a copy in fp64, and counts the requests.
#[derive(Default)]
struct Copies(Arc<std::sync::Mutex<Vec<&'static str>>>);

struct Copied(Tensor, Arc<std::sync::Mutex<Vec<&'static str>>>);

impl SavedTensorStorage for Copies {
    fn pack(&self, input: &Tensor) -> Result<Box<dyn StoredTensor>> {
        self.0.lock().unwrap().push("pack");
        Ok(Box::new(Copied(input.detach().copy(), self.0.clone())))
    }
}

impl StoredTensor for Copied {
    fn wait(&self) -> Result<()> {
        self.1.lock().unwrap().push("wait");
        Ok(())
    }
    fn unpack(&self) -> Result<Tensor> {
        self.1.lock().unwrap().push("unpack");
        Ok(self.0.shallow_clone())
    }
}

#[test]
fn stored_inputs_are_restored() {
    let (plain, stored) = (leaves(Kind::Float), leaves(Kind::Float));
    autograd::backward(&[&layer(&plain[0], &plain[1..]).unwrap().square().sum(Kind::Float)]).unwrap();
    let log = Arc::default();
    let weights = owned(&stored[1..]);
    let storage = Arc::new(Copies(Arc::clone(&log)));
    let [y] = RETAIN.run_with_storage(move |[x]| Ok([layer(x, &weights)?]), [&stored[0]], storage).unwrap();
    assert_eq!(*log.lock().unwrap(), ["pack", "wait"]);
    autograd::backward(&[&y.square().sum(Kind::Float)]).unwrap();
    assert_eq!(*log.lock().unwrap(), ["pack", "wait", "unpack"]);
    assert_eq!(gradients(&plain), gradients(&stored));
}

#[test]
fn an_ordinary_segment_keeps_nothing() {
    let leaves = leaves(Kind::Float);
    let weights = owned(&leaves[1..]);
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen_by_segment = seen.clone();
    let f = move |[x]: [&Tensor; 1]| {
        seen_by_segment.lock().unwrap().push(autograd::retain::active());
        Ok([layer(x, &weights)?])
    };
    let [y] = checkpoint(f, [&leaves[0]]).unwrap();
    autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    assert_eq!(*seen.lock().unwrap(), [false, false]);
}
