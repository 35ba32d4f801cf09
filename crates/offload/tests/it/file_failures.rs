//! Truncated and missing files, full disks, and changed tensors in files.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{alone, assert_intact, batch, snapshot, tiny};
use expect_test::{Expect, expect};
use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::module::{Input, LanguageModel, freeze, parameters, trainable};
use offload::{Method, Offload, OffloadConfig, Tier};
use runtime::autograd::backward;
use tch::Tensor;

const WEIGHTS: &str = "model.safetensors";

fn in_files(folder: &Path) -> OffloadConfig {
    OffloadConfig { tier: Tier::File(folder.to_owned()), ..OffloadConfig::default() }
}

/// A folder with the tiny model in Hugging Face's format.
fn saved() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    hugging_face::save(&tiny(), folder.path(), SHARD_BYTES).unwrap();
    folder
}

/// An error without the names that differ from run to run.
fn words(error: impl ToString, folder: &Path) -> String {
    let text = error.to_string().replace(&folder.display().to_string(), "DIR");
    let Some((before, after)) = text.split_once("/offload-") else { return text };
    let end = after.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(after.len());
    format!("{before}/offload-*{}", &after[end..])
}

fn logits(model: &impl LanguageModel) -> Result<Tensor, models::Error> {
    let _no_grad = tch::no_grad_guard();
    model.logits(&Input::new(&batch(60, 7)))
}

#[test]
fn a_truncated_weights_file_is_an_error() {
    let _alone = alone();
    let reference = logits(&*tiny()).unwrap();
    let folder = saved();
    let path = folder.path().join(WEIGHTS);
    for (method, expected) in [
        (
            Method::Overlap,
            expect![
                "offload: loading of `layers.3` failed: work on the stream failed: DIR/model.safetensors: 4096 bytes from 107632 on: failed to fill whole buffer; is the file whole?; the model on the host is unchanged"
            ],
        ),
        (
            Method::OneLayer,
            expect![
                "offload: loading of `layers.2` failed: DIR/model.safetensors: 4096 bytes from 84848 on: failed to fill whole buffer; is the file whole?; the model on the host is unchanged"
            ],
        ),
    ] {
        let opened = Folder::open(folder.path()).unwrap();
        let options = OffloadConfig { method, ..in_files(folder.path()) };
        let (model, offload) = Offload::open(&opened, None, &options).unwrap();
        assert!(logits(&model).unwrap().equal(&reference));
        let intact = snapshot(&model);

        // In place, because a replaced file is unchanged for open handles.
        let whole = std::fs::read(&path).unwrap();
        let cut =
            || std::fs::File::options().write(true).open(&path).unwrap().set_len(whole.len() as u64 / 2);
        cut().unwrap();
        let error = words(logits(&model).unwrap_err(), folder.path());
        expected.assert_eq(&error);
        offload.check_on_host().unwrap();

        std::fs::write(&path, &whole).unwrap();
        for _ in 0..2 {
            assert!(logits(&model).unwrap().equal(&reference), "{}", method.name());
        }
        assert_intact(&intact, &model, method.name());
    }
}

#[test]
fn a_missing_weights_file_is_an_error() {
    let _alone = alone();
    let folder = saved();
    let opened = Folder::open(folder.path()).unwrap();
    std::fs::rename(folder.path().join(WEIGHTS), folder.path().join("elsewhere")).unwrap();
    let error = Offload::open(&opened, None, &in_files(folder.path())).unwrap_err();
    expect!["DIR/model.safetensors: No such file or directory (os error 2)"]
        .assert_eq(&words(error, folder.path()));

    // A file that is removed while it is open still exists for its handle.
    std::fs::rename(folder.path().join("elsewhere"), folder.path().join(WEIGHTS)).unwrap();
    let (model, _offload) = Offload::open(&opened, None, &in_files(folder.path())).unwrap();
    std::fs::remove_file(folder.path().join(WEIGHTS)).unwrap();
    assert!(logits(&model).unwrap().equal(&logits(&*tiny()).unwrap()));
}

