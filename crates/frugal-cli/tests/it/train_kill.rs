//! Real processes, killed: what is lost, and that a resumed run gives the bits of one that was never stopped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use frugal::training::checkpoint;

use crate::texts::write_texts;

const STEPS: u64 = 60;
const EVERY: u64 = 7;

struct Run {
    folder: tempfile::TempDir,
    data: &'static [&'static str],
}

const SYNTHETIC: &[&str] = &["--vocabulary", "32", "--length", "16"];
const DOCUMENTS: &[&str] = &["--data", "store", "--strategy", "packed", "--length", "32"];

impl Run {
    fn new() -> Self {
        Self::over(SYNTHETIC)
    }

    fn over(data: &'static [&'static str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        if data == DOCUMENTS {
            write_texts(folder.path());
        }
        Self { folder, data }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn log(&self) -> PathBuf {
        self.out().join("losses.jsonl")
    }

    fn checkpoints(&self) -> PathBuf {
        self.out().join("checkpoints")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(crate::program());
        command.args(["train", "--width", "16", "--heads", "2", "--dropout", "0.1", "--batch", "4"]);
        command.args(["--accumulation", "2", "--clip", "1", "--warmup", "5", "--log-every", "1"]);
        command.args(self.data);
        command.args(["--steps", &STEPS.to_string(), "--checkpoint-every", &EVERY.to_string(), "--resume"]);
        command.arg("--out").arg(self.out());
        // One thread: no other order of summation, and room for other tests.
        command.env("OMP_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
        command.current_dir(self.folder.path());
        command
    }

    fn start(&self) -> Child {
        self.command().spawn().unwrap()
    }

    fn finish(&self) -> Output {
        self.command().output().unwrap()
    }

    /// Steps in the order they were logged. A last line without its end was torn by a kill.
    fn lines(&self) -> Vec<(u64, u64)> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let parse = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).ok()?;
            Some((value["step"].as_u64()?, value["loss"].as_f64()?.to_bits()))
        };
        whole.filter_map(parse).collect()
    }

    fn losses(&self) -> BTreeMap<u64, u64> {
        self.lines().into_iter().collect()
    }

    /// Waits until `ready` says so; false where the process has ended before.
    fn wait_for(&self, child: &mut Child, ready: impl Fn(&Self) -> bool) -> bool {
        loop {
            if ready(self) {
                return true;
            }
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::yield_now();
        }
    }
}

fn is_writing(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(".tmp-"))
}

fn reference(data: &'static [&'static str]) -> BTreeMap<u64, u64> {
    let run = Run::over(data);
    let output = run.finish();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let losses = run.losses();
    assert_eq!(losses.keys().copied().collect::<Vec<_>>(), (1..=STEPS).collect::<Vec<_>>());
    losses
}

/// The losses of a run over synthetic data that is not stopped.
fn unbroken() -> &'static BTreeMap<u64, u64> {
    static LOSSES: OnceLock<BTreeMap<u64, u64>> = OnceLock::new();
    LOSSES.get_or_init(|| reference(SYNTHETIC))
}

#[test]
fn a_killed_run_loses_little_and_goes_on_to_the_same_bits() {
    let run = Run::new();
    // A fixed sequence of moments: after so many more lines of the log, or while a checkpoint is written.
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let (mut kills, mut most_lost) = (0, 0);
    for round in 0..7 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let before = run.lines().len();
        let more = 1 + (random % 12) as usize;
        let mut child = run.start();
        let killed = if round % 3 == 2 {
            run.wait_for(&mut child, |run| run.lines().len() > before && is_writing(&run.checkpoints()))
        } else {
            run.wait_for(&mut child, |run| run.lines().len() >= before + more)
        };
        child.kill().unwrap();
        child.wait().unwrap();
        kills += u32::from(killed);
        // A resume goes on from the newest checkpoint, and takes the later steps out of the log.
        let last = run.lines().last().map_or(0, |(step, _)| *step);
        let saved = checkpoint::steps(&run.checkpoints()).unwrap().first().copied().unwrap_or(0);
        most_lost = most_lost.max(last.saturating_sub(saved));
    }
    let output = run.finish();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(kills >= 4, "only {kills} kills hit a run");
    assert_eq!(&run.losses(), unbroken());
    assert_eq!(run.lines().len() as u64, STEPS, "each step is in the log once");
    assert!(most_lost <= EVERY, "{most_lost} steps lost by one kill");
    eprintln!("{kills} kills, at most {most_lost} steps lost by one");
}

