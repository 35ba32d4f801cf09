//! Shards of the vocabulary in processes, over `runtime::collectives`, against the whole vocabulary.

use fused_ce::vocabulary_parallel::Shard;
use runtime::collectives::{Group, GroupConfig, Store};
use testing::ranks::{LIMIT, Ranks};

use crate::vocabulary_parallel::{VOCABULARY, Whole, cases, run, same};

/// A rank's process runs this test alone.
#[test]
fn a_rank() {
    testing::ranks::rank(|counts: Vec<usize>, launch| {
        let store = Store::connect(launch, LIMIT).unwrap();
        let world = Group::new(&store, "world", GroupConfig::default()).unwrap();
        for count in counts.into_iter().filter(|count| world.rank() < *count) {
            let (name, first) = (format!("{count} ranks"), (0..count).collect::<Vec<_>>());
            loss(&Group::of_ranks(&store, &name, &first, GroupConfig::default()).unwrap());
        }
        world.barrier("end").unwrap();
    });
}

#[test]
fn ranks_compute_the_loss_of_the_whole_vocabulary() {
    Ranks::new("vocabulary_parallel_processes::a_rank", 4).run(&[2, 3, 4]);
}

fn loss(group: &Group) {
    // The last rank of three and of four has few classes.
    let slices: &[i64] = match group.size() {
        2 => &[10, 13],
        3 => &[1, 20, 2],
        _ => &[5, 8, 9, 1],
    };
    let (rows, first) = (slices[group.rank()], slices[..group.rank()].iter().sum::<i64>());
    let widest = slices.iter().copied().max().unwrap();
    let whole = Whole::new(6);
    for case in cases() {
        let shard = Shard { first, vocabulary: VOCABULARY, widest, group: Box::new(group.clone()) };
        let (found, of_rank) = run(&case, &whole, Some((first, rows, shard))).unwrap();
        let (outputs, gradients) = run(&case, &whole, None).unwrap();
        assert_eq!(found.len(), outputs.len());
        for (slot, (found, expected)) in found.iter().zip(&outputs).enumerate() {
            same(&format!("{case:?} output {slot}"), found, expected);
        }
        for (slot, found) in of_rank.iter().enumerate() {
            let expected = match slot {
                1 | 2 | 4 => gradients[slot].narrow(0, first, rows),
                _ => gradients[slot].shallow_clone(),
            };
            same(&format!("{case:?} gradient {slot}"), found, &expected);
        }
    }
    group.barrier("end").unwrap();
}
