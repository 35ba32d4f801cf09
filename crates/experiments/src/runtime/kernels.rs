//! The fused kernels alone, each against a copy of as many bytes and against libtorch's operators for the same result.
//!
//! On CUDA the calls are captured in a graph, so that the time is the GPU's and not that of the launches.

mod gradients;
mod nf4;

use kernels::adam::{AdamStep, AdamTensors, adam, adam_many};
use kernels::cross_entropy::{Coefficients, Statistics, Targets, TileInputs, Wanted, pass_for};
use kernels::norm::{self, rms_norm};
use kernels::physical;
use kernels::rope::RotaryTable;
use kernels::swiglu;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::autograd::{self, GradMode, Keep};
use runtime::device::graph::CapturedStep;
use runtime::measure::{self, MeasurementPlan, Samples};
use runtime::ops::{self, foreach, optimizer};
use tch::{Device, Kind, Tensor};

use super::cost::{Figures, Part};
use crate::driver::Bench;
use crate::dtype;

const KIND: Kind = Kind::BFloat16;

pub(crate) fn parts(_: &Bench) -> Vec<Part> {
    let part = |about, run: super::cost::Measure| Part { about, run };
    vec![
        part("RMS norm", Box::new(norms)),
        part("SwiGLU", Box::new(products)),
        part("rotary embedding", Box::new(rope)),
        part("cross-entropy", Box::new(cross_entropy)),
        part("AdamW", Box::new(adam_w)),
        part("gradients", Box::new(gradients::gradients)),
        part("NF4", Box::new(nf4::dequantization)),
    ]
}

/// A call of the kernel. Its number chooses among several sets of tensors that together exceed a cache.
type Call = Box<dyn FnMut(usize) -> runtime::Result<()>>;

/// A line of the table.
struct Line {
    what: &'static str,
    shape: String,
    /// Bytes that a call reads and writes at least.
    bytes: f64,
    ours: Call,
    libtorch: Option<Call>,
}

/// Returns the size for CUDA (a step of Llama-3-8B with 8192 tokens), for a CPU (Qwen2.5-0.5B with 1024), or for a smoke run.
fn sized<T>(device: Device, scale: Scale, [of_cuda, of_cpu, of_smoke]: [T; 3]) -> T {
    match scale {
        Scale::Smoke => of_smoke,
        _ if device.is_cuda() => of_cuda,
        _ => of_cpu,
    }
}

fn discard(result: Result<Tensor, tch::TchError>) -> runtime::Result<()> {
    result.map(drop).map_err(runtime::Error::from)
}

fn random(shape: &[i64], device: Device) -> runtime::Result<Tensor> {
    Ok(Tensor::f_randn(shape, (KIND, device))?)
}

/// Seconds of one call.
fn seconds(device: Device, scale: Scale, mut call: Call) -> anyhow::Result<Samples> {
    const CALLS: usize = 6;
    let budget = if scale == Scale::Smoke { 0.1 } else { 1.0 };
    let plan =
        MeasurementPlan { warmup: 2, repeats: 21, budget: Some(budget), ..MeasurementPlan::new(device) };
    let body = move || (0..CALLS).try_for_each(&mut call);
    let measured = if device.is_cuda() {
        let mut step = CapturedStep::capture(device, body)?;
        measure::run(&plan, |_| step.replay())?
    } else {
        let mut body = body;
        measure::run(&plan, |_| body())?
    };
    let samples = measured.time.samples.iter().map(|seconds| seconds / CALLS as f64).collect();
    Ok(Samples { samples })
}

fn copy(device: Device, bytes: f64) -> runtime::Result<Call> {
    let options = (Kind::Uint8, device);
    let half = (bytes / 2.0) as i64;
    let sets: Vec<(Tensor, Tensor)> = (0..2)
        .map(|_| Ok((Tensor::f_ones([half], options)?, Tensor::f_zeros([half], options)?)))
        .collect::<runtime::Result<_>>()?;
    Ok(Box::new(move |index| {
        let (source, target) = &sets[index % sets.len()];
        target.shallow_clone().f_copy_(source)?;
        Ok(())
    }))
}

