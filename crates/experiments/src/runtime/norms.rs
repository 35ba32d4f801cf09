//! The fused norms and libtorch's own operators, in turns.

use std::sync::Mutex;
use std::time::Instant;

use anyhow::Context;
use kernels::norm::{Keep, Options, layer_norm, rms_norm};
use kernels::physical;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::autograd::{self, Backward, Forward, Function};
use runtime::device::synchronize;
use runtime::memory::{Region, live_bytes};
use runtime::ops;
use tch::{Device, Kind, Tensor};

use super::cost::{Figures, Part};
use crate::driver::Bench;
use crate::dtype;

const SHAPES: [(i64, i64); 4] = [(4096, 256), (4096, 768), (2048, 2048), (1024, 4096)];
const EPS: f64 = 1e-5;

pub(crate) fn parts(_: &Bench) -> Vec<Part> {
    vec![Part { about: "norms", run: Box::new(norms) }]
}

/// Takes a norm's output, and gives a ready gradient away in backward, as a product's backward does.
struct Follower(Mutex<Option<Tensor>>);

impl Function for Follower {
    fn forward(&mut self, _: &mut Forward, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
        Ok(vec![Tensor::f_zeros([], (Kind::Float, inputs[0].device()))?])
    }

    fn backward(&self, _: &mut Backward, _: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
        Ok(vec![self.0.lock().ok().and_then(|mut gradient| gradient.take())])
    }
}

type Norm<'a> = &'a dyn Fn(&Tensor) -> runtime::Result<Tensor>;

/// Seconds of forward, and of forward and backward.
fn step(
    leaf: &Tensor,
    upstream: &Tensor,
    parameters: [&Tensor; 2],
    norm: Norm,
) -> anyhow::Result<(f64, f64)> {
    let gradient = upstream.f_add_scalar(0.0)?;
    for tensor in [leaf, parameters[0], parameters[1]] {
        autograd::set_grad(tensor, None)?;
    }
    let device = leaf.device();
    synchronize(device)?;
    let start = Instant::now();
    let y = norm(leaf)?;
    synchronize(device)?;
    let forward = start.elapsed().as_secs_f64();
    let [end] = autograd::apply(Follower(Mutex::new(Some(gradient))), &[&y])?;
    drop(y);
    autograd::backward(&[&end])?;
    synchronize(device)?;
    Ok((forward, start.elapsed().as_secs_f64()))
}

/// Bytes held between forward and backward beside y, where nothing else holds x; and the peak of forward and backward.
fn memory(leaf: &Tensor, upstream: &Tensor, norm: Norm) -> anyhow::Result<(f64, f64)> {
    let device = leaf.device();
    let before = live_bytes(device)?;
    let region = Region::start(device)?;
    let y = norm(&leaf.f_neg()?)?;
    let of_y = y.numel() * y.kind().elt_size_in_bytes();
    let kept = live_bytes(device)? - before - of_y as u64;
    let gradient = upstream.f_add_scalar(0.0)?;
    let [end] = autograd::apply(Follower(Mutex::new(Some(gradient))), &[&y])?;
    drop(y);
    autograd::backward(&[&end])?;
    Ok((kept as f64, region.finish()?.peak_above_start() as f64))
}

