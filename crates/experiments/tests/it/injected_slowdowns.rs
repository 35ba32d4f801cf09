//! Injected slowdowns cost time, and change nothing that is learned.

use std::collections::BTreeSet;

use experiments::corpus::{Corpus, Limits};
use experiments::training::injected_slowdowns::Inefficiency;
use experiments::training::setup::{Common, Setup};
use models::Gpt2LikeConfig;
use tch::Device;

const STEPS: u64 = 3;

fn losses(corpus: &Corpus, on: &BTreeSet<Inefficiency>) -> Vec<f64> {
    let model = Gpt2LikeConfig {
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 32,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let common = Common { model, odd: (15, 3), batch_size: 4, lr: 1e-4, device: Device::Cpu, seed: 5 };
    let mut setup = Setup::new(corpus, on, &common).unwrap();
    setup.run(STEPS).unwrap().into_iter().map(|record| record.loss).collect()
}

#[test]
fn injected_slowdowns_train_the_same() {
    let limits = Limits { max_length: 32, train_tokens: 2_000, validation_tokens: 100, vocabulary: 0 };
    let corpus = Corpus::embedded(&limits).unwrap();
    let clean = losses(&corpus, &BTreeSet::new());
    assert_eq!(clean.len() as u64, STEPS);
    assert!(clean[0] != clean[2], "the losses {clean:?} do not change, so they show nothing");

    let other = [Inefficiency::PadToMax, Inefficiency::OddWidth];
    let worst = |losses: &[f64]| {
        losses.iter().zip(&clean).map(|(ours, clean)| (ours / clean - 1.0).abs()).fold(0.0, f64::max)
    };
    let mut cases: Vec<(String, BTreeSet<Inefficiency>)> =
        Inefficiency::ALL.iter().map(|&one| (one.to_string(), BTreeSet::from([one]))).collect();
    let same = Inefficiency::ALL.into_iter().filter(|one| !other.contains(one));
    cases.push(("all that train the same".into(), same.collect()));
    for (name, on) in cases {
        let losses = losses(&corpus, &on);
        assert_eq!(losses.len() as u64, STEPS, "{name}");
        assert!(losses.iter().all(|loss| loss.is_finite()), "{name}: {losses:?}");
        let error = worst(&losses);
        if other.iter().any(|other| on.contains(other)) {
            // Other batches, or another model: other losses.
            assert!(error > 1e-5, "{name}: {error}");
        } else {
            eprintln!("{name}: {error:.1e}, {:.0} % of the tolerance", error / 1e-5 * 100.0);
            assert!(error <= 1e-5, "{name}: {error}: {losses:?}, not {clean:?}");
        }
    }
}
