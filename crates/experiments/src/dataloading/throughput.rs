//! Tokens per second of a whole loader whose batches are taken at once.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use dataloading::Result;
use dataloading::balanced_batch_sampler::{BalancedConfig, BatchSize};
use dataloading::batch::Counts;
use dataloading::batch_source::BatchSource;
use dataloading::datasets::{BaseDataset, PackedConfig, PackedDataset, SequencedDataset, StandardDataset};
use dataloading::loader::{Loader, LoaderConfig};
use dataloading::packing::PackingConfig;
use dataloading::random_batch_sampler::BatchConfig;
use dataloading::samples::Samples;
use dataloading::token_store::TokenStore;
use report::{Case, Metric};

use super::synthetic::{Synthetic, text_lengths};
use super::texts;
use crate::driver::Bench;

/// Samples of a batch.
pub(crate) const BATCH: usize = 32;
/// Maximum number of tokens of a row.
pub(crate) const LENGTH: usize = 512;

/// How samples become batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// [`BaseDataset`].
    Base,
    /// [`StandardDataset`].
    Standard,
    /// [`StandardDataset::balanced`] with `k` 20.
    Balanced,
    /// [`SequencedDataset`] without a capacity.
    Sequenced,
    /// [`PackedDataset`], 8 rows: about the tokens of a batch of the others.
    Packed,
}

/// All of them.
const STRATEGIES: [Strategy; 5] =
    [Strategy::Base, Strategy::Standard, Strategy::Balanced, Strategy::Sequenced, Strategy::Packed];

impl Strategy {
    /// The name in records.
    fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Standard => "standard",
            Self::Balanced => "balanced",
            Self::Sequenced => "sequenced",
            Self::Packed => "packed",
        }
    }

    /// The data set of these samples.
    ///
    /// # Errors
    /// Samples that make no batch.
    fn over(self, samples: Arc<dyn Samples>, seed: u64) -> Result<Arc<dyn BatchSource>> {
        let options = BatchConfig { batch_size: BATCH, max_length: LENGTH, seed, ..BatchConfig::default() };
        let balanced = BalancedConfig {
            batch_size: BatchSize::Samples(BATCH),
            k: 20,
            max_length: LENGTH,
            seed,
            ..BalancedConfig::default()
        };
        let plan = PackingConfig { capacity: LENGTH, ..PackingConfig::default() };
        Ok(match self {
            Self::Base => Arc::new(BaseDataset::new(samples, &options)?),
            Self::Standard => Arc::new(StandardDataset::new(samples, &options)?),
            Self::Balanced => Arc::new(StandardDataset::balanced(samples, &balanced, 0)?),
            Self::Sequenced => Arc::new(SequencedDataset::new(samples, &options, None)?),
            Self::Packed => Arc::new(PackedDataset::new(
                samples,
                &PackedConfig { rows: 8, plan, seed, ..Default::default() },
            )?),
        })
    }
}

fn strategy(text: &str) -> std::result::Result<Strategy, String> {
    let known = || STRATEGIES.iter().map(|strategy| strategy.name());
    STRATEGIES
        .into_iter()
        .find(|strategy| strategy.name() == text)
        .ok_or_else(|| format!("expected one of {}", known().collect::<Vec<_>>().join(", ")))
}

#[derive(clap::Args)]
pub(crate) struct ThroughputArgs {
    /// Number of samples, instead of the scale's
    #[arg(long, value_parser = clap::value_parser!(u32).range(100..))]
    samples: Option<u32>,
    /// A token store to read documents from, instead of generated samples
    #[arg(long, value_name = "FOLDER", conflicts_with = "samples")]
    data: Option<PathBuf>,
    /// These only: base, standard, balanced, sequenced, packed
    #[arg(long, value_delimiter = ',', value_parser = strategy)]
    strategies: Vec<Strategy>,
    /// Numbers of workers
    #[arg(long, value_delimiter = ',', default_value = "0,1,2")]
    workers: Vec<usize>,
    /// Measured epochs of each case, after one to warm up
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
}

/// Strategies over the same samples.
struct Table {
    samples: Arc<dyn Samples>,
    /// The suffix of a strategy's name in records.
    suffix: &'static str,
    strategies: Vec<Strategy>,
}

