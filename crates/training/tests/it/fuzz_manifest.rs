//! A checkpoint with randomly changed files is always refused.

use std::fs;
use std::path::Path;

use runtime::random::RandomState;
use serde_json::json;
use tch::{Device, Kind, Tensor};
use testing::fuzz::{self, Outcome};
use training::checkpoint::{self, Checkpoints, LazyTensor, Snapshot};

/// A folder in memory if possible: the test writes it tens of thousands of times.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Corrects the manifest's own checksum, so that the other checks are tested.
fn sign(folder: &Path, manifest: &[u8]) {
    use sha2::{Digest, Sha256};
    let digest: String = Sha256::digest(manifest).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(folder.join("manifest.sha256"), format!("{digest}  manifest.json\n")).unwrap();
}

#[test]
fn a_changed_checkpoint_is_refused_or_equivalent() {
    let root = scratch();
    let tensors = [("w".to_owned(), Tensor::arange(6, (Kind::Float, Device::Cpu)))];
    let random_state = RandomState::capture(Device::Cpu).unwrap();
    let state = json!({ "data": { "position": 7 } });
    let lazy = || LazyTensor::from_tensors(&tensors);
    let snapshot = Snapshot::new(5, lazy(), lazy(), random_state.clone(), state.clone());
    Checkpoints::open(root.path(), 2).unwrap().save(snapshot).unwrap();
    let folder = root.path().join("step-000000000005");
    let names = [
        "manifest.json",
        "manifest.json",
        "manifest.json",
        "manifest.sha256",
        "state.json",
        "random.bin",
        "model.safetensors",
    ];
    let files: Vec<(&str, Vec<u8>)> =
        names.iter().map(|name| (*name, fs::read(folder.join(name)).unwrap())).collect();
    let checksum = &files[3].1.clone();
    fuzz::run("checkpoint", |random| {
        let (name, good) = &files[random.below(files.len())];
        let bytes = if name.ends_with("json") && random.once_in(2) {
            fuzz::json(random, &serde_json::from_slice(good).unwrap()).into_bytes()
        } else {
            fuzz::bytes(random, good)
        };
        // A new file each time, because a mapped file must not be truncated.
        fs::remove_file(folder.join(name)).unwrap();
        fs::write(folder.join(name), &bytes).unwrap();
        let signed = *name == "manifest.json" && random.once_in(2);
        if signed {
            sign(&folder, &bytes);
        }
        // The buffer of the checksum is 1 MiB.
        let found = fuzz::within(400 * bytes.len() + (4 << 20), || checkpoint::latest(root.path()));
        fs::write(folder.join(name), good).unwrap();
        if signed {
            fs::write(folder.join("manifest.sha256"), checksum).unwrap();
        }
        let Ok(found) = found else { return Outcome::Refused };
        let checkpoint = found.checkpoint.unwrap();
        assert!(signed || bytes == *good, "a change that the checksums do not show");
        assert_eq!((checkpoint.step, &checkpoint.state), (5, &state));
        assert_eq!(checkpoint.random, random_state);
        assert_eq!(checkpoint.model[0].1, tensors[0].1);
        // It describes each file correctly. An unused field may be nested deeper than a value can be.
        if signed && let Ok(manifest) = serde_json::from_slice::<serde_json::Value>(&bytes) {
            for name in ["model.safetensors", "optimizer.safetensors", "state.json", "random.bin"] {
                let length = fs::metadata(folder.join(name)).unwrap().len();
                assert_eq!(manifest["files"][name]["bytes"], json!(length), "{name} was read unchecked");
            }
        }
        Outcome::Read
    });
}
