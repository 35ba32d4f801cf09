//! Ranks of stage 3 that hang, are killed or stopped, between and within their passes.

use testing::ranks::Ranks;
use training::checkpoint;

use super::faulty::{Fault, Injected, Operation, PATIENCE, STEP};
use super::training_case::Case;
use super::{A_RANK, case, run};

const OPERATIONS: [Operation; 4] =
    [Operation::Forward, Operation::Backward, Operation::Reduce, Operation::Gather];

fn faulty(fault: Injected, folder: &tempfile::TempDir) -> Case {
    let (folder, timeout) = (Some(folder.path().to_owned()), Some(PATIENCE));
    // With one slot every layer is gathered again in backward.
    Case { fault: Some(fault), folder, timeout, ..case(3, 0.5, 4, "[offload]\nring = 1\n") }
}

/// What the other rank of two must say, and the newest whole checkpoint of that training.
#[track_caller]
fn check(printed: &[String], (fault, rank, operation): Injected, folder: &tempfile::TempDir) {
    let named: &[&str] = match operation {
        // The system may drop what a killed rank has sent, so that the other one misses a message of an operation before.
        _ if fault != Fault::Hangs => {
            &["all_gather of `layers.", "reduce_scatter of `bucket ", "all_gather of `bucket "]
        }
        Operation::Forward => &["all_gather of `layers.0`"],
        // A layer's gradients are reduced beside the gather of the next one.
        Operation::Backward => &["all_gather of `layers.", "reduce_scatter of `bucket "],
        // The other rank may be a layer behind, and the one that hangs has left its gathers.
        Operation::Reduce => &["reduce_scatter of `bucket 0`", "all_gather of `layers."],
        Operation::Gather => &["all_gather of `bucket 0`"],
        Operation::Save => unreachable!("not injected"),
    };
    let failed = printed.iter().find(|line| line.starts_with("failed")).expect("a failure");
    assert!(named.iter().any(|named| failed.contains(named)), "{failed}");
    assert!(failed.contains(&format!("with rank {rank}: ")), "{failed}");
    assert!(!failed.contains("work on the stream"), "{failed}");
    let found = checkpoint::latest(folder.path()).unwrap();
    assert!(found.refused.is_empty(), "{:?}", found.refused);
    assert_eq!(found.checkpoint.unwrap().step, STEP - 1);
}

#[test]
fn a_rank_that_hangs_is_named_with_the_operation() {
    let faults = OPERATIONS.map(|operation| ((Fault::Hangs, 1, operation), tempfile::tempdir().unwrap()));
    let runs: Vec<_> = faults.iter().map(|(fault, folder)| (faulty(*fault, folder), 2)).collect();
    for ((fault, folder), printed) in faults.iter().zip(run(&runs)) {
        check(&printed[0], *fault, folder);
    }
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named_with_the_operation() {
    let killed = OPERATIONS.map(|operation| (Fault::Killed, 1, operation));
    for fault in killed.into_iter().chain([(Fault::Stopped, 0, Operation::Backward)]) {
        let folder = tempfile::tempdir().unwrap();
        // The other one ends, too.
        let printed = Ranks { lost: &[0, 1], ..Ranks::new(A_RANK, 2) }.run(&[(faulty(fault, &folder), 2)]);
        let of_training = |line: &String| line.strip_prefix("training 0: ").map(str::to_owned);
        let printed: Vec<String> = printed[1 - fault.1].iter().filter_map(of_training).collect();
        check(&printed, fault, &folder);
    }
}
