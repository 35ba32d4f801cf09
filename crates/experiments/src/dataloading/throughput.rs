//! Tokens per second of a whole loader whose batches are taken at once.

use std::sync::Arc;
use std::time::Instant;

use dataloading::Result;
use dataloading::balanced_batch_sampler::{BalancedOptions, BatchSize};
use dataloading::batch::Counts;
use dataloading::batch_source::BatchSource;
use dataloading::datasets::{BaseDataset, PackedDataset, PackedOptions, SequencedDataset, StandardDataset};
use dataloading::loader::{Loader, LoaderOptions};
use dataloading::packing::PackingOptions;
use dataloading::random_batch_sampler::BatchOptions;
use dataloading::samples::Samples;
use report::cli::Scale;
use report::{Case, Metric};
use tch::Device;

use super::Figures;
use super::synthetic::{Synthetic, text_lengths};

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
pub(crate) const STRATEGIES: [Strategy; 5] =
    [Strategy::Base, Strategy::Standard, Strategy::Balanced, Strategy::Sequenced, Strategy::Packed];

impl Strategy {
    /// As records call it.
    pub(crate) fn name(self) -> &'static str {
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
    pub(crate) fn over<S: Samples + 'static>(self, samples: S, seed: u64) -> Result<Arc<dyn BatchSource>> {
        let options = BatchOptions { batch_size: BATCH, max_length: LENGTH, seed, ..BatchOptions::default() };
        let balanced = BalancedOptions {
            batch_size: BatchSize::Samples(BATCH),
            k: 20,
            max_length: LENGTH,
            seed,
            ..BalancedOptions::default()
        };
        let plan = PackingOptions { capacity: LENGTH, ..PackingOptions::default() };
        Ok(match self {
            Self::Base => Arc::new(BaseDataset::new(samples, &options)?),
            Self::Standard => Arc::new(StandardDataset::new(samples, &options)?),
            Self::Balanced => Arc::new(StandardDataset::balanced(samples, &balanced, 0)?),
            Self::Sequenced => Arc::new(SequencedDataset::new(samples, &options, None)?),
            Self::Packed => Arc::new(PackedDataset::new(
                samples,
                &PackedOptions { rows: 8, plan, seed, ..Default::default() },
            )?),
        })
    }
}

/// Where samples are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// In memory.
    Memory,
    /// In a token store, whose files are mapped and, after the first epoch, in the system's cache.
    Store,
}

/// How many samples.
pub(crate) fn size(scale: Scale) -> usize {
    match scale {
        Scale::Smoke => 5_000,
        Scale::Laptop | Scale::Full => 200_000,
        Scale::Paper => 1_000_000,
    }
}

/// How many tokens a store gets.
pub(crate) fn store_tokens(scale: Scale) -> u64 {
    match scale {
        Scale::Smoke => 500_000,
        Scale::Laptop | Scale::Full => 8_000_000,
        Scale::Paper => 64_000_000,
    }
}

/// Lengths of text, and their tokens.
pub(crate) fn synthetic(n: usize, seed: u64) -> Arc<Synthetic> {
    Arc::new(Synthetic::new(&text_lengths(n, seed)))
}

/// One strategy with so many workers: whole epochs, one to warm up.
///
/// # Errors
/// Samples that make no batch; a device that is not there.
pub(crate) fn measure<S: Samples + 'static>(
    samples: S,
    origin: Origin,
    strategy: Strategy,
    workers: usize,
    device: Device,
    epochs: u64,
    seed: u64,
) -> Result<Figures> {
    let source = strategy.over(samples, seed)?;
    let (mut rates, mut positions, mut per_token) = (Vec::new(), Vec::new(), Vec::new());
    let mut sum = Counts::default();
    for epoch in 0..=epochs {
        let options = LoaderOptions {
            workers,
            prefetch: 4,
            device,
            epochs: Some(epoch + 1),
            ..LoaderOptions::default()
        };
        let state = Loader::new(source.clone(), &LoaderOptions { workers: 0, ..options })?.state();
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
    let metrics = vec![
        Metric::of_samples("tokens_per_second", "tokens/s", &rates),
        Metric::of_samples("positions_per_second", "positions/s", &positions),
        Metric::of_samples("work_per_token_seconds", "s", &per_token),
        Metric::exact("padding", "ratio", sum.padding as f64 / (sum.tokens + sum.padding) as f64),
    ];
    let from = match origin {
        Origin::Memory => "",
        Origin::Store => " from a store",
    };
    let case = Case::new().with("strategy", format!("{}{from}", strategy.name())).with("workers", workers);
    Ok(Figures { experiment: "loader", case, metrics })
}
