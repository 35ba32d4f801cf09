//! The loader: the same sequence for any number of workers, resuming at any batch, and failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::strategies::{content, reference, strategies};
use dataloading::packing::{Algorithm, LongDocuments, PackingConfig};
use dataloading::{
    BalancedConfig, BaseDataset, Batch, BatchConfig, BatchSize, BatchSource, Capacity, Error, Incomplete,
    Loader, LoaderConfig, LoaderState, Overflow, PackedConfig, PackedDataset, Result, Samples,
    SequencedDataset, StandardDataset,
};
use proptest::prelude::*;

fn all(loader: Loader) -> Vec<Vec<Vec<i64>>> {
    loader.map(|batch| content(&batch.unwrap())).collect()
}

fn options(workers: usize, prefetch: usize) -> LoaderConfig {
    LoaderConfig { workers, prefetch, epochs: Some(2), ..LoaderConfig::default() }
}

#[test]
fn any_number_of_workers_makes_the_same_sequence() {
    for source in strategies(37, 5) {
        let expected = reference(&source, 2);
        for workers in 0..=4 {
            // The last two exceed all batches of both epochs.
            for prefetch in [1, 3, 1000, usize::MAX] {
                let mut loader = Loader::new(source.clone(), &options(workers, prefetch)).unwrap();
                let batches: Vec<_> = loader.by_ref().map(|batch| content(&batch.unwrap())).collect();
                assert_eq!(batches, expected, "{workers} workers, prefetch {prefetch}");
                assert_eq!(loader.stats().batches, expected.len() as u64);
                assert!(loader.stats().worked_seconds > 0.0);
                assert!(loader.next().is_none());
            }
        }
    }
}

#[test]
fn held_batches_do_not_change() {
    let source = strategies(37, 5).remove(1);
    let kept: Vec<Batch> = Loader::new(source.clone(), &options(2, 3)).unwrap().map(Result::unwrap).collect();
    assert_eq!(kept.iter().map(content).collect::<Vec<_>>(), reference(&source, 2));
}

