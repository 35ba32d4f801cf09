//! Ranks that are killed, and checkpoints that other numbers of ranks resume from.

use testing::ranks::Ranks;

use crate::faulty::{Fault, Operation};
use crate::run;
use crate::training_case::{Case, RuleName};
use crate::trainings::{Place, end, files};

#[test]
fn a_killed_training_resumes_with_other_numbers_of_ranks_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let case = Case { steps: 8, clip: true, dropout: true, stage: 2, ..Case::default() };
    let saved = Case { folder: Some(folder.path().to_owned()), ..case.clone() };
    let killed = Case { fault: Some((Fault::Killed, 3, Operation::Reduce)), ..saved.clone() };
    let printed = Ranks { lost: &[0, 1, 2, 3], ..Ranks::new("a_rank", 4) }.run(&[(killed, 4)]);
    // The others name the one that is gone.
    let named = |log: &Vec<String>| log.iter().any(|line| line.contains("with rank 3"));
    assert!(printed[..3].iter().any(named), "{printed:?}");
    // With two ranks over what stands for NCCL up to step 6, with three to the end; and with one that is not stopped.
    let over_devices = Case { place: Place::StandIn, steps: 6, ..saved.clone() };
    let printed = run(&[(over_devices, 2), (saved, 3), (case, 1)]);
    assert_eq!(end(&printed[1][0], 8), end(&printed[2][0], 8));
}

/// An 8-bit state is written whole, by any number of ranks, and read by any.
#[test]
fn a_killed_training_with_8_bit_state_resumes_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let case = Case { steps: 6, rule: RuleName::AdamW8bit, vocabulary: 61, stage: 2, ..Case::default() };
    let saved = Case { folder: Some(folder.path().to_owned()), ..case.clone() };
    let killed = Case { fault: Some((Fault::Killed, 3, Operation::Reduce)), ..saved.clone() };
    Ranks { lost: &[0, 1, 2, 3], ..Ranks::new("a_rank", 4) }.run(&[(killed, 4)]);
    let printed = run(&[(Case { steps: 5, ..saved.clone() }, 3), (Case { stage: 0, ..saved }, 1), (case, 1)]);
    assert_eq!(end(&printed[1][0], 6), end(&printed[2][0], 6));
}

#[test]
fn checkpoints_do_not_say_how_many_ranks_wrote_them() {
    let folders: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
    let runs: Vec<(Case, usize)> = folders
        .iter()
        .zip([(1, 1), (2, 2), (1, 4), (0, 1)])
        .map(|(folder, (stage, count))| {
            (Case { stage, folder: Some(folder.path().to_owned()), ..Case::default() }, count)
        })
        .collect();
    run(&runs);
    let written = |number: usize| files(folders[number].path());
    let one = written(0);
    assert!(one.len() >= 4);
    assert!(written(1) == one, "two ranks");
    assert!(written(2) == one, "four ranks");
    // Without ranks the random state differs, because micro-batches have no seeds of their own.
    for (name, bytes) in &written(3) {
        if name == "model.safetensors" || name == "optimizer.safetensors" {
            assert!(one.iter().any(|(other, found)| other == name && found == bytes), "{name:?}");
        }
    }
}
