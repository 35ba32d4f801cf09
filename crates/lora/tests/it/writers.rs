//! Concurrent and killed writers of one adapter: a reader always finds one complete adapter, never a mixture.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use files::atomic_write;
use lora::LoraConfig;
use lora::peft::{CONFIG_FILE, PREFIX, TENSORS_FILE, write_folder};
use models::tensors_file;
use tch::{Device, Kind, Tensor};

/// The folder that a child process writes, and the ranks of the adapters that it writes in turns.
const CHILD: &str = "FRUGAL_TEST_WRITES";
const NAME: &str = "q_proj.lora_A.weight";

/// An adapter whose every byte identifies it.
fn write(folder: &Path, rank: i64) {
    let config = LoraConfig { r: rank, ..LoraConfig::default() };
    let tensor = Tensor::full([rank, 2000], rank as f64, (Kind::Float, Device::Cpu));
    write_folder(folder, &config, &[(format!("{PREFIX}{NAME}"), tensor)]).unwrap();
}

/// The rank of the existing adapter.
fn read(folder: &Path) -> i64 {
    let (config, tensors) = atomic_write::read(folder, || {
        let config = LoraConfig::read(&folder.join(CONFIG_FILE)).map_err(|error| error.to_string())?;
        let tensors = tensors_file::read(&folder.join(TENSORS_FILE), Device::Cpu);
        Ok::<_, String>((config, tensors.map_err(|error| error.to_string())?))
    })
    .unwrap();
    let [(_, tensor)] = &tensors[..] else { panic!("{} tensors", tensors.len()) };
    assert_eq!(
        tensor.size(),
        [config.r, 2000],
        "the configuration of one adapter beside the weights of another"
    );
    assert_eq!(f64::try_from(tensor.min()).unwrap(), config.r as f64);
    assert_eq!(f64::try_from(tensor.max()).unwrap(), config.r as f64);
    config.r
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// This process again, writing adapters of these ranks in turns until it is killed, with a line for each.
fn child(test: &str, folder: &Path, ranks: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, format!("{ranks} {}", folder.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Writes as its parent has asked. False in the parent.
fn is_child() -> bool {
    let Ok(asked) = std::env::var(CHILD) else { return false };
    let (ranks, folder) = asked.split_once(' ').unwrap();
    let ranks: Vec<i64> = ranks.split(',').map(|rank| rank.parse().unwrap()).collect();
    for rank in ranks.iter().cycle() {
        write(Path::new(folder), *rank);
        // Ends the child when its parent no longer reads.
        if writeln!(std::io::stderr(), "written").is_err() {
            break;
        }
    }
    true
}

/// Reads the child's lines until it has written so often.
fn wait_for(child: &mut Child, count: usize) {
    let lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    assert_eq!(lines.map(Result::unwrap).filter(|line| line.contains("written")).take(count).count(), count);
}

#[test]
fn a_killed_writer_leaves_the_old_adapter_or_the_new_one() {
    if is_child() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("adapter");
    write(&folder, 2);
    fs::write(folder.join("README.md"), "kept").unwrap();
    for round in 1..=8 {
        let test = "writers::a_killed_writer_leaves_the_old_adapter_or_the_new_one";
        let mut child = child(test, &folder, "3,4");
        wait_for(&mut child, round % 5 + 1);
        // Somewhere within the next adapter.
        child.kill().unwrap();
        child.wait().unwrap();
        assert!([3, 4].contains(&read(&folder)));
        assert_eq!(names(&folder), ["README.md", CONFIG_FILE, TENSORS_FILE]);
    }
    // The next writer removes what was left.
    write(&folder, 2);
    assert_eq!((read(&folder), names(root.path())), (2, vec!["adapter".to_owned()]));
}

#[test]
fn two_writing_processes_leave_one_complete_adapter() {
    if is_child() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("adapter");
    write(&folder, 2);
    let test = "writers::two_writing_processes_leave_one_complete_adapter";
    let mut children = ["3", "4"].map(|rank| child(test, &folder, rank));
    for _ in 0..20 {
        for child in &mut children {
            wait_for(child, 1);
            assert!([2, 3, 4].contains(&read(&folder)));
        }
    }
    for mut child in children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!([3, 4].contains(&read(&folder)));
    assert_eq!(names(&folder), [CONFIG_FILE, TENSORS_FILE]);
}

#[test]
fn writing_threads_leave_one_complete_adapter() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("made/by/them");
    std::thread::scope(|scope| {
        for rank in 1..=4 {
            let folder = &folder;
            scope.spawn(move || {
                for _ in 0..20 {
                    write(folder, rank);
                    assert!((1..=4).contains(&read(folder)));
                }
            });
        }
    });
    assert_eq!(names(&folder), [CONFIG_FILE, TENSORS_FILE]);
    assert_eq!(names(folder.parent().unwrap()), ["them"]);
}
