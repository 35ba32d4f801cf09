//! Rows of one length, filled with documents by a packing plan over the whole data set.

use super::Documents;
use crate::batch_source::BatchSource;
use crate::error::{Error, Result};
use crate::fingerprint::{Fingerprint, SEQUENCE};
use crate::host_batch::HostBatch;
use crate::length_order::lengths_of;
use crate::packing::{PackingConfig, PackingPlan};
use crate::permutation::Permutation;
use crate::random_batch_sampler::{Incomplete, Order, batches_of, check_batch_size, check_index, stream};
use crate::samples::Samples;

/// Options of packed batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedConfig {
    /// Rows per batch, at least 1.
    pub rows: usize,
    /// The packing algorithm and the length of rows.
    pub plan: PackingConfig,
    /// The padding token.
    pub pad: u32,
    /// The seed of the order.
    pub seed: u64,
    /// The order of rows, and of the documents of equal length in them.
    pub order: Order,
    /// How an incomplete last batch is handled.
    pub incomplete: Incomplete,
}

impl Default for PackedConfig {
    /// One row of 512 tokens.
    fn default() -> Self {
        Self {
            rows: 1,
            plan: PackingConfig::default(),
            pad: 0,
            seed: 0,
            order: Order::default(),
            incomplete: Incomplete::default(),
        }
    }
}

/// Batches `[rows, capacity]` of packed documents.
///
/// The plan is made once. Every epoch permutes the rows, and the documents in them: a slot of a row fixes a length only,
/// and the documents of that length are permuted over its slots. Both permutations are computed, so the plan is the only
/// state, and any batch of any epoch is available in constant time.
#[derive(Debug)]
pub struct PackedDataset<S> {
    samples: S,
    plan: PackingPlan,
    options: PackedConfig,
    fingerprint: u64,
}

impl<S: Samples> PackedDataset<S> {
    /// Plans the rows in `O(n)` time and keeps the [`PackingPlan`].
    ///
    /// # Errors
    /// Same as [`PackingPlan::new`]; a batch of 0 rows; fewer rows than a batch has if incomplete batches are dropped.
    pub fn new(samples: S, options: &PackedConfig) -> Result<Self> {
        const WHAT: &str = "PackedDataset";
        let plan = PackingPlan::new(&lengths_of(WHAT, &samples)?, &options.plan)?;
        let options = *options;
        check_batch_size(WHAT, options.rows, options.incomplete, plan.rows())?;
        if options.rows.checked_mul(plan.capacity()).is_none_or(|positions| i32::try_from(positions).is_err())
        {
            return Err(Error::Config {
                what: WHAT,
                reason: format!(
                    "{} rows of {} tokens exceed the range of cu_seqlens (int32); use fewer",
                    options.rows,
                    plan.capacity()
                ),
            });
        }
        let PackedConfig { rows, plan: of_plan, pad, seed: _, order, incomplete } = options;
        let PackingConfig { capacity, algorithm, long } = of_plan;
        let fingerprint = Fingerprint::new(WHAT)
            .number(SEQUENCE)
            .number(samples.fingerprint())
            .numbers([rows as u64, capacity as u64, pad.into()].into_iter())
            .numbers([algorithm as u64, long as u64, order as u64, incomplete as u64].into_iter())
            .finish();
        Ok(Self { samples, plan, options, fingerprint })
    }

    /// Returns the number of rows dropped per epoch because their batch would be incomplete; in shuffled order they differ
    /// from epoch to epoch.
    pub fn dropped_rows(&self) -> usize {
        self.plan.rows().saturating_sub(self.batches(0) * self.options.rows)
    }

    /// Returns the packing plan.
    pub fn plan(&self) -> &PackingPlan {
        &self.plan
    }
}

impl<S: Samples> BatchSource for PackedDataset<S> {
    fn seed(&self) -> u64 {
        self.options.seed
    }

    fn batches(&self, _epoch: u64) -> usize {
        batches_of(self.plan.rows(), self.options.rows, self.options.incomplete)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn fill(&self, epoch: u64, index: usize, host: &mut HostBatch) -> Result<()> {
        check_index("PackedDataset", epoch, index, self.batches(epoch))?;
        let PackedConfig { rows, pad, seed, order, .. } = self.options;
        let positions = index * rows..((index + 1) * rows).min(self.plan.rows());
        let shuffled = order == Order::Shuffled;
        let of_rows = Permutation::new(self.plan.rows() as u64, seed, epoch, stream::BATCHES);
        let mut documents = Documents::in_memory_of(host);
        host.chosen.clear();
        for (row, position) in positions.clone().enumerate() {
            let planned = if shuffled { of_rows.at(position as u64) as usize } else { position };
            let mut outcome = Ok(());
            // Slots of one length are adjacent, so caching the latest permutation serves most of them.
            let mut latest: Option<(u32, Permutation)> = None;
            let fill = |length: u32, count: u32, rank: u32| {
                if !shuffled {
                    return rank;
                }
                match &latest {
                    Some((of, order)) if *of == length => order.at(u64::from(rank)) as u32,
                    _ => {
                        let stream = stream::DOCUMENTS + u64::from(length);
                        let order = Permutation::new(u64::from(count), seed, epoch, stream);
                        latest = Some((length, order));
                        order.at(u64::from(rank)) as u32
                    }
                }
            };
            self.plan.visit_row(planned, fill, |piece| {
                if outcome.is_ok() {
                    outcome = documents.read(&self.samples, piece.document, piece.start, piece.length);
                    host.chosen.push(row as u32);
                }
            });
            outcome?;
        }
        let placed = host.chosen.iter().map(|&row| row as usize).zip(documents.iter());
        let chosen: Vec<(usize, &[u32])> = placed.collect();
        host.write_packed(chosen.iter().copied(), positions.len(), self.plan.capacity(), pad, 0)?;
        documents.give_back(host);
        Ok(())
    }
}
