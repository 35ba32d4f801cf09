//! Fine-tuning on rewards of the model's own answers.

use std::os::unix::fs::PermissionsExt as _;

use expect_test::expect;
use serde_json::{Value, json};

use super::session::Session;
use super::{Tiny, refused};

const TRAIN: &str = "finetune --model @model --questions @questions.jsonl --steps 1 --out @out --objective grpo --grader exact \
                     --batch-size 8 --accumulation 1 --max-new-tokens 4";

fn write(tiny: &Tiny, name: &str, count: usize) {
    let line = |number: usize| {
        json!({ "question": format!("{number} and one is "), "answer": format!("{}", number + 1), "kind": "sum" }).to_string()
    };
    std::fs::write(tiny.path(name), (0..count).map(line).collect::<Vec<_>>().join("\n")).unwrap();
}

fn program(tiny: &Tiny, script: &str) {
    let path = tiny.path("grade.sh");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn rewards_that_cannot_be_learned_are_told() {
    let tiny = Tiny::new();
    write(&tiny, "questions.jsonl", 8);
    refused(
        &tiny,
        &TRAIN.replace("--grader exact ", ""),
        expect![[r#"
        error: `rollout.grader` (--grader) is missing; expected number, exact, contains, regex, or the path of a program, such as ./grade.py
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("exact", "best"),
        expect![[r#"
        error: `rollout.grader` (--grader) is best; expected number, exact, contains, regex, or the path of a program, such as ./grade.py
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("--batch-size 8", "--batch-size 6"),
        expect![[r#"
        error: a step has 6 answers (--batch-size 6 times --accumulation 1), which is no multiple of the 8 answers to each question; change one of them, or --set rollout.samples
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("--max-new-tokens 4", "--max-new-tokens 400"),
        expect![[r#"
        error: the longest question has 15 tokens, and an answer up to 400: more than the model's 200 positions; lower --max-new-tokens, or leave long questions out
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --mask all"),
        expect![[r#"
        error: `data.mask` (--mask) is "all", which changes nothing here: with `objective.kind = "grpo"` the data are questions, and rows are the model's own answers; leave it out
    "#]],
    );
    refused(
        &tiny,
        "finetune --model @model --data @questions.jsonl --steps 1 --out @out --grader exact",
        expect![[r#"
            error: `rollout.grader` (--grader) is "exact", which changes nothing here: it is read with `objective.kind = "grpo"`, which learns from the model's own answers; leave it out
        "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --packing 64"),
        expect![[r#"
        error: `objective.kind = "grpo"` (--objective grpo) and `data.packing` (--packing) cannot be combined: rows are the model's own answers, which are not known before a step; leave `data.packing` (--packing) out
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --offload file"),
        expect![[r#"
        error: `objective.kind = "grpo"` (--objective grpo) and `offload` (--offload) cannot be combined: each token of an answer would load every layer; leave `offload` (--offload) out; `model.dtype = "nf4"` (--dtype nf4) makes the weights smaller
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --method full --beta 0.1"),
        expect![[r#"
        error: `objective.kind = "grpo"` (--objective grpo) with `objective.beta` (--beta) and full fine-tuning cannot be combined: the reference is the model without its adapters; train an adapter, or leave `objective.beta` (--beta) out
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --group-size 1"),
        expect![[r#"
        error: objective: 1 answers to each prompt; expected at least 2, since an answer is compared with the others
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("--objective grpo", "--objective dpo"),
        expect![[r#"
            error: `rollout.grader` (--grader) is "exact", which changes nothing here: it is read with `objective.kind = "grpo"`, which learns from the model's own answers; leave it out
        "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("--grader exact", "--grader @grade.sh"),
        expect![[r#"
        error: the grader grade.sh: No such file or directory (os error 2)
    "#]],
    );
    program(&tiny, "cat > /dev/null; echo 1");
    refused(
        &tiny,
        &TRAIN.replace("--grader exact", "--grader @grade.sh"),
        expect![[r#"
        error: rewards: the grader grade.sh has written 1 lines for 8 answers; it must write a number for each, in their order
    "#]],
    );
    std::fs::write(tiny.path("questions.jsonl"), "{\"question\": \"a\"}\n").unwrap();
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: questions.jsonl: line 1: the fields are question; expected `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, `question` and `answer`, `input_ids`, or `text` (another field that holds the text is named with --field)
    "#]],
    );
}

/// A model whose logits differ, so that it can learn.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures/preference/model");

/// The lines of a run's log, without their seconds.
fn log(tiny: &Session, out: &str) -> Vec<Value> {
    let text = String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line["seconds"] = json!(0);
        line
    };
    text.lines().map(line).collect()
}

#[test]
fn a_model_learns_from_the_rewards_of_a_program() {
    let tiny = Session::new();
    write(&tiny, "questions.jsonl", 20);
    write(&tiny, "held.jsonl", 6);
    // Answers that begin with a small letter of the first half are good, and the question's record is there.
    program(
        &tiny,
        "while read -r line; do case $line in *'\"kind\":\"sum\"'*'\"completion\":\"'[a-m]*) echo 1;; *) echo 0;; esac; done",
    );
    let run = |out: &str, steps: &str, more: &[&str]| {
        let grader = tiny.path("grade.sh").display().to_string();
        let train = ["finetune", "--model", MODEL, "--questions", "questions.jsonl", "--objective", "grpo"];
        let words = [
            "--grader",
            &grader,
            "--targets",
            "all-linear",
            "--lr",
            "2e-2",
            "--schedule",
            "constant",
            "--warmup",
            "0",
        ];
        let loop_of = [
            "--batch-size",
            "32",
            "--accumulation",
            "2",
            "--max-new-tokens",
            "2",
            "--out",
            out,
            "--steps",
            steps,
        ];
        let ended = tiny.run_words(&[&train[..], &words, &loop_of, more].concat());
        assert_eq!(ended.status, 0, "{}", ended.err);
        ended.err
    };
    let said = run("whole", "20", &["--validation", "held.jsonl", "--evaluate-every", "10"]);
    assert!(
        said.contains("20 questions, 8 of a step with 8 answers each; 64 answers are generated at a time"),
        "{said}"
    );
    assert!(said.contains("20 steps, mean reward 0."), "{said}");
    let lines = log(&tiny, "whole");
    let of = |step: u64, key: &str| {
        let line = lines.iter().find(|line| line["step"] == step && !line[key].is_null());
        line.and_then(|line| line[key].as_f64()).unwrap_or_else(|| panic!("{key} of {step}: {lines:?}"))
    };
    let mean = |from: u64| (from..from + 4).map(|step| of(step, "reward")).sum::<f64>() / 4.0;
    assert!(mean(17) > mean(1) + 0.3, "{} to {}", mean(1), mean(17));
    assert!(of(20, "validation_reward") > of(0, "validation_reward"), "{lines:?}");
    assert_eq!(of(1, "clipped"), 0.0);
    // A run that goes on has the same samples, whatever is generated or computed at a time.
    run("parts", "3", &[]);
    run("parts", "8", &["--resume"]);
    let parts: Vec<Value> = log(&tiny, "parts");
    let steps =
        |lines: &[Value]| lines.iter().filter(|line| !line["loss"].is_null()).cloned().collect::<Vec<_>>();
    run("again", "8", &["--set", "rollout.at_once=5"]);
    let again = log(&tiny, "again");
    run("folder", "3", &[]);
    tiny.succeed("resume folder --set training.steps=8 --quiet");
    assert_eq!(steps(&log(&tiny, "folder")), steps(&parts));
    assert_eq!(steps(&parts).len(), 8);
    for (whole, other) in [(&lines, &parts), (&lines, &again)] {
        for (whole, other) in steps(whole).iter().zip(steps(other)) {
            assert_eq!(
                (&whole["reward"], &whole["gradient_norm"]),
                (&other["reward"], &other["gradient_norm"])
            );
        }
    }
    // The adapter is what ordinary fine-tuning writes, and the page tells the reward.
    let config: Value = serde_json::from_slice(&tiny.bytes("whole/adapter_config.json")).unwrap();
    assert_eq!(config["peft_type"], "LORA");
    let page = String::from_utf8(tiny.bytes("whole/index.html")).unwrap();
    assert!(page.contains("Mean reward") && page.contains("validation reward"), "{page}");
}

#[test]
fn the_divergence_from_the_model_at_the_start_is_learned_too() {
    let tiny = Session::new();
    write(&tiny, "questions.jsonl", 8);
    let arguments = TRAIN.replace('@', "").replace("--steps 1", "--steps 4");
    let ended =
        tiny.run(&format!("{arguments} --beta 0.1 --lr 1e-2 --grader regex --set rollout.aggregate=grpo"));
    assert_eq!(ended.status, 2, "{}", ended.err);
    std::fs::write(
        tiny.path("letters.jsonl"),
        "{\"question\": \"say a\", \"answer\": \"^[a-m]\"}\n".repeat(2),
    )
    .unwrap();
    let arguments = arguments.replace("questions.jsonl", "letters.jsonl").replace("exact", "regex");
    let ended = tiny.run(&format!("{arguments} --beta 0.1 --lr 1e-1 --schedule constant --warmup 0"));
    assert_eq!(ended.status, 0, "{}", ended.err);
    let lines = log(&tiny, "out");
    assert_eq!(lines[0]["divergence"], 0.0, "{lines:?}");
    assert!(lines[3]["divergence"].as_f64().unwrap() > 0.0, "{lines:?}");
}