fn measure_line(line: Line, device: Device, scale: Scale, figures: &mut Figures) -> anyhow::Result<()> {
    let Line { what, shape, bytes, ours, libtorch } = line;
    let case = Case::new().with("what", what).with("shape", shape).with("dtype", dtype::name(KIND));
    let ours = seconds(device, scale, ours)?;
    let copied = seconds(device, scale, copy(device, bytes)?)?;
    let mut metrics = vec![
        Metric::of_samples("seconds", "s", &ours.samples),
        Metric::of_samples("copy_seconds", "s", &copied.samples),
        Metric::exact("bytes_moved", "B", bytes),
    ];
    metrics.extend(shares(&ours.samples, bytes, copied.median(), device)?);
    if let Some(libtorch) = libtorch {
        let theirs = seconds(device, scale, libtorch)?;
        let ratios: Vec<f64> = ours.samples.iter().map(|seconds| seconds / theirs.median()).collect();
        metrics.push(Metric::of_samples("libtorch_seconds", "s", &theirs.samples));
        metrics.push(Metric::of_samples("time_ratio", "ratio", &ratios));
    }
    figures.extend(metrics.into_iter().map(|metric| (case.clone(), metric)));
    Ok(())
}

/// Shares of the rate of a copy of as many bytes, and of a copy so large that its launch does not count.
fn shares(samples: &[f64], bytes: f64, copied: f64, device: Device) -> anyhow::Result<[Metric; 2]> {
    let rate = physical::copy_bandwidth(device)?.rate().unwrap_or(f64::NAN);
    let of_equal: Vec<f64> = samples.iter().map(|seconds| copied / seconds).collect();
    let of_large: Vec<f64> = samples.iter().map(|seconds| bytes / seconds / rate).collect();
    Ok([
        Metric::of_samples("share_of_equal_copy", "ratio", &of_equal),
        Metric::of_samples("share_of_copy_rate", "ratio", &of_large),
    ])
}

fn norms(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let of_cuda: &[(i64, i64)] = &[(8192, 4096), (16_384, 4096), (4096, 8192), (4096, 16_384)];
    let shapes = sized(device, scale, [of_cuda, &[(1024, 896)], &[(64, 896)]]);
    let mut figures = Vec::new();
    for &(tokens, width) in shapes {
        let x = (0..3).map(|_| Ok(random(&[tokens, width], device)?.f_set_requires_grad(true)?));
        let x: Vec<Tensor> = x.collect::<runtime::Result<_>>()?;
        let upstream = random(&[tokens, width], device)?;
        let weight = random(&[width], device)?.f_set_requires_grad(true)?;
        let ours = |x: &Tensor, weight: &Tensor| rms_norm(x, Some(weight), norm::Options::default());
        let libtorch = move |x: &Tensor, weight: &Tensor| {
            Ok(ops::norm::fused_rms_norm(x, &[width], Some(weight), Some(1e-5))?.0)
        };
        let matrix = (tokens * width * 2) as f64;
        let shape = format!("{tokens} × {width}");
        let forward = Line {
            what: "RMS norm, forward",
            shape: shape.clone(),
            bytes: 2.0 * matrix,
            ours: forward_of(&x, &weight, ours),
            libtorch: Some(forward_of(&x, &weight, libtorch)),
        };
        measure_line(forward, device, scale, &mut figures)?;
        let backward = Line {
            what: "RMS norm, backward",
            shape,
            bytes: 3.0 * matrix,
            ours: backward_of(&x, &weight, &upstream, ours),
            libtorch: Some(backward_of(&x, &weight, &upstream, libtorch)),
        };
        measure_line(backward, device, scale, &mut figures)?;
    }
    Ok(figures)
}

