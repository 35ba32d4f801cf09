//! Ranks that are killed, and checkpoints that other numbers of ranks resume from.

use sharding::Stage;

use crate::processes::{run, start};
use crate::training_case::Case;

/// The lines of the last step, the weights and the state.
fn end(lines: Vec<String>, step: u64) -> Vec<String> {
    let last = format!("result step {step} ");
    lines.into_iter().filter(|line| !line.starts_with("result step") || line.starts_with(&last)).collect()
}

#[test]
fn a_killed_training_resumes_with_other_numbers_of_ranks_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let case = Case { steps: 8, clip: true, dropout: true, stage: Some(Stage::Two), ..Case::default() };
    let unbroken = end(run(&case, 1).remove(0), 8);

    let saved = Case { folder: Some(folder.path().to_owned()), ..case };
    let (logs, failed) = start(&Case { killed_after: 3, ..saved.clone() }, 4);
    assert_eq!(failed.as_deref(), Some("rank 3 was ended by signal 9"));
    // The others name the one that is gone.
    let named = |log: &Vec<String>| log.iter().any(|line| line.contains("with rank 3"));
    assert!(logs[..3].iter().any(named), "{logs:?}");
    // With two ranks up to step 6, with three to the end.
    run(&Case { steps: 6, ..saved.clone() }, 2);
    let resumed = end(run(&saved, 3).remove(0), 8);
    assert_eq!(resumed, unbroken);
}

#[test]
fn checkpoints_do_not_say_how_many_ranks_wrote_them() {
    let written = |stage: Option<Stage>, count: usize| {
        let folder = tempfile::tempdir().unwrap();
        run(&Case { stage, folder: Some(folder.path().to_owned()), ..Case::default() }, count);
        let newest = folder.path().join("step-000000000003");
        let mut files: Vec<_> =
            std::fs::read_dir(&newest).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let file =
            |path: &std::path::PathBuf| (path.file_name().unwrap().to_owned(), std::fs::read(path).unwrap());
        files.iter().map(file).collect::<Vec<_>>()
    };
    let one = written(Some(Stage::One), 1);
    assert!(one.len() >= 4);
    assert!(written(Some(Stage::Two), 2) == one, "two ranks");
    assert!(written(Some(Stage::One), 4) == one, "four ranks");
    // Without ranks the random state differs, because micro-batches have no seeds of their own.
    let alone = written(None, 1);
    for (name, bytes) in &alone {
        if name == "model.safetensors" || name == "optimizer.safetensors" {
            assert!(one.iter().any(|(other, found)| other == name && found == bytes), "{name:?}");
        }
    }
}
