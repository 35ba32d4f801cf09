//! Recomputed segments: the same gradients bit for bit, less memory, the same random numbers.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use runtime::Result;
use runtime::autograd::{self, Checkpoint, GradMode, Keep, checkpoint};
use runtime::memory::Region;
use tch::{Device, Kind, Tensor, kind};

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, kind::FLOAT_CPU).set_requires_grad(true)
}

fn twin(tensor: &Tensor) -> Tensor {
    tensor.detach().copy().set_requires_grad(true)
}

fn block(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    Ok(x.f_matmul(w)?.f_tanh()?.f_add(x)?)
}

#[test]
fn gradients_equal_those_of_the_plain_segment_bit_for_bit() {
    let (x, w) = (leaf(&[6, 8]), leaf(&[8, 8]));
    let (x2, w2) = (twin(&x), twin(&w));
    let weight = w.shallow_clone();
    let [y] = checkpoint(move |[x]| Ok([block(x, &weight)?]), [&x]).unwrap();
    autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    block(&x2, &w2).unwrap().sum(Kind::Float).backward();
    assert_eq!(x.grad(), x2.grad());
    assert_eq!(w.grad(), w2.grad(), "a captured weight gets its gradient");
}

#[test]
fn captured_weights_train_even_when_no_input_needs_a_gradient() {
    let (x, w) = (leaf(&[6, 8]).detach(), leaf(&[8, 8]));
    let (weight, w2) = (w.shallow_clone(), twin(&w));
    let [y] = checkpoint(move |[x]| Ok([block(x, &weight)?]), [&x]).unwrap();
    autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    block(&x, &w2).unwrap().sum(Kind::Float).backward();
    assert_eq!(w.grad(), w2.grad());
}

#[test]
fn a_chain_of_two_hundred_segments_works() {
    let x = leaf(&[5]);
    let x2 = twin(&x);
    let (mut y, mut y2) = (x.shallow_clone(), x2.shallow_clone());
    for _ in 0..200 {
        [y] = checkpoint(|[x]| Ok([x.f_sin()?.f_mul(x)?]), [&y]).unwrap();
        y2 = y2.sin() * &y2;
    }
    autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    y2.sum(Kind::Float).backward();
    assert_eq!(x.grad(), x2.grad());
}

#[test]
fn segments_nested_deeper_than_an_engine_thread_allows_work() {
    // From 60 levels, libtorch moves a nested backward to another thread.
    const DEPTH: usize = 100;
    type Threads = Arc<Mutex<HashSet<std::thread::ThreadId>>>;
    fn nest(depth: usize, x: &Tensor, threads: &Threads) -> Result<Tensor> {
        threads.lock().unwrap().insert(std::thread::current().id());
        if depth == 0 {
            return Ok(x.f_tanh()?.f_mul_scalar(1.01)?);
        }
        let seen = threads.clone();
        let [inner] = checkpoint(move |[x]| Ok([nest(depth - 1, x, &seen)?]), [x])?;
        Ok(inner.f_sin()?)
    }
    let x = leaf(&[5]);
    let x2 = twin(&x);
    let threads = Threads::default();
    let y = nest(DEPTH, &x, &threads).unwrap();
    assert_eq!(threads.lock().unwrap().len(), 1);
    autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    assert!(threads.lock().unwrap().len() > 1, "the nest did not reach the engine's own threads");
    let mut y2 = x2.tanh() * 1.01;
    for _ in 0..DEPTH {
        y2 = y2.sin();
    }
    y2.sum(Kind::Float).backward();
    assert_eq!(x.grad(), x2.grad());
}

#[test]
fn a_chain_keeps_its_inputs_only_and_the_last_segment_opts_out() {
    const WIDE: i64 = 1 << 20;
    let segment = |x: &Tensor| x.sin().cos().sin().cos();
    let x = leaf(&[WIDE]);
    let held = |run: &dyn Fn() -> Tensor| {
        let region = Region::start(Device::Cpu).unwrap();
        let y = run();
        let usage = region.finish().unwrap();
        drop(y);
        // Rounded to whole wide tensors: small ones do not matter.
        ((usage.live_after as f64 - usage.live_before as f64) / (WIDE as f64 * 4.0)).round() as i64
    };
    // Plain: four operators a segment, each holds its input. Checkpointed: the input of each of the first two, and the
    // four of the last. The chain's own input existed before, and its output exists after.
    let plain = held(&|| {
        let mut y = x.shallow_clone();
        for _ in 0..3 {
            y = segment(&y);
        }
        y
    });
    let recomputed = held(&|| {
        let mut y = x.shallow_clone();
        for recompute in [true, true, false] {
            let options = Checkpoint { recompute, ..Checkpoint::default() };
            [y] = options.run(move |[x]| Ok([segment(x)]), [&y]).unwrap();
        }
        y
    });
    assert_eq!((plain, recomputed), (12, 6));

    let mut runs = Vec::new();
    for recompute in [true, false] {
        let count = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let seen = count.clone();
        let segment = move |[x]: [&Tensor; 1]| {
            seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            Ok([x.f_sin()?])
        };
        let options = Checkpoint { recompute, ..Checkpoint::default() };
        let [y] = options.run(segment, [&x]).unwrap();
        autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
        runs.push(count.load(std::sync::atomic::Ordering::SeqCst));
    }
    assert_eq!(runs, [2, 1]);
}

#[test]
fn errors_name_the_cause() {
    let x = leaf(&[4]);
    let failing = |[x]: [&Tensor; 1]| {
        if GradMode::enabled() {
            Err(runtime::Error::invalid("segment", "it broke"))
        } else {
            Ok([x.f_sin()?])
        }
    };
    let [y] = checkpoint(failing, [&x]).unwrap();
    let error = autograd::backward(&[&y.sum(Kind::Float)]).unwrap_err().to_string();
    assert_eq!(error, "backward of `checkpoint`: segment: it broke");

    let [y] = checkpoint(|[x]| Ok([x.f_sin()?]), [&x]).unwrap();
    let error =
        autograd::grad(&[&y.sum(Kind::Float)], &[None], &[&x], Keep::default()).unwrap_err().to_string();
    assert!(error.contains("call autograd::backward and read .grad()"), "{error}");
}
