//! Padding and time of packing, on one thread.

use dataloading::Result;
use dataloading::packing::{
    Algorithm, PackingConfig, PackingPlan, StreamingBestFit, StreamingConfig, lower_bound, next_fit,
};
use report::{Case, Metric};

use super::synthetic::uniform_lengths;
use super::{repeats, seconds};
use crate::driver::Bench;

/// Tokens of a row, and the longest document.
pub(crate) const CAPACITY: u32 = 512;

/// The wanted fill. On three of five draws of 10,000 lengths no packing at all reaches it: documents above 256
/// tokens have rows of their own, and some dozens more of them than of the others leave rows half empty.
const BAR: f64 = 0.997;

/// How much is packed, or sampled from.
#[derive(clap::Args)]
pub(crate) struct Sizes {
    /// Measure these numbers of documents or samples instead of the scale's
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(100..))]
    sizes: Vec<u32>,
}

impl Sizes {
    /// The given sizes, or else those of the scale.
    pub(crate) fn or(&self, usual: &[usize]) -> Vec<usize> {
        if self.sizes.is_empty() {
            usual.to_vec()
        } else {
            self.sizes.iter().map(|&size| size as usize).collect()
        }
    }
}

/// Measures every packer on every number of documents.
pub(crate) fn run(bench: &mut Bench, sizes: &Sizes) -> anyhow::Result<()> {
    const ALL: [usize; 4] = [10_000, 1_000_000, 10_000_000, 100_000_000];
    let sizes = sizes.or(bench.sized([&ALL[..1], &ALL[..2], &ALL[..3], &ALL]));
    let cases = sizes.into_iter().flat_map(|size| PACKERS.map(|packer| (size, packer)));
    let label = |(size, packer): &(usize, Packer)| format!("{size} documents, {}", packer.name());
    bench.each(cases, label, |bench, (size, packer)| {
        let metrics = measure(packer, size, bench)?;
        bench.put(&Case::new().with("documents", size).with("packer", packer.name()), metrics)
    })
}

/// A packer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packer {
    /// A plan, and all rows written down.
    Plan(Algorithm),
    /// A stream through the default buffer.
    Streaming,
    /// Documents in the given order, a new row when the next does not fit.
    NextFit,
    /// A row for each document.
    OnePerRow,
}

/// All of them.
pub(crate) const PACKERS: [Packer; 5] = [
    Packer::Plan(Algorithm::BestFitDecreasing),
    Packer::Plan(Algorithm::FirstFitDecreasing),
    Packer::Streaming,
    Packer::NextFit,
    Packer::OnePerRow,
];

impl Packer {
    /// The name in records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plan(algorithm) => algorithm.name(),
            Self::Streaming => "streaming best-fit",
            Self::NextFit => "next-fit",
            Self::OnePerRow => "one per row",
        }
    }

    /// Rows, and how many documents were put into them.
    fn pack(self, lengths: &[u32]) -> Result<usize> {
        match self {
            Self::Plan(algorithm) => {
                let plan =
                    PackingPlan::new(lengths, &PackingConfig { algorithm, ..PackingConfig::default() })?;
                Ok(std::hint::black_box(plan.assignment()).offsets.len() - 1)
            }
            Self::Streaming => {
                let mut packer = StreamingBestFit::new(&StreamingConfig::default())?;
                let mut rows = 0;
                for (document, &length) in (0..).zip(lengths) {
                    rows += usize::from(std::hint::black_box(packer.push(document, length)?).is_some());
                }
                while packer.close_row().is_some() {
                    rows += 1;
                }
                Ok(rows)
            }
            Self::NextFit => next_fit(lengths, CAPACITY as usize),
            Self::OnePerRow => Ok(lengths.len()),
        }
    }
}

/// Measures a packer on `n` lengths uniform in `1..=512`: fill over several seeds, time on the first.
fn measure(packer: Packer, n: usize, bench: &Bench) -> Result<Vec<Metric>> {
    let seed = bench.seed;
    let (draws, runs) = if n > 100_000 { (1, 3) } else { (201, repeats(bench)) };
    let (mut fills, mut possible, mut where_possible) = (Vec::new(), Vec::new(), Vec::new());
    let (mut excess, mut over) = (Vec::new(), Vec::new());
    for draw in 0..draws {
        let lengths = uniform_lengths(n, CAPACITY, seed + draw);
        let rows = packer.pack(&lengths)?;
        let tokens: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
        let bound = lower_bound(&lengths, CAPACITY as usize)?;
        let fill = |rows: usize| tokens as f64 / (rows as u64 * u64::from(CAPACITY)) as f64;
        fills.push(fill(rows));
        possible.push(fill(bound));
        if fill(bound) >= BAR {
            where_possible.push(fill(rows));
        }
        excess.push((rows - bound) as f64);
        over.push(rows as f64 / bound as f64);
    }
    let lengths = uniform_lengths(n, CAPACITY, seed);
    let times = seconds(runs, || packer.pack(&lengths));
    let rates: Vec<f64> = times.iter().map(|seconds| n as f64 / seconds).collect();
    Ok(vec![
        Metric::of_samples("fill", "ratio", &fills),
        Metric::of_samples("possible_fill", "ratio", &possible),
        Metric::exact("attainable", "ratio", where_possible.len() as f64 / draws as f64),
        Metric::of_samples("fill_where_possible", "ratio", &where_possible),
        Metric::of_samples("rows_over_bound", "ratio", &over),
        Metric::of_samples("rows_above_bound", "count", &excess),
        Metric::of_samples("pack_seconds", "s", &times),
        Metric::of_samples("documents_per_second", "documents/s", &rates),
    ])
}
