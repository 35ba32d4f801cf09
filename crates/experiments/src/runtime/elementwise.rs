//! Fused elementwise passes beside the chains of libtorch's operators that they stand for, in turns in one process.

use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Record};
use runtime::autograd::{self, GradMode, Keep};
use runtime::device::{graph, synchronize};
use runtime::fused::elementwise::{Elementwise, Expr};
use runtime::measure::physical;
use runtime::random::Generator;
use runtime::{Result, memory};
use tch::{Device, Kind, Tensor};

const EXPERIMENT: &str = "elementwise";

type Composed = fn(&[Tensor]) -> Result<Tensor>;
type Fused = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An expression on both sides. Its first `full` inputs have the shape of the result, the others that of its last dimension.
struct Expression {
    name: &'static str,
    full: usize,
    vectors: usize,
    ours: Fused,
    theirs: Composed,
    /// Of the full inputs: how many ours keeps and reads again for backward.
    reads: usize,
    /// Of the full inputs: how many have a gradient that is written, and is not the upstream one.
    writes: usize,
}

fn fused<const N: usize>(expression: impl for<'g> FnOnce([Expr<'g>; N]) -> Expr<'g>) -> (Fused, [bool; N]) {
    let compiled = Elementwise::new(expression);
    let keeps = compiled.keeps([true; N]);
    let apply = move |inputs: &[Tensor]| compiled.apply(std::array::from_fn(|index| &inputs[index]));
    (Box::new(apply), keeps)
}

fn expression<const N: usize>(
    name: &'static str,
    [full, writes]: [usize; 2],
    ours: impl for<'g> FnOnce([Expr<'g>; N]) -> Expr<'g>,
    theirs: Composed,
) -> Expression {
    let (ours, keeps) = fused(ours);
    let reads = keeps[..full].iter().filter(|kept| **kept).count();
    Expression { name, full, vectors: N - full, ours, theirs, reads, writes }
}

fn expressions() -> Vec<Expression> {
    vec![
        expression(
            "GELU(x + bias)",
            [1, 1],
            |[x, bias]| (x + bias).gelu(),
            |x| Ok(x[0].f_add(&x[1])?.f_gelu("none")?),
        ),
        expression(
            "SiLU(gate)·up",
            [2, 2],
            |[gate, up]| gate.silu() * up,
            |x| Ok(x[0].f_silu()?.f_mul(&x[1])?),
        ),
        expression(
            "residual + x·σ(gate)",
            [3, 2],
            |[residual, x, gate]| residual + x * gate.sigmoid(),
            |x| Ok(x[0].f_add(&x[1].f_mul(&x[2].f_sigmoid()?)?)?),
        ),
        expression(
            "chain of 8",
            [2, 2],
            |[x, y, scale, shift]| (((x * scale + shift).tanh() * y + x).silu() * 0.5 + y).square(),
            |x| {
                let inner = x[0].f_mul(&x[2])?.f_add(&x[3])?.f_tanh()?;
                let outer = inner.f_mul(&x[1])?.f_add(&x[0])?.f_silu()?;
                Ok(outer.f_mul_scalar(0.5)?.f_add(&x[1])?.f_square()?)
            },
        ),
    ]
}

/// What is timed: one pass without a graph, or the forward with its backward.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Forward,
    Both,
}

fn step(
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    upstream: &Tensor,
    part: Part,
) -> Result<()> {
    if part == Part::Forward {
        let _no_grad = GradMode::off();
        let _y = black_box(f(inputs)?);
        return synchronize(upstream.device());
    }
    let y = f(inputs)?;
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let _gradients = black_box(autograd::grad(&[&y], &[Some(upstream)], &inputs, Keep::default())?);
    synchronize(upstream.device())
}

/// Bytes that live on between forward and backward, beyond inputs and output.
fn kept(f: &dyn Fn(&[Tensor]) -> Result<Tensor>, inputs: &[Tensor]) -> Result<f64> {
    let before = memory::live_bytes(Device::Cpu)?;
    let y = f(inputs)?;
    let output = y.numel() * y.kind().elt_size_in_bytes();
    Ok((memory::live_bytes(Device::Cpu)? - before) as f64 - output as f64)
}

/// Seconds of both sides and their ratio, in turns; who goes first changes.
pub(crate) fn in_turns(
    budget: f64,
    mut ours: impl FnMut() -> Result<()>,
    mut theirs: impl FnMut() -> Result<()>,
) -> Result<[Vec<f64>; 3]> {
    fn seconds(count: u32, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            work()?;
        }
        Ok(start.elapsed().as_secs_f64() / f64::from(count))
    }
    let once = seconds(1, &mut ours)? + seconds(1, &mut theirs)?;
    // A turn of some milliseconds, so that the clock and a changed cache do not count.
    let count = (0.005 / once).ceil().clamp(1.0, 1000.0) as u32;
    let rounds = (budget / (once * f64::from(count))).clamp(5.0, 41.0) as usize;
    let mut samples = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..rounds {
        let (a, b) = if round % 2 == 0 {
            let a = seconds(count, &mut ours)?;
            (a, seconds(count, &mut theirs)?)
        } else {
            let b = seconds(count, &mut theirs)?;
            (seconds(count, &mut ours)?, b)
        };
        [a, b, a / b].into_iter().zip(&mut samples).for_each(|(sample, samples)| samples.push(sample));
    }
    Ok(samples)
}