#[test]
fn resuming_at_any_position_gives_the_same_batches() {
    for source in strategies(23, 8) {
        let expected = reference(&source, 2);
        let mut loader = Loader::new(source.clone(), &options(2, 3)).unwrap();
        for done in 0..=expected.len() {
            let state = loader.state();
            let words = serde_json::to_string(&state).unwrap();
            let state: LoaderState = serde_json::from_str(&words).unwrap();
            let workers = done % 3;
            let rest = all(Loader::resume(source.clone(), &options(workers, 2), &state).unwrap());
            assert_eq!(rest, expected[done..], "from {words}");
            loader.next();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn ranks_partition_the_sequence_also_after_a_change(
        before in 1_u64..4,
        after in 1_u64..4,
        rounds in 0_usize..6,
        seed: u64,
        strategy in 0_usize..5,
    ) {
        let source = strategies(29, seed).remove(strategy);
        let expected = reference(&source, 2);
        let with = |rank, ranks| LoaderConfig { rank, ranks, ..options((rank % 2) as usize, 2) };
        let mut batches = Vec::new();
        let mut loaders: Vec<Loader> =
            (0..before).map(|rank| Loader::new(source.clone(), &with(rank, before)).unwrap()).collect();
        for _ in 0..rounds {
            let round: Vec<_> = loaders.iter_mut().map(|loader| loader.next()).collect();
            prop_assert!(round.iter().all(Option::is_some) || round.iter().all(Option::is_none));
            batches.extend(round.into_iter().flatten().map(|batch| content(&batch.unwrap())));
        }
        let states: Vec<LoaderState> = loaders.iter().map(Loader::state).collect();
        prop_assert!(states.iter().all(|state| *state == states[0]));
        let mut loaders: Vec<Loader> = (0..after)
            .map(|rank| Loader::resume(source.clone(), &with(rank, after), &states[0]).unwrap())
            .collect();
        loop {
            let round: Vec<_> = loaders.iter_mut().map(|loader| loader.next()).collect();
            if round.iter().all(Option::is_none) {
                break;
            }
            batches.extend(round.into_iter().map(|batch| content(&batch.unwrap().unwrap())));
        }
        prop_assert!(expected.len() - batches.len() < after.max(before) as usize);
        prop_assert_eq!(&batches[..], &expected[..batches.len()]);
    }
}

/// Samples with an invalid one among them.
struct Bad {
    sample: usize,
    panics: bool,
    reads: AtomicUsize,
}

impl Samples for Bad {
    fn len(&self) -> usize {
        100
    }

    fn length(&self, _: usize) -> usize {
        3
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if index == self.sample && self.panics {
            panic!("sample {index} is cursed");
        }
        if index == self.sample {
            return Err(Error::Record {
                from: "corpus.jsonl".into(),
                location: format!("line {}", index + 1),
                reason: "not UTF-8".into(),
            });
        }
        out.extend([1, 2, 3]);
        Ok(())
    }
}

fn bad(sample: usize, panics: bool) -> Arc<dyn BatchSource> {
    let options =
        BatchConfig { batch_size: 10, order: dataloading::Order::Sequential, ..BatchConfig::default() };
    let samples = Bad { sample, panics, reads: AtomicUsize::new(0) };
    Arc::new(StandardDataset::new(samples, &options).unwrap())
}

#[test]
fn a_bad_record_is_an_error_with_its_index_and_ends_the_loader() {
    for workers in [0, 1, 3] {
        for sample in [0, 42, 99] {
            let mut loader = Loader::new(bad(sample, false), &options(workers, 4)).unwrap();
            for _ in 0..sample / 10 {
                assert!(loader.next().unwrap().is_ok());
            }
            let at = loader.state();
            let error = loader.next().unwrap().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("batch {} of epoch 0: corpus.jsonl: line {}: not UTF-8", sample / 10, sample + 1)
            );
            assert!(loader.next().is_none());
            assert_eq!(loader.state(), at);
        }
    }
}

#[test]
fn a_panic_is_an_error_with_its_index_and_ends_the_loader() {
    for workers in [0, 1, 3] {
        let mut loader = Loader::new(bad(57, true), &options(workers, 2)).unwrap();
        let error = loader.by_ref().find_map(Result::err).unwrap();
        assert_eq!(
            error.to_string(),
            "a worker of the loader panicked at batch 5 of epoch 0: sample 57 is cursed"
        );
        assert!(loader.next().is_none());
    }
}

#[test]
fn an_abandoned_loader_ends_its_threads() {
    for taken in [0, 1, 5] {
        let samples = Arc::new(Bad { sample: 1000, panics: false, reads: AtomicUsize::new(0) });
        let dataset = StandardDataset::new(samples.clone(), &BatchConfig::default()).unwrap();
        let options = LoaderConfig { epochs: None, ..options(3, 4) };
        let mut loader = Loader::new(Arc::new(dataset), &options).unwrap();
        assert_eq!(loader.by_ref().take(taken).filter(Result::is_ok).count(), taken);
        drop(loader);
        // The threads held clones of the samples.
        assert_eq!(Arc::strong_count(&samples), 1);
        // 32 samples a batch; those taken, four ahead.
        assert!(samples.reads.load(Ordering::Relaxed) <= (taken + 4) * 32);
    }
}

#[test]
fn a_state_of_other_data_is_refused() {
    let source = strategies(37, 5).remove(1);
    let state = Loader::new(source.clone(), &options(0, 1)).unwrap().state();
    // Saved states contain this fingerprint, on any machine.
    assert_eq!(
        serde_json::to_string(&state).unwrap(),
        r#"{"seed":5,"epoch":0,"position":0,"batches":10,"fingerprint":2099923815248559698}"#
    );
    let former = serde_json::from_str::<LoaderState>(r#"{"seed":5,"epoch":0,"position":0,"batches":10}"#);
    assert!(former.unwrap_err().to_string().starts_with("missing field `fingerprint`"));
    let refused = |source: &Arc<dyn BatchSource>, options: LoaderConfig, state: LoaderState, words: &str| {
        assert_eq!(Loader::resume(source.clone(), &options, &state).unwrap_err().to_string(), words);
    };
    refused(
        &strategies(37, 6).remove(1),
        options(0, 1),
        state,
        "loader: the state has seed 5, but the data set has seed 6; use the same seed to resume",
    );
    refused(
        &strategies(20, 5).remove(1),
        options(0, 1),
        state,
        "loader: the state is at batch 0 of 10 of epoch 0, but the data set has 5; resume with the same data and batch \
         size",
    );
    refused(
        &source,
        LoaderConfig { rank: 2, ranks: 2, ..options(0, 1) },
        state,
        "loader: rank 2 of 2; expected a rank from 0 to below the number of ranks",
    );
}

/// Each changes the content of the batches but not their number.
#[test]
fn a_state_of_other_data_or_options_of_as_many_batches_is_refused() {
    let samples = || (0..40).map(|index| vec![index; 1 + index as usize % 8]).collect::<Vec<Vec<u32>>>();
    let mut other = samples();
    other[17][1] += 1;
    let plain = BatchConfig { batch_size: 10, max_length: 32, ..BatchConfig::default() };
    let standard = |samples, change: fn(&mut BatchConfig)| -> Arc<dyn BatchSource> {
        let mut options = plain;
        change(&mut options);
        Arc::new(StandardDataset::new(samples, &options).unwrap())
    };
    let sequenced = |capacity| -> Arc<dyn BatchSource> {
        Arc::new(SequencedDataset::new(samples(), &plain, capacity).unwrap())
    };
    let balanced = |change: fn(&mut BalancedConfig)| -> Arc<dyn BatchSource> {
        let batch_size = BatchSize::Samples(10);
        let mut options = BalancedConfig { batch_size, k: 100, max_length: 32, ..Default::default() };
        change(&mut options);
        Arc::new(StandardDataset::balanced(samples(), &options, 0).unwrap())
    };
    let packed = |change: fn(&mut PackedConfig)| -> Arc<dyn BatchSource> {
        let plan = PackingConfig { capacity: 8, ..PackingConfig::default() };
        let mut options = PackedConfig { rows: 6, plan, ..PackedConfig::default() };
        change(&mut options);
        Arc::new(PackedDataset::new(samples(), &options).unwrap())
    };
    let cut = |overflow| Some(Capacity { tokens: 32, overflow });
    let sources = [
        standard(samples(), |_| {}),
        standard(other, |_| {}),
        standard(samples(), |options| options.batch_size = 11),
        standard(samples(), |options| options.max_length = 31),
        standard(samples(), |options| options.pad = 1),
        standard(samples(), |options| options.order = dataloading::Order::Sequential),
        standard(samples(), |options| options.incomplete = Incomplete::Drop),
        Arc::new(BaseDataset::new(samples(), &plain).unwrap()),
        sequenced(None),
        sequenced(cut(Overflow::Truncate)),
        sequenced(cut(Overflow::Drop)),
        balanced(|_| {}),
        balanced(|options| options.k = 101),
        balanced(|options| options.batch_size = BatchSize::Tokens(80)),
        packed(|_| {}),
        packed(|options| options.plan.algorithm = Algorithm::FirstFitDecreasing),
        packed(|options| options.plan.long = LongDocuments::Drop),
        packed(|options| options.pad = 1),
    ];
    for (at, of_state) in sources.iter().enumerate() {
        let mut loader = Loader::new(of_state.clone(), &options(0, 1)).unwrap();
        loader.next().unwrap().unwrap();
        let mut state = loader.state();
        for (other, source) in sources.iter().enumerate() {
            // Packed data sets have other numbers of batches, which alone would be refused.
            state.batches = source.batches(0) as u64;
            let resumed = Loader::resume(source.clone(), &options(0, 1), &state);
            assert_eq!(resumed.is_ok(), at == other, "state of {at}, source {other}");
        }
    }
    let state = Loader::new(sources[0].clone(), &options(0, 1)).unwrap().state();
    let refused = Loader::resume(sources[2].clone(), &options(0, 1), &state).unwrap_err().to_string();
    let (ours, theirs) = (sources[0].fingerprint(), sources[2].fingerprint());
    assert_eq!(
        refused,
        format!(
            "loader: the state has other data or options (its fingerprint is {ours:016x}, that of the data set {theirs:016x}); \
             resume with the same data, strategy, batch size and other options"
        )
    );
}

#[test]
fn more_ranks_than_batches_continue_into_later_epochs() {
    let source = strategies(9, 4).remove(1);
    assert_eq!(source.batches(0), 3);
    let expected = reference(&source, 5);
    for workers in [0, 2] {
        let of_rank = |rank| {
            let options = LoaderConfig { rank, ranks: 7, epochs: Some(5), ..options(workers, 2) };
            all(Loader::new(source.clone(), &options).unwrap())
        };
        // Two complete rounds of seven in 15 batches.
        for rank in 0..7 {
            assert_eq!(of_rank(rank), [expected[rank as usize].clone(), expected[rank as usize + 7].clone()]);
        }
        // No complete round in an epoch.
        let options = LoaderConfig { rank: 0, ranks: 7, epochs: Some(2), ..options(workers, 2) };
        assert!(all(Loader::new(source.clone(), &options).unwrap()).is_empty());
    }
}

#[test]
fn absurd_numbers_are_refused() {
    let source = strategies(9, 4).remove(1);
    let refused = |options: &LoaderConfig| Loader::new(source.clone(), options).unwrap_err().to_string();
    let many = options(usize::MAX, 1);
    assert_eq!(refused(&many), "loader: 18446744073709551615 workers; expected at most 1024");
    let many = LoaderConfig { ranks: 1 << 25, ..options(0, 1) };
    assert_eq!(refused(&many), "loader: 33554432 ranks; expected at most 16777216");
    assert_eq!(
        refused(&LoaderConfig { ranks: 0, ..options(0, 1) }),
        "loader: rank 0 of 0; expected a rank from 0 to below the number of ranks"
    );
    for workers in [0, 2] {
        let options = LoaderConfig { epochs: None, ..options(workers, 1) };
        let state = Loader::new(source.clone(), &options).unwrap().state();
        let state = LoaderState { epoch: u64::MAX, position: 3, ..state };
        let mut loader = Loader::resume(source.clone(), &options, &state).unwrap();
        assert_eq!(
            loader.next().unwrap().unwrap_err().to_string(),
            "loader: 0 batches after batch 3 of epoch 18446744073709551615 exceed the range of batch numbers"
        );
        assert!(loader.next().is_none());
    }
}

/// Panics with a value whose drop panics too.
struct Cursed;

impl Drop for Cursed {
    fn drop(&mut self) {
        panic!("and its words too");
    }
}

struct PanicsTwice;

impl BatchSource for PanicsTwice {
    fn seed(&self) -> u64 {
        0
    }

    fn batches(&self, _: u64) -> usize {
        3
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn fill(&self, _: u64, _: usize, _: &mut dataloading::HostBatch) -> Result<()> {
        std::panic::panic_any(Cursed)
    }
}

#[test]
fn a_panic_that_panics_again_does_not_keep_the_consumer_waiting() {
    for workers in [0, 2] {
        let mut loader = Loader::new(Arc::new(PanicsTwice), &options(workers, 2)).unwrap();
        assert_eq!(
            loader.next().unwrap().unwrap_err().to_string(),
            "a worker of the loader panicked at batch 0 of epoch 0: no message"
        );
        assert!(loader.next().is_none());
    }
}

#[test]
fn a_loader_that_is_dropped_after_an_error_does_not_wait_for_its_workers() {
    // The workers have filled the prefetch buffer and wait.
    let mut loader = Loader::new(bad(0, false), &options(3, 4)).unwrap();
    assert!(loader.next().unwrap().is_err());
    drop(loader);
}
