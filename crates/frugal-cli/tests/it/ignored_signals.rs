//! Signals that were ignored when the program started stay ignored: those of `nohup`, and of a script's command in the background.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::tiny_folder::Tiny;

/// The program, started with these signals ignored, as `nohup` does it.
fn ignoring(signals: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("trap '' {signals}; exec \"$@\""), "sh"])
        .arg(crate::program())
        .args(arguments);
    command.env("OMP_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn send(child: &Child, signal: Signal) {
    // It may have ended meanwhile.
    let _ = kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal);
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_training_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["train", "--width", "16", "--heads", "2", "--vocabulary", "32", "--length", "16"];
    let words = [&words[..], &["--steps", "60", "--log-every", "1", "--json", "--out", "run"]].concat();
    for (ignored, signals) in [
        ("HUP", &[Signal::HUP][..]),
        ("HUP INT TERM", &[Signal::INT, Signal::HUP, Signal::TERM, Signal::HUP]),
    ] {
        let _ = std::fs::remove_dir_all(folder.path().join("run"));
        let mut child = ignoring(ignored, &words).current_dir(folder.path()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        // From the first line on there are handlers.
        let first = out.next().unwrap().unwrap();
        signals.iter().for_each(|signal| send(&child, *signal));
        let steps = out.map_while(Result::ok).filter(|line| line.contains("\"loss\"")).count();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{ignored}: {}", said(&output));
        assert!(steps >= 59, "{steps} lines after {first}");
    }
}

#[test]
fn an_export_goes_on() {
    let tiny = Tiny::new();
    let out = tiny.path("out.gguf");
    let words = ["export", "--model", "model", "--format", "gguf", "--type", "f32", "--out", "out.gguf"];
    let mut child = ignoring("HUP INT", &words).current_dir(tiny.path("")).spawn().unwrap();
    // Until the shell ignores them, signals end it.
    let ignored = [Signal::HUP, Signal::INT].iter().map(|signal| 1 << (signal.as_raw() - 1)).sum::<u64>();
    let status = format!("/proc/{}/status", child.id());
    while std::fs::read_to_string(&status).is_ok_and(|status| {
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).unwrap() & ignored != ignored)
    }) {
        std::thread::yield_now();
    }
    // At every moment of it.
    while child.try_wait().unwrap().is_none() {
        [Signal::HUP, Signal::INT].into_iter().for_each(|signal| send(&child, signal));
        std::thread::yield_now();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(out.exists());
}

#[test]
fn a_launcher_goes_on_and_passes_on_what_ranks_do_not_ignore() {
    // The ranks' parent is the launcher.
    let script = "kill -HUP $PPID; kill -INT $PPID; sleep 0.2; echo done";
    let output = ignoring("HUP INT", &["launch", "-n", "2", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout).matches("done").count(), 2);
    // SIGINT would not reach ranks that ignore it, too.
    let script = "trap 'exit 3' TERM; kill -TERM $PPID; while :; do sleep 0.05; done";
    let output = ignoring("INT", &["launch", "-n", "1", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(said(&output).contains("ended with exit status 3"), "{}", said(&output));
}
