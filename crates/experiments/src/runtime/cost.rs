//! Overhead of the runtime: each figure against the same work without it, in turns.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use report::cli::Scale;
use report::{Case, Metric};
use runtime::autograd::{self, Backward, Forward, Function, GradMode, Keep, checkpoint};
use runtime::device::{graph, synchronize};
use runtime::memory;
use runtime::profile::Counter;
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;

/// Figures with the case each belongs to.
pub(crate) type Figures = Vec<(Case, Metric)>;

/// Measures a group of figures.
pub(crate) type Measure = Box<dyn Fn(Device, Scale) -> anyhow::Result<Figures>>;

/// A group of figures.
pub(crate) struct Part {
    pub(crate) about: &'static str,
    pub(crate) run: Measure,
}

/// Whether few repeats of each have to do: these are many figures.
fn short(scale: Scale) -> bool {
    matches!(scale, Scale::Smoke | Scale::Laptop)
}

/// Returns the groups that can be measured on the device.
pub(crate) fn parts(bench: &Bench) -> Vec<Part> {
    let mut parts = vec![
        Part { about: "hand-written functions", run: Box::new(functions) },
        Part { about: "counting work", run: Box::new(counter) },
        Part { about: "a captured step", run: Box::new(captured_step) },
    ];
    if bench.device == Device::Cpu {
        parts.insert(0, Part { about: "tracking allocations", run: Box::new(tracking) });
        parts.push(Part { about: "large blocks", run: Box::new(large_blocks) });
    }
    parts
}

/// Seconds per operator of a loop of small operators that allocate their results.
pub(crate) fn small_operators(tracked: bool, operators: u32) -> anyhow::Result<f64> {
    if tracked {
        memory::track_cpu()?;
    }
    let _no_grad = GradMode::off();
    let (a, b) = (Tensor::ones([64], tch::kind::FLOAT_CPU), Tensor::ones([64], tch::kind::FLOAT_CPU));
    let round = |count: u32| {
        let start = Instant::now();
        for _ in 0..count {
            let _result = black_box(a.f_add(&b)?.f_relu()?);
        }
        anyhow::Ok(start.elapsed().as_secs_f64() / f64::from(2 * count))
    };
    round(operators / 10)?;
    // The best of several short rounds: what disturbs a round only ever adds.
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        best = best.min(round(operators / 10)?);
    }
    Ok(best)
}

/// Allocation tracking cannot be taken off again, so each side runs in processes of its own, in turns.
fn tracking(_: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (rounds, operators) = if short(scale) { (3, 100_000) } else { (11, 400_000) };
    let program = std::env::current_exe().context("finding this program to run it again")?;
    let once = |tracked: bool| -> anyhow::Result<f64> {
        let mut command = Command::new(&program);
        command.args(["runtime", "small-operators", "--operators", &operators.to_string()]);
        if tracked {
            command.arg("--tracked");
        }
        let output = command.output().context("running small operators in a process")?;
        ensure!(
            output.status.success(),
            "small operators: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().with_context(|| format!("reading `{}` as seconds", text.trim()))
    };
    let (mut with, mut without, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let (tracked, plain) = if round % 2 == 0 {
            let tracked = once(true)?;
            (tracked, once(false)?)
        } else {
            let plain = once(false)?;
            (once(true)?, plain)
        };
        with.push(tracked);
        without.push(plain);
        ratios.push(tracked / plain);
    }
    let case = || Case::new().with("what", "allocation tracking, 64-element operators");
    Ok(vec![
        (case(), Metric::of_samples("with_seconds", "s", &with)),
        (case(), Metric::of_samples("without_seconds", "s", &without)),
        (case(), Metric::of_samples("time_ratio", "ratio", &ratios)),
    ])
}

/// Times two pieces of work in turns; `count` repetitions in each turn.
fn in_turns(
    what: &str,
    count: u32,
    rounds: usize,
    mut with: impl FnMut() -> runtime::Result<()>,
    mut without: impl FnMut() -> runtime::Result<()>,
) -> anyhow::Result<Figures> {
    fn seconds(count: u32, work: &mut dyn FnMut() -> runtime::Result<()>) -> runtime::Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            work()?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(count))
    }
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (a, b) = (seconds(count, &mut with)?, seconds(count, &mut without)?);
        if round > 0 {
            ours.push(a);
            theirs.push(b);
            ratios.push(a / b);
        }
    }
    let case = || Case::new().with("what", what);
    Ok(vec![
        (case(), Metric::of_samples("with_seconds", "s", &ours)),
        (case(), Metric::of_samples("without_seconds", "s", &theirs)),
        (case(), Metric::of_samples("time_ratio", "ratio", &ratios)),
    ])
}

struct Double;

impl Function for Double {
    fn forward(&mut self, _: &mut Forward<'_>, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].f_mul_scalar(2.0)?])
    }

    fn backward(&self, _: &mut Backward, grads: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        grads.into_iter().map(|grad| Ok(grad.map(|grad| grad.f_mul_scalar(2.0)).transpose()?)).collect()
    }
}

