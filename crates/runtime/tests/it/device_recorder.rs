//! The recorder that stands for a graph on the CPU: replays have the bits of the step, and what a graph would not repeat is an error.

use expect_test::{Expect, expect};
use runtime::autograd;
use runtime::device::graph::{Capture, Graph, operators_only};
use runtime::ops::{self, TryScalar};
use runtime::{Result, parallel, random};
use tch::{Device, Kind, Tensor, kind};

/// A training of one layer: its step's inputs lie in tensors that are written before the step.
struct Training {
    weight: Tensor,
    x: Tensor,
    rate: Tensor,
    loss: Tensor,
}

impl Training {
    fn new() -> Self {
        random::seed(1).unwrap();
        Self {
            weight: Tensor::randn([4, 3], kind::FLOAT_CPU).set_requires_grad(true),
            x: Tensor::zeros([5, 4], kind::FLOAT_CPU),
            rate: Tensor::zeros([] as [i64; 0], kind::DOUBLE_CPU),
            loss: Tensor::zeros([] as [i64; 0], kind::FLOAT_CPU),
        }
    }

    fn prepare(&mut self, step: u32) {
        random::seed(100 + u64::from(step)).unwrap();
        self.x.copy_(&Tensor::randn([5, 4], kind::FLOAT_CPU));
        let _ = self.rate.fill_(0.1 / f64::from(step));
        // What the step draws itself goes on from here.
        random::seed(1000 + u64::from(step)).unwrap();
    }

    fn step(&self) -> Result<()> {
        let noise = Tensor::f_rand([5, 3], kind::FLOAT_CPU)?;
        let y = self.x.f_matmul(&self.weight)?.f_gelu("none")?.f_add(&noise)?;
        let y = y.f_transpose(0, 1)?.f_contiguous()?.f_softmax(-1, Kind::Float)?;
        let loss = y.f_square()?.f_sum(Kind::Float)?;
        autograd::backward(&[&loss])?;
        let _no_grad = tch::no_grad_guard();
        let gradient = self.weight.f_grad()?;
        let update = gradient.f_mul(&self.rate)?;
        let _ = self.weight.f_detach()?.f_sub_(&update)?;
        autograd::set_grad(&self.weight, None)?;
        self.loss.shallow_clone().f_copy_(&loss.f_detach()?)?;
        Ok(())
    }
}

#[test]
fn replays_have_the_bits_of_the_step() {
    let run = |captured: bool| {
        let (mut training, mut capture) = (Training::new(), Capture::recorder());
        let mut graph: Option<Graph> = None;
        let mut losses = Vec::new();
        for step in 1..=8 {
            training.prepare(step);
            match &mut graph {
                Some(graph) => graph.replay().unwrap(),
                None if captured => graph = capture.run(None, || training.step()).unwrap().1,
                None => training.step().unwrap(),
            }
            losses.push(training.loss.double_value(&[]));
        }
        assert_eq!(graph.is_some(), captured);
        assert!(graph.is_none_or(|graph| graph.operators().unwrap() > 20));
        (losses, training.weight.detach())
    };
    let (eager, captured) = (run(false), run(true));
    assert_eq!(eager.0, captured.0);
    assert_eq!(eager.1, captured.1);
    assert!(eager.0.windows(2).all(|losses| losses[0] != losses[1]), "{:?}", eager.0);
}

/// Returns the error of two runs of a step.
fn refused(mut step: impl FnMut(usize) -> Result<()>) -> String {
    let mut capture = Capture::recorder();
    let runs = (0..2).map(|run| capture.run(None, || step(run)).map(|_| ()));
    runs.collect::<Result<()>>().unwrap_err().to_string()
}

fn check(step: impl FnMut(usize) -> Result<()>, expected: Expect) {
    let mut error = refused(step);
    // Addresses differ from run to run.
    while let Some(at) = error.find("0x") {
        let end = error[at..].find(',').map_or(error.len(), |length| at + length);
        error.replace_range(at..end, "HERE");
    }
    expected.assert_eq(&error);
}