/// The suffix of strategies over a token store, whose files are mapped and, after the first epoch, in the system's cache.
const FROM_STORE: &str = " from a store";

/// Measures strategies over the given store or number of samples; if neither is given, and no strategy chosen, over samples in memory
/// and in a store.
pub(crate) fn run(bench: &mut Bench, arguments: &ThroughputArgs) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let table = |samples: Arc<dyn Samples>, suffix, usual: &[Strategy]| {
        let chosen = &arguments.strategies[..];
        Table { samples, suffix, strategies: if chosen.is_empty() { usual } else { chosen }.to_vec() }
    };
    let mut tables = Vec::new();
    if let Some(store) = &arguments.data {
        tables.push(table(Arc::new(TokenStore::open(store)?), FROM_STORE, &STRATEGIES));
    } else {
        let usual = bench.sized([5_000, 200_000, 200_000, 1_000_000]);
        let count = arguments.samples.map_or(usual, |samples| samples as usize);
        let samples = Synthetic::new(&text_lengths(count, bench.seed));
        tables.push(table(Arc::new(samples), "", &STRATEGIES));
        if arguments.strategies.is_empty() && arguments.samples.is_none() {
            let tokens = bench.sized([500_000, 8_000_000, 8_000_000, 64_000_000]);
            let store = texts::repeated(&folder.path().join("store"), tokens)?;
            tables.push(table(Arc::new(store), FROM_STORE, &[Strategy::Standard, Strategy::Packed]));
        }
    }
    let mut cases = Vec::new();
    for table in &tables {
        for &strategy in &table.strategies {
            cases.extend(arguments.workers.iter().map(|&workers| (table, strategy, workers)));
        }
    }
    let label = |(_, strategy, workers): &(&Table, Strategy, usize)| {
        format!("{}, {workers} workers", strategy.name())
    };
    bench.each(cases, label, |bench, (Table { samples, suffix, .. }, strategy, workers)| {
        let metrics = measure(samples, strategy, workers, arguments.epochs, bench)?;
        let name = format!("{}{suffix}", strategy.name());
        bench.put(&Case::new().with("strategy", name).with("workers", workers), metrics)
    })
}

/// Measures a strategy with so many workers: whole epochs, one to warm up.
fn measure(
    samples: &Arc<dyn Samples>,
    strategy: Strategy,
    workers: usize,
    epochs: u64,
    bench: &Bench,
) -> Result<Vec<Metric>> {
    let device = bench.device;
    let source = strategy.over(samples.clone(), bench.seed)?;
    let (mut rates, mut positions, mut per_token) = (Vec::new(), Vec::new(), Vec::new());
    let mut sum = Counts::default();
    for epoch in 0..=epochs {
        let options =
            LoaderConfig { workers, prefetch: 4, device, epochs: Some(epoch + 1), ..LoaderConfig::default() };
        let state = Loader::new(source.clone(), &LoaderConfig { workers: 0, ..options })?.state();
        let state = dataloading::LoaderState { epoch, batches: source.batches(epoch) as u64, ..state };
        let mut loader = Loader::resume(source.clone(), &options, &state)?;
        let began = Instant::now();
        let mut counts = Counts::default();
        for batch in loader.by_ref() {
            let batch = batch?;
            counts.tokens += batch.counts.tokens;
            counts.padding += batch.counts.padding;
        }
        runtime::device::synchronize(device)?;
        let seconds = began.elapsed().as_secs_f64();
        if epoch == 0 {
            continue;
        }
        rates.push(counts.tokens as f64 / seconds);
        positions.push((counts.tokens + counts.padding) as f64 / seconds);
        per_token.push(loader.stats().worked_seconds / counts.tokens as f64);
        sum.tokens += counts.tokens;
        sum.padding += counts.padding;
    }
    Ok(vec![
        Metric::of_samples("tokens_per_second", "tokens/s", &rates),
        Metric::of_samples("positions_per_second", "positions/s", &positions),
        Metric::of_samples("work_per_token_seconds", "s", &per_token),
        Metric::exact("padding", "ratio", sum.padding as f64 / (sum.tokens + sum.padding) as f64),
    ])
}
