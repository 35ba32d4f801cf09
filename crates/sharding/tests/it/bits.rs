//! No bit of a training depends on the number of ranks.

use sharding::Stage;

use crate::processes::run;
use crate::training_case::Case;

/// Trains with 1 to 4 ranks in both stages. Losses and norms on every rank, weights on every rank and the state on rank 0 are those of
/// one rank.
#[track_caller]
fn check(case: &Case) -> Vec<String> {
    let whole = run(case, 1).remove(0);
    assert!(whole.len() > 20, "{whole:?}");
    for stage in [Stage::One, Stage::Two] {
        for count in 2..=4 {
            let case = Case { stage: Some(stage), ..case.clone() };
            for (rank, found) in run(&case, count).into_iter().enumerate() {
                let of = |line: &&String| rank == 0 || !line.starts_with("result state");
                let expected: Vec<&String> = whole.iter().filter(of).collect();
                assert_eq!(expected, found.iter().collect::<Vec<_>>(), "rank {rank} of {count}, {case:?}");
            }
        }
    }
    whole
}

#[test]
fn fp32_weights_have_the_bits_of_one_process_without_ranks() {
    let case = Case { clip: false, ..Case::default() };
    let sharded = check(&case);
    let alone = run(&Case { stage: None, ..case }, 1).remove(0);
    assert_eq!(alone, sharded);
}

#[test]
fn a_last_round_with_fewer_micro_batches_than_ranks_changes_no_bit() {
    check(&Case { micro_batches: 5, clip: true, ..Case::default() });
    check(&Case { micro_batches: 1, ..Case::default() });
}

#[test]
fn dropout_draws_the_same_numbers_on_any_rank() {
    check(&Case { dropout: true, clip: true, micro_batches: 3, ..Case::default() });
}

#[test]
fn bf16_weights_and_their_master_copies_have_the_same_bits() {
    check(&Case { bf16: true, clip: true, ..Case::default() });
    check(&Case { bf16: true, master_weights: true, clip: true, ..Case::default() });
}

#[test]
fn frozen_and_recomputed_layers_and_one_bucket_change_no_bit() {
    check(&Case { recompute: true, clip: true, bucket_bytes: usize::MAX, ..Case::default() });
    check(&Case { recompute: true, dropout: true, bucket_bytes: 1, ..Case::default() });
}
