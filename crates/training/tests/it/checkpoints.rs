//! Checkpoints: which are refused, used instead, and kept.

use std::fs;
use std::path::Path;

use runtime::random::RandomState;
use serde_json::json;
use tch::{Device, Kind, Tensor};
use training::checkpoint::{Checkpoints, LazyTensor, Snapshot};

fn save(checkpoints: &Checkpoints, step: u64) -> Vec<String> {
    let tensor = Tensor::full([3, 2], step as f64, (Kind::Float, Device::Cpu));
    let half = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).reshape([2, 3]).transpose(0, 1);
    let model = [("w".to_owned(), tensor), ("h".to_owned(), half)];
    let optimizer = [("w.step".to_owned(), Tensor::from(step as i64))];
    let random = RandomState::capture(Device::Cpu).unwrap();
    let state = json!({ "data": { "position": step } });
    let (model, optimizer) = (LazyTensor::from_tensors(&model), LazyTensor::from_tensors(&optimizer));
    checkpoints.save(Snapshot::new(step, model, optimizer, random, state)).unwrap().warnings
}

fn entries(root: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn folder(root: &Path, step: u64) -> std::path::PathBuf {
    root.join(format!("step-{step:012}"))
}

#[test]
fn checkpoints_round_trip_and_the_last_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(root.path(), 2).unwrap();
    assert!(checkpoints.latest().unwrap().checkpoint.is_none());
    for step in [5, 10, 15, 15] {
        assert!(save(&checkpoints, step).is_empty());
    }
    assert_eq!(checkpoints.steps().unwrap(), [15, 10]);
    let found = checkpoints.latest().unwrap();
    let checkpoint = found.checkpoint.unwrap();
    assert!(found.refused.is_empty());
    assert_eq!(checkpoint.step, 15);
    assert_eq!(checkpoint.state["data"]["position"], 15);
    let names: Vec<&str> = checkpoint.model.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["w", "h"], "wide dtypes come first");
    assert_eq!(
        checkpoint.model[1].1,
        Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).reshape([2, 3]).transpose(0, 1)
    );
    assert_eq!(checkpoint.optimizer[0].1.int64_value(&[]), 15);
    assert_eq!(checkpoint.random, RandomState::capture(Device::Cpu).unwrap());
    let names = [".lock", "step-000000000010", "step-000000000015"];
    assert_eq!(entries(root.path()), names, "nothing temporary is left");
    // Remains of a crash are removed.
    fs::create_dir(root.path().join(".tmp-step-000000000020")).unwrap();
    drop(checkpoints);
    drop(Checkpoints::open(root.path(), 2).unwrap());
    assert_eq!(entries(root.path()), names);
    assert!(Checkpoints::open(root.path(), 0).is_err());
}

#[test]
fn truncated_altered_and_missing_files_are_refused_by_name() {
    let files = [
        "model.safetensors",
        "optimizer.safetensors",
        "random.bin",
        "state.json",
        "manifest.json",
        "manifest.sha256",
    ];
    for file in files {
        for damage in ["truncate", "alter", "remove", "extend"] {
            let root = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
            save(&checkpoints, 1);
            save(&checkpoints, 2);
            let path = folder(root.path(), 2).join(file);
            let mut bytes = fs::read(&path).unwrap();
            match damage {
                "truncate" => bytes.truncate(bytes.len() / 2),
                "alter" => {
                    let middle = bytes.len() / 2;
                    bytes[middle] ^= 1;
                }
                "extend" => bytes.push(0),
                _ => {}
            }
            if damage == "remove" {
                fs::remove_file(&path).unwrap()
            } else {
                fs::write(&path, &bytes).unwrap()
            }
            let found = checkpoints.latest().unwrap();
            assert_eq!(found.checkpoint.unwrap().step, 1, "{file} {damage}");
            let [reason] = &found.refused[..] else { panic!("{file} {damage}: {:?}", found.refused) };
            // A damaged checksum is seen at the manifest.
            let named =
                reason.contains(file) || (file == "manifest.sha256" && reason.contains("manifest.json"));
            assert!(named, "{file} {damage}: {reason}");
        }
    }
}

#[test]
fn without_a_valid_checkpoint_each_reason_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
    save(&checkpoints, 1);
    save(&checkpoints, 2);
    fs::write(folder(root.path(), 1).join("state.json"), "{}").unwrap();
    fs::remove_file(folder(root.path(), 2).join("manifest.json")).unwrap();
    let message = checkpoints.latest().unwrap_err().to_string();
    for words in
        ["no checkpoint in", "state.json: truncated: 2 of", "manifest.json: No such file", "start again"]
    {
        assert!(message.contains(words), "{words}: {message}");
    }
}

#[test]
fn a_refused_later_checkpoint_evicts_no_other() {
    let root = tempfile::tempdir().unwrap();
    {
        let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
        for step in [46, 53, 60] {
            save(&checkpoints, step);
        }
    }
    fs::write(folder(root.path(), 60).join("state.json"), "{}").unwrap();
    let checkpoints = Checkpoints::open(root.path(), 1).unwrap();
    assert_eq!(checkpoints.latest().unwrap().checkpoint.unwrap().step, 53);
    let warnings = save(&checkpoints, 56);
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("step-000000000060 does not belong to this training"), "{warning}");
    assert_eq!(entries(root.path()), [".lock", "abandoned-step-000000000060", "step-000000000056"]);
    assert_eq!(checkpoints.latest().unwrap().checkpoint.unwrap().step, 56);
}

