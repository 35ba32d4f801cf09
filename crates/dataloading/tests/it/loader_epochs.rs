//! The ends of epochs, and epochs without batches.

use std::sync::Arc;

use dataloading::{
    BalancedConfig, Batch, BatchSize, BatchSource, Incomplete, Loader, LoaderConfig, Result, StandardDataset,
};

fn options(workers: usize, prefetch: usize) -> LoaderConfig {
    LoaderConfig { workers, prefetch, ..LoaderConfig::default() }
}

/// A source with two batches in some epochs and none in others; asking for one particular epoch panics.
struct Short {
    has: fn(u64) -> bool,
    forbidden: u64,
}

impl BatchSource for Short {
    fn seed(&self) -> u64 {
        0
    }

    fn batches(&self, epoch: u64) -> usize {
        assert!(epoch < self.forbidden, "no epoch {epoch}");
        if (self.has)(epoch) { 2 } else { 0 }
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn fill(&self, epoch: u64, index: usize, host: &mut dataloading::HostBatch) -> Result<()> {
        host.write_rows([&[epoch as u32, index as u32][..]].into_iter(), 2, 0, 0)
    }
}

fn short(has: fn(u64) -> bool, forbidden: u64) -> Arc<dyn BatchSource> {
    Arc::new(Short { has, forbidden })
}

/// Returns epoch and index of each batch, and the error that ended the loader.
fn positions(loader: Loader) -> (Vec<(i64, i64)>, Option<String>) {
    let mut positions = Vec::new();
    for batch in loader {
        match batch {
            Ok(batch) => {
                let tokens = Vec::<i64>::try_from(batch.tokens.f_reshape([-1]).unwrap()).unwrap();
                positions.push((tokens[0], tokens[1]));
            }
            Err(error) => return (positions, Some(error.to_string())),
        }
    }
    (positions, None)
}

#[test]
fn the_last_epoch_is_finished_without_asking_for_the_next() {
    for workers in [0, 2] {
        for epochs in 1..4 {
            let expected: Vec<(i64, i64)> =
                (0..epochs as i64).flat_map(|epoch| [(epoch, 0), (epoch, 1)]).collect();
            for ranks in [1, 2, epochs * 2] {
                let mut seen = Vec::new();
                for rank in 0..ranks {
                    let options = LoaderConfig { rank, ranks, epochs: Some(epochs), ..options(workers, 3) };
                    let (positions, error) =
                        positions(Loader::new(short(|_| true, epochs), &options).unwrap());
                    assert_eq!(error, None);
                    seen.extend(positions);
                }
                seen.sort();
                assert_eq!(seen, expected, "{workers} workers, {ranks} ranks");
            }
        }
    }
}

#[test]
fn a_finished_loader_resumes_at_the_end_or_into_further_epochs() {
    for workers in [0, 2] {
        let options = LoaderConfig { epochs: Some(1), ..options(workers, 3) };
        let mut loader = Loader::new(short(|_| true, 1), &options).unwrap();
        assert_eq!(loader.by_ref().count(), 2);
        let state = loader.state();
        assert_eq!((state.epoch, state.position, state.batches), (0, 2, 2));
        assert_eq!(Loader::resume(short(|_| true, 1), &options, &state).unwrap().count(), 0);
        let further = LoaderConfig { epochs: Some(2), ..options };
        let rest = Loader::resume(short(|_| true, 2), &further, &state).unwrap();
        assert_eq!(positions(rest), (vec![(1, 0), (1, 1)], None));
    }
}

#[test]
fn an_epoch_without_batches_is_skipped() {
    let odd = || short(|epoch| epoch % 2 == 1, 6);
    for workers in [0, 2] {
        let options = LoaderConfig { epochs: Some(6), ..options(workers, 2) };
        let expected = [(1, 0), (1, 1), (3, 0), (3, 1), (5, 0), (5, 1)];
        let mut loader = Loader::new(odd(), &options).unwrap();
        for done in 0..=expected.len() {
            let rest = Loader::resume(odd(), &options, &loader.state()).unwrap();
            assert_eq!(positions(rest), (expected[done..].to_vec(), None));
            loader.next();
        }
    }
}

#[test]
fn epochs_without_any_batch_are_an_error() {
    let none = || short(|_| false, u64::MAX);
    let refused = |epochs| {
        let options = LoaderConfig { epochs, ..options(0, 2) };
        Loader::new(none(), &options).unwrap_err().to_string()
    };
    assert_eq!(
        refused(Some(1)),
        "loader: epoch 0 has no batch; keep incomplete batches, or use smaller ones"
    );
    assert_eq!(
        refused(Some(3)),
        "loader: epochs 0 to 2 have no batch; keep incomplete batches, or use smaller ones"
    );
    let words = "loader: epochs 0 to 65535 have no batch; keep incomplete batches, or use smaller ones";
    assert_eq!(refused(None), words);
    for workers in [0, 2] {
        for (source, words) in [
            (
                short(|epoch| epoch == 0, u64::MAX),
                "loader: epochs 1 to 65536 have no batch; keep incomplete batches, or use smaller ones",
            ),
            (short(|_| true, 1), "a worker of the loader panicked at batch 2 of epoch 0: no epoch 1"),
        ] {
            let options = LoaderConfig { epochs: None, ..options(workers, 2) };
            let (positions, error) = positions(Loader::new(source, &options).unwrap());
            assert_eq!((positions.len(), error.as_deref()), (2, Some(words)), "{workers} workers");
        }
    }
}

/// Lengths 5 and 6 fill a batch only together, and the offset of the windows is random in each epoch.
#[test]
fn balanced_batches_skip_epochs_without_full_windows() {
    let lengths = [[5; 16], [6; 16]].concat().into_iter().chain([20]);
    let samples: Vec<Vec<u32>> = lengths.map(|length| vec![7; length]).collect();
    let balanced = BalancedConfig {
        batch_size: BatchSize::Samples(32),
        k: 1,
        incomplete: Incomplete::Drop,
        ..BalancedConfig::default()
    };
    let source = Arc::new(StandardDataset::balanced(samples, &balanced, 0).unwrap());
    let batches: Vec<usize> = (0..20).map(|epoch| source.batches(epoch)).collect();
    assert!(batches.contains(&0) && batches.contains(&1), "{batches:?}");
    for ranks in [1, 2] {
        let options = LoaderConfig { ranks, epochs: Some(20), ..options(2, 2) };
        let taken: Vec<Batch> = Loader::new(source.clone(), &options).unwrap().map(Result::unwrap).collect();
        assert_eq!(taken.len(), batches.iter().sum::<usize>() / ranks as usize);
        assert!(taken.iter().all(|batch| batch.counts.documents == 32));
    }
}
