//! The sizes of a training's batches, as far as bytes and seconds of its steps depend on them.

use accounting::candidates::Batch;
use accounting::decoder_flops::Workload;
use training::masked_rows::MaskedBatches;

/// The sizes of a training's batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataShape {
    /// The batches of which one has the largest peak, each with its number in the training, from 0.
    pub largest: Vec<(u64, Batch)>,
    /// Rows, mean positions and mean labels of a batch.
    pub mean: Batch,
    /// Whether rows hold several documents.
    pub packed: bool,
    /// Batches of an epoch; `None` for data without an end.
    pub epoch: Option<u64>,
    /// The largest batch of an evaluation for each number of rows at a time, by falling numbers; empty if none is made.
    pub evaluations: Vec<(usize, Batch)>,
}

impl DataShape {
    /// Batches of one size without an end, of which all positions have labels.
    pub fn uniform(rows: u64, length: u64, packed: bool) -> Self {
        let batch = Batch { work: Workload { batch: rows, sequence: length }, labelled: None };
        Self { largest: vec![(0, batch)], mean: batch, packed, epoch: None, evaluations: Vec::new() }
    }

    /// Goes over the first `count` batches of a training.
    pub fn of(batches: &MaskedBatches, count: u64) -> Self {
        let mut largest: Vec<(u64, Batch)> = Vec::new();
        let (mut seen, mut rows, mut positions, mut labels) = (0, 0, 0, 0);
        for (number, shape) in (0..).zip(batches.shapes(count)) {
            let work = Workload { batch: shape.rows as u64, sequence: shape.length as u64 };
            let (own, labelled) = (work.batch * work.sequence, shape.labelled as u64);
            seen += 1;
            rows += work.batch;
            positions += own;
            labels += labelled;
            // A batch with as many positions and labels has no smaller peak.
            let size = |batch: &Batch| (batch.work.batch * batch.work.sequence, batch.labelled.unwrap_or(0));
            let is_below = |of: (u64, u64), than: (u64, u64)| of.0 <= than.0 && of.1 <= than.1;
            if !largest.iter().any(|(_, other)| is_below((own, labelled), size(other))) {
                largest.retain(|(_, other)| !is_below(size(other), (own, labelled)));
                largest.push((number, Batch { work, labelled: Some(labelled.max(1)) }));
            }
        }
        let (seen, rows) = (seen.max(1), rows.max(1));
        let batch = rows.div_ceil(seen);
        let sequence = positions.div_ceil(rows).max(1);
        let labelled = labels.div_ceil(seen).clamp(1, batch * sequence);
        let mean = Batch { work: Workload { batch, sequence }, labelled: Some(labelled) };
        // Each costs a prediction of every candidate: the largest by positions and the largest by labels say enough.
        largest.sort_by_key(|(_, batch)| std::cmp::Reverse(batch.work.batch * batch.work.sequence));
        if largest.len() > 2 {
            largest = vec![largest[0], largest[largest.len() - 1]];
        }
        let epoch = Some(batches.batches_per_epoch());
        Self { largest, mean, packed: batches.is_packed(), epoch, evaluations: Vec::new() }
    }

    /// Adds evaluations on `batches`, and on the same rows fewer at a time.
    ///
    /// # Errors
    /// None in practice: the rows have made batches before.
    pub fn with_evaluations(mut self, batches: &MaskedBatches) -> training::Result<Self> {
        let mut batches = batches.clone();
        loop {
            let rows = batches.rows_per_batch();
            if let Some((_, batch)) = Self::of(&batches, u64::MAX).largest.first() {
                self.evaluations.push((rows, *batch));
            }
            if rows == 1 {
                return Ok(self);
            }
            batches = batches.with_rows_per_batch(rows.div_ceil(2))?;
        }
    }
}
