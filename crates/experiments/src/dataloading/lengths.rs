//! Lengths of the lines of texts, and the padding of each batching strategy: counted over whole epochs, and computed where a
//! closed form is known.

use std::sync::Arc;

use dataloading::Result;
use dataloading::balanced_batch_sampler::{BalancedConfig, BatchSize};
use dataloading::batch_source::BatchSource;
use dataloading::datasets::{BaseDataset, PackedConfig, PackedDataset, SequencedDataset, StandardDataset};
use dataloading::host_batch::HostBatch;
use dataloading::length_statistics::{LengthStatistics, Waste};
use dataloading::packing::PackingConfig;
use dataloading::random_batch_sampler::BatchConfig;
use dataloading::samples::Samples;
use report::{Case, Metric};

use super::texts::Text;
use super::throughput::{BATCH, LENGTH};
use crate::driver::Bench;

/// Tokens of a bin of the histogram.
const BIN: usize = 16;

/// How batches are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batching {
    /// All padded to one length.
    OneLength,
    /// Padded to the longest of a random batch.
    Longest,
    /// Padded to the longest of a batch whose lengths differ by at most so much.
    Balanced(usize),
    /// Joined.
    Sequenced,
    /// Packed whole into rows.
    Packed,
}

/// All of them, from the most padding to the least.
pub const BATCHINGS: [Batching; 7] = [
    Batching::OneLength,
    Batching::Longest,
    Batching::Balanced(64),
    Batching::Balanced(20),
    Batching::Balanced(5),
    Batching::Sequenced,
    Batching::Packed,
];

/// Counts of whole epochs.
#[derive(Debug, Clone, PartialEq)]
pub struct Counted {
    /// Positions of all batches, for each epoch.
    pub positions: Vec<f64>,
    /// The share of them that is padding.
    pub padding: Vec<f64>,
    /// Tokens that did not fit, for each epoch.
    pub dropped: Vec<f64>,
}

impl Batching {
    /// The name in records.
    pub fn name(self) -> String {
        match self {
            Self::OneLength => format!("all to {LENGTH}"),
            Self::Longest => "to the longest".into(),
            Self::Balanced(k) => format!("balanced, k {k}"),
            Self::Sequenced => "sequenced".into(),
            Self::Packed => "packed".into(),
        }
    }

    /// The padding computed from the lengths, where there is a closed form.
    pub fn computed(self, statistics: &LengthStatistics) -> Option<Waste> {
        match self {
            Self::OneLength => Some(statistics.padded_to(LENGTH)),
            Self::Longest => Some(statistics.padded_to_batch(BATCH, LENGTH)),
            // Nothing pads a sequence, as nothing pads a batch of one.
            Self::Sequenced => Some(statistics.padded_to_batch(1, LENGTH)),
            Self::Balanced(_) | Self::Packed => None,
        }
    }

    /// The data set.
    fn over<S: Samples + 'static>(self, samples: S, seed: u64) -> Result<Box<dyn BatchSource>> {
        let options = BatchConfig { batch_size: BATCH, max_length: LENGTH, seed, ..BatchConfig::default() };
        Ok(match self {
            Self::OneLength => Box::new(BaseDataset::new(samples, &options)?),
            Self::Longest => Box::new(StandardDataset::new(samples, &options)?),
            Self::Balanced(k) => {
                let batch_size = BatchSize::Samples(BATCH);
                let options =
                    BalancedConfig { batch_size, k, max_length: LENGTH, seed, ..Default::default() };
                Box::new(StandardDataset::balanced(samples, &options, 0)?)
            }
            Self::Sequenced => Box::new(SequencedDataset::new(samples, &options, None)?),
            Self::Packed => {
                let plan = PackingConfig { capacity: LENGTH, ..PackingConfig::default() };
                let options = PackedConfig { rows: 8, plan, seed, ..Default::default() };
                Box::new(PackedDataset::new(samples, &options)?)
            }
        })
    }

    /// Makes all batches of so many epochs and counts.
    ///
    /// # Errors
    /// Samples that make no batch.
    pub fn count<S: Samples + 'static>(self, samples: S, epochs: u64, seed: u64) -> Result<Counted> {
        let source = self.over(samples, seed)?;
        let mut counted = Counted { positions: Vec::new(), padding: Vec::new(), dropped: Vec::new() };
        let mut host = HostBatch::new(tch::Device::Cpu);
        for epoch in 0..epochs {
            let (mut tokens, mut padding, mut dropped) = (0, 0, 0);
            for index in 0..source.batches(epoch) {
                source.fill(epoch, index, &mut host)?;
                let counts = host.finish()?.counts;
                tokens += counts.tokens;
                padding += counts.padding;
                dropped += counts.dropped;
            }
            let positions = (tokens + padding) as f64;
            counted.positions.push(positions);
            counted.padding.push(padding as f64 / positions);
            counted.dropped.push(dropped as f64);
        }
        Ok(counted)
    }
}

/// Measures the lengths of texts' lines, and the padding of every strategy.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let label = |text: &Text| text.name().to_owned();
    bench.each(Text::ALL, label, |bench, text| {
        let case = || Case::new().with("text", text.name());
        let lines = match text.lines()? {
            Ok(lines) => Arc::new(lines),
            Err(why) => {
                let missing = [("lines", "count"), ("tokens", "count"), ("mean_length", "tokens")];
                let missing = missing.map(|(name, unit)| Metric::not_measured(name, unit, &why));
                return bench.put(&case(), missing.to_vec());
            }
        };
        let statistics = LengthStatistics::from_samples(&*lines)?;
        bench.put(&case(), described(&statistics))?;
        for bin in statistics.histogram(BIN) {
            let share = bin.samples as f64 / statistics.samples() as f64;
            let metric = Metric::exact("share_of_lines", "ratio", share);
            bench.put(&case().with("length", bin.from), vec![metric])?;
        }
        for batching in BATCHINGS {
            let counted = batching.count(lines.clone(), bench.sized([1, 5, 5, 5]), bench.seed)?;
            let mut metrics = vec![
                Metric::of_samples("positions", "count", &counted.positions),
                Metric::of_samples("padding", "ratio", &counted.padding),
                Metric::of_samples("dropped_tokens", "count", &counted.dropped),
            ];
            if let Some(waste) = batching.computed(&statistics) {
                metrics.push(Metric::exact("expected_padding", "ratio", waste.share()));
            }
            bench.put(&case().with("batches", batching.name()), metrics)?;
        }
        Ok(())
    })
}

fn described(statistics: &LengthStatistics) -> Vec<Metric> {
    let quantile = |(name, q)| Metric::exact(name, "tokens", statistics.quantile(q) as f64);
    let quantiles = [
        ("shortest", 0.0),
        ("length_p10", 0.1),
        ("length_median", 0.5),
        ("length_p90", 0.9),
        ("length_p99", 0.99),
        ("longest", 1.0),
    ];
    let mut metrics = vec![
        Metric::exact("lines", "count", statistics.samples() as f64),
        Metric::exact("tokens", "count", statistics.tokens() as f64),
        Metric::exact("mean_length", "tokens", statistics.mean()),
    ];
    metrics.extend(quantiles.map(quantile));
    metrics
}