#[test]
fn what_a_graph_would_not_repeat_is_an_error_that_names_it() {
    let x = Tensor::ones([3], kind::FLOAT_CPU);
    let rates = [0.5, 0.25];
    check(
        |run| {
            drop(x.try_mul_scalar(rates[run])?);
            Ok(())
        },
        expect![
            "`aten::mul.Scalar`, argument `other`: its value is 0.5 at one step and 0.25 at the next; a captured step repeats the first, so keep the value in a tensor that is written before the step"
        ],
    );
    let two = [Tensor::ones([3], kind::FLOAT_CPU), Tensor::ones([3], kind::FLOAT_CPU)];
    check(
        |run| {
            drop(x.f_add(&two[run])?);
            Ok(())
        },
        expect![
            "`aten::add.Tensor`, argument `other`: its memory is at address HERE, element 0 at one step and at address HERE, element 0 at the next; a captured step repeats the first, so copy new values into the same tensor"
        ],
    );
    check(
        |run| {
            drop(x.f_narrow(0, 0, 2 + run as i64)?.f_exp()?);
            Ok(())
        },
        expect![
            "`aten::slice.Tensor`, argument `end`: its value is 2 at one step and 3 at the next; a captured step repeats the first, so keep the value in a tensor that is written before the step"
        ],
    );
    check(
        |run| {
            drop(if run == 0 { x.f_exp()? } else { x.f_log()? });
            Ok(())
        },
        expect![
            "operator 0: it is aten::exp at one step and aten::log at the next; a captured step runs the same operators each time"
        ],
    );
    check(
        |_| Ok(x.f_double_value(&[0]).map(drop)?),
        expect!["`aten::_local_scalar_dense` reads values on the host, which a captured step cannot"],
    );
    check(
        |_| ops::read(&x).map(drop),
        expect![
            "captured step: the host reads values of a device (`ops::read`), which a recording cannot repeat"
        ],
    );
    check(
        |_| {
            drop(x.f_nonzero()?);
            Ok(())
        },
        expect!["`aten::nonzero` reads values on the host, which a captured step cannot"],
    );
    let mask = x.gt(0.0);
    check(
        |_| {
            drop(x.f_index(&[Some(mask.shallow_clone())])?);
            Ok(())
        },
        expect![
            "`aten::index.Tensor` counts the true elements of a mask on the host, which a captured step cannot"
        ],
    );
    check(
        |_| {
            let _scope = runtime::profile::kernel("my_kernel", [&x]);
            parallel::for_each(1, |_| {})
        },
        expect![
            "captured step: a kernel computes outside libtorch's dispatcher (the kernel that began last: `my_kernel`), which a recording cannot repeat"
        ],
    );
    check(
        |run| {
            drop(x.f_add(&Tensor::f_from_slice(&[run as f32; 3])?)?);
            Ok(())
        },
        expect![
            "`aten::add.Tensor`, argument `other`: its content, which no recorded operator wrote, differs between two steps; it comes from the host, or from a kernel outside the dispatcher; a captured step repeats the first, so copy new values into the same tensor"
        ],
    );
}

#[test]
fn constants_from_the_host_are_repeated() {
    let (mut sum, mut capture) = (Tensor::zeros([3], kind::FLOAT_CPU), Capture::recorder());
    let mut step = || -> Result<()> {
        let _ = sum.f_add_(&Tensor::f_from_slice(&[1.0f32, 2.0, 3.0])?)?;
        Ok(())
    };
    assert!(capture.run(None, &mut step).unwrap().1.is_none());
    let mut graph = capture.run(None, &mut step).unwrap().1.unwrap();
    graph.replay().unwrap();
    assert_eq!(sum, Tensor::from_slice(&[3.0f32, 6.0, 9.0]));
}

#[test]
fn a_step_that_fails_leaves_the_thread_as_it_was() {
    assert!(!operators_only());
    let mut capture = Capture::recorder();
    let failed = capture.run(None, || -> Result<()> {
        assert!(operators_only());
        Err(runtime::Error::invalid("step", "no data"))
    });
    assert_eq!(failed.unwrap_err().to_string(), "step: no data");
    assert!(!operators_only());
    let x = Tensor::ones([2], (Kind::Float, Device::Cpu));
    assert_eq!(x.double_value(&[0]), 1.0, "the host reads again");
}
