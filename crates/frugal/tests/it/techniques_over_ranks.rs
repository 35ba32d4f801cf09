//! Every technique over two ranks computes the bits of one, or is refused by name before anything is made.

use std::time::Duration;

use expect_test::expect;
use frugal::Error;
use frugal::config::{Compute, ScalerConfig};
use frugal::runtime::collectives::{Group, GroupOptions, Store};
use frugal::training::trainer::Overflow;
use test_ranks::Ranks;

use crate::pairs::{Family, Outcome, Promise, ROWS, TECHNIQUES, Technique, broken, run_over};

/// What a step that overflows crosses: its gradients are infinite at the first scales.
const OVERFLOWING: Technique = Technique {
    name: "fp16, a scale that overflows",
    group: "precision",
    promise: Promise::Nothing,
    set: |config, _| {
        config.precision.compute = Compute::Fp16;
        config.precision.scaler = Some(ScalerConfig::Dynamic {
            init_scale: 1e10,
            growth_factor: 2.0,
            backoff_factor: 0.125,
            growth_interval: 1,
        });
    },
};

/// Ranks need a micro-batch each, and ZeRO-2 does more than ZeRO-1.
const DIVIDED: Technique = Technique {
    name: "two micro-batches",
    group: "accumulation",
    promise: Promise::Nothing,
    set: |config, _| {
        (config.training.batch, config.training.accumulation) = (ROWS / 2, 2);
        config.optimizer.zero_stage = 2;
    },
};

/// A rank's process runs this test alone.
#[test]
#[allow(
    clippy::print_stdout,
    clippy::result_large_err,
    reason = "what a rank prints is its result; a test's errors are few"
)]
fn a_rank() {
    test_ranks::rank(|(): (), launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        let ranks = Group::new(&store, "training", GroupOptions::default()).unwrap();
        for family in [Family::Llama, Family::Gpt2] {
            let techniques = TECHNIQUES.iter().chain([&OVERFLOWING]);
            for (technique, overflow) in techniques
                .map(|technique| (technique, Overflow::Skip))
                .chain([(&OVERFLOWING, Overflow::Retry { most: 20 })])
            {
                let run = |ranks: &Group| run_over(family, &[&DIVIDED, technique], Some(ranks), overflow);
                let name = technique.name;
                match run(&ranks) {
                    Err(error @ Error::Conflict { .. }) => println!("{name}: {error}"),
                    Err(error) => panic!("{family:?}, {name}: {error}"),
                    Ok(over) => {
                        check_overflow(technique, overflow, &over);
                        let alone = run(&Group::alone()).unwrap();
                        let different = broken(Promise::Bits, &over, &alone, true);
                        assert!(different.is_none(), "{family:?}, {name}: {different:?}");
                    }
                }
            }
        }
        ranks.barrier("end").unwrap();
    });
}

fn check_overflow(technique: &Technique, overflow: Overflow, outcome: &Outcome) {
    let (skipped, retries) = (outcome.skipped, outcome.retries);
    match overflow {
        _ if technique.name != OVERFLOWING.name => {
            assert_eq!((skipped, retries), (0, 0), "{}", technique.name)
        }
        Overflow::Skip => assert!(skipped > 0 && retries == 0, "{skipped} skipped"),
        Overflow::Retry { .. } => assert!(skipped == 0 && retries > 0, "{retries} retries"),
    }
}

#[test]
fn every_technique_computes_the_bits_of_one_rank_or_is_refused_by_name() {
    let printed = Ranks::new("techniques_over_ranks::a_rank", 2).run(&());
    assert_eq!(printed[0], printed[1]);
    let (llama, gpt2) = printed[0].split_at(printed[0].len() / 2);
    assert_eq!(llama, gpt2, "what is refused depends on the techniques alone");
    expect![[r#"
        offload, overlap: `offload` and 2 ranks do not go together: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; take `optimizer.zero_stage = 3`, or leave `offload` out
        offload, function: `offload` and 2 ranks do not go together: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; take `optimizer.zero_stage = 3`, or leave `offload` out
        offload, checkpointing: `offload` and 2 ranks do not go together: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; take `optimizer.zero_stage = 3`, or leave `offload` out
        offload, a resident layer: `offload` and 2 ranks do not go together: offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets; take `optimizer.zero_stage = 3`, or leave `offload` out
        offload to files: `offload.tier = "file"` and full fine-tuning do not go together: weights in files are frozen; train an adapter, or take `offload.tier = "host"`
        optimizer on the host: `optimizer.place = "host"` and weights on the device do not go together: the update on the host is that of offloaded layers; add `offload`, or take `optimizer.place = "device"`"#]].assert_eq(&llama.join("\n"));
}
