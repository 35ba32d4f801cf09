//! `frugal train` as a process: over every kind of data, with every way of making batches, and with a diagnosis.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::tiny_folder::{self, losses};

/// `frugal train` with `arguments` between blanks.
fn train(arguments: &str) -> Output {
    let mut command = Command::new(crate::program());
    command.args(["train", "--json", "--device", "cpu", "--heads", "2"]).args(arguments.split_whitespace());
    command.env("OMP_NUM_THREADS", "1").output().unwrap()
}

/// The lines of a run that ended well.
fn lines(arguments: &str) -> (Vec<Value>, String) {
    let output = train(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments}: {message}");
    let text = String::from_utf8(output.stdout).unwrap();
    (tiny_folder::lines(&text), message)
}

#[test]
fn a_healthy_training_is_called_healthy_and_goes_on_as_without_a_diagnosis() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let common = "--data embedded --width 128 --length 128 --batch 16 --steps 9";
    let (plain, silence) = lines(common);
    assert_eq!(silence, "");
    let (diagnosed, message) = lines(&format!("{common} --diagnose --trace {}", trace.display()));
    assert_eq!(losses(&plain).len(), 9);
    assert_eq!(losses(&diagnosed), losses(&plain));
    assert!(message.contains("nothing found in 3 steps of "), "{message}");
    assert!(message.contains("\n  forward "), "{message}");
    let findings: Vec<&Value> =
        diagnosed.iter().map(|line| &line["diagnosis"]).filter(|line| !line.is_null()).collect();
    assert_eq!(findings, [&json!([])]);
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let steps = trace["traceEvents"].as_array().unwrap().iter();
    assert_eq!(steps.filter(|event| event["name"] == "step" && event["cat"] == "user_annotation").count(), 3);
}

#[test]
fn padding_without_workers_is_reported() {
    let arguments =
        "--data embedded --width 64 --length 128 --strategy base --workers 0 --steps 8 --diagnose";
    let (lines, message) = lines(arguments);
    let diagnosis = lines.iter().find_map(|line| line["diagnosis"].as_array()).unwrap();
    let padding = diagnosis.iter().find(|finding| finding["name"] == "padding");
    let padding = padding.unwrap_or_else(|| panic!("{message}"));
    assert!(padding["share"].as_f64().unwrap() > 0.2, "{padding}");
    assert!(message.contains("Pack several documents into a row"), "{message}");
}

#[test]
fn too_few_steps_are_no_diagnosis() {
    let (lines, message) = lines("--width 16 --steps 5 --diagnose");
    assert_eq!(losses(&lines).len(), 5);
    assert_eq!(message, "warning: nothing was diagnosed: that needs 6 steps, and the training ends before\n");
}

fn records(path: &Path, metric: &str) -> Vec<(u64, f64)> {
    let records = report::record::read_records(path).unwrap().into_iter();
    let of = records.filter(|record| record.experiment == "training" && record.metric.name == metric);
    of.map(|record| (record.case.get("step").unwrap().as_u64().unwrap(), record.metric.value.unwrap()))
        .collect()
}

#[test]
fn records_are_written_for_each_step_and_evaluation_and_go_on_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("records.jsonl"), folder.path().join("run"));
    let run = |steps: u64| {
        lines(&format!(
            "--width 16 --steps {steps} --evaluate-every 2 --clip 1 --resume --out {} --records {}",
            out.display(),
            file.display()
        ))
    };
    let first = losses(&run(3).0);
    assert_eq!(records(&file, "loss").len(), 3);
    let (second, message) = run(5);
    assert_eq!(message, "", "more steps at a constant rate are no other training");
    let all: Vec<f64> = first.into_iter().chain(losses(&second)).collect();
    let expected: Vec<(u64, f64)> = (1..=5).zip(all).collect();
    assert_eq!(records(&file, "loss"), expected);
    assert_eq!(records(&file, "gradient_norm").len(), 5);
    let evaluated: Vec<u64> = records(&file, "validation_loss").into_iter().map(|(step, _)| step).collect();
    assert_eq!(evaluated, [2, 4]);
    let record = &report::record::read_records(&file).unwrap()[0];
    assert_eq!(
        serde_json::to_string(&record.case).unwrap(),
        r#"{"model":"gpt2-like","optimizer":"adamw","schedule":"constant","data":"synthetic","batch":8,"length":32,"width":16,"seed":0,"step":1}"#
    );
    assert!(record.environment.torch.is_some());
}
