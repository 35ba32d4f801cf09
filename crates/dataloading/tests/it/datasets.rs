//! The batches of each data set.

use std::collections::BTreeMap;
use std::ops::Range;

use dataloading::packing::PackingConfig;
use dataloading::{
    BaseDataset, Batch, BatchConfig, BatchSampler, BatchSource, Capacity, IGNORE_INDEX, Incomplete, Order,
    Overflow, PackedConfig, PackedDataset, RandomBatchSampler, Result, Samples, SequencedDataset,
    StandardDataset,
};
use proptest::prelude::*;
use tch::Tensor;

/// Token `position` of sample `index` is `1 + index · 1000 + position`.
#[derive(Debug)]
struct Numbered(Vec<usize>);

impl Samples for Numbered {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn length(&self, index: usize) -> usize {
        self.0[index]
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        out.extend((0..self.0[index]).map(|position| (1 + index * 1000 + position) as u32));
        Ok(())
    }
}

fn numbers(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.f_to_kind(tch::Kind::Int64).unwrap().f_reshape([-1]).unwrap()).unwrap()
}

/// Checks the invariants of every batch, and returns its documents: sample and positions.
fn documents(batch: &Batch, lengths: &[usize], pad: i64) -> Vec<(usize, Range<usize>)> {
    let (rows, length) = batch.tokens.size2().unwrap();
    let (tokens, labels) = (numbers(&batch.tokens), numbers(&batch.labels));
    let starts: Vec<usize> = match &batch.packing {
        Some(packing) => packing.starts.iter().map(|&start| start as usize).collect(),
        None => (0..=rows).map(|row| (row * length) as usize).collect(),
    };
    assert_eq!((starts[0], *starts.last().unwrap()), (0, (rows * length) as usize));
    let mut ranges = Vec::new();
    let (mut of_tokens, mut targets) = (0, 0);
    for (id, range) in starts.windows(2).map(|ends| ends[0]..ends[1]).enumerate() {
        assert!(range.is_empty() || range.start / length as usize == (range.end - 1) / length as usize);
        if let Some(packing) = &batch.packing {
            let (positions, ids) = (numbers(&packing.positions), numbers(&packing.document_ids));
            assert_eq!(positions[range.clone()], (0..range.len() as i64).collect::<Vec<_>>());
            assert!(ids[range.clone()].iter().all(|&actual| actual == id as i64));
            assert!(range.len() as i64 <= packing.longest);
        }
        let within = &tokens[range.clone()];
        let kept = within.iter().take_while(|&&token| token != pad).count();
        assert!(within[kept..].iter().all(|&token| token == pad));
        assert!(
            batch.packing.is_none() || kept == 0 || kept == within.len(),
            "padding is a document of its own"
        );
        for position in 0..within.len() {
            let expected = if position + 1 < kept { within[position + 1] } else { IGNORE_INDEX };
            assert_eq!(labels[range.start + position], expected);
        }
        if kept > 0 {
            let (sample, start) = ((within[0] - 1) as usize / 1000, (within[0] - 1) as usize % 1000);
            assert_eq!(within[..kept], (within[0]..within[0] + kept as i64).collect::<Vec<_>>());
            assert!(start + kept <= lengths[sample]);
            ranges.push((sample, start..start + kept));
            of_tokens += kept;
            targets += kept - 1;
        }
    }
    if let Some(packing) = &batch.packing {
        assert_eq!(
            numbers(&packing.cu_seqlens),
            packing.starts.iter().map(|&s| i64::from(s)).collect::<Vec<_>>()
        );
    }
    let counts = batch.counts;
    assert_eq!((counts.documents, counts.tokens, counts.targets), (ranges.len(), of_tokens, targets));
    assert_eq!(counts.padding, (rows * length) as usize - of_tokens);
    ranges
}