fn shared(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

fn forward_of(
    x: &[Tensor],
    weight: &Tensor,
    norm: impl Fn(&Tensor, &Tensor) -> runtime::Result<Tensor> + 'static,
) -> Call {
    let (x, weight) = (shared(x), weight.shallow_clone());
    Box::new(move |index| {
        let _no_grad = GradMode::off();
        norm(&x[index % x.len()], &weight).map(drop)
    })
}

/// Backward alone. The first call makes the graph, on the stream on which the backward then runs too.
fn backward_of(
    x: &[Tensor],
    weight: &Tensor,
    upstream: &Tensor,
    norm: impl Fn(&Tensor, &Tensor) -> runtime::Result<Tensor> + 'static,
) -> Call {
    let (x, weight, upstream) = (shared(x), weight.shallow_clone(), upstream.shallow_clone());
    let mut outputs = Vec::new();
    Box::new(move |index| {
        if outputs.is_empty() {
            outputs = x.iter().map(|x| norm(x, &weight)).collect::<runtime::Result<_>>()?;
        }
        let index = index % x.len();
        let keep = Keep { graph: true, ..Keep::default() };
        autograd::grad(&[&outputs[index]], &[Some(&upstream)], &[&x[index], &weight], keep).map(drop)
    })
}

fn products(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (tokens, features) = sized(device, scale, [(8192, 14_336), (1024, 4864), (32, 4864)]);
    let tensors = |count: usize| -> runtime::Result<Vec<Tensor>> {
        (0..count).map(|_| random(&[tokens, features], device)).collect()
    };
    let matrix = (tokens * features * 2) as f64;
    let shape = format!("{tokens} × {features}");
    let mut figures = Vec::new();
    let inputs = tensors(2)?;
    let (theirs, mut out) = (shared(&inputs), Tensor::f_empty([tokens, features], (KIND, device))?);
    let forward = Line {
        what: "SwiGLU product, forward",
        shape: shape.clone(),
        bytes: 3.0 * matrix,
        ours: Box::new(move |_| swiglu::forward(&inputs[0], &inputs[1], None, &mut out)),
        libtorch: Some(Box::new(move |_| discard(theirs[0].f_silu()?.f_mul(&theirs[1])))),
    };
    measure_line(forward, device, scale, &mut figures)?;
    let inputs = tensors(3)?;
    let theirs = shared(&inputs);
    let backward = Line {
        what: "SwiGLU product, backward in place",
        shape,
        bytes: 6.0 * matrix,
        ours: Box::new(move |_| {
            let [gate, up, grad] = [0, 1, 2].map(|index| inputs[index].shallow_clone());
            swiglu::backward(gate, up, None, grad).map(drop)
        }),
        libtorch: Some(Box::new(move |_| {
            let silu = theirs[0].f_silu()?;
            let (_product, _of_up) = (silu.f_mul(&theirs[1])?, silu.f_mul(&theirs[2])?);
            drop(theirs[2].f_mul(&theirs[1])?.f_silu_backward(&theirs[0])?);
            Ok(())
        })),
    };
    measure_line(backward, device, scale, &mut figures)?;
    Ok(figures)
}

fn rope(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (tokens, heads, kv_heads, head) =
        sized(device, scale, [(8192, 32, 8, 128), (1024, 14, 2, 64), (64, 14, 2, 64)]);
    let table = RotaryTable::new(head, tokens, 1e4, device)?;
    let q = random(&[1, tokens, heads, head], device)?;
    let k = random(&[1, tokens, kv_heads, head], device)?;
    let both = [q.shallow_clone(), k.shallow_clone()];
    let half = |index: i64| -> runtime::Result<Tensor> {
        let half = table.values(tokens)?.f_select(1, index)?;
        Ok(Tensor::f_cat(&[&half, &half], 1)?.f_view([1, tokens, 1, head])?.f_to_kind(KIND)?)
    };
    let (cos, sin) = (half(0)?, half(1)?);
    let line = Line {
        what: "rotary embedding of q and k",
        shape: format!("{tokens} × {heads} + {kv_heads} heads × {head}"),
        bytes: (2 * tokens * (heads + kv_heads) * head * 2) as f64,
        ours: Box::new(move |_| {
            let _no_grad = GradMode::off();
            table.rotate(&q, &k, None).map(drop)
        }),
        libtorch: Some(Box::new(move |_| {
            for x in &both {
                let (first, second) = (x.f_narrow(3, 0, head / 2)?, x.f_narrow(3, head / 2, head / 2)?);
                let rotated = Tensor::f_cat(&[second.f_neg()?, first], 3)?;
                drop(x.f_mul(&cos)?.f_add(&rotated.f_mul(&sin)?)?);
            }
            Ok(())
        })),
    };
    let mut figures = Vec::new();
    measure_line(line, device, scale, &mut figures)?;
    Ok(figures)
}

/// Over a tile of fp32 logits, as the linear cross-entropy makes them; the gradient is rounded to bf16 in place.
fn cross_entropy(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let of_cuda: &[(i64, i64)] = &[(4096, 128_256), (4096, 32_000), (4096, 50_257)];
    let mut figures = Vec::new();
    for &(tokens, vocabulary) in sized(device, scale, [of_cuda, &[(64, 151_936)], &[(4, 32_000)]]) {
        let stride = pass_for(device).row_stride(vocabulary, Kind::Float);
        let tile = Tensor::f_randn([tokens, stride], (Kind::Float, device))?.f_narrow(1, 0, vocabulary)?;
        let labels = Tensor::f_randint(vocabulary, [tokens], (Kind::Int64, device))?;
        let elements = (tokens * vocabulary) as f64;
        let shape = format!("{tokens} × {vocabulary}");
        let mut known = Statistics::new(tokens, false, Wanted::default(), (Kind::Float, device))?;
        let (mut logits, columns, theirs) =
            (tile.shallow_clone(), labels.shallow_clone(), tile.shallow_clone());
        let statistics = Line {
            what: "cross-entropy, statistics",
            shape: shape.clone(),
            bytes: 4.0 * elements,
            ours: Box::new(move |_| {
                let targets = Targets::Columns(&columns);
                pass_for(device).statistics(&mut logits, TileInputs::new(targets), &mut known)
            }),
            libtorch: Some(Box::new(move |_| discard(theirs.f_logsumexp([1].as_slice(), false)))),
        };
        measure_line(statistics, device, scale, &mut figures)?;
        let row = |value: f64| Tensor::f_full([tokens], value, (Kind::Float, device));
        let (maximum, powers, target) = (row(4.0)?, row(1e-3)?, row(-1e-3)?);
        let (mut logits, theirs) = (tile.shallow_clone(), tile);
        let gradient = Line {
            what: "cross-entropy, gradient",
            shape,
            bytes: 6.0 * elements,
            ours: Box::new(move |_| {
                let targets = Targets::Columns(&labels);
                let coefficients =
                    Coefficients { maximum: &maximum, powers: &powers, target: &target, constant: None };
                let inputs = TileInputs::new(targets);
                pass_for(device).gradient_as(&mut logits, inputs, coefficients, KIND).map(drop)
            }),
            libtorch: Some(Box::new(move |_| discard(theirs.f_softmax(-1, Kind::Float)?.f_to_kind(KIND)))),
        };
        measure_line(gradient, device, scale, &mut figures)?;
    }
    Ok(figures)
}

/// bf16 gradients and weights with fp32 masters, over several tensors.
fn adam_w(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (count, side) = sized(device, scale, [(12, 4096), (4, 1024), (4, 128)]);
    let shape = [side, side];
    let state = || -> runtime::Result<Vec<Tensor>> {
        (0..count).map(|_| Ok(Tensor::f_ones(shape, (Kind::Float, device))?)).collect()
    };
    let narrow = || -> runtime::Result<Vec<Tensor>> { (0..count).map(|_| random(&shape, device)).collect() };
    let scalars = || -> runtime::Result<Vec<Tensor>> {
        (0..count).map(|_| Ok(Tensor::f_zeros([] as [i64; 0], (Kind::Float, device))?)).collect()
    };
    let options = optimizer::AdamW::default();
    let (gradients, weights, masters, means, squares) = (narrow()?, narrow()?, state()?, state()?, state()?);
    let (of_theirs, theirs, steps, own_steps) = (
        [shared(&gradients), shared(&weights)],
        [shared(&masters), shared(&means), shared(&squares)],
        scalars()?,
        scalars()?,
    );
    let ours = move |call: usize| -> runtime::Result<()> {
        let all: Vec<AdamTensors<'_>> = (0..gradients.len())
            .map(|index| AdamTensors {
                gradient: &gradients[index],
                master: &masters[index],
                exp_avg: &means[index],
                exp_avg_sq: &squares[index],
                weight: Some(&weights[index]),
            })
            .collect();
        if adam_many(&all, &own_steps, options, true, None, None)? {
            return Ok(());
        }
        let step = AdamStep { step: 1 + call as u64, ..AdamStep::default() };
        all.iter().try_for_each(|one| adam(one, &step))
    };
    let libtorch = move |_: usize| -> runtime::Result<()> {
        let [gradients, weights] = &of_theirs;
        let [params, exp_avgs, exp_avg_sqs] = &theirs;
        let wide: Vec<Tensor> =
            gradients.iter().map(|grad| grad.f_to_kind(Kind::Float)).collect::<Result<_, _>>()?;
        let tensors = optimizer::AdamWTensors { params, grads: &wide, exp_avgs, exp_avg_sqs, steps: &steps };
        optimizer::fused_adamw_(&tensors, options, None)?;
        foreach::copy_(weights, params)
    };
    let line = Line {
        what: "AdamW, bf16 gradient and weight, fp32 master",
        shape: format!("{count} × {side} × {side}"),
        bytes: (count * side * side * 28) as f64,
        ours: Box::new(ours),
        libtorch: Some(Box::new(libtorch)),
    };
    let mut figures = Vec::new();
    measure_line(line, device, scale, &mut figures)?;
    Ok(figures)
}
