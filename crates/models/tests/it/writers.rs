//! Concurrent writers of one file and of one model's folder leave one complete result.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use models::hugging_face::{self, Folder, SHARD_BYTES};
use models::state_dict::state_dict;
use models::{DecoderConfig, Llama, tensors_file};
use tch::{Device, Kind, Tensor};

/// The file that a child process writes, and the value that it fills it with.
const CHILD: &str = "FRUGAL_TEST_WRITES";

/// A file whose every value says which one it is; larger ones are longer, too.
fn write(path: &Path, value: i64) {
    let tensor = Tensor::full([50_000 * value], value, (Kind::Int64, Device::Cpu));
    tensors_file::write(path, &[("x".to_owned(), tensor)]).unwrap();
}

fn read(path: &Path) -> i64 {
    let tensors = tensors_file::read(path, Device::Cpu).unwrap();
    let [(_, tensor)] = &tensors[..] else { panic!("{} tensors", tensors.len()) };
    let value = tensor.int64_value(&[0]);
    assert_eq!(tensor.size(), [50_000 * value]);
    assert!(tensor.equal(&Tensor::full([50_000 * value], value, (Kind::Int64, Device::Cpu))));
    value
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn concurrent_writers_of_a_file_leave_one_complete_result() {
    if let Ok(asked) = std::env::var(CHILD) {
        let (value, path) = asked.split_once(' ').unwrap();
        for _ in 0..20 {
            write(Path::new(path), value.parse().unwrap());
        }
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x.safetensors");
    write(&path, 1);
    let children: Vec<_> = [2, 3]
        .map(|value| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "writers::concurrent_writers_of_a_file_leave_one_complete_result"])
                .env(CHILD, format!("{value} {}", path.display()))
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .into();
    std::thread::scope(|scope| {
        for value in [4, 5] {
            let path = &path;
            scope.spawn(move || (0..20).for_each(|_| write(path, value)));
        }
        for _ in 0..40 {
            assert!((1..=5).contains(&read(&path)));
        }
    });
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert!((2..=5).contains(&read(&path)));
    assert_eq!(names(root.path()), ["x.safetensors"], "nothing temporary is left");
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x.safetensors");
    write(&path, 1);
    let twice = ["a", "a"].map(|name| (name.to_owned(), Tensor::from(1.0)));
    tensors_file::write(&path, &twice).unwrap_err();
    let broke = files::atomic_write::file(&path, |out| {
        out.write_all(b"half")?;
        Err::<(), _>(std::io::Error::other("broke off"))
    });
    assert_eq!(broke.unwrap_err().to_string(), "broke off");
    assert_eq!((read(&path), names(root.path())), (1, vec!["x.safetensors".to_owned()]));
}

#[test]
fn concurrent_writers_of_a_model_leave_one_complete_result() {
    let model = |width: i64| {
        let config =
            DecoderConfig { max_position_embeddings: 32, ..DecoderConfig::llama(40, width, 24, 2, 4) };
        let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
        let _no_grad = tch::no_grad_guard();
        for (_, tensor) in state_dict(&model) {
            let _ = tensor.shallow_clone().fill_(width as f64);
        }
        model
    };
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("model");
    let check = || {
        let model = Folder::open(&path).unwrap().load(None, Device::Cpu).unwrap();
        let width = model.decoder_config().hidden_size;
        for (name, tensor) in state_dict(&model) {
            assert_eq!(f64::try_from(tensor.min()).unwrap(), width as f64, "{name}");
            assert_eq!(f64::try_from(tensor.max()).unwrap(), width as f64, "{name}");
        }
    };
    hugging_face::save(&model(16), &path, SHARD_BYTES).unwrap();
    fs::write(path.join("tokenizer.json"), "{}").unwrap();
    std::thread::scope(|scope| {
        for (width, limit) in [(16, SHARD_BYTES), (24, 9_000), (32, 4_000)] {
            let (path, check) = (&path, &check);
            let model = model(width);
            scope.spawn(move || {
                for _ in 0..10 {
                    hugging_face::save(&model, path, limit).unwrap();
                    check();
                }
            });
        }
    });
    check();
    assert!(path.join("tokenizer.json").is_file());
    assert_eq!(names(root.path()), ["model"]);
    // Only files of the final model.
    let shards = names(&path).into_iter().filter(|name| name.starts_with("model-")).count();
    assert_eq!(shards == 0, path.join("model.safetensors").is_file());
}