/// Returns all documents of an epoch, and the number of tokens dropped.
fn epoch(source: &impl BatchSource, number: u64, lengths: &[usize]) -> (Vec<(usize, Range<usize>)>, usize) {
    let mut all = Vec::new();
    let mut dropped = 0;
    for index in 0..source.batches(number) {
        let batch = source.batch(number, index).unwrap();
        dropped += batch.counts.dropped;
        all.extend(documents(&batch, lengths, 0));
    }
    (all, dropped)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn rows_of_single_samples_are_correct(
        lengths in proptest::collection::vec(0_usize..30, 1..60),
        batch_size in 1_usize..9,
        max_length in 1_usize..35,
        number in 0_u64..3,
    ) {
        prop_assume!(lengths.iter().any(|&length| length > 0));
        let options = BatchConfig { batch_size, max_length, ..BatchConfig::default() };
        let base = BaseDataset::new(Numbered(lengths.clone()), &options).unwrap();
        let standard = StandardDataset::new(Numbered(lengths.clone()), &options).unwrap();
        let expected: Vec<_> = lengths.iter().enumerate().filter(|&(_, &length)| length > 0)
            .map(|(sample, &length)| (sample, 0..length.min(max_length))).collect();
        let cut: usize = lengths.iter().map(|&length| length.saturating_sub(max_length)).sum();
        let (mut of_base, dropped) = epoch(&base, number, &lengths);
        prop_assert_eq!(dropped, cut);
        let (mut of_standard, dropped) = epoch(&standard, number, &lengths);
        prop_assert_eq!(dropped, cut);
        prop_assert_eq!(&of_base, &of_standard, "the same samples in the same order");
        of_base.sort_by_key(|(sample, _)| *sample);
        of_standard.sort_by_key(|(sample, _)| *sample);
        prop_assert_eq!(of_base, expected);
        for index in 0..base.batches(number) {
            prop_assert_eq!(base.batch(number, index).unwrap().tokens.size()[1], max_length as i64);
            let batch = standard.batch(number, index).unwrap();
            let longest = documents(&batch, &lengths, 0).iter().map(|(_, positions)| positions.len()).max().unwrap();
            prop_assert_eq!(batch.tokens.size()[1], longest as i64);
        }
    }

    #[test]
    fn sequences_respect_their_capacity(
        lengths in proptest::collection::vec(0_usize..30, 1..60),
        batch_size in 1_usize..9,
        max_length in 1_usize..35,
        room in proptest::option::of(0_usize..60),
        cut: bool,
    ) {
        prop_assume!(lengths.iter().any(|&length| length > 0));
        let options = BatchConfig { batch_size, max_length, ..BatchConfig::default() };
        let overflow = if cut { Overflow::Truncate } else { Overflow::Drop };
        let capacity = room.map(|room| Capacity { tokens: max_length + room, overflow });
        let dataset = SequencedDataset::new(Numbered(lengths.clone()), &options, capacity).unwrap();
        let standard = StandardDataset::new(Numbered(lengths.clone()), &options).unwrap();
        for index in 0..dataset.batches(2) {
            let batch = dataset.batch(2, index).unwrap();
            let ranges = documents(&batch, &lengths, 0);
            let expected_ranges = documents(&standard.batch(2, index).unwrap(), &lengths, 0);
            prop_assert_eq!(batch.counts.padding, 0);
            prop_assert_eq!(batch.tokens.size()[0], 1);
            let mut left = capacity.map_or(usize::MAX, |capacity| capacity.tokens);
            let mut expected = Vec::new();
            for (sample, positions) in expected_ranges.clone() {
                let fits = positions.len() <= left;
                if !fits && cut && left > 0 {
                    expected.push((sample, 0..left));
                } else if fits {
                    expected.push((sample, positions.clone()));
                }
                if !fits { break }
                left -= positions.len();
            }
            prop_assert_eq!(&ranges, &expected);
            let given: usize = expected_ranges.iter().map(|(sample, _)| lengths[*sample]).sum();
            prop_assert_eq!(batch.counts.tokens + batch.counts.dropped, given);
        }
    }

    #[test]
    fn packed_rows_hold_everything_once_per_epoch(
        lengths in proptest::collection::vec(0_usize..70, 1..80),
        rows in 1_usize..5,
        capacity in 1_usize..40,
        sequential: bool,
    ) {
        prop_assume!(lengths.iter().any(|&length| length > 0));
        let order = if sequential { Order::Sequential } else { Order::Shuffled };
        let plan = PackingConfig { capacity, ..Default::default() };
        let options = PackedConfig { rows, plan, order, ..PackedConfig::default() };
        let dataset = PackedDataset::new(Numbered(lengths.clone()), &options).unwrap();
        for number in 0..2 {
            let mut next = BTreeMap::new();
            let (mut all, dropped) = epoch(&dataset, number, &lengths);
            prop_assert_eq!(dropped, 0);
            all.sort_by_key(|(sample, positions)| (*sample, positions.start));
            for (sample, positions) in all {
                prop_assert_eq!(next.insert(sample, positions.end).unwrap_or(0), positions.start);
            }
            let expected: BTreeMap<_, _> = lengths.iter().copied().enumerate().filter(|&(_, l)| l > 0).collect();
            prop_assert_eq!(next, expected);
        }
    }
}

