//! All strategies over the same samples, and the content of a batch.

use std::sync::Arc;

use dataloading::packing::PackingConfig;
use dataloading::{
    BalancedConfig, BaseDataset, Batch, BatchConfig, BatchSize, BatchSource, Capacity, Overflow,
    PackedConfig, PackedDataset, SequencedDataset, StandardDataset,
};

pub(crate) fn samples(n: usize) -> Vec<Vec<u32>> {
    (0..n)
        .map(|index| (0..1 + index * 31 % 40).map(|position| (index * 64 + position) as u32).collect())
        .collect()
}

/// Returns all strategies over the same samples.
pub(crate) fn strategies(n: usize, seed: u64) -> Vec<Arc<dyn BatchSource>> {
    let options = BatchConfig { batch_size: 4, max_length: 32, seed, ..BatchConfig::default() };
    let balanced = BalancedConfig {
        batch_size: BatchSize::Samples(4),
        k: 5,
        max_length: 32,
        seed,
        ..Default::default()
    };
    let plan = PackingConfig { capacity: 32, ..Default::default() };
    let packed = PackedConfig { rows: 2, plan, seed, ..PackedConfig::default() };
    let capacity = Some(Capacity { tokens: 60, overflow: Overflow::Truncate });
    vec![
        Arc::new(BaseDataset::new(samples(n), &options).unwrap()),
        Arc::new(StandardDataset::new(samples(n), &options).unwrap()),
        Arc::new(StandardDataset::balanced(samples(n), &balanced, 0).unwrap()),
        Arc::new(SequencedDataset::new(samples(n), &options, capacity).unwrap()),
        Arc::new(PackedDataset::new(samples(n), &packed).unwrap()),
    ]
}

/// Returns the whole content of a batch.
pub(crate) fn content(batch: &Batch) -> Vec<Vec<i64>> {
    let numbers = |tensor: &tch::Tensor| -> Vec<i64> {
        let mut numbers = tensor.size();
        numbers.extend(
            Vec::<i64>::try_from(tensor.f_to_kind(tch::Kind::Int64).unwrap().f_reshape([-1]).unwrap())
                .unwrap(),
        );
        numbers
    };
    let mut content = vec![numbers(&batch.tokens), numbers(&batch.labels), vec![batch.counts.dropped as i64]];
    if let Some(packing) = &batch.packing {
        content.extend([&packing.positions, &packing.document_ids, &packing.cu_seqlens].map(numbers));
    }
    content
}

/// Returns the batches without a loader.
pub(crate) fn reference(source: &Arc<dyn BatchSource>, epochs: u64) -> Vec<Vec<Vec<i64>>> {
    let batch = |epoch| move |index| content(&source.batch(epoch, index).unwrap());
    (0..epochs).flat_map(|epoch| (0..source.batches(epoch)).map(batch(epoch))).collect()
}
