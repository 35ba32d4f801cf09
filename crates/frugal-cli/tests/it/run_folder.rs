//! The output folder of a fine-tuning: it alone makes the same run again, to the same bits, also after a kill.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::event_reader::{self, Events};
use crate::tiny_folder::Tiny;
use frugal::Config;
use frugal::run_folder::{RunRecord, State};
use lora::peft::TENSORS_FILE;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Writes sixty sums; a training holds one out.
pub(crate) fn sums(tiny: &Tiny) {
    let mut lines = String::new();
    for n in 0..60 {
        let (a, b) = (n % 7, n % 11);
        let prompt = format!("Ann has {a} pears and buys {b} more:");
        writeln!(lines, "{}", json!({ "prompt": prompt, "completion": format!(" {}.", a + b) })).unwrap();
    }
    std::fs::write(tiny.path("sums.jsonl"), lines).unwrap();
}

const TRAIN: &str = "finetune --model model --data sums.jsonl --r 4 --batch-size 4 --accumulation 2 --seed 3 --dropout 0.1 --steps 8 \
                     --set optimizer.lr=0.03 --evaluate-every 2 --checkpoint-every 3";

fn text(tiny: &Tiny, name: &str) -> String {
    String::from_utf8(tiny.bytes(name)).unwrap()
}

/// The values of a log: step, loss, validation loss.
fn losses(tiny: &Tiny, out: &str) -> Vec<(Value, Value, Value)> {
    let log = text(tiny, &format!("{out}/losses.jsonl"));
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["step"].clone(), line["loss"].clone(), line["validation_loss"].clone())).collect()
}

/// The event files of a folder, in the order in which they were made.
fn events(tiny: &Tiny, out: &str) -> Vec<Events> {
    let files = std::fs::read_dir(tiny.path(out)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.to_string_lossy().contains("tfevents")).collect();
    files.sort();
    files.iter().map(|path| event_reader::read(&std::fs::read(path).unwrap())).collect()
}

/// What TensorBoard shows: a start makes it forget what earlier files have from its step on.
fn shown(files: &[Events], tag: &str) -> BTreeMap<u64, f32> {
    let mut all = BTreeMap::new();
    for file in files {
        all.retain(|step, _| file.starts.iter().all(|start| step < start));
        all.extend(
            file.scalars.iter().filter(|(own, ..)| own == tag).map(|(_, step, value)| (*step, *value)),
        );
    }
    all
}

#[test]
fn a_run_folder_makes_the_same_run_again_also_after_a_kill() {
    let tiny = Tiny::new();
    sums(&tiny);
    let (_, err) = tiny.succeed(&format!("{TRAIN} --out one"));
    assert!(err.contains("1 of 60 rows are held out for validation, by their hash (--held-out 0"), "{err}");
    for part in [
        ", validation loss ",
        "the adapter is in one",
        "the best adapter is in one/best (",
        "before: ",
        "after:  ",
        "one/index.html",
        "next:\n  frugal generate --model one --prompt TEXT\n",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }

    // The configuration has the origin of each value.
    let config = text(&tiny, "one/config.toml");
    for line in [
        "lr = 0.03 # --set",
        "steps = 8 # --steps",
        "batch = 4 # --batch-size",
        "warmup = 0.03 # default",
        "r = 4 # --r",
    ] {
        assert!(config.lines().any(|own| own == line), "{line}: {config}");
    }
    // The record has the data's identity.
    let record = RunRecord::read(&tiny.path("one")).unwrap().unwrap();
    let digest: String =
        Sha256::digest(tiny.bytes("sums.jsonl")).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(record.train.files[0].sha256.as_deref(), Some(&*digest));
    assert_eq!((record.train.rows, record.validation.rows, record.steps), (59, 1, 8));
    let outcome = record.outcome.clone().unwrap();
    assert!(
        (outcome.state, outcome.step) == (State::Finished, 8) && outcome.peak_bytes > 1 << 20,
        "{outcome:?}"
    );
    assert!(
        record.starts[0].command.starts_with("frugal finetune --model model --data sums.jsonl"),
        "{record:?}"
    );

    // Three forms of the same losses.
    let log = losses(&tiny, "one");
    assert_eq!(log.len(), 13, "8 steps, 5 evaluations");
    assert_eq!(log[0].0, 0, "the first evaluation is before the first step");
    let table = text(&tiny, "one/losses.csv");
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
    assert!(rows.iter().all(|row| row.len() == 10) && rows.len() == 14, "{table}");
    let files = events(&tiny, "one");
    assert_eq!((files.len(), &*files[0].version, &files[0].starts), (1, "brain.Event:2", &vec![1]));
    let (steps, validation) = (shown(&files, "train/loss"), shown(&files, "validation/loss"));
    assert_eq!((steps.len(), validation.len()), (8, 5));
    for (row, (step, loss, validated)) in rows[1..].iter().zip(&log) {
        assert_eq!(row[0], step.to_string());
        let (columns, curve) = if loss.is_null() { (row[8], &validation) } else { (row[1], &steps) };
        let value = loss.as_f64().or(validated.as_f64()).unwrap();
        assert_eq!(columns.parse::<f64>().unwrap(), value);
        assert_eq!(curve[&step.as_u64().unwrap()], value as f32);
    }
    let page = text(&tiny, "one/index.html");
    assert!(page.contains("<svg") && page.contains("<polyline") && page.contains(&digest), "{page}");
    assert!(!page.contains("http-equiv=\"refresh\"") && page.contains("finished"), "{page}");
    let samples = text(&tiny, "one/samples.jsonl");
    let sample: Value = serde_json::from_str(samples.lines().next().unwrap()).unwrap();
    assert!(
        sample["prompt"].as_str().unwrap().starts_with("Ann has") && sample["base"].is_string(),
        "{samples}"
    );
    assert_ne!(sample["base"], sample["tuned"]);

    // The folder alone: from its configuration, and resumed after a kill.
    tiny.succeed("finetune --config one/config.toml --out two --quiet --samples 0");
    assert!(text(&tiny, "two/config.toml").contains("steps = 8 # file one/config.toml\n"));
    tiny.kill_at_step(&format!("{TRAIN} --out three --json"), 5);
    tiny.succeed("resume three --quiet");
    for out in ["two", "three"] {
        for file in [TENSORS_FILE.to_owned(), format!("best/{TENSORS_FILE}"), "best.json".to_owned()] {
            assert!(
                tiny.bytes(&format!("one/{file}")) == tiny.bytes(&format!("{out}/{file}")),
                "{out} {file}"
            );
        }
        assert_eq!(losses(&tiny, out), log, "{out}");
        let files = events(&tiny, out);
        assert_eq!(shown(&files, "train/loss"), steps, "{out}");
    }
    assert_eq!(events(&tiny, "three").iter().map(|file| file.starts[0]).collect::<Vec<_>>(), [1, 4]);
    assert_eq!(text(&tiny, "three/losses.csv").lines().count(), 14);
    let config = text(&tiny, "three/config.toml");
    assert!(config.contains("steps = 8 # --steps\n") && config.contains("lr = 0.03 # --set\n"), "{config}");
    let starts = RunRecord::read(&tiny.path("three")).unwrap().unwrap().starts;
    assert_eq!(starts.iter().map(|start| start.step).collect::<Vec<_>>(), [0, 3]);

    runs(&tiny);
    // Other data under the same name are said.
    std::fs::write(tiny.path("sums.jsonl"), text(&tiny, "sums.jsonl").replace("pears", "plums")).unwrap();
    let (_, err) =
        tiny.succeed("finetune --config one/config.toml --out four --samples 0 --steps 1 --no-baseline");
    assert!(
        err.contains("note: the training data have changed since the training whose configuration this is"),
        "{err}"
    );
}