#[test]
fn neighbours_change_from_epoch_to_epoch() {
    let lengths: Vec<usize> = (0..400).map(|index| 1 + index * 13 % 20).collect();
    let plan = PackingConfig { capacity: 20, ..Default::default() };
    let options = PackedConfig { rows: 1, plan, ..PackedConfig::default() };
    let dataset = PackedDataset::new(Numbered(lengths.clone()), &options).unwrap();
    let pairs = |number| {
        let mut pairs = std::collections::BTreeSet::new();
        for index in 0..dataset.batches(number) {
            let ranges = documents(&dataset.batch(number, index).unwrap(), &lengths, 0);
            for pair in ranges.windows(2) {
                pairs.insert((pair[0].0, pair[1].0));
            }
        }
        pairs
    };
    let (first, second) = (pairs(0), pairs(1));
    let kept = first.intersection(&second).count();
    assert!(first.len() > 150 && kept * 5 < first.len(), "{kept} of {} pairs stayed", first.len());
    assert_eq!(first, pairs(0));
}

#[test]
fn a_single_token_has_no_target() {
    let options = BatchConfig { batch_size: 3, ..BatchConfig::default() };
    let batch = StandardDataset::new(Numbered(vec![1, 1, 1]), &options).unwrap().batch(0, 0).unwrap();
    assert_eq!((batch.counts.targets, batch.counts.tokens), (0, 3));
    assert_eq!(numbers(&batch.labels), [IGNORE_INDEX; 3]);
}

/// Samples that are shorter than their reported lengths.
struct Changed;

impl Samples for Changed {
    fn len(&self) -> usize {
        1
    }

    fn length(&self, _: usize) -> usize {
        4
    }

    fn read(&self, _: usize, out: &mut Vec<u32>) -> Result<()> {
        out.extend([1, 2, 3]);
        Ok(())
    }
}

#[test]
fn invalid_options_are_errors() {
    let dataset = StandardDataset::new(Changed, &BatchConfig::default()).unwrap();
    assert_eq!(
        dataset.batch(0, 0).unwrap_err().to_string(),
        "samples: sample 0: 3 tokens from token 0 on, but its length implies 4; the data changed after it was opened; \
         open it again"
    );
    assert_eq!(
        dataset.batch(0, 1).unwrap_err().to_string(),
        "RandomBatchSampler: batch 1 of epoch 0, which has 1"
    );
    let capacity = Some(Capacity { tokens: 100, overflow: Overflow::Truncate });
    assert_eq!(
        SequencedDataset::new(Numbered(vec![3]), &BatchConfig::default(), capacity).unwrap_err().to_string(),
        "SequencedDataset: the capacity of 100 tokens is less than max_length, 512; a sequence must hold at least \
         one sample"
    );
}

