//! Balanced batches: their guarantees for any lengths, and the cost of finding one.

use dataloading::balanced_batch_sampler::k_from_flag;
use dataloading::{
    BalancedBatchSampler, BalancedConfig, BatchConfig, BatchSampler, BatchSize, BatchSource, Incomplete,
    RandomBatchSampler, Result, Samples, StandardDataset,
};
use proptest::prelude::*;

/// Lengths without tokens.
struct Lengths(Vec<usize>);

impl Samples for Lengths {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn length(&self, index: usize) -> usize {
        self.0[index]
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        out.extend(std::iter::repeat_n(index as u32, self.0[index]));
        Ok(())
    }
}

fn all_batches(sampler: &impl BatchSampler, epoch: u64) -> Vec<Vec<u32>> {
    let choose = |index| {
        let mut chosen = Vec::new();
        sampler.choose(epoch, index, &mut chosen).unwrap();
        chosen
    };
    (0..sampler.batches(epoch)).map(choose).collect()
}

proptest! {
    #[test]
    fn every_sample_occurs_once_and_length_gaps_are_at_most_k(
        lengths in proptest::collection::vec(0_usize..60, 1..300),
        size in 1_usize..20,
        k in 0_usize..70,
        max_length in 1_usize..80,
        seed: u64,
        epoch: u64,
    ) {
        prop_assume!(lengths.iter().any(|&length| length > 0));
        let options = BalancedConfig { batch_size: BatchSize::Samples(size), k, max_length, seed, ..Default::default() };
        let sampler = BalancedBatchSampler::new(&Lengths(lengths.clone()), &options).unwrap();
        let batches = all_batches(&sampler, epoch);
        let mut seen = vec![0; lengths.len()];
        for batch in &batches {
            let of_batch = || batch.iter().map(|&sample| lengths[sample as usize].min(max_length));
            prop_assert!(of_batch().max().unwrap() - of_batch().min().unwrap() <= k);
            batch.iter().for_each(|&sample| seen[sample as usize] += 1);
        }
        prop_assert_eq!(seen, lengths.iter().map(|&length| length.min(1)).collect::<Vec<_>>());
        let short = batches.iter().filter(|batch| batch.len() < size).count();
        prop_assert!(short <= sampler.most_windows(), "{} short batches, {} windows", short, sampler.most_windows());
    }

    #[test]
    fn batches_by_tokens_respect_the_limit(
        lengths in proptest::collection::vec(1_usize..60, 1..200),
        limit in 60_usize..400,
        k in 0_usize..70,
        epoch in 0_u64..5,
    ) {
        let options = BalancedConfig { batch_size: BatchSize::Tokens(limit), k, ..Default::default() };
        let sampler = BalancedBatchSampler::new(&Lengths(lengths.clone()), &options).unwrap();
        let mut seen = vec![0; lengths.len()];
        for batch in all_batches(&sampler, epoch) {
            let longest = batch.iter().map(|&sample| lengths[sample as usize]).max().unwrap();
            prop_assert!(batch.len() * longest <= limit);
            batch.iter().for_each(|&sample| seen[sample as usize] += 1);
        }
        prop_assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn dropping_leaves_full_batches_only(
        lengths in proptest::collection::vec(1_usize..60, 20..200),
        size in 1_usize..20,
        k in 0_usize..70,
    ) {
        let options = BalancedConfig { batch_size: BatchSize::Samples(size), k, incomplete: Incomplete::Drop, ..Default::default() };
        let sampler = BalancedBatchSampler::new(&Lengths(lengths.clone()), &options);
        // A batch is full if enough of the sorted lengths are within k.
        let mut sorted = lengths.clone();
        sorted.sort();
        let possible = sorted.windows(size).any(|window| window[size - 1] - window[0] <= k);
        prop_assert_eq!(sampler.is_ok(), possible);
        let Ok(sampler) = sampler else { return Ok(()) };
        let mut seen = vec![0; lengths.len()];
        for batch in all_batches(&sampler, 1) {
            prop_assert_eq!(batch.len(), size);
            batch.iter().for_each(|&sample| seen[sample as usize] += 1);
        }
        prop_assert!(seen.iter().all(|&times| times <= 1));
        let lost = seen.iter().filter(|&&times| times == 0).count();
        prop_assert!(lost <= sampler.most_windows() * (size - 1));
        prop_assert_eq!(lost, sampler.dropped_samples(1));
    }

    #[test]
    fn the_largest_k_is_standard_batching(
        lengths in proptest::collection::vec(0_usize..60, 1..200),
        size in 1_usize..20,
        beyond in 0_usize..5,
        seed: u64,
        epoch: u64,
    ) {
        prop_assume!(lengths.iter().any(|&length| length > 0));
        let used = || lengths.iter().copied().filter(|&length| length > 0);
        let k = used().max().unwrap() - used().min().unwrap() + beyond;
        let balanced = BalancedConfig { batch_size: BatchSize::Samples(size), k, seed, ..Default::default() };
        let standard = BatchConfig { batch_size: size, seed, ..Default::default() };
        let balanced = BalancedBatchSampler::new(&Lengths(lengths.clone()), &balanced).unwrap();
        let standard = RandomBatchSampler::new(&Lengths(lengths.clone()), &standard).unwrap();
        prop_assert_eq!(all_batches(&balanced, epoch), all_batches(&standard, epoch));
    }
}

#[test]
fn the_tensors_are_those_of_standard_batching_too() {
    let lengths = || Lengths((0..50).map(|index| 1 + index * 7 % 23).collect());
    let options = BalancedConfig { batch_size: BatchSize::Samples(8), k: 22, ..Default::default() };
    let balanced = StandardDataset::balanced(lengths(), &options, 9).unwrap();
    let options = BatchConfig { batch_size: 8, pad: 9, ..Default::default() };
    let standard = StandardDataset::new(lengths(), &options).unwrap();
    assert_eq!(balanced.batches(3), 7);
    for index in 0..7 {
        let (a, b) = (balanced.batch(3, index).unwrap(), standard.batch(3, index).unwrap());
        assert_eq!(a.tokens, b.tokens);
        assert_eq!(a.labels, b.labels);
    }
}

/// Lengths distributed as in text: many short, few long.
fn skewed(n: usize) -> Lengths {
    Lengths((0..n).map(|index| 1 + (index * 7919 % n) * 500 / n * (index % 5) / 4).collect())
}

#[test]
fn operations_per_batch_do_not_depend_on_the_size() {
    let mut counts = Vec::new();
    for n in [1_000, 10_000, 100_000] {
        let options = BalancedConfig { batch_size: BatchSize::Samples(16), k: 20, ..Default::default() };
        let sampler = BalancedBatchSampler::new(&skewed(n), &options).unwrap();
        let batches = sampler.batches(0);
        let (mut chosen, mut most_comparisons, mut passes, mut measured) = (Vec::new(), 0, 0, 0);
        for index in (0..batches).step_by(batches / 50) {
            let done = sampler.choose_counted(0, index, &mut chosen).unwrap();
            assert_eq!(done.lookups, chosen.len() as u64, "one lookup for each sample");
            most_comparisons = most_comparisons.max(done.comparisons);
            passes += done.passes;
            measured += chosen.len() as u64 + 1;
        }
        assert!(passes <= 2 * measured, "{passes} passes for {measured} elements");
        counts.push(most_comparisons);
    }
    // 500 lengths and k = 20 make 25 windows for any n.
    assert!(counts.iter().all(|&count| (4..=6).contains(&count)), "{counts:?}");
}

#[test]
fn pairs_within_a_window_are_about_equally_frequent() {
    // One length: all 12 samples are in one window with k = 0, next to 30 of other lengths.
    let lengths: Vec<usize> = (0..42).map(|index| if index < 12 { 5 } else { 6 + index }).collect();
    let options = BalancedConfig { batch_size: BatchSize::Samples(4), k: 0, ..Default::default() };
    let sampler = BalancedBatchSampler::new(&Lengths(lengths), &options).unwrap();
    let epochs = 6_000;
    let mut together = vec![0_f64; 12 * 12];
    let mut first = vec![0_f64; sampler.batches(0)];
    let mut chosen = Vec::new();
    for epoch in 0..epochs {
        assert_eq!(sampler.batches(epoch), first.len());
        for (index, count) in first.iter_mut().enumerate() {
            sampler.choose(epoch, index, &mut chosen).unwrap();
            if chosen.contains(&41) {
                *count += 1.0;
            }
            for &a in chosen.iter().filter(|&&a| a < 12) {
                for &b in chosen.iter().filter(|&&b| b < a) {
                    together[a as usize * 12 + b as usize] += 1.0;
                }
            }
        }
    }
    let chi_square = |counts: &[f64]| {
        let expected = counts.iter().sum::<f64>() / counts.len() as f64;
        let statistic: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
        let freedom = counts.len() as f64 - 1.0;
        (statistic - freedom) / (2.0 * freedom).sqrt()
    };
    let pairs: Vec<f64> =
        (0..12).flat_map(|a| (0..a).map(move |b| a * 12 + b)).map(|at| together[at]).collect();
    // Three of eleven others share a sample's batch.
    assert_eq!(pairs.iter().sum::<f64>(), epochs as f64 * 18.0);
    assert!(chi_square(&pairs).abs() < 5.0, "pairs: {}", chi_square(&pairs));
    assert!(chi_square(&first).abs() < 5.0, "position of a batch in the epoch: {}", chi_square(&first));
}

#[test]
fn window_boundaries_change_between_epochs() {
    let options = BalancedConfig { batch_size: BatchSize::Samples(100), k: 9, ..Default::default() };
    let sampler = BalancedBatchSampler::new(&Lengths((1..=50).collect()), &options).unwrap();
    let mut shortest_batch = std::collections::BTreeSet::new();
    for epoch in 0..60 {
        let with_first = all_batches(&sampler, epoch).into_iter().find(|batch| batch.contains(&0)).unwrap();
        shortest_batch.insert(with_first.len());
    }
    assert_eq!(shortest_batch, (1..=10).collect());
}

#[test]
fn invalid_sampler_options_are_refused() {
    let refused = |options: BalancedConfig, words: &str| {
        let error = BalancedBatchSampler::new(&Lengths(vec![3, 9]), &options).unwrap_err();
        assert_eq!(error.to_string(), words);
    };
    refused(
        BalancedConfig { batch_size: BatchSize::Samples(0), ..Default::default() },
        "BalancedBatchSampler: the batch size is 0; expected at least 1",
    );
    refused(
        BalancedConfig { batch_size: BatchSize::Tokens(8), ..Default::default() },
        "BalancedBatchSampler: a batch of 8 tokens cannot hold the longest sample, 9 tokens; use larger batches, or a \
         smaller max_length",
    );
    for batch_size in [BatchSize::Samples(2), BatchSize::Tokens(18)] {
        let incomplete = Incomplete::Drop;
        refused(
            BalancedConfig { batch_size, k: 5, incomplete, ..Default::default() },
            "BalancedBatchSampler: no 6 consecutive lengths have enough samples for a full batch, and incomplete ones \
             are dropped, so there is no batch; keep them, or use smaller batches or a larger k",
        );
        let options = BalancedConfig { batch_size, k: 6, incomplete, ..Default::default() };
        assert_eq!(BalancedBatchSampler::new(&Lengths(vec![3, 9]), &options).unwrap().batches(0), 1);
    }
    assert_eq!(
        k_from_flag(-3).unwrap_err().to_string(),
        "k: -3 is negative; expected the largest difference in length within a batch, from 0 on"
    );
    assert_eq!(k_from_flag(20).unwrap(), 20);
    let sampler = BalancedBatchSampler::new(&Lengths(vec![3, 9]), &BalancedConfig::default()).unwrap();
    let error = sampler.choose(4, 1, &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "BalancedBatchSampler: batch 1 of epoch 4, which has 1");
}
