//! The sizes of a training's batches, as far as bytes and seconds of its steps depend on them.

use accounting::candidates::Batch;
use accounting::decoder_flops::Workload;
use models::DecoderConfig;
use training::masked_rows::MaskedBatches;

use super::WeightFormat;

/// Batches whose sizes are read: a fraction of a second. Later ones are taken to be as large as any can be.
const READ: u64 = 1 << 18;

/// The sizes of a training's batches.
#[derive(Debug, Clone, PartialEq)]
pub struct DataShape {
    /// The batches that may have the largest peak, each with its number in the training, from 0.
    pub largest: Vec<(u64, Batch)>,
    /// Rows, mean positions and mean labels of a batch.
    pub mean: Batch,
    /// Whether rows of a batch hold several documents.
    pub packed: bool,
    /// Batches of an epoch; `None` for data without an end.
    pub epoch: Option<u64>,
    /// The largest batch of an evaluation for each number of rows at a time, by falling numbers; empty if none is made.
    pub evaluations: Vec<(usize, Batch)>,
    /// A second model that reads each batch, whose distributions are learned.
    pub teacher: Option<TeacherShape>,
}

/// The teacher of a distillation, as far as it decides bytes and seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct TeacherShape {
    /// Its sizes.
    pub config: Box<DecoderConfig>,
    /// The format of its weights.
    pub format: WeightFormat,
}

impl DataShape {
    /// Batches of one size without an end, with a label at every position.
    pub fn uniform(rows: u64, length: u64, packed: bool) -> Self {
        let batch = Batch::new(Workload { batch: rows, sequence: length }, None);
        Self {
            largest: vec![(0, batch)],
            mean: batch,
            packed,
            epoch: None,
            evaluations: Vec::new(),
            teacher: None,
        }
    }

    /// Reads the sizes of the first `count` batches of a training.
    ///
    /// # Errors
    /// Rows that cannot be read.
    pub fn of(batches: &MaskedBatches, count: u64) -> training::Result<Self> {
        Self::of_first(batches, count, READ)
    }

    fn of_first(batches: &MaskedBatches, count: u64, read: u64) -> training::Result<Self> {
        let mut largest: Vec<(u64, Batch)> = Vec::new();
        let mut longest = None;
        let (mut seen, mut rows, mut positions, mut labels) = (0, 0, 0, 0);
        let beyond = (count > read).then(|| batches.largest_shape());
        for (number, shape) in (0..).zip(batches.shapes(count.min(read)).chain(beyond)) {
            let shape = shape?;
            let work = Workload { batch: shape.rows as u64, sequence: shape.length as u64 };
            let (own, labelled) = (work.batch * work.sequence, shape.labelled as u64);
            if shape.longest > shape.length {
                longest = longest.max(Some(shape.longest as u64));
            }
            if number < read {
                seen += 1;
                rows += work.batch;
                positions += own;
                labels += labelled;
            }
            // A batch with as many positions and labels has no smaller peak.
            let size = |batch: &Batch| (batch.work.batch * batch.work.sequence, batch.labelled.unwrap_or(0));
            let is_below = |of: (u64, u64), than: (u64, u64)| of.0 <= than.0 && of.1 <= than.1;
            if !largest.iter().any(|(_, other)| is_below((own, labelled), size(other))) {
                largest.retain(|(_, other)| !is_below(size(other), (own, labelled)));
                largest.push((number, Batch::new(work, Some(labelled.max(1)))));
            }
        }
        let (seen, rows) = (seen.max(1), rows.max(1));
        let batch = rows.div_ceil(seen);
        let sequence = positions.div_ceil(rows).max(1);
        let labelled = labels.div_ceil(seen).clamp(1, batch * sequence);
        let mean = Batch { longest, ..Batch::new(Workload { batch, sequence }, Some(labelled)) };
        for (_, batch) in &mut largest {
            batch.longest = longest;
        }
        // Each costs a prediction of every candidate: the largest by positions and the largest by labels say enough.
        largest.sort_by_key(|(_, batch)| std::cmp::Reverse(batch.work.batch * batch.work.sequence));
        if largest.len() > 2 {
            largest = vec![largest[0], largest[largest.len() - 1]];
        }
        let epoch = Some(batches.batches_per_epoch());
        let (packed, evaluations) = (batches.holds_documents(), Vec::new());
        Ok(Self { largest, mean, packed, epoch, evaluations, teacher: None })
    }

    /// Adds evaluations on `batches`, and on the same rows fewer at a time.
    ///
    /// # Errors
    /// Rows that cannot be read.
    pub fn with_evaluations(mut self, batches: &MaskedBatches) -> training::Result<Self> {
        let mut batches = batches.clone();
        loop {
            let rows = batches.rows_per_batch();
            if let Some((_, batch)) = Self::of(&batches, u64::MAX)?.largest.first() {
                self.evaluations.push((rows, *batch));
            }
            if rows == 1 {
                return Ok(self);
            }
            batches = batches.with_rows_per_batch(rows.div_ceil(2))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use training::masked_rows::{Layout, MaskedRow};

    /// A million epochs are planned without going over them, for batches as large as any.
    #[test]
    fn batches_beyond_the_first_are_as_large_as_any() {
        let row = |length: i64| MaskedRow::new((0..length).collect(), (0..length).collect());
        let rows: Vec<MaskedRow> = (4..24).map(row).collect();
        let layout = Layout { batch: 4, shuffle: Some(3), epochs: Some(1_000_000), ..Layout::default() };
        let batches = MaskedBatches::new(rows, layout, tch::Device::Cpu).unwrap();
        let all = DataShape::of(&batches, 5_000_000).unwrap();
        let positions = |batch: &Batch| batch.work.batch * batch.work.sequence;
        let exact = DataShape::of_first(&batches, 500, 500).unwrap();
        assert!(exact.largest[0].0 < 500 && all.mean.work.batch == exact.mean.work.batch);
        let bound = batches.largest_shape().unwrap();
        assert_eq!((bound.rows, bound.length, bound.labelled), (4, 22, 22 + 21 + 20 + 19));
        let short = DataShape::of_first(&batches, 500, 1).unwrap();
        for (shape, most) in [(&all, 4 * 22), (&exact, 4 * 22), (&short, 4 * 22)] {
            assert_eq!(shape.largest.iter().map(|(_, batch)| positions(batch)).max(), Some(most));
        }
        let labels = |shape: &DataShape| shape.largest.iter().filter_map(|(_, batch)| batch.labelled).max();
        assert_eq!(labels(&all), Some(82));
        assert_eq!(labels(&short), Some(82));
        assert!(labels(&exact) <= Some(82));
    }
}