#[test]
fn a_killed_run_over_packed_documents_goes_on_to_the_same_bits_with_any_number_of_workers() {
    let reference = reference(DOCUMENTS);
    let run = Run::over(DOCUMENTS);
    let with = |workers: &str| {
        let mut command = run.command();
        command.args(["--workers", workers]);
        command
    };
    // As many steps as that, and then the other number of workers.
    for (workers, steps) in [("1", 9), ("0", 20), ("3", 31), ("1", 45)] {
        let mut child = with(workers).spawn().unwrap();
        assert!(run.wait_for(&mut child, |run| run.losses().len() >= steps), "it ended before step {steps}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let output = with("2").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(run.losses(), reference);
}

#[test]
fn an_interrupted_run_loses_nothing() {
    let run = Run::new();
    let mut child = run.start();
    assert!(run.wait_for(&mut child, |run| run.lines().len() >= 10), "it ended early");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{message}");
    let at = run.lines().len();
    let expected = format!(
        "error: interrupted after step {at} of {STEPS}, which is saved; resume with `frugal resume {}`\n",
        run.out().display()
    );
    assert!(message.ends_with(&expected), "{message}");
    assert!(run.finish().status.success());
    assert_eq!(&run.losses(), unbroken());
    assert_eq!(run.lines().len() as u64, STEPS, "no step was done twice");
}

#[test]
fn a_checkpoint_that_does_not_fit_on_the_disk_is_an_error_and_the_earlier_ones_stay() {
    let run = Run::new();
    let limited = |extra: &str| {
        let command = run.command();
        let mut words: Vec<String> = vec![command.get_program().to_string_lossy().into_owned()];
        words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
        // A limit on the size of files stands for a full disk: writing fails in the middle.
        let script = format!("trap '' XFSZ; ulimit -f 24; exec {} {extra}", words.join(" "));
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).env("OMP_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
        shell.output().unwrap()
    };
    // 24 blocks of 512 or 1024 bytes, as the shell counts: more than the log, less than the optimizer's state.
    let output = limited("");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("error: the checkpoint of step 7 was not written: "), "{message}");
    assert!(message.contains("raise the limit on the size of files"), "{message}");
    assert!(message.contains("; there is no earlier one; then continue with `frugal resume "), "{message}");
    let left = std::fs::read_dir(run.checkpoints()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), [".lock"], "what was half-written is removed");

    let output = limited("--ignore-failed-checkpoints");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    let warnings = message.lines().filter(|line| line.starts_with("warning: the checkpoint of step "));
    assert_eq!(warnings.count() as u64, STEPS.div_ceil(EVERY), "{message}");
    let last = format!(
        "error: trained up to step {STEPS}; its checkpoint was not written, and there is no earlier one\n"
    );
    assert!(message.ends_with(&last), "{message}");
    assert_eq!(run.losses().len() as u64, STEPS);
}

#[test]
fn an_interrupted_run_that_could_not_be_saved_says_so() {
    let run = Run::new();
    let mut command = run.command();
    command.args(["--ignore-failed-checkpoints"]);
    let mut words: Vec<std::ffi::OsString> = command.get_args().map(Into::into).collect();
    let steps = words.iter().position(|word| word == "--steps").unwrap();
    words[steps + 1] = "100000".into();
    let mut command = Command::new(command.get_program());
    command.args(words).env("OMP_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    assert!(run.wait_for(&mut child, |run| run.lines().len() >= 10), "it ended early");
    // Its folder is gone: whatever stands in the way of the next checkpoint.
    std::fs::rename(run.checkpoints(), run.folder.path().join("gone")).unwrap();
    let at = run.lines().len() as u64;
    assert!(run.wait_for(&mut child, |run| run.lines().len() as u64 > at + EVERY), "it ended early");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{message}");
    let last = message.lines().last().unwrap();
    assert!(
        last.starts_with("error: interrupted after step ") && !last.contains("which is saved"),
        "{message}"
    );
    assert!(last.contains("its checkpoint was not written, and the last is that of step "), "{message}");
}
