//! Standard output that cannot be written, or whose reader has gone.
#![cfg(target_os = "linux")]

use std::fs::OpenOptions;
use std::process::{Output, Stdio};

use crate::tiny_folder::{FINETUNE, Tiny};

fn run(tiny: &Tiny, arguments: &str, out: Stdio) -> Output {
    tiny.command(arguments).stdin(Stdio::null()).stdout(out).output().unwrap()
}

/// The commands whose result is on standard output.
fn commands() -> Vec<String> {
    let mut commands: Vec<String> = [
        "--help",
        "eval --help",
        "--version",
        "completions bash",
        "info model",
        "plan parameters --model qwen2.5-0.5b",
        "data show problems/train.jsonl --model model --format question-answer",
        "data check problems/train.jsonl --model model --format question-answer",
        "generate --model model --prompt Ann --max-new-tokens 2",
        "eval --model model --data problems/test.jsonl --format question-answer --limit 2",
        "eval --model model --data problems --limit 1 --max-new-tokens 1 --json",
        "runs ls",
    ]
    .map(str::to_owned)
    .into();
    commands.push(format!("{FINETUNE} --steps 1 --samples 0 --out run --json"));
    commands
}

#[test]
fn output_that_cannot_be_written_ends_with_an_error() {
    let tiny = Tiny::new();
    for command in commands() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = run(&tiny, &command, full.into());
        let said = String::from_utf8(output.stderr).unwrap();
        let is_quiet = command == "runs ls";
        // There is no run to be listed.
        assert!(output.status.code() == Some(1) || is_quiet, "{command}: {:?} {said}", output.status);
        let words = "error: standard output cannot be written: No space left on device";
        assert!(said.contains(words) || is_quiet, "{command}: {said}");
    }
    assert!(tiny.path("run/adapter_model.safetensors").is_file(), "what was trained is there");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let tiny = Tiny::new();
    for command in commands().into_iter().step_by(3) {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = run(&tiny, &format!("{command} --quiet"), writer.into());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.is_empty(), "{command}: {:?} {said}", output.status);
    }
}