#[test]
fn a_new_training_keeps_its_checkpoints_and_those_of_the_previous() {
    let root = tempfile::tempdir().unwrap();
    {
        let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
        for step in [800, 900, 1000] {
            save(&checkpoints, step);
        }
    }
    let checkpoints = Checkpoints::open(root.path(), 2).unwrap();
    assert_eq!(save(&checkpoints, 5).len(), 3);
    for step in [10, 15] {
        assert!(save(&checkpoints, step).is_empty());
    }
    assert_eq!(checkpoints.steps().unwrap(), [15, 10]);
    assert_eq!(checkpoints.latest().unwrap().checkpoint.unwrap().step, 15);
    // The second time, the names exist.
    for step in [900, 1000] {
        save(&checkpoints, step);
    }
    save(&checkpoints, 5);
    let aside: Vec<String> =
        entries(root.path()).into_iter().filter(|name| name.starts_with("abandoned-")).collect();
    let names = ["800", "900", "900-2", "1000", "1000-2"].map(|step| {
        let (step, number) = step.split_once('-').map_or((step, ""), |(step, _)| (step, "-2"));
        format!("abandoned-step-{step:0>12}{number}")
    });
    for name in names {
        assert!(aside.contains(&name), "{name}: {aside:?}");
    }
}

#[test]
fn a_crash_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one() {
    for named in [false, true] {
        let root = tempfile::tempdir().unwrap();
        save(&Checkpoints::open(root.path(), 3).unwrap(), 7);
        // The state after the first rename: both the old and the new checkpoint have temporary names.
        let replaced = root.path().join(".replaced-step-000000000007");
        fs::rename(folder(root.path(), 7), &replaced).unwrap();
        fs::create_dir(root.path().join(".tmp-step-000000000007")).unwrap();
        if named {
            save(&Checkpoints::open(&root.path().join("other"), 3).unwrap(), 7);
            fs::rename(folder(&root.path().join("other"), 7), folder(root.path(), 7)).unwrap();
            fs::remove_dir_all(root.path().join("other")).unwrap();
        }
        assert_eq!(training::checkpoint::latest(root.path()).unwrap().checkpoint.unwrap().step, 7, "reading");
        assert!(replaced.exists(), "reading writes nothing");
        let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
        assert_eq!(checkpoints.latest().unwrap().checkpoint.unwrap().step, 7);
        assert_eq!(entries(root.path()), [".lock", "step-000000000007"]);
    }
}

#[test]
fn failed_removal_is_a_warning() {
    let root = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(root.path(), 1).unwrap();
    save(&checkpoints, 1);
    // A file at the temporary name of the old one prevents its removal.
    fs::write(root.path().join(".tmp-step-000000000001"), "").unwrap();
    let warnings = save(&checkpoints, 2);
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("step-000000000001 was not removed: "), "{warning}");
    assert_eq!(checkpoints.steps().unwrap(), [2, 1]);
}

/// Names of this crate's own, but files and links: of a copy that went wrong, or of another program.
#[test]
fn stray_files_with_temporary_names_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let kept = root.path().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "x").unwrap();
    let strays = |names: &[&str]| {
        for name in names {
            fs::write(root.path().join(name), "stray").unwrap();
        }
    };
    strays(&[".tmp-notes", ".tmp-step-000000000007"]);
    std::os::unix::fs::symlink(&kept, root.path().join(".tmp-link")).unwrap();
    std::os::unix::fs::symlink("nowhere", root.path().join(".tmp-dangling")).unwrap();
    let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
    assert_eq!(entries(root.path()), [".lock", "kept"]);
    assert_eq!(entries(&kept), ["file"], "what a link points to stays");
    // And those that come while it is open.
    for names in [&[".tmp-step-000000000007"][..], &[".tmp-step-000000000007", ".replaced-step-000000000007"]]
    {
        strays(names);
        assert_eq!(save(&checkpoints, 7), [""; 0]);
        assert_eq!(entries(root.path()), [".lock", "kept", "step-000000000007"]);
    }
    drop(checkpoints);
    strays(&[".replaced-step-000000000007"]);
    assert_eq!(Checkpoints::open(root.path(), 3).unwrap().latest().unwrap().checkpoint.unwrap().step, 7);
    assert_eq!(entries(root.path()), [".lock", "kept", "step-000000000007"]);
}

/// Whoever asks whether a folder is in use has the lock for a moment, shared.
#[test]
fn a_question_does_not_keep_a_writer_out() {
    let root = tempfile::tempdir().unwrap();
    drop(Checkpoints::open(root.path(), 1).unwrap());
    let asks = fs::File::open(root.path().join(".lock")).unwrap();
    asks.lock_shared().unwrap();
    let (started, has_started) = std::sync::mpsc::channel();
    let opened = std::thread::scope(|scope| {
        let opener = scope.spawn(|| {
            started.send(()).unwrap();
            Checkpoints::open(root.path(), 1)
        });
        has_started.recv().unwrap();
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        drop(asks);
        opener.join().unwrap()
    });
    opened.unwrap();
}

#[test]
fn a_second_writer_is_refused_and_readers_are_allowed() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a").join("b");
    let checkpoints = Checkpoints::open(&path, 1).unwrap();
    save(&checkpoints, 3);
    fs::create_dir(path.join(".tmp-step-000000000004")).unwrap();
    let message = Checkpoints::open(&path, 1).unwrap_err().to_string();
    assert!(
        message.starts_with(&format!("{} is in use: another training writes", path.display())),
        "{message}"
    );
    assert!(path.join(".tmp-step-000000000004").exists(), "what the first is writing stays");
    assert_eq!(training::checkpoint::steps(&path).unwrap(), [3]);
    assert_eq!(training::checkpoint::latest(&path).unwrap().checkpoint.unwrap().step, 3);
    drop(checkpoints);
    Checkpoints::open(&path, 1).unwrap();
}