/// Forward and backward through ten hand-written nodes, or ten recomputed segments, against ten of libtorch's own.
fn functions(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    const CHAIN: usize = 10;
    let rounds = if short(scale) { 3 } else { 9 };
    let x = Tensor::f_ones([64], (Kind::Float, device))?.f_set_requires_grad(true)?;
    let run = |step: &dyn Fn(&Tensor) -> runtime::Result<Tensor>| {
        let mut y = x.shallow_clone();
        for _ in 0..CHAIN {
            y = step(&y)?;
        }
        let loss = y.f_sum(Kind::Float)?;
        x.shallow_clone().zero_grad();
        autograd::backward(&[&loss])
    };
    let operator = |y: &Tensor| Ok(y.f_mul_scalar(2.0)?);
    let mut figures = in_turns(
        "chain of 10 hand-written functions, 64 elements",
        200,
        rounds,
        || run(&|y| autograd::apply(Double, &[y]).map(|[y]| y)),
        || run(&operator),
    )?;
    figures.extend(in_turns(
        "chain of 10 recomputed segments, 64 elements",
        200,
        rounds,
        || run(&|y| checkpoint(|[y]| Ok([y.f_mul_scalar(2.0)?]), [y]).map(|[y]| y)),
        || run(&operator),
    )?);
    Ok(figures)
}

/// The FLOP counter while it runs.
fn counter(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let rounds = if short(scale) { 3 } else { 9 };
    let a = Tensor::f_ones([64, 64], (Kind::Float, device))?;
    let products = || -> runtime::Result<()> {
        for _ in 0..1000 {
            let _product = black_box(a.f_mm(&a)?);
        }
        Ok(())
    };
    let counted = || {
        let counter = Counter::start()?;
        products()?;
        counter.finish().map(|_| ())
    };
    in_turns("counting 1000 products of 64 × 64", 1, rounds, counted, products)
}

/// Filling a fresh tensor of 64 MiB, whose pages the kernel must provide.
fn large_blocks(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let rounds = if short(scale) { 3 } else { 9 };
    memory::track_cpu()?;
    let fill = |kept: bool, huge: bool| {
        let before = (memory::set_block_cache(kept)?, memory::set_huge_pages(huge)?);
        let filled = Tensor::f_ones([16 << 20], (Kind::Float, device));
        drop(filled?);
        memory::set_block_cache(before.0)?;
        memory::set_huge_pages(before.1)?;
        Ok(())
    };
    let mut figures =
        in_turns("huge pages, filling a new 64 MiB", 5, rounds, || fill(false, true), || fill(false, false))?;
    // Both sides ask for huge pages; switching off gives everything back, so the first fill of a turn is a fresh one.
    let reuse = || {
        let filled = Tensor::f_ones([16 << 20], (Kind::Float, device))?;
        drop(filled);
        Ok(())
    };
    figures.extend(in_turns("kept blocks, filling a new 64 MiB", 5, rounds, reuse, || fill(false, true))?);
    Ok(figures)
}

/// A training step of many small kernels, replayed as one CUDA graph, against the same step launched kernel by kernel.
fn captured_step(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    const WHAT: &str = "training step captured as one CUDA graph";
    if !device.is_cuda() {
        let case = Case::new().with("what", WHAT);
        return Ok(vec![(case, Metric::not_measured("time_ratio", "ratio", "no GPU"))]);
    }
    let (count, rounds) = if short(scale) { (3, 3) } else { (10, 41) };
    let weights: Vec<Tensor> = (0..32)
        .map(|_| {
            Ok(Tensor::f_full([256, 256], 1.0 / 256.0, (Kind::Float, device))?.f_set_requires_grad(true)?)
        })
        .collect::<runtime::Result<_>>()?;
    let x = Tensor::f_ones([64, 256], (Kind::Float, device))?;
    let body = || {
        let (mut weights, x) =
            (weights.iter().map(Tensor::shallow_clone).collect::<Vec<_>>(), x.shallow_clone());
        move || -> runtime::Result<()> {
            let mut y = x.shallow_clone();
            for weight in &weights {
                y = y.f_mm(weight)?.f_tanh()?;
            }
            let references: Vec<&Tensor> = weights.iter().collect();
            let loss = y.f_square()?.f_mean(Kind::Float)?;
            let gradients = autograd::grad(&[&loss], &[None], &references, Keep::default())?;
            let _no_grad = GradMode::off();
            for (weight, gradient) in weights.iter_mut().zip(gradients.iter().flatten()) {
                let _ = weight.f_sub_(&gradient.f_mul_scalar(1e-4)?)?;
            }
            Ok(())
        }
    };
    let mut plain = body();
    let mut graph = graph::CapturedStep::capture(device, body())?;
    in_turns(
        WHAT,
        count,
        rounds,
        || graph.replay().and_then(|()| synchronize(device)),
        || plain().and_then(|()| synchronize(device)),
    )
}
