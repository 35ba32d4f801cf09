//! The fused operations of a decoder's block and the chains of libtorch's operators that they replace, in turns. (The norms
//! have their own experiment.)

use std::hint::black_box;
use std::time::Instant;

use anyhow::Context;
use kernels::physical;
use kernels::rope::RotaryTable;
use kernels::swiglu::silu_mul;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::autograd::{self, GradMode, Keep};
use runtime::device::synchronize;
use runtime::memory::{Region, live_bytes};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::cost::{Figures, Part};
use crate::driver::Bench;
use crate::dtype;

/// Batch, sequence, heads of queries, of keys, their width, and the width within the MLP: of Qwen2.5-0.5B and Llama-3-8B, and
/// one that fits the caches.
const SHAPES: [(&str, [i64; 6]); 3] = [
    ("1 × 64, Qwen2.5-0.5B", [1, 64, 14, 2, 64, 4864]),
    ("2 × 512, Qwen2.5-0.5B", [2, 512, 14, 2, 64, 4864]),
    ("1 × 512, Llama-3-8B", [1, 512, 32, 8, 128, 14_336]),
];

pub(crate) fn parts(_: &Bench) -> Vec<Part> {
    vec![
        Part { about: "rotary embedding", run: Box::new(rope) },
        Part { about: "SwiGLU's product", run: Box::new(swiglu) },
    ]
}

type Piece<'a> = &'a dyn Fn(&[Tensor]) -> runtime::Result<Vec<Tensor>>;

/// Two implementations and their inputs.
struct Comparison<'a> {
    what: &'static str,
    ours: Piece<'a>,
    theirs: Piece<'a>,
    /// How often forward and backward must move the bytes of all inputs.
    moves: [f64; 2],
    inputs: Vec<Tensor>,
}

fn rope(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let mut figures = Vec::new();
    for (shape, [batch, sequence, heads, kv_heads, head, _]) in shapes(scale) {
        let table = RotaryTable::new(head, sequence, 1e4, device)?;
        for kind in [Kind::Float, Kind::BFloat16] {
            // transformers' form: cosines and sines of a whole head, in the dtype of q and k, made once for all layers.
            let whole = |index: i64| -> runtime::Result<Tensor> {
                let half = table.values(sequence)?.f_select(1, index)?;
                Ok(Tensor::f_cat(&[&half, &half], 1)?.f_view([1, sequence, 1, head])?.f_to_kind(kind)?)
            };
            let (cos, sin) = (whole(0)?, whole(1)?);
            let theirs = |x: &[Tensor]| {
                let rotated = x.iter().map(|x| {
                    let (first, second) = (x.f_narrow(3, 0, head / 2)?, x.f_narrow(3, head / 2, head / 2)?);
                    let turned = Tensor::f_cat(&[second.f_neg()?, first], 3)?;
                    Ok(x.f_mul(&cos)?.f_add(&turned.f_mul(&sin)?)?)
                });
                rotated.collect()
            };
            let ours = |x: &[Tensor]| {
                let (q, k) = table.rotate(&x[0], &x[1], None)?;
                Ok(vec![q, k])
            };
            let sizes = [[batch, sequence, heads, head], [batch, sequence, kv_heads, head]];
            let inputs = leaves(&sizes, kind, device)?;
            let what = "rotary embedding of q and k";
            let comparison = Comparison { what, ours: &ours, theirs: &theirs, moves: [2.0, 2.0], inputs };
            compare(&comparison, shape, kind, scale, &mut figures)?;
        }
    }
    Ok(figures)
}

fn swiglu(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let mut figures = Vec::new();
    for (shape, [batch, sequence, .., inner]) in shapes(scale) {
        for kind in [Kind::Float, Kind::BFloat16] {
            let ours = |x: &[Tensor]| Ok(vec![silu_mul(&x[0], &x[1])?]);
            let theirs = |x: &[Tensor]| Ok(vec![x[0].f_silu()?.f_mul(&x[1])?]);
            let inputs = leaves(&[[batch, sequence, 1, inner]; 2], kind, device)?;
            // Two inputs and one output of half their size; those inputs and the upstream gradient, and two gradients.
            let what = "SiLU(gate)·up";
            let comparison = Comparison { what, ours: &ours, theirs: &theirs, moves: [1.5, 2.5], inputs };
            compare(&comparison, shape, kind, scale, &mut figures)?;
        }
    }
    Ok(figures)
}

fn shapes(scale: Scale) -> impl Iterator<Item = (&'static str, [i64; 6])> {
    let count = if scale == Scale::Smoke { 1 } else { SHAPES.len() };
    SHAPES.into_iter().take(count)
}

