//! Concurrent backwards over one graph: none overwrites what another reads.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use runtime::Result;
use runtime::autograd::{self, Backward, Forward, Function, Keep};
use tch::{Kind, Tensor, kind};

const RETAIN: Keep = Keep { graph: true, derivative: false };

/// What happens inside a backward, before it reads the saved tensors.
type Meanwhile = Box<dyn FnMut() + Send>;

/// y = 2x, with a factor that backward reads and, where it may, overwrites.
struct Doubled {
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
    /// What each run observed, in the order in which they ended.
    might_overwrite: Arc<Mutex<Vec<bool>>>,
}

impl Function for Doubled {
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        ctx.save(&Tensor::f_full([3], 2.0, kind::DOUBLE_CPU)?);
        Ok(vec![inputs[0].f_mul_scalar(2.0)?])
    }

    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut factor = ctx.take_saved().remove(0);
        // Once, and not while the lock is held, because it may re-enter.
        let meanwhile = self.meanwhile.lock().unwrap().take();
        if let Some(mut meanwhile) = meanwhile {
            meanwhile();
        }
        self.might_overwrite.lock().unwrap().push(ctx.may_overwrite_saved());
        let gradient = grads[0].as_ref().unwrap() * &factor;
        if ctx.may_overwrite_saved() {
            let _ = factor.fill_(f64::NAN);
        }
        Ok(vec![Some(gradient)])
    }
}

struct Graph {
    x: Tensor,
    loss: Tensor,
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
    might_overwrite: Arc<Mutex<Vec<bool>>>,
}

impl Graph {
    fn new() -> Self {
        let (meanwhile, might_overwrite) = (Arc::default(), Arc::default());
        let x = Tensor::ones([3], kind::DOUBLE_CPU).set_requires_grad(true);
        let function =
            Doubled { meanwhile: Arc::clone(&meanwhile), might_overwrite: Arc::clone(&might_overwrite) };
        let [y] = autograd::apply(function, &[&x]).unwrap();
        let loss = y.sum(Kind::Double);
        Self { x, loss, meanwhile, might_overwrite }
    }

    fn gradient(&self, keep: Keep) -> Result<Tensor> {
        Ok(autograd::grad(&[&self.loss], &[None], &[&self.x], keep)?.remove(0).unwrap())
    }

    fn told(&self) -> Vec<bool> {
        self.might_overwrite.lock().unwrap().clone()
    }
}

#[test]
fn only_the_last_backward_may_overwrite_saved_tensors() {
    let graph = Graph::new();
    assert_eq!(graph.gradient(RETAIN).unwrap(), Tensor::full([3], 2.0, kind::DOUBLE_CPU));
    assert_eq!(graph.gradient(Keep::default()).unwrap(), Tensor::full([3], 2.0, kind::DOUBLE_CPU));
    assert_eq!(graph.told(), [false, true]);
}

#[test]
fn releasing_the_graph_keeps_saved_tensors_for_a_concurrent_backward() {
    // The outer backward holds the saved tensors while the inner one, which would be the last, runs completely.
    for outer in [RETAIN, Keep::default()] {
        let graph = Graph::new();
        let (x, loss) = (graph.x.shallow_clone(), graph.loss.shallow_clone());
        let (tell, told) = channel();
        *graph.meanwhile.lock().unwrap() = Some(Box::new(move || {
            let inner = autograd::grad(&[&loss], &[None], &[&x], Keep::default());
            tell.send(inner.map(|mut gradients| gradients.remove(0).unwrap())).unwrap();
        }));
        assert_eq!(graph.gradient(outer).unwrap(), Tensor::full([3], 2.0, kind::DOUBLE_CPU), "{outer:?}");
        let inner = told.recv().unwrap();
        if outer.graph {
            assert_eq!(inner.unwrap(), Tensor::full([3], 2.0, kind::DOUBLE_CPU));
            assert_eq!(graph.told(), [false, false]);
        } else {
            let error = inner.unwrap_err().to_string();
            assert!(error.contains("a second time") && error.contains("retain_graph"), "{error}");
            assert_eq!(graph.told(), [true]);
        }
    }
}

#[test]
fn concurrent_retaining_and_releasing_backwards_succeed_or_return_an_error() {
    // One thread is held inside its backward, with the saved tensors, until the other has begun its own.
    let graph = Graph::new();
    let (began, begun): (Sender<()>, Receiver<()>) = channel();
    let (open, gate): (Sender<()>, Receiver<()>) = channel();
    *graph.meanwhile.lock().unwrap() = Some(Box::new(move || {
        began.send(()).unwrap();
        gate.recv().unwrap();
    }));
    let first = {
        let (x, loss) = (graph.x.shallow_clone(), graph.loss.shallow_clone());
        std::thread::spawn(move || {
            autograd::grad(&[&loss], &[None], &[&x], RETAIN).map(|mut found| found.remove(0))
        })
    };
    begun.recv().unwrap();
    let second = {
        let (x, loss) = (graph.x.shallow_clone(), graph.loss.shallow_clone());
        std::thread::spawn(move || {
            open.send(()).unwrap();
            autograd::grad(&[&loss], &[None], &[&x], Keep::default()).map(|mut found| found.remove(0))
        })
    };
    for thread in [first, second] {
        let gradient = thread.join().unwrap().unwrap().unwrap();
        assert_eq!(gradient, Tensor::full([3], 2.0, kind::DOUBLE_CPU));
    }
    assert!(!graph.told()[0]);
    let error = graph.gradient(RETAIN).unwrap_err().to_string();
    assert!(error.contains("a second time, after its saved tensors were freed"), "{error}");
}
