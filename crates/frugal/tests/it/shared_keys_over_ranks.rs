//! A model whose layers share keys, over two ranks: the bits of one, in stages 2 and 3 of ZeRO, or an error that names what cannot be combined.

use std::time::Duration;

use frugal::Error;
use frugal::runtime::collectives::{Group, GroupConfig, Store};
use frugal::training::trainer::Overflow;
use testing::ranks::Ranks;

use crate::pairs::{Rounding, broken, run_over};
use crate::techniques::{Family, Promise, TECHNIQUES};
use crate::techniques_over_ranks::DIVIDED;

const CROSSED: [&str; 8] = [
    "LoRA",
    "LoRA and rows of tokens",
    "fused loss",
    "recompute layers",
    "keep activations",
    "offload, overlap",
    "a frozen layer",
    "packing",
];

/// A rank's process runs this test alone.
#[test]
#[allow(clippy::print_stdout, reason = "what a rank prints is its result")]
fn a_rank() {
    testing::ranks::rank(|(): (), launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        for stage in &DIVIDED {
            for technique in TECHNIQUES.iter().filter(|technique| CROSSED.contains(&technique.name)) {
                let run = |ranks: &Group| {
                    run_over(Family::Gemma4, &[stage, technique], Some(ranks.into()), Overflow::Skip)
                        .map_err(Box::new)
                };
                let name = format!("{}, {}", stage.name, technique.name);
                let ranks = Group::new(&store, &name, GroupConfig::default()).unwrap();
                match run(&ranks) {
                    Err(error) if matches!(*error, Error::Conflict { .. }) => println!("{name}: refused"),
                    Err(error) => panic!("{name}: {error}"),
                    Ok(over) => {
                        println!("{name}: {:?}", over.losses);
                        if ranks.rank() == 0 {
                            let alone = run(&Group::alone()).unwrap();
                            let different = broken(Promise::Bits, &over, &alone, Rounding::Fp32);
                            assert!(different.is_none(), "{name}: {different:?}");
                        }
                    }
                }
                ranks.barrier("the next one").unwrap();
            }
        }
    });
}

#[test]
fn layers_that_share_keys_have_the_bits_of_one_rank() {
    let printed = Ranks::new("shared_keys_over_ranks::a_rank", 2).run(&());
    assert_eq!(printed[0], printed[1]);
    assert_eq!(printed[0].len(), 2 * CROSSED.len());
    let refused: Vec<&str> =
        printed[0].iter().filter(|line| line.ends_with("refused")).map(String::as_str).collect();
    // Layers of the ring get their memory from the ranks' buckets in stage 3 alone.
    assert_eq!(refused, ["stage 2, offload, overlap: refused"]);
}
