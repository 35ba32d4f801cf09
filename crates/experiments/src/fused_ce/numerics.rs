//! `fused-ce numerics`: how far each implementation is from the exact loss and gradients.

use report::cli::Scale;
use report::{Case, Metric};
use tch::Kind;

use super::baselines::Implementation;
use super::exact::{Exact, TENSORS};
use super::shapes::Shape;
use crate::driver::Bench;
use crate::dtype;

/// Odd sizes, so that no kernel has only whole vectors, and enough tokens for many chunks.
const SHAPE: Shape = Shape { tokens: 509, hidden: 251, vocabulary: 4093, kind: Kind::Float, ignored: 0.25 };
/// Tokens of a chunk: all of them at once, down to two.
const CHUNKS: [i64; 4] = [509, 64, 8, 2];
/// The relative difference that another order of fp32 sums may make: four roundings. Low precision is compared with libtorch's own
/// error without any.
const ORDER_OF_FP32: f64 = 1.0 / (1 << 22) as f64;

#[derive(clap::Args)]
pub(crate) struct Numerics {
    /// Seeds, each with its own inputs
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Numerics) -> anyhow::Result<()> {
    let device = bench.device;
    let seeds = arguments.seeds.unwrap_or(bench.sized([1, 3, 3, 10]));
    let vocabulary = if bench.scale == Scale::Smoke { 409 } else { SHAPE.vocabulary };
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    let inputs = kinds.into_iter().flat_map(|kind| (0..seeds).map(move |seed| (kind, seed)));
    let compared = compared();
    let mut errors = vec![Vec::new(); compared.len()];
    let mut zeros = Vec::new();
    let label = |(kind, seed): &(Kind, u64)| format!("{} inputs, seed {seed}", dtype::name(*kind));
    bench.each(inputs, label, |bench, (kind, seed)| {
        let shape = Shape { kind, vocabulary, ..SHAPE };
        if seed == 0 {
            zeros.clear();
            errors.iter_mut().for_each(Vec::clear);
        }
        let exact = Exact::new(&shape, bench.seed + seed, device)?;
        zeros.push(exact.zeros_under_the_assignments_tolerance()?);
        for ((implementation, chunk), errors) in compared.iter().zip(&mut errors) {
            errors.push(exact.errors(*implementation, *chunk)?);
        }
        if seed + 1 < seeds {
            return Ok(());
        }
        for ((implementation, chunk), by_seed) in compared.iter().zip(&errors) {
            // The same implementation with all tokens in one chunk.
            let unchunked = compared.iter().position(|case| *case == (*implementation, Some(CHUNKS[0])));
            let unchunked = unchunked.map(|index| &errors[index][..]);
            for (index, tensor) in TENSORS.into_iter().enumerate() {
                let case = Case::new()
                    .with("dtype", dtype::name(kind))
                    .with("method", implementation.name())
                    .with("chunk", chunk.unwrap_or(shape.tokens))
                    .with("tensor", tensor);
                let mut metrics = errors_of(index, kind, by_seed, &errors[0], unchunked);
                if tensor != "loss" {
                    let share: Vec<f64> = zeros.iter().map(|zeros| zeros[index - 1]).collect();
                    metrics.push(Metric::of_samples("gradient_over_tolerance", "ratio", &share));
                }
                bench.put(&case, metrics)?;
            }
        }
        Ok(())
    })
}

/// The compared implementations, each with the tokens of its chunks. The first has no chunks.
fn compared() -> Vec<(Implementation, Option<i64>)> {
    let chunked = [
        Implementation::ChunkedRecompute,
        Implementation::GradInForward,
        Implementation::LinearCrossEntropy,
        Implementation::RoundedGradient,
    ];
    let chunked = chunked.into_iter().flat_map(|one| CHUNKS.map(|chunk| (one, Some(chunk))));
    std::iter::once((Implementation::Naive, None)).chain(chunked).collect()
}

/// The error of one tensor over all seeds, and, of a gradient, over those of the naive implementation and of one chunk. The loss is one
/// number, whose error may be anything down to 0 by chance.
fn errors_of(
    index: usize,
    kind: Kind,
    by_seed: &[[f64; 3]],
    naive: &[[f64; 3]],
    unchunked: Option<&[[f64; 3]]>,
) -> Vec<Metric> {
    let errors: Vec<f64> = by_seed.iter().map(|errors| errors[index]).collect();
    let over = |name: &str, others: &[[f64; 3]], allowance: f64| {
        let ratios: Vec<f64> =
            errors.iter().zip(others).map(|(error, other)| error / (other[index] + allowance)).collect();
        Metric::of_samples(name, "ratio", &ratios)
    };
    let mut metrics = vec![Metric::of_samples("relative_error", "exact", &errors)];
    if TENSORS[index] != "loss" {
        let allowance = if kind == Kind::Float { ORDER_OF_FP32 } else { 0.0 };
        metrics.push(over("error_vs_naive", naive, 0.0));
        metrics.push(over("error_vs_allowed", naive, allowance));
        metrics.extend(unchunked.map(|unchunked| over("error_vs_one_chunk", unchunked, 0.0)));
    }
    metrics
}