#[test]
fn a_missing_folder_is_an_error() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut model = tiny();
    let intact = snapshot(&*model);
    let error = in_files(&folder.path().join("none")).install(&mut *model).unwrap_err();
    expect![[r#"offload: DIR/none: a folder for the layers cannot be created in it: No such file or directory (os error 2) at path "DIR/none/offload-*""#]].assert_eq(&words(error, folder.path()));
    assert_intact(&intact, &*model, "no folder");
    assert!(logits(&*model).unwrap().equal(&logits(&*tiny()).unwrap()));
}

#[test]
fn layers_in_another_dtype_than_the_files_are_converted_into_files_of_their_own() {
    let _alone = alone();
    let folder = saved();
    let opened = Folder::open(folder.path()).unwrap();
    let kind = tch::Kind::BFloat16;
    let (model, _offload) = Offload::open(&opened, Some(kind), &in_files(folder.path())).unwrap();
    let expected = opened.load(Some(kind), tch::Device::Cpu).unwrap();
    assert!(logits(&model).unwrap().equal(&logits(&expected).unwrap()));
}

const CHILD: &str = "OFFLOAD_TEST_SMALL_FILES_IN";

/// In a separate process with a file size limit of 16 KiB, where the system refuses writes as on a full disk.
#[test]
fn a_full_disk_is_an_error() {
    let _alone = alone();
    if let Some(folder) = std::env::var_os(CHILD).map(PathBuf::from) {
        return on_a_full_disk(&folder);
    }
    let folder = tempfile::tempdir().unwrap();
    // The blocks that `ulimit` counts have 512 bytes or 1024, by shell.
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "file_failures::a_full_disk_is_an_error", "--nocapture"])
        .env(CHILD, folder.path())
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed") && text.contains("the disk was full"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "what was begun is removed");
}

fn on_a_full_disk(folder: &Path) {
    let reference = logits(&*tiny()).unwrap();
    let mut model = tiny();
    freeze(&*model, ".*", true).unwrap();
    let intact = snapshot(&*model);
    let error = words(in_files(folder).install(&mut *model).unwrap_err(), folder);
    expect!["offload: DIR/offload-*/layers.0.0.safetensors: cannot be written: File too large (os error 27); the file tier needs space for the model's layers in a writable folder"].assert_eq(&error);
    assert_intact(&intact, &*model, "a full disk");
    assert!(logits(&*model).unwrap().equal(&reference));
    // The memory tier works.
    let offload = OffloadConfig::default().install(&mut *model).unwrap();
    assert!(logits(&*model).unwrap().equal(&reference));
    offload.check_on_host().unwrap();
    eprintln!("the disk was full");
}

/// A model in files; `change` modifies an offloaded layer.
fn changed(change: impl FnOnce(&Tensor), expected: Expect) {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut model = tiny();
    freeze(&*model, r"layers\..*(weight)", true).unwrap();
    let offload = in_files(folder.path()).install(&mut *model).unwrap();
    let reference = logits(&*model).unwrap();
    let name = "layers.2.mlp.up_proj.weight";
    let tensor = parameters(&*model).into_iter().find(|(other, _)| other == name).unwrap().1.shallow_clone();
    change(&tensor);
    for _ in 0..2 {
        let error = words(logits(&*model).unwrap_err(), folder.path());
        expected.assert_eq(&error);
        offload.check_on_host().unwrap();
    }
    // Unfreezing a layer can be undone; writing it cannot.
    if tensor.requires_grad() {
        let _ = tensor.set_requires_grad(false);
        assert!(logits(&*model).unwrap().equal(&reference));
        let tokens = batch(60, 7);
        let loss = model.loss(&Input::new(&tokens), &tokens).unwrap().sum;
        backward(&[&loss]).unwrap();
        assert!(trainable(&*model).iter().all(|(_, tensor)| tensor.grad().defined()));
    }
}

#[test]
fn training_a_tensor_in_a_file_is_an_error() {
    changed(
        |tensor| drop(tensor.set_requires_grad(true)),
        expect![
            "offload: file tier: `layers.2.mlp.up_proj.weight` is to be trained, but it is stored in DIR/offload-*/layers.2.0.safetensors and is read from there; decide what is trained, and load weights, before the model is offloaded to files"
        ],
    );
}

#[test]
fn writing_a_tensor_in_a_file_is_an_error() {
    changed(
        |tensor| drop(tensor.shallow_clone().fill_(1.0)),
        expect![
            "offload: file tier: `layers.2.mlp.up_proj.weight` was changed in memory, but it is stored in DIR/offload-*/layers.2.0.safetensors and is read from there; decide what is trained, and load weights, before the model is offloaded to files"
        ],
    );
}

const KILLED: &str = "OFFLOAD_TEST_KILLED_IN";

/// A process that is killed has no time to remove anything.
#[test]
fn a_killed_process_leaves_no_files() {
    let _alone = alone();
    if let Some(folder) = std::env::var_os(KILLED).map(PathBuf::from) {
        let mut model = tiny();
        freeze(&*model, ".*", true).unwrap();
        let reference = logits(&*model).unwrap();
        let _offload = in_files(&folder).install(&mut *model).unwrap();
        assert!(logits(&*model).unwrap().equal(&reference));
        eprintln!("the layers are in files");
        // Until it is killed.
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "file_failures::a_killed_process_leaves_no_files", "--nocapture"])
        .env(KILLED, folder.path())
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(child.stderr.take().unwrap());
    let ready = std::io::BufRead::lines(lines).any(|line| line.unwrap().contains("the layers are in files"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ready);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