#[test]
fn options_without_a_batch_are_refused() {
    let samples = || Numbered(vec![3, 2]);
    let options = BatchConfig { max_length: usize::MAX, ..BatchConfig::default() };
    assert_eq!(
        BaseDataset::new(samples(), &options).unwrap_err().to_string(),
        "BaseDataset: 2 rows padded to max_length, 18446744073709551615, exceed the memory; use a smaller one"
    );
    assert_eq!(StandardDataset::new(samples(), &options).unwrap().batch(0, 0).unwrap().tokens.size(), [2, 3]);
    assert_eq!(
        PackedDataset::new(samples(), &PackedConfig { rows: 0, ..PackedConfig::default() })
            .unwrap_err()
            .to_string(),
        "PackedDataset: the batch size is 0; expected at least 1"
    );
    let sampler = || RandomBatchSampler::new(&samples(), &BatchConfig::default()).unwrap();
    assert_eq!(
        StandardDataset::with_sampler(Numbered(vec![3]), sampler(), 512, 0).unwrap_err().to_string(),
        "StandardDataset: the sampler has 2 samples, but the data set has 1; create the sampler from this data set"
    );
    assert_eq!(
        StandardDataset::with_sampler(samples(), sampler(), 0, 0).unwrap_err().to_string(),
        "StandardDataset: max_length is 0; expected at least 1 token"
    );
}

/// Drops that no batch's counts can report, because there is no batch.
#[test]
fn samples_of_dropped_batches_are_counted() {
    let lengths: Vec<usize> = (0..53).map(|index| index * 7 % 30).collect();
    let used = lengths.iter().filter(|&&length| length > 0).count();
    for (incomplete, dropped) in [(Incomplete::Keep, 0), (Incomplete::Drop, used % 8)] {
        let options = BatchConfig { batch_size: 8, incomplete, ..BatchConfig::default() };
        let sampler = RandomBatchSampler::new(&Numbered(lengths.clone()), &options).unwrap();
        assert_eq!(sampler.dropped_samples(3), dropped);
        let batches = StandardDataset::new(Numbered(lengths.clone()), &options).unwrap();
        let documents =
            (0..batches.batches(3)).map(|index| batches.batch(3, index).unwrap().counts.documents);
        assert_eq!(documents.sum::<usize>(), used - dropped);

        let plan = PackingConfig { capacity: 32, ..PackingConfig::default() };
        let options = PackedConfig { rows: 5, plan, incomplete, ..PackedConfig::default() };
        let packed = PackedDataset::new(Numbered(lengths.clone()), &options).unwrap();
        let rows = packed.plan().rows();
        assert!(!rows.is_multiple_of(5), "{rows} rows, and none is left out");
        assert_eq!(packed.dropped_rows(), if incomplete == Incomplete::Drop { rows % 5 } else { 0 });
        let handed = (0..packed.batches(3)).map(|index| packed.batch(3, index).unwrap().tokens.size()[0]);
        assert_eq!(handed.sum::<i64>() as usize, rows - packed.dropped_rows());
    }
}

#[test]
fn reading_part_of_a_sample_is_correct() {
    for part in [0..0, 0..5, 2..4, 3..9, 7..9] {
        let (mut of_vectors, mut by_default) = (vec![99], vec![99]);
        let samples = Numbered(vec![5, 5]);
        let mut document = Vec::new();
        samples.read(1, &mut document).unwrap();
        vec![Vec::new(), document.clone()].read_part(1, part.clone(), &mut of_vectors).unwrap();
        samples.read_part(1, part.clone(), &mut by_default).unwrap();
        let expected: Vec<u32> = document.into_iter().skip(part.start).take(part.len()).collect();
        assert_eq!(of_vectors, [vec![99], expected].concat(), "{part:?}");
        assert_eq!(by_default, of_vectors, "{part:?}");
    }
}
