//! No bit of a training depends on the number of ranks, nor on whether they are connected as CPUs are or as GPUs.

use crate::run;
use crate::training_case::{Case, Dtype, RuleName};
use crate::trainings::Place;

/// Trains each case with 1 to 4 ranks in both stages. Losses and norms on every rank, weights on every rank and the state on rank 0
/// are those of one rank. Returns what one rank printed of each.
#[track_caller]
fn check(cases: &[Case]) -> Vec<Vec<String>> {
    let several = (1..=2).flat_map(|stage| (2..=4).map(move |count| (stage, count, 1)));
    check_over(cases, &several.collect::<Vec<_>>())
}

/// Trains each case with one rank, and as `others` say: stage, ranks, replicas. Each twice, the second time over what stands for NCCL.
#[track_caller]
fn check_over(cases: &[Case], others: &[(usize, usize, usize)]) -> Vec<Vec<String>> {
    let mut runs = Vec::new();
    for case in cases {
        let of = |(stage, count, replicas), place| (Case { stage, replicas, place, ..case.clone() }, count);
        runs.push(of((1, 1, 1), Place::Host));
        runs.extend(others.iter().flat_map(|&over| [of(over, Place::Host), of(over, Place::StandIn)]));
    }
    let printed = run(&runs);
    let of_case = runs.len() / cases.len();
    for (runs, printed) in runs.chunks(of_case).zip(printed.chunks(of_case)) {
        let whole = &printed[0][0];
        assert!(whole.len() > 20, "{whole:?}");
        for ((case, count), printed) in runs.iter().zip(printed) {
            for (rank, found) in printed.iter().enumerate() {
                let of = |line: &&String| rank == 0 || !line.starts_with("state");
                let expected: Vec<&String> = whole.iter().filter(of).collect();
                assert_eq!(expected, found.iter().collect::<Vec<_>>(), "rank {rank} of {count}, {case:?}");
            }
        }
    }
    printed.into_iter().step_by(of_case).map(|mut of_ranks| of_ranks.remove(0)).collect()
}

#[test]
fn fp32_weights_have_the_bits_of_one_process_without_ranks() {
    let case = Case { clip: false, ..Case::default() };
    let sharded = check(std::slice::from_ref(&case));
    let alone = run(&[(Case { stage: 0, ..case }, 1)]);
    assert_eq!(alone[0], sharded);
}

/// The random numbers of an element are those of its index in the whole parameter, on whichever rank it is.
#[test]
fn stochastic_rounding_has_the_bits_of_one_process_without_ranks() {
    let seeded = Some(3);
    let case = Case { dtype: Dtype::Bf16, stochastic_rounding: seeded, bucket_bytes: 1, ..Case::default() };
    // Without ranks, gradients of several micro-batches are added in bf16.
    let one = Case { micro_batches: 1, ..case.clone() };
    let sharded = check_over(&[case, one.clone()], &[(1, 3, 1), (2, 4, 1), (2, 4, 2)]).swap_remove(1);
    let of = |case: Case| run(&[(Case { stage: 0, ..case }, 1)]).swap_remove(0).swap_remove(0);
    assert_eq!(of(one.clone()), sharded);
    assert_ne!(of(Case { stochastic_rounding: None, ..one }), sharded);
}

#[test]
fn other_micro_batches_dropout_dtypes_and_layers_change_no_bit() {
    let case = Case { clip: true, ..Case::default() };
    check(&[
        // A last round with fewer micro-batches than ranks.
        Case { micro_batches: 5, ..case.clone() },
        Case { micro_batches: 1, clip: false, ..case.clone() },
        // The same random numbers on any rank.
        Case { dropout: true, micro_batches: 3, ..case.clone() },
        Case { dtype: Dtype::Bf16, ..case.clone() },
        Case { dtype: Dtype::Bf16, master_weights: true, ..case.clone() },
        Case { dtype: Dtype::Fp64, ..case.clone() },
        // A frozen layer and recomputed ones, in one bucket and in one bucket each.
        Case { recompute: true, bucket_bytes: usize::MAX, ..case.clone() },
        Case { recompute: true, dropout: true, bucket_bytes: 1, clip: false, ..case },
    ]);
}

/// An 8-bit state is divided between its blocks, wherever shards end. Matrices of 128 columns have 8 bits, biases and norms 32.
#[test]
fn other_rules_have_the_bits_of_one_process_without_ranks() {
    for rule in [RuleName::Lion, RuleName::AdamW8bit] {
        let case = Case { rule, vocabulary: 61, ..Case::default() };
        let rounded = Case {
            dtype: Dtype::Bf16,
            stochastic_rounding: Some(3),
            // Without ranks, gradients of several micro-batches are added in bf16.
            micro_batches: 1,
            ..case.clone()
        };
        let master = Case { dtype: Dtype::Bf16, master_weights: true, clip: true, ..case.clone() };
        let several = [(1, 2, 1), (1, 3, 1), (2, 4, 1), (2, 4, 2)];
        let sharded = check_over(&[case.clone(), rounded.clone(), master], &several);
        let alone = run(&[(Case { stage: 0, ..case }, 1), (Case { stage: 0, ..rounded }, 1)]);
        assert_eq!(alone[0][0], sharded[0], "{rule:?}");
        assert_eq!(alone[1][0], sharded[1], "{rule:?}");
        let is_divided = |line: &String| line.contains("exp_avg_sq_scale [");
        assert_eq!(sharded[0].iter().any(is_divided), rule == RuleName::AdamW8bit);
    }
}

#[test]
fn replicas_change_no_bit() {
    let case = Case { clip: true, micro_batches: 6, ..Case::default() };
    let cases = [
        case.clone(),
        // In the last round some ranks have no micro-batch.
        Case { dtype: Dtype::Bf16, master_weights: true, dropout: true, micro_batches: 5, ..case },
    ];
    check_over(&cases, &[(1, 4, 2), (2, 4, 2), (1, 3, 3), (2, 2, 2)]);
}

#[test]
fn replicas_divide_the_ranks() {
    let refused = sharding::Mesh::new(&runtime::collectives::Group::alone(), 2).unwrap_err().to_string();
    assert!(refused.contains("1 ranks in 2 replicas"), "{refused}");
}
