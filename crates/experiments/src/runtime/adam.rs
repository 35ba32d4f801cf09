//! A step of Adam in one pass beside libtorch's fused kernel, with and without the casts that it needs, in turns.

use std::time::Instant;

use anyhow::Context;
use kernels::adam::{AdamStep, AdamTensors, adam, bytes_moved};
use kernels::physical;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::ops::optimizer::{AdamW, AdamWTensors, fused_adamw_};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};

use super::cost::{Figures, Part};
use crate::driver::Bench;

pub(crate) fn parts(bench: &Bench, parameters: Option<i64>) -> Vec<Part> {
    let (default, rounds) = bench.sized([(1 << 16, 5), (16 << 20, 11), (64 << 20, 11), (64 << 20, 31)]);
    let count = parameters.unwrap_or(default);
    let run = move |device: Device, _: Scale| steps(device, count, rounds);
    vec![Part { about: "Adam", run: Box::new(run) }]
}

/// The parameters of both sides: bf16 weights and gradients, and the same gradients in fp32.
struct Model {
    gradient: Tensor,
    wide_gradient: Tensor,
    weight: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    /// Steps done, as libtorch counts them.
    count: Tensor,
}

impl Model {
    fn new(parameters: i64) -> anyhow::Result<Self> {
        let mut generator = Generator::new(0)?;
        let master = generator.normal(&[parameters], kind::FLOAT_CPU)?;
        let gradient = generator.normal(&[parameters], kind::FLOAT_CPU)?.f_to_kind(Kind::BFloat16)?;
        Ok(Self {
            wide_gradient: gradient.f_to_kind(Kind::Float)?,
            gradient,
            weight: master.f_to_kind(Kind::BFloat16)?,
            exp_avg: master.f_zeros_like()?,
            exp_avg_sq: master.f_zeros_like()?,
            master,
            count: Tensor::f_zeros([] as [i64; 0], kind::FLOAT_CPU)?,
        })
    }

    fn tensors(&self, mixed: bool) -> AdamTensors<'_> {
        AdamTensors {
            gradient: if mixed { &self.gradient } else { &self.wide_gradient },
            master: &self.master,
            exp_avg: &self.exp_avg,
            exp_avg_sq: &self.exp_avg_sq,
            weight: mixed.then_some(&self.weight),
        }
    }

    fn libtorch(&self, gradient: &Tensor) -> runtime::Result<()> {
        let tensors = AdamWTensors {
            params: &[&self.master],
            grads: &[gradient],
            exp_avgs: &[&self.exp_avg],
            exp_avg_sqs: &[&self.exp_avg_sq],
            steps: &[&self.count],
        };
        fused_adamw_(&tensors, AdamW::default(), None)
    }
}

/// How the gradient is cast for libtorch's kernel.
#[derive(Clone, Copy, PartialEq)]
enum Casts {
    None,
    Buffer,
    Fresh,
}

const CASES: [(&str, &str, Casts); 3] = [
    ("fp32", "_fused_adamw_", Casts::None),
    ("mixed", "casts into a buffer", Casts::Buffer),
    ("mixed", "casts into a new tensor", Casts::Fresh),
];

fn theirs(model: &mut Model, casts: Casts) -> runtime::Result<()> {
    if casts == Casts::None {
        return model.libtorch(&model.wide_gradient);
    }
    if casts == Casts::Buffer {
        model.wide_gradient.f_copy_(&model.gradient)?;
        model.libtorch(&model.wide_gradient)?;
    } else {
        model.libtorch(&model.gradient.f_to_kind(Kind::Float)?)?;
    }
    Ok(model.weight.f_copy_(&model.master)?)
}

fn steps(device: Device, parameters: i64, rounds: usize) -> anyhow::Result<Figures> {
    let mut figures = Vec::new();
    let case = |precision: &str, beside: &str| {
        Case::new().with("precision", precision).with("baseline", beside).with("parameters", parameters)
    };
    if device != Device::Cpu {
        let metric = || Metric::not_measured("speed", "ratio", "a pass of the CPU");
        return Ok(CASES.iter().map(|(precision, beside, _)| (case(precision, beside), metric())).collect());
    }
    // The fresh tensor is the allocator's kept block after the first step, as in a training loop.
    runtime::memory::track_cpu()?;
    let copy = physical::copy_bandwidth(device)?.rate().context("a copy has a rate")?;
    let mut model = Model::new(parameters)?;
    // A step of a small model is repeated within a turn, so that the clock does not count.
    let repeats = ((8 << 20) / parameters).clamp(1, 1000);
    let mut number = 0;
    for (precision, beside, casts) in CASES {
        let mixed = casts != Casts::None;
        let mut seconds = |of_ours: bool| -> anyhow::Result<f64> {
            let start = Instant::now();
            for _ in 0..repeats {
                number += 1;
                if of_ours {
                    adam(&model.tensors(mixed), &AdamStep { step: number, ..AdamStep::default() })?;
                } else {
                    theirs(&mut model, casts)?;
                }
            }
            Ok(start.elapsed().as_secs_f64() / repeats as f64)
        };
        let mut samples = [const { Vec::new() }; 3];
        for round in 0..=rounds {
            let first = seconds(round % 2 == 0)?;
            let second = seconds(round % 2 == 1)?;
            let (ours, libtorch) = if round % 2 == 0 { (first, second) } else { (second, first) };
            // The first round touches memory for the first time.
            if round > 0 {
                samples[0].push(ours);
                samples[1].push(libtorch);
                samples[2].push(libtorch / ours);
            }
        }
        let bytes = bytes_moved(&model.tensors(mixed)) as f64;
        // The cast reads 2 bytes and writes 4, the copy reads 4 and writes 2, and the step reads a gradient of 4.
        let of_libtorch = if mixed { 40.0 * parameters as f64 } else { bytes };
        let share = |bytes: f64, samples: &[f64]| -> Vec<f64> {
            samples.iter().map(|seconds| bytes / seconds / copy).collect()
        };
        for metric in [
            Metric::of_samples("seconds", "s", &samples[0]),
            Metric::of_samples("libtorch_seconds", "s", &samples[1]),
            Metric::of_samples("speed", "ratio", &samples[2]),
            Metric::exact("bytes_moved", "B", bytes),
            Metric::exact("libtorch_bytes_moved", "B", of_libtorch),
            Metric::of_samples("bandwidth_share", "ratio", &share(bytes, &samples[0])),
            Metric::of_samples("libtorch_bandwidth_share", "ratio", &share(of_libtorch, &samples[1])),
        ] {
            figures.push((case(precision, beside), metric));
        }
    }
    Ok(figures)
}
