//! Ranks that hang, are killed or stopped, or are slow.

use std::sync::Mutex;

use runtime::autograd::GradientHook;
use testing::ranks::Ranks as Processes;
use training::checkpoint;

use crate::faulty::{Fault, Injected, Operation, PATIENCE, STEP, wait};
use crate::run;
use crate::training_case::Case;
use crate::trainings::Place;

/// Delays the gradients of all parameters. Dropped where the process ends.
pub(crate) fn delay_backward(parameters: &[(String, &tch::Tensor)], rank: usize) {
    for (number, (_, parameter)) in parameters.iter().enumerate() {
        let delays = Mutex::new(testing::fuzz::Random::new((1000 * rank + number) as u64));
        let hook = GradientHook::new(parameter, move || {
            wait(&delays);
            Ok(())
        });
        std::mem::forget(hook.unwrap());
    }
}

/// What the other rank of two must say, and the newest whole checkpoint of that training.
#[track_caller]
fn check(printed: &[String], (_, rank, operation): Injected, folder: &tempfile::TempDir) {
    let named = match operation {
        Operation::Reduce | Operation::Forward | Operation::Backward => "reduce_scatter of `bucket ",
        Operation::Gather => "all_gather of `bucket ",
        Operation::Save if rank == 0 => "send of `layers.",
        Operation::Save => "recv of `layers.",
    };
    let failed = printed.iter().find(|line| line.starts_with("failed")).expect("a failure");
    assert!(failed.contains(named) && failed.contains(&format!("with rank {rank}: ")), "{failed}");
    let found = checkpoint::latest(folder.path()).unwrap();
    assert!(found.refused.is_empty(), "{:?}", found.refused);
    assert_eq!(found.checkpoint.unwrap().step, STEP - 1);
}

fn case(fault: Injected, place: Place, folder: &tempfile::TempDir) -> Case {
    let folder = Some(folder.path().to_owned());
    Case { fault: Some(fault), place, folder, timeout: PATIENCE, ..Case::default() }
}

const OPERATIONS: [Operation; 3] = [Operation::Reduce, Operation::Gather, Operation::Save];

#[test]
fn a_rank_that_hangs_is_named_with_the_operation() {
    let faults: Vec<_> = [Place::Host, Place::StandIn]
        .iter()
        .flat_map(|place| OPERATIONS.map(|operation| (operation, *place)))
        .map(|(operation, place)| ((Fault::Hangs, 1, operation), place, tempfile::tempdir().unwrap()))
        .collect();
    let runs: Vec<_> =
        faults.iter().map(|(fault, place, folder)| (case(*fault, *place, folder), 2)).collect();
    for ((fault, _, folder), printed) in faults.iter().zip(run(&runs)) {
        check(&printed[0], *fault, folder);
    }
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named_with_the_operation() {
    let killed = OPERATIONS.map(|operation| (Fault::Killed, 1, operation));
    let first = [
        (Fault::Killed, 0, Operation::Reduce),
        (Fault::Stopped, 0, Operation::Gather),
        (Fault::Killed, 0, Operation::Save),
    ];
    let faults = killed.into_iter().chain(first).map(|fault| (fault, Place::Host));
    for (fault, place) in faults.chain(killed.into_iter().map(|fault| (fault, Place::StandIn))) {
        let folder = tempfile::tempdir().unwrap();
        // The other one ends, too.
        let printed = Processes { lost: &[0, 1], ..Processes::new("a_rank", 2) }
            .run(&[(case(fault, place, &folder), 2)]);
        let of_training = |line: &String| line.strip_prefix("training 0: ").map(str::to_owned);
        let printed: Vec<String> = printed[1 - fault.1].iter().filter_map(of_training).collect();
        check(&printed, fault, &folder);
    }
}

#[test]
fn delays_change_no_bit() {
    let delayed = Case { delays: true, clip: true, ..Case::default() };
    let case = Case { delays: false, ..delayed.clone() };
    let two = Case { stage: 2, ..delayed.clone() };
    let printed = run(&[(case, 1), (delayed, 3), (two.clone(), 3), (Case { recompute: true, ..two }, 4)]);
    assert_eq!(printed[0][0], printed[1][0]);
    assert_eq!(printed[0][0], printed[2][0]);
}