fn norms(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (shapes, rounds) = if scale == Scale::Smoke { (&SHAPES[..1], 3) } else { (&SHAPES[..], 9) };
    let copy = physical::copy_bandwidth(device)?.rate().context("a copy has a rate")?;
    let mut figures = Vec::new();
    for &(tokens, width) in shapes {
        for kind in [Kind::Float, Kind::BFloat16] {
            let ones = |size: &[i64]| Tensor::f_ones(size, (kind, device));
            let leaf = Tensor::f_randn([tokens, width], (kind, device))?.f_set_requires_grad(true)?;
            let upstream = Tensor::f_randn([tokens, width], (kind, device))?;
            let weight = ones(&[width])?.f_set_requires_grad(true)?;
            let bias = ones(&[width])?.f_zeros_like()?.f_set_requires_grad(true)?;
            let (w, b) = (Some(&weight), Some(&bias));
            for what in ["layer norm", "RMS norm"] {
                let layer = what == "layer norm";
                let ours = |keep: Keep, x: &Tensor| {
                    let options = Options { eps: EPS, keep, output: None };
                    if layer { layer_norm(x, w, b, options) } else { rms_norm(x, w, options) }
                };
                let theirs = |x: &Tensor| {
                    if layer {
                        return Ok(x.f_layer_norm([width], w, b, EPS, false)?);
                    }
                    Ok(ops::norm::fused_rms_norm(x, &[width], w, Some(EPS))?.0)
                };
                let (input, output) = (|x: &Tensor| ours(Keep::Input, x), |x: &Tensor| ours(Keep::Output, x));
                let sides: [(&str, Norm); 3] =
                    [("libtorch", &theirs), ("input", &input), ("output", &output)];
                let mut times = [const { Vec::new() }; 3];
                for round in 0..=rounds {
                    for turn in 0..3 {
                        let side = (round + turn) % 3;
                        let time = step(&leaf, &upstream, [&weight, &bias], sides[side].1)?;
                        if round > 0 {
                            times[side].push(time);
                        }
                    }
                }
                let of_theirs = memory(&leaf, &upstream, &theirs)?;
                // x and y; what was kept, the upstream gradient, and the input's gradient.
                let bytes = (5 * tokens * width) as f64 * kind.elt_size_in_bytes() as f64;
                for (side, &(keep, norm)) in sides.iter().enumerate().skip(1) {
                    let case = || {
                        Case::new()
                            .with("what", what)
                            .with("dtype", dtype::name(kind))
                            .with("shape", format!("{tokens} × {width}"))
                            .with("keep", keep)
                    };
                    let memories = [memory(&leaf, &upstream, norm)?, of_theirs];
                    let metrics = beside([&times[side], &times[0]], memories, bytes / copy);
                    figures.extend(metrics.into_iter().map(|metric| (case(), metric)));
                }
            }
        }
    }
    Ok(figures)
}

/// The figures of a norm beside libtorch's, from the seconds of forward and of both passes in each round, and from the bytes that are
/// held and those of the peak. A copy of as many bytes takes `copied` seconds.
fn beside(
    [ours, theirs]: [&[(f64, f64)]; 2],
    [(kept, peak), (libtorch_kept, libtorch_peak)]: [(f64, f64); 2],
    copied: f64,
) -> Vec<Metric> {
    type Value = fn(&(f64, f64)) -> f64;
    let (forward, step): (Value, Value) = (|times| times.0, |times| times.1);
    let seconds = |name: &str, times: &[(f64, f64)], value: Value| {
        Metric::of_samples(name, "s", &times.iter().map(value).collect::<Vec<f64>>())
    };
    let ratio = |name: &str, value: Value| {
        let ratios = ours.iter().zip(theirs).map(|(ours, theirs)| value(ours) / value(theirs));
        Metric::of_samples(name, "ratio", &ratios.collect::<Vec<f64>>())
    };
    let shares: Vec<f64> = ours.iter().map(|times| copied / step(times)).collect();
    vec![
        seconds("forward_seconds", ours, forward),
        seconds("libtorch_forward_seconds", theirs, forward),
        ratio("forward_ratio", forward),
        seconds("step_seconds", ours, step),
        seconds("libtorch_step_seconds", theirs, step),
        ratio("step_ratio", step),
        Metric::of_samples("share_of_copy_rate", "ratio", &shares),
        Metric::exact("held_bytes", "B", kept),
        Metric::exact("libtorch_held_bytes", "B", libtorch_kept),
        Metric::exact("held_ratio", "ratio", kept / libtorch_kept),
        Metric::exact("peak_bytes", "B", peak),
        Metric::exact("libtorch_peak_bytes", "B", libtorch_peak),
    ]
}
