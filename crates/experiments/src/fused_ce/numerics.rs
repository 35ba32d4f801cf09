//! `fused-ce numerics`: how far each implementation is from the exact loss and gradients.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use tch::Kind;

use super::baselines::Implementation;
use super::exact::{Exact, TENSORS};
use super::shapes::Shape;
use crate::dtype;

/// Odd sizes, so that no kernel has only whole vectors, and enough tokens for many chunks.
const SHAPE: Shape = Shape { tokens: 509, hidden: 251, vocabulary: 4093, kind: Kind::Float, ignored: 0.25 };
/// Tokens of a chunk: all of them at once, down to two.
const CHUNKS: [i64; 4] = [509, 64, 8, 2];
/// What fp32 sums in another order may differ by, relative to the result: four roundings. Low precision is held to libtorch's own
/// error without any.
const ORDER_OF_FP32: f64 = 1.0 / (1 << 22) as f64;

#[derive(clap::Args)]
pub(crate) struct Numerics {
    /// How many seeds, each with its own inputs, where `--seeds` does not say: 1, 3 or 10
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Seeds, each with its own inputs
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Numerics) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.scale)?;
    let seeds = arguments.seeds.unwrap_or(match arguments.scale {
        Scale::Smoke => 1,
        Scale::Laptop | Scale::Full => 3,
        Scale::Paper => 10,
    });
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    let mut progress = Progress::new(seeds * kinds.len() as u64);
    for kind in kinds {
        let vocabulary = if arguments.scale == Scale::Smoke { 409 } else { SHAPE.vocabulary };
        let shape = Shape { kind, vocabulary, ..SHAPE };
        let mut cases: Vec<(Implementation, Option<i64>)> = vec![(Implementation::Naive, None)];
        for implementation in [
            Implementation::ChunkedRecompute,
            Implementation::GradInForward,
            Implementation::LinearCrossEntropy,
            Implementation::RoundedGradient,
        ] {
            cases.extend(CHUNKS.map(|chunk| (implementation, Some(chunk))));
        }
        let mut errors = vec![Vec::new(); cases.len()];
        let mut zeros = Vec::new();
        for seed in 0..seeds {
            progress.message(&format!("{} inputs, seed {seed}", dtype::name(kind)));
            let exact = Exact::new(&shape, common.seed + seed, device)?;
            zeros.push(exact.zeros_under_the_assignments_tolerance()?);
            for ((implementation, chunk), errors) in cases.iter().zip(&mut errors) {
                errors.push(exact.errors(*implementation, *chunk)?);
            }
            progress.step();
        }
        for ((implementation, chunk), of_case) in cases.iter().zip(&errors) {
            for (index, tensor) in TENSORS.into_iter().enumerate() {
                let case = Case::new()
                    .with("dtype", dtype::name(kind))
                    .with("method", implementation.name())
                    .with("chunk", chunk.unwrap_or(shape.tokens))
                    .with("tensor", tensor);
                let found: Vec<f64> = of_case.iter().map(|errors| errors[index]).collect();
                let over = |other: &[[f64; 3]], more: f64| -> Vec<f64> {
                    of_case.iter().zip(other).map(|(own, other)| own[index] / (other[index] + more)).collect()
                };
                let allowance = if kind == Kind::Float { ORDER_OF_FP32 } else { 0.0 };
                let mut metrics = vec![Metric::of_samples("relative_error", "exact", &found)];
                if tensor != "loss" {
                    // The loss is one number, whose error may be anything down to 0 by chance.
                    metrics.push(Metric::of_samples("error_vs_naive", "ratio", &over(&errors[0], 0.0)));
                    metrics.push(Metric::of_samples(
                        "error_vs_allowed",
                        "ratio",
                        &over(&errors[0], allowance),
                    ));
                    let unchunked = cases.iter().position(|case| *case == (*implementation, Some(CHUNKS[0])));
                    if let Some(unchunked) = unchunked {
                        let ratios = over(&errors[unchunked], 0.0);
                        metrics.push(Metric::of_samples("error_vs_one_chunk", "ratio", &ratios));
                    }
                    let share: Vec<f64> = zeros.iter().map(|zeros| zeros[index - 1]).collect();
                    metrics.push(Metric::of_samples("gradient_over_tolerance", "ratio", &share));
                }
                sink.put("fused-ce-numerics", &case, metrics)?;
            }
        }
    }
    Ok(())
}