fn leaves(shapes: &[[i64; 4]], kind: Kind, device: Device) -> runtime::Result<Vec<Tensor>> {
    let mut generator = Generator::new(0)?;
    let leaf = |shape: &[i64; 4]| {
        let x = generator.normal(shape, (Kind::Float, Device::Cpu))?.f_to_device(device)?.f_to_kind(kind)?;
        Ok(x.f_set_requires_grad(true)?)
    };
    shapes.iter().map(leaf).collect()
}

/// Runs one forward without a graph, or forward and backward to every input. The caller owns the upstream gradients, so neither
/// side writes over them.
fn step(piece: Piece, inputs: &[Tensor], upstream: &[Tensor], backward: bool) -> runtime::Result<()> {
    if backward {
        let outputs = piece(inputs)?;
        let grads: Vec<Option<&Tensor>> = upstream.iter().map(Some).collect();
        let references = (outputs.iter().collect::<Vec<_>>(), inputs.iter().collect::<Vec<_>>());
        let _gradients = black_box(autograd::grad(&references.0, &grads, &references.1, Keep::default())?);
    } else {
        let _no_grad = GradMode::off();
        let _outputs = black_box(piece(inputs)?);
    }
    synchronize(inputs[0].device())
}

/// Bytes that are held between forward and backward beside the outputs, where nothing else holds the inputs, as where they are
/// the outputs of projections; and the peak of forward above its inputs.
fn memory(piece: Piece, inputs: &[Tensor]) -> anyhow::Result<(f64, f64)> {
    let device = inputs[0].device();
    let before = live_bytes(device)?;
    let fresh: Vec<Tensor> = inputs.iter().map(Tensor::f_neg).collect::<Result<_, _>>()?;
    let region = Region::start(device)?;
    let outputs = piece(&fresh)?;
    let peak = region.finish()?.peak_above_start();
    drop(fresh);
    let bytes: usize = outputs.iter().map(|y| y.numel() * y.kind().elt_size_in_bytes()).sum();
    let kept = live_bytes(device)? as f64 - before as f64 - bytes as f64;
    Ok((kept, peak as f64))
}

fn compare(
    comparison: &Comparison,
    shape: &str,
    kind: Kind,
    scale: Scale,
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let Comparison { what, ours, theirs, moves, inputs } = comparison;
    let device = inputs[0].device();
    let copy = physical::copy_bandwidth(device)?.rate().context("a copy has a rate")?;
    let upstream = ours(inputs)?;
    let upstream: Vec<Tensor> = upstream.iter().map(|y| y.f_detach()).collect::<Result<_, _>>()?;
    let all: usize = inputs.iter().map(|x| x.numel() * x.kind().elt_size_in_bytes()).sum();
    let case = |part: &str| {
        Case::new()
            .with("what", *what)
            .with("dtype", dtype::name(kind))
            .with("shape", shape)
            .with("part", part)
    };
    let budget = if scale == Scale::Smoke { 0.05 } else { 0.3 };
    for (part, backward, moved) in
        [("forward", false, moves[0]), ("forward + backward", true, moves[0] + moves[1])]
    {
        let [mine, eager, ratios] = in_turns(
            budget,
            || step(ours, inputs, &upstream, backward),
            || step(theirs, inputs, &upstream, backward),
        )?;
        let bytes = all as f64 * moved;
        let shares: Vec<f64> = mine.iter().map(|seconds| bytes / seconds / copy).collect();
        for metric in [
            Metric::of_samples("seconds", "s", &mine),
            Metric::of_samples("eager_seconds", "s", &eager),
            Metric::of_samples("time_vs_eager", "ratio", &ratios),
            Metric::exact("bytes_moved", "B", bytes),
            Metric::of_samples("bandwidth_share", "ratio", &shares),
        ] {
            figures.push((case(part), metric));
        }
    }
    let (of_ours, of_theirs) = (memory(ours, inputs)?, memory(theirs, inputs)?);
    for metric in [
        Metric::exact("held_bytes", "B", of_ours.0),
        Metric::exact("eager_held_bytes", "B", of_theirs.0),
        Metric::exact("forward_peak_bytes", "B", of_ours.1),
        Metric::exact("eager_forward_peak_bytes", "B", of_theirs.1),
    ] {
        figures.push((case("forward + backward"), metric));
    }
    Ok(())
}

/// Seconds of both sides and their ratio, measured alternately; the order changes from round to round.
fn in_turns(
    budget: f64,
    mut ours: impl FnMut() -> runtime::Result<()>,
    mut theirs: impl FnMut() -> runtime::Result<()>,
) -> runtime::Result<[Vec<f64>; 3]> {
    fn seconds(count: u32, work: &mut dyn FnMut() -> runtime::Result<()>) -> runtime::Result<f64> {
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
