//! Ranks that share one GPU, over NCCL.

use std::time::{Duration, Instant};

use testing::ranks::{Ranks, on_one_gpu};

use crate::faulty::{Fault, Operation};
use crate::training_case::{Case, Dtype};
use crate::trainings::{self, Place};

/// Two ranks, which run the test `a_rank`.
fn two(lost: &'static [usize]) -> Ranks<'static> {
    Ranks { lost, variables_of: on_one_gpu, ..Ranks::new("a_rank", 2) }
}

/// Says that there is no GPU.
fn is_missing() -> bool {
    let is_missing = runtime::device::cuda_count().unwrap() == 0;
    if is_missing {
        eprintln!("skipped: no CUDA device");
    }
    is_missing
}

#[test]
fn two_ranks_over_nccl_train_to_the_bits_of_one_on_the_same_gpu() {
    if is_missing() {
        return;
    }
    let case = Case { place: Place::Gpu, steps: 20, clip: true, ..Case::default() };
    let cases = [
        case.clone(),
        Case { dtype: Dtype::Bf16, master_weights: true, dropout: true, micro_batches: 5, ..case },
    ];
    for case in cases {
        let runs: Vec<(Case, usize)> =
            [(1, 1), (1, 2), (2, 2)].map(|(stage, count)| (Case { stage, ..case.clone() }, count)).into();
        let printed = trainings::of_runs(&two(&[]).run(&runs), &runs);
        let whole = &printed[0][0];
        assert!(whole.len() > 20, "{whole:?}");
        for ((case, count), printed) in runs.iter().zip(&printed) {
            for (rank, found) in printed.iter().enumerate() {
                let expected: Vec<&String> =
                    whole.iter().filter(|line| rank == 0 || !line.starts_with("state")).collect();
                assert_eq!(expected, found.iter().collect::<Vec<_>>(), "rank {rank} of {count}, {case:?}");
            }
        }
    }
}

/// libtorch ends the process of a rank that waits for one that is gone.
#[test]
fn when_a_rank_over_nccl_is_killed_the_other_ends_in_time() {
    if is_missing() {
        return;
    }
    let timeout = Duration::from_secs(10);
    let fault = Some((Fault::Killed, 1, Operation::Reduce));
    let case = Case { place: Place::Gpu, stage: 2, fault, timeout, ..Case::default() };
    let start = Instant::now();
    two(&[0, 1]).run(&[(case, 2)]);
    assert!(start.elapsed() < Duration::from_secs(60), "it took {:?}", start.elapsed());
}
