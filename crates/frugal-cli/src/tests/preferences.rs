//! Fine-tuning on pairs of a chosen and a rejected answer, and on answers with a label.

use expect_test::expect;
use serde_json::{Value, json};

use super::session::Session;
use super::{Tiny, refused};

const TRAIN: &str = "finetune --model @model --data @pairs.jsonl --steps 1 --out @out --objective dpo";

fn write(tiny: &Tiny, pairs: &[Value]) {
    let lines: Vec<String> = pairs.iter().map(Value::to_string).collect();
    std::fs::write(tiny.path("pairs.jsonl"), lines.join("\n")).unwrap();
}

fn pair(number: usize) -> Value {
    json!({ "prompt": format!("{number} and one is "), "chosen": format!("{}", number + 1), "rejected": "many" })
}

#[test]
fn pairs_that_cannot_be_learned_are_told() {
    let tiny = Tiny::new();
    write(&tiny, &[pair(1), pair(2)]);
    refused(
        &tiny,
        &TRAIN.replace("--objective dpo", ""),
        expect![[r#"
            error: the data have pairs of a `chosen` and a `rejected` answer; give --objective dpo (or ipo, orpo, simpo, cpo, kto), or write the chosen ones as `messages` or `completion` to learn them alone
        "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --method full --reference adapters-off"),
        expect![[r#"
        error: `objective.kind = "dpo"` (--objective dpo) and full fine-tuning cannot be combined: the reference is the model without its adapters; train an adapter, or use `objective.reference = "before-training"` (--reference before-training)
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("dpo", "orpo --reference adapters-off"),
        expect![[r#"
            error: `objective.reference` (--reference) and an objective without a reference cannot be combined: only "dpo", "ipo" and "kto" compare with a reference; leave it out
        "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --init pissa"),
        expect![[r#"
        error: `objective.kind = "dpo"` (--objective dpo) and an adapter that changes the model from the start cannot be combined: the reference is the model without its adapters, which is not the model at the start then; use `adapter.init_lora_weights = true` (--init true), "gaussian" or "orthogonal", or `objective.reference = "before-training"` (--reference before-training)
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --micro-batch-size 1"),
        expect![[r#"
            error: `objective.kind = "dpo"` (--objective dpo) and `training.micro_batch_size` (--micro-batch-size) cannot be combined: answers that are compared are in one micro-batch; use a smaller `training.batch` (--batch-size) with more `training.accumulation` (--accumulation)
        "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --beta 0"),
        expect![[r#"
        error: objective: beta is 0; expected a number above 0
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --set objective.gamma=1"),
        expect![[r#"
        error: `objective.gamma` is 1; expected `objective.kind = "simpo"` (--objective simpo) with it
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --mask all"),
        expect![[r#"
        error: `data.mask` (--mask) is "all", which changes nothing here: an objective over preferences learns what follows the prompt; leave it out
    "#]],
    );
    refused(
        &tiny,
        "eval --model @model --data @pairs.jsonl",
        expect![[r#"
            error: the data are chosen and rejected answers, and a mean loss over good and bad ones says nothing; a training with --objective measures them with --validation, or write the good ones as `messages` or `completion`
        "#]],
    );
    write(&tiny, &[json!({ "text": "one and two" })]);
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: --objective dpo learns from pairs of answers: the data need `chosen` and `rejected` in each record, with their `prompt`
    "#]],
    );
    write(&tiny, &[pair(1), json!({ "prompt": "2 and 2 is ", "chosen": "4" })]);
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
            error: pairs.jsonl: line 2: the record has `chosen` and no `rejected`; a pair needs both; `frugal data check pairs.jsonl --model model` lists all wrong records
        "#]],
    );
    write(&tiny, &[json!({ "prompt": "1 and 1 is ", "chosen": "2", "rejected": "2" })]);
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: pairs.jsonl: none of its 2 rows has a text to learn: no answer, every answer with weight 0, or answers beyond the longest row of 200 tokens
    "#]],
    );
    write(&tiny, &[pair(1)]);
    refused(
        &tiny,
        &format!("{TRAIN} --max-length 3"),
        expect![[r#"
        error: pairs.jsonl: line 1: 6 tokens are more than the longest row of 3; shorten it, or choose what happens to long rows: --overlong skip or truncate; `frugal data check pairs.jsonl --model model --max-length 3` lists all wrong records
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("--objective dpo", "--beta 0.1"),
        expect![[r#"
            error: `objective.beta` (--beta) is 0.1; expected an objective over preferences with it, such as `objective.kind = "dpo"` (--objective dpo), or `objective.divergence = "jensen-shannon"` (--divergence jensen-shannon)
        "#]],
    );
}

/// The losses of steps, by their numbers.
fn losses(tiny: &Session, out: &str) -> Vec<(u64, f64)> {
    let text = String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect()
}

#[test]
fn the_model_at_the_start_is_asked_once_or_in_each_step() {
    let tiny = Session::new();
    write(&tiny, &(0..30).map(pair).collect::<Vec<_>>());
    let run = |out: &str, steps: &str, more: &[&str]| {
        let train =
            ["finetune", "--model", "model", "--data", "pairs.jsonl", "--objective", "dpo", "--quiet"];
        let loop_of = ["--batch-size", "4", "--accumulation", "1", "--schedule", "constant", "--warmup", "0"];
        let ended = tiny.run_words(
            &[&train[..], &loop_of, &["--lr", "1e-3", "--steps", steps, "--out", out], more].concat(),
        );
        assert_eq!(ended.status, 0, "{}", ended.err);
        losses(&tiny, out)
    };
    let each = run("each", "4", &[]);
    let once = run("once", "4", &["--reference", "before-training"]);
    assert!(
        tiny.path("once/reference.safetensors").is_file()
            && !tiny.path("each/reference.safetensors").exists()
    );
    for ((step, each), (_, once)) in each.iter().zip(&once) {
        assert!((each - once).abs() < 1e-5, "step {step}: {each} and {once}");
    }
    // All weights, and a run that goes on from a checkpoint.
    let whole = run("whole", "4", &["--method", "full"]);
    assert!((whole[0].1 - 2f64.ln()).abs() < 1e-6 && whole[3].1 < 0.69, "{whole:?}");
    run("parts", "2", &["--method", "full"]);
    assert_eq!(run("parts", "4", &["--method", "full", "--resume"]), whole);
    // From the run's own folder.
    run("folder", "2", &["--method", "full"]);
    tiny.succeed("resume folder --set training.steps=4 --quiet");
    assert_eq!(losses(&tiny, "folder"), whole);
}

#[test]
fn another_model_is_compared_with() {
    let tiny = Session::new();
    tiny.write_model("other", 16, 2);
    write(&tiny, &[pair(1)]);
    let run = |flags: &str| {
        let train = "finetune --data pairs.jsonl --objective dpo --beta 2 --batch-size 1 --accumulation 1 --steps 2 \
                     --held-out 0 --samples 0";
        tiny.succeed(&format!("{train} {flags}")).1
    };
    let said = run("--model model --reference-model other --out one");
    assert!(said.contains("the reference other has computed 1 pair in "), "{said}");
    run("--model other --reference-model model --out two");
    run("--model model --reference-model model --out self");
    let [one, two, own] = ["one", "two", "self"].map(|out| losses(&tiny, out)[0].1);
    // With the margin m of a model over another, −ln σ(βm) and −ln σ(−βm).
    assert!(((-one).exp() + (-two).exp() - 1.0).abs() < 1e-6, "{one} {two}");
    assert!((one - two).abs() > 1e-3 && (own - 2f64.ln()).abs() < 1e-6, "{one} {two} {own}");
    // A run that goes on has what the reference computed.
    std::fs::remove_dir_all(tiny.path("other")).unwrap();
    tiny.write_model("other", 16, 3);
    let (_, said) = tiny.succeed("resume one --set training.steps=4");
    assert!(!said.contains("has computed"), "{said}");
    assert_eq!(losses(&tiny, "one").len(), 4);

    for (flags, expected) in [
        ("dpo --reference-model nowhere", "the reference: "),
        (
            "dpo --reference-model other --reference adapters-off",
            "another model is asked before the training",
        ),
        ("orpo --reference-model other", "compare with a reference"),
    ] {
        let error = tiny.fail(&format!(
            "finetune --model model --data pairs.jsonl --steps 1 --out no --objective {flags}"
        ));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_training_on_pairs_says_their_order() {
    let tiny = Session::new();
    let pairs: Vec<Value> = (0..60).map(pair).collect();
    write(&tiny, &pairs);
    let train = [
        "finetune",
        "--model",
        "model",
        "--data",
        "pairs.jsonl",
        "--objective",
        "dpo",
        "--lr",
        "1e-2",
        "--batch-size",
        "4",
    ];
    let loop_of = ["--accumulation", "2", "--evaluate-every", "2", "--samples", "2"];
    let run = |steps: &str, out: &str| {
        let words = [&train[..], &loop_of, &["--steps", steps, "--out", out]].concat();
        let ended = tiny.run_words(&words);
        assert_eq!(ended.status, 0, "{}", ended.err);
        (ended.err, String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap())
    };
    let (said, losses) = run("4", "out");
    assert!(said.contains("data: pairs.jsonl (chosen and rejected answers)"), "{said}");
    assert!(said.contains("1 of 60 pairs are held out for validation"), "{said}");
    let lines: Vec<Value> = losses.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |step: u64, key: &str| {
        let line = lines.iter().find(|line| line["step"] == step && !line[key].is_null());
        line.and_then(|line| line[key].as_f64()).unwrap()
    };
    // Before the first step the model is its own reference.
    assert!(
        (of(0, "validation_loss") - 2f64.ln()).abs() < 1e-6 && (of(1, "loss") - 2f64.ln()).abs() < 1e-6,
        "{losses}"
    );
    assert_eq!((of(1, "chosen_reward"), of(1, "rejected_reward"), of(1, "accuracy")), (0.0, 0.0, 0.0));
    assert!(of(4, "loss") < 0.6 && of(4, "accuracy") > 0.8, "{losses}");
    assert!(of(4, "chosen_reward") > of(4, "rejected_reward") && of(4, "validation_loss") < 0.69, "{losses}");
    // The adapter is what ordinary fine-tuning writes.
    let config: Value = serde_json::from_slice(&tiny.bytes("out/adapter_config.json")).unwrap();
    assert_eq!(config["peft_type"], "LORA");
    // A run of the same configuration has the same losses.
    let (_, again) = run("4", "again");
    let without_seconds = |losses: &str| {
        let line = |line: &str| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            line["seconds"] = json!(0);
            line.to_string()
        };
        losses.lines().map(line).collect::<Vec<_>>()
    };
    assert_eq!(without_seconds(&losses), without_seconds(&again));
}

#[test]
fn rated_answers_are_learned_from_labels_and_from_pairs() {
    let tiny = Session::new();
    let pairs: Vec<Value> = (0..60).map(pair).collect();
    write(&tiny, &pairs);
    let answers = pairs.iter().flat_map(|pair| {
        [("chosen", true), ("rejected", false)].map(|(side, label)| {
            json!({ "prompt": pair["prompt"], "completion": pair[side], "label": label }).to_string()
        })
    });
    std::fs::write(tiny.path("rated.jsonl"), answers.collect::<Vec<_>>().join("\n")).unwrap();
    let run = |data: &str, out: &str, more: &[&str]| {
        let train = ["finetune", "--model", "model", "--data", data, "--objective", "kto", "--lr", "3e-2"];
        let loop_of = ["--batch-size", "4", "--accumulation", "4", "--evaluate-every", "3", "--samples", "0"];
        let words = [&train[..], &loop_of, &["--steps", "6", "--out", out], more].concat();
        let ended = tiny.run_words(&words);
        assert_eq!(ended.status, 0, "{}", ended.err);
        let losses = String::from_utf8(tiny.bytes(&format!("{out}/losses.jsonl"))).unwrap();
        (ended.err, losses.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>())
    };
    let of = |lines: &[Value], step: u64, key: &str| {
        let line = lines.iter().find(|line| line["step"] == step && !line[key].is_null());
        line.and_then(|line| line[key].as_f64()).unwrap_or_else(|| panic!("{key} of step {step}: {lines:?}"))
    };
    let (said, lines) = run("rated.jsonl", "rated", &[]);
    assert!(said.contains("data: rated.jsonl (answers with a label)"), "{said}");
    assert!(said.contains("of 120 rows are held out for validation"), "{said}");
    assert_eq!((of(&lines, 0, "validation_loss"), of(&lines, 1, "loss")), (0.5, 0.5));
    assert_eq!(of(&lines, 1, "reference_point"), 0.0);
    assert!(of(&lines, 6, "loss") < 0.47 && of(&lines, 6, "accuracy") >= 0.75, "{lines:?}");
    assert!(of(&lines, 6, "chosen_reward") > of(&lines, 6, "rejected_reward"), "{lines:?}");
    // Both answers of a pair stay together.
    let (said, of_pairs) = run("pairs.jsonl", "pairs", &[]);
    assert!(said.contains("1 of 60 pairs are held out for validation"), "{said}");
    assert!(of(&of_pairs, 6, "loss") < 0.47, "{of_pairs:?}");
    // The model at the start, asked once.
    let (_, once) = run("rated.jsonl", "once", &["--reference", "before-training"]);
    for step in 1..=6 {
        let (each, once) = (of(&lines, step, "loss"), of(&once, step, "loss"));
        assert!((each - once).abs() < 1e-5, "step {step}: {each} and {once}");
    }
    for (data, more, expected) in [
        ("rated.jsonl", "--objective dpo", "answers with a `label` are for --objective kto"),
        ("rated.jsonl", "--objective kto --set objective.alpha=1", "expected `objective.kind = \"cpo\"`"),
        ("rated.jsonl", "--objective kto --set objective.desirable_weight=-1", "desirable_weight is -1"),
    ] {
        let error = tiny.fail(&format!("finetune --model model --data {data} --steps 1 --out no {more}"));
        assert!(error.contains(expected), "{error}");
    }
}
