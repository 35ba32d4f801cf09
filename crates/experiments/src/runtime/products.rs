//! Matrix products of training and generation: what `kernels::matmul` chooses on this processor, and what it could choose.

use std::time::Instant;

use kernels::matmul::mm_into;
use report::cli::Scale;
use report::{Case, Metric};
use runtime::device::synchronize;
use tch::{Device, Kind, Tensor};

use super::cost::{Figures, Part};
use crate::driver::Bench;
use crate::dtype;

/// Rows and columns of weights of Qwen2.5-0.5B, with a slice of its head, and of Llama-3-8B.
const WEIGHTS: [(&str, i64, i64); 6] = [
    ("0.5B, query", 896, 896),
    ("0.5B, up", 4864, 896),
    ("0.5B, down", 896, 4864),
    ("0.5B, 8192 rows of the head", 8192, 896),
    ("8B, query", 4096, 4096),
    ("8B, up", 14_336, 4096),
];
/// Multiplications beyond which libtorch's fp16 product takes seconds on a processor without instructions for it.
const FP16_LIMIT: i64 = 1 << 28;

pub(crate) fn parts(_: &Bench) -> Vec<Part> {
    vec![Part { about: "matrix products", run: Box::new(products) }]
}

fn products(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let (weights, tokens, effort): (_, &[i64], _) = match scale {
        Scale::Smoke => (&WEIGHTS[..1], &[64], Effort { rounds: 1, flops: 1e8 }),
        Scale::Laptop => (&WEIGHTS[1..2], &[512], Effort { rounds: 5, ..Effort::USUAL }),
        Scale::Full => (&WEIGHTS[..4], &[128, 512, 2048], Effort::USUAL),
        Scale::Paper => (&WEIGHTS[..], &[128, 512, 2048, 8192], Effort::USUAL),
    };
    let mut figures = Vec::new();
    for &(weight, out, width) in weights {
        for &tokens in tokens {
            for pass in Pass::ALL {
                let case = |kind| {
                    Case::new()
                        .with("weight", weight)
                        .with("tokens", tokens)
                        .with("pass", pass.name())
                        .with("dtype", dtype::name(kind))
                };
                for (kind, metric) in pass.measure([tokens, out, width], device, &effort)? {
                    figures.push((case(kind), metric));
                }
            }
        }
    }
    Ok(figures)
}

/// How long a product is measured.
struct Effort {
    rounds: usize,
    /// Floating-point operations of a sample, which repeats the product until it has as many, at most 100 times.
    flops: f64,
}

impl Effort {
    /// A sample takes about ten milliseconds at the rate of a processor.
    const USUAL: Self = Self { rounds: 9, flops: 2e9 };
}

/// The three products of a linear layer `y [tokens, out] = x [tokens, in]·Wᵀ`.
#[derive(Clone, Copy, PartialEq)]
enum Pass {
    Forward,
    InputGradient,
    WeightGradient,
}

impl Pass {
    const ALL: [Self; 3] = [Self::Forward, Self::InputGradient, Self::WeightGradient];