/// What `frugal runs` says of these folders.
fn runs(tiny: &Tiny) {
    let (out, _) = tiny.succeed("runs ls");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 5, "a heading, a rule, three trainings: {out}");
    assert!(
        lines[2].starts_with("one ") && lines[2].ends_with("finished") && lines[2].contains("8/8"),
        "{out}"
    );
    let (out, _) = tiny.succeed("runs show three");
    assert!(out.contains("held-out") || out.contains("59 rows"), "{out}");
    assert!(out.contains("frugal resume three --quiet") && out.contains("SHA-256"), "{out}");

    let (out, _) = tiny.succeed("runs diff one two --json");
    let diff: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(diff["settings"], json!({ "training.samples": [5, 0] }));
    assert_eq!(diff["losses"]["validation loss"][0], diff["losses"]["validation loss"][1]);
    let (out, _) = tiny.succeed("runs diff one three");
    assert!(out.contains("the settings and the data are equal"), "{out}");

    // A training whose process is gone is interrupted, not running.
    let mut record = RunRecord::read(&tiny.path("one")).unwrap().unwrap();
    record.outcome = None;
    record.write(&tiny.path("one")).unwrap();
    let (out, _) = tiny.succeed("runs ls one --json");
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["state"], "interrupted");
    let refused = tiny.run("runs show model");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no config.toml in it"), "{refused:?}");
}

#[test]
fn a_training_that_does_not_improve_stops_and_keeps_its_best() {
    let tiny = Tiny::new();
    sums(&tiny);
    // Without a learning rate no evaluation is better than the first.
    let train = "finetune --model model --data sums.jsonl --r 4 --batch-size 4 --accumulation 1 --steps 30 --lr 0 --samples 0 \
                 --no-baseline --evaluate-every 2 --patience 3 --checkpoint-every 3 --out run";
    let (_, err) = tiny.succeed(train);
    assert!(err.contains("stopped early: 3 evaluations in a row were not better"), "{err}");
    assert!(err.contains("at step 2)"), "the best is the first: {err}");
    let (out, _) = tiny.succeed("runs ls --json");
    let run: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&run["step"], &run["state"], &run["best_step"]),
        (&json!(8), &json!("stopped-early"), &json!(2))
    );
    // It stays stopped, and goes on where it is asked to.
    let (_, err) = tiny.succeed("resume run");
    assert!(err.contains("stopped early"), "{err}");
    let (_, err) = tiny.succeed("resume run --patience 4 --json");
    assert!(!err.contains("differ"), "{err}");
    assert_eq!(losses(&tiny, "run").iter().filter(|(_, loss, _)| loss.is_f64()).count(), 10);
    let config: Config = text(&tiny, "run/config.toml").parse().unwrap();
    assert_eq!(config.training.patience, Some(4));
    assert!(text(&tiny, "run/config.toml").contains("patience = 4 # --patience\n"));
}