/// A training step of many small kernels, replayed as one CUDA graph, over the same step launched kernel by kernel.
fn captured(device: Device) -> Result<Metric> {
    const NAME: &str = "captured_vs_launched";
    if !device.is_cuda() {
        return Ok(Metric::not_measured(NAME, "ratio", "no GPU"));
    }
    let weights: Vec<Tensor> = (0..32)
        .map(|_| {
            Ok(Tensor::f_full([256, 256], 1.0 / 256.0, (Kind::Float, device))?.f_set_requires_grad(true)?)
        })
        .collect::<Result<_>>()?;
    let x = Tensor::f_ones([64, 256], (Kind::Float, device))?;
    let body = || {
        let (mut weights, x) =
            (weights.iter().map(Tensor::shallow_clone).collect::<Vec<_>>(), x.shallow_clone());
        move || -> Result<()> {
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
    let mut graph = graph::Step::capture(device, 3, body())?;
    let [_, _, ratios] = in_turns(
        1.0,
        || graph.replay().and_then(|()| synchronize(device)),
        || plain().and_then(|()| synchronize(device)),
    )?;
    Ok(Metric::of_samples(NAME, "ratio", &ratios))
}

/// Runs the experiment and writes its records.
pub(crate) fn measure(common: &CommonArgs, scale: Scale) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let environment = crate::environment::of(device)?;
    let mut records = common.open_records()?;
    let mut out = std::io::stdout().lock();
    let mut emit = |case: Case, metric: Metric| -> anyhow::Result<()> {
        let case = case.with("device", common.device.as_str());
        let record = Record { experiment: EXPERIMENT.into(), case, metric, environment: environment.clone() };
        if let Some(records) = &mut records {
            records.write(&record)?;
        }
        if common.json {
            writeln!(out, "{}", serde_json::to_string(&record)?)?;
        } else {
            let value = record.metric.value.map_or("not measured".to_owned(), |value| format!("{value:.4e}"));
            let case = record.case.describe();
            writeln!(out, "{case:70} {:18} {value} {}", record.metric.name, record.metric.unit)?;
        }
        Ok(())
    };
    if device == Device::Cpu {
        memory::track_cpu()?;
    }
    let bandwidth = physical::copy_bandwidth(device)?.rate();
    // In the second-level caches of two cores, and far beyond the third level's.
    let (rows, budget) = match scale {
        Scale::Smoke => ([64, 512], 0.05),
        Scale::Laptop => ([128, 8192], 0.35),
        Scale::Paper => ([128, 16_384], 2.0),
    };
    emit(Case::new().with("expression", "captured step"), captured(device)?)?;
    let expressions = expressions();
    let mut progress = Progress::new(expressions.len() as u64);
    for expression in &expressions {
        progress.message(expression.name);
        for rows in rows {
            for (dtype, kind) in [("fp32", Kind::Float), ("bf16", Kind::BFloat16)] {
                let shape = [rows, 1024];
                let mut generator = Generator::new(common.seed)?;
                let mut random = |shape: &[i64]| -> Result<Tensor> {
                    let x = generator.normal(shape, (Kind::Float, Device::Cpu))?;
                    Ok(x.f_to_device(device)?.f_to_kind(kind)?.f_set_requires_grad(true)?)
                };
                let mut inputs: Vec<Tensor> =
                    (0..expression.full).map(|_| random(&shape)).collect::<Result<_>>()?;
                inputs.extend(
                    (0..expression.vectors).map(|_| random(&shape[1..])).collect::<Result<Vec<_>>>()?,
                );
                let upstream = random(&shape)?.f_detach()?;
                let tensor = (shape[0] * shape[1]) as f64 * kind.elt_size_in_bytes() as f64;
                // Forward reads the inputs and writes the output; backward reads what was kept and the upstream gradient,
                // and writes the gradients. Vectors are too small to count.
                let forward = tensor * (expression.full + 1) as f64;
                let both = forward + tensor * (expression.reads + 1 + expression.writes) as f64;
                let case = |part: &str| {
                    Case::new()
                        .with("expression", expression.name)
                        .with("dtype", dtype)
                        .with("shape", format!("{rows} × 1024"))
                        .with("part", part)
                };
                for (name, part, bytes) in
                    [("forward", Part::Forward, forward), ("forward + backward", Part::Both, both)]
                {
                    let [ours, theirs, ratios] = in_turns(
                        budget,
                        || step(&expression.ours, &inputs, &upstream, part),
                        || step(&expression.theirs, &inputs, &upstream, part),
                    )?;
                    let case = || case(name);
                    emit(case(), Metric::of_samples("seconds", "s", &ours))?;
                    emit(case(), Metric::of_samples("eager_seconds", "s", &theirs))?;
                    emit(case(), Metric::of_samples("time_vs_eager", "ratio", &ratios))?;
                    emit(case(), Metric::exact("bytes_moved", "B", bytes))?;
                    if let Some(bandwidth) = bandwidth {
                        let shares: Vec<f64> =
                            ours.iter().map(|seconds| bytes / seconds / bandwidth).collect();
                        emit(case(), Metric::of_samples("bandwidth_share", "ratio", &shares))?;
                    }
                    if part == Part::Both && device == Device::Cpu {
                        emit(case(), Metric::exact("kept_bytes", "B", kept(&expression.ours, &inputs)?))?;
                        emit(
                            case(),
                            Metric::exact("eager_kept_bytes", "B", kept(&expression.theirs, &inputs)?),
                        )?;
                    }
                }
            }
        }
        progress.step();
    }
    Ok(())
}