    fn name(self) -> &'static str {
        match self {
            Self::Forward => "y = x·Wᵀ",
            Self::InputGradient => "dx = dy·W",
            Self::WeightGradient => "dW = dyᵀ·x",
        }
    }

    /// The operands as the product sees them, `[m, k]` and `[k, n]`.
    fn operands(
        self,
        [tokens, out, width]: [i64; 3],
        options: (Kind, Device),
    ) -> anyhow::Result<(Tensor, Tensor)> {
        let random = |rows: i64, columns: i64| -> anyhow::Result<Tensor> {
            Ok(Tensor::f_randn([rows, columns], (Kind::Float, options.1))?.f_to_kind(options.0)?)
        };
        let transposed = |tensor: anyhow::Result<Tensor>| -> anyhow::Result<Tensor> { Ok(tensor?.f_tr()?) };
        Ok(match self {
            Self::Forward => (random(tokens, width)?, transposed(random(out, width))?),
            Self::InputGradient => (random(tokens, out)?, random(out, width)?),
            Self::WeightGradient => (transposed(random(tokens, out))?, random(tokens, width)?),
        })
    }

    /// Measures every candidate of every dtype once per round, so that a disturbance does not hit one of them alone.
    fn measure(
        self,
        sizes: [i64; 3],
        device: Device,
        effort: &Effort,
    ) -> anyhow::Result<Vec<(Kind, Metric)>> {
        let kinds: &[Kind] = if device == Device::Cpu {
            &[Kind::Float, Kind::BFloat16, Kind::Half]
        } else {
            &[Kind::BFloat16]
        };
        let mut candidates = Vec::new();
        for &kind in kinds {
            candidates.extend(self.candidates(sizes, (kind, device))?);
        }
        let work = 2.0 * sizes.iter().product::<i64>() as f64;
        let repeats = (effort.flops / work).ceil().clamp(1.0, 100.0) as u32;
        let mut seconds = vec![Vec::new(); candidates.len()];
        for round in 0..=effort.rounds {
            for (candidate, seconds) in candidates.iter_mut().zip(&mut seconds) {
                // The first run brings as many operands into the cache as fit.
                (candidate.run)()?;
                synchronize(device)?;
                let start = Instant::now();
                for _ in 0..repeats {
                    (candidate.run)()?;
                }
                synchronize(device)?;
                if round > 0 {
                    seconds.push(start.elapsed().as_secs_f64() / f64::from(repeats));
                }
            }
        }
        let of = |kind: Kind, name: &str| {
            candidates.iter().position(|candidate| candidate.kind == kind && candidate.name == name)
        };
        let over = |a: usize, b: usize| -> Vec<f64> {
            seconds[a].iter().zip(&seconds[b]).map(|(a, b)| a / b).collect()
        };
        let mut metrics = Vec::new();
        for (candidate, seconds) in candidates.iter().zip(&seconds) {
            let rates: Vec<f64> = seconds.iter().map(|seconds| work / seconds).collect();
            metrics.push((candidate.kind, Metric::of_samples(candidate.name, "FLOP/s", &rates)));
        }
        for &kind in kinds {
            let Some(chosen) = of(kind, CHOSEN) else { continue };
            let median = |candidate: usize| {
                report::statistics::summarize(&seconds[candidate])
                    .map_or(f64::INFINITY, |summary| summary.median)
            };
            // A product into fp32 is another one.
            let of_kind = (0..candidates.len())
                .filter(|&other| candidates[other].kind == kind && candidates[other].name != INTO_FP32);
            let fastest = of_kind.min_by(|&a, &b| median(a).total_cmp(&median(b))).unwrap_or(chosen);
            let best = over(chosen, fastest);
            metrics.push((kind, Metric::of_samples("over_fastest", "ratio", &best)));
            if let Some(single) = of(Kind::Float, CHOSEN).filter(|_| kind != Kind::Float) {
                metrics.push((kind, Metric::of_samples("over_fp32", "ratio", &over(chosen, single))));
                if let Some(wide) = of(kind, INTO_FP32) {
                    metrics.push((
                        kind,
                        Metric::of_samples("into_fp32_over_fp32", "ratio", &over(wide, single)),
                    ));
                }
            }
        }
        Ok(metrics)
    }

    fn candidates(self, sizes: [i64; 3], options: (Kind, Device)) -> anyhow::Result<Vec<Candidate>> {
        let (kind, device) = options;
        let (a, b) = self.operands(sizes, options)?;
        let result = |kind| Tensor::f_empty([a.size()[0], b.size()[1]], (kind, device));
        let copies = || (a.shallow_clone(), b.shallow_clone());
        let mut candidates = Vec::new();
        let mut add = |name, run: Box<dyn FnMut() -> anyhow::Result<()>>| {
            candidates.push(Candidate { kind, name, run })
        };

        let ((left, right), mut out) = (copies(), result(kind)?);
        add(CHOSEN, Box::new(move || Ok(mm_into(&mut out, &left, &right, false)?)));
        if kind != Kind::Half || device.is_cuda() || sizes.iter().product::<i64>() <= FP16_LIMIT {
            let ((left, right), out) = (copies(), result(kind)?);
            let run = move || {
                let _product = left.f_mm_out(&out, &right)?;
                Ok(())
            };
            add("libtorch", Box::new(run));
        }
        if device.is_cuda() {
            return Ok(candidates);
        }
        if kind != Kind::Float {
            let ((left, right), mut out) = (copies(), result(kind)?);
            let cast = move || {
                let (left, right) = (left.f_to_kind(Kind::Float)?, right.f_to_kind(Kind::Float)?);
                let mut wide = Tensor::f_empty(out.size(), (Kind::Float, device))?;
                mm_into(&mut wide, &left, &right, false)?;
                out.f_copy_(&wide)?;
                Ok(())
            };
            add("cast_to_fp32", Box::new(cast));
            let ((left, right), mut out) = (copies(), result(Kind::Float)?);
            add(INTO_FP32, Box::new(move || Ok(mm_into(&mut out, &left, &right, false)?)));
        }
        Ok(candidates)
    }
}

/// The implementation that `kernels::matmul` chooses.
const CHOSEN: &str = "chosen";
/// The implementation that `kernels::matmul` chooses for an output in fp32, as sums of gradients need.
const INTO_FP32: &str = "into_fp32";

/// An implementation of a product.
struct Candidate {
    kind: Kind,
    name: &'static str,
    run: Box<dyn FnMut() -> anyhow::Result<()>>,
}
