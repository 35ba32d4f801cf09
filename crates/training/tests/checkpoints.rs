//! Checkpoints: what is refused, what is used instead, what is kept.

use std::fs;
use std::path::Path;

use runtime::random::RandomState;
use serde_json::json;
use tch::{Device, Kind, Tensor};
use training::checkpoint::{Checkpoints, Snapshot};

fn save(checkpoints: &Checkpoints, step: u64) {
    let tensor = Tensor::full([3, 2], step as f64, (Kind::Float, Device::Cpu));
    let half = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).reshape([2, 3]).transpose(0, 1);
    let model = [("w".to_owned(), tensor), ("h".to_owned(), half)];
    let optimizer = [("w.step".to_owned(), Tensor::from(step as i64))];
    let random = RandomState::capture(Device::Cpu).unwrap();
    let state = json!({ "data": { "position": step } });
    let snapshot = Snapshot { step, model: &model, optimizer: &optimizer, random: &random, state: &state };
    checkpoints.save(&snapshot).unwrap();
}

fn folder(root: &Path, step: u64) -> std::path::PathBuf {
    root.join(format!("step-{step:012}"))
}

#[test]
fn what_is_written_is_read_and_the_last_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(root.path(), 2).unwrap();
    assert!(checkpoints.latest().unwrap().checkpoint.is_none());
    for step in [5, 10, 15, 15] {
        save(&checkpoints, step);
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
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2, "nothing temporary is left");
    // What a crash leaves is removed.
    fs::create_dir(root.path().join(".tmp-step-000000000020")).unwrap();
    Checkpoints::open(root.path(), 2).unwrap();
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    assert!(Checkpoints::open(root.path(), 0).is_err());
}

#[test]
fn every_file_that_is_truncated_altered_or_missing_is_refused_by_name() {
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
fn where_none_is_valid_each_reason_is_told() {
    let root = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(root.path(), 3).unwrap();
    save(&checkpoints, 1);
    save(&checkpoints, 2);
    fs::write(folder(root.path(), 1).join("state.json"), "{}").unwrap();
    fs::remove_file(folder(root.path(), 2).join("manifest.json")).unwrap();
    let message = checkpoints.latest().unwrap_err().to_string();
    for words in [
        "no checkpoint in",
        "state.json: truncated: 2 bytes of",
        "manifest.json: No such file",
        "start again",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
}
