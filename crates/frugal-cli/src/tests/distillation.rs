//! Fine-tuning on the distributions of a teacher.

use expect_test::expect;
use serde_json::{Value, json};

use super::session::Session;
use super::{Tiny, refused};

const TRAIN: &str = "finetune --model @model --data @my.jsonl --steps 1 --out @out --objective distillation";

fn write_rows(tiny: &Tiny) {
    let rows: Vec<String> = (0..60)
        .map(|number| {
            json!({ "prompt": format!("{number} and one is"), "completion": format!(" {}", number + 1) })
                .to_string()
        })
        .collect();
    std::fs::write(tiny.path("my.jsonl"), rows.join("\n")).unwrap();
}

#[test]
fn teachers_that_cannot_teach_are_refused() {
    let tiny = Tiny::new();
    write_rows(&tiny);
    tiny.write_model("big", 32, 5);
    refused(
        &tiny,
        TRAIN,
        expect![[r#"
        error: `objective.teacher` (--teacher) is absent; expected the teacher of `objective.kind = "distillation"` (--objective distillation): a folder, a GGUF file or a name on the hub
    "#]],
    );
    refused(
        &tiny,
        &TRAIN.replace("--objective distillation", "--teacher @big"),
        expect![[r#"
        error: `objective.teacher` (--teacher) is "big", which changes nothing here: it is read with `objective.kind = "distillation"`, which learns from a teacher; leave it out
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --teacher @none"),
        expect![[r#"
        error: the teacher: `none`: there is no such folder; if it was moved, move it back or link the name to its new place (a run takes --set objective.teacher=PATH, too)
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --teacher @big --distillation-temperature 0"),
        expect![[r#"
        error: distillation: the temperature is 0; expected a number above 0
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --teacher @big --beta 0.5"),
        expect![[r#"
        error: `objective.beta` (--beta) is 0.5; expected an objective over preferences with it, such as `objective.kind = "dpo"` (--objective dpo), or `objective.divergence = "jensen-shannon"` (--divergence jensen-shannon)
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --teacher @big --divergence jensen-shannon --beta 1"),
        expect![[r#"
        error: distillation: beta is 1; expected a number between 0 and 1, where the divergence is 0: the ends are the forward and the reverse divergence
    "#]],
    );
    refused(
        &tiny,
        &format!("{TRAIN} --teacher @big --label-weight 2"),
        expect![[r#"
        error: distillation: the weight of the labels is 2; expected a number from 0 (the teacher alone) to 1 (the labels alone)
    "#]],
    );
    // Two tokens that have changed places.
    let path = tiny.path("big/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let of = |id: u64| {
        let entry = vocabulary.iter().find(|(_, own)| own.as_u64() == Some(id));
        entry.map(|(token, _)| token.clone()).unwrap()
    };
    let (one, other) = (of(70), of(71));
    (vocabulary[&one], vocabulary[&other]) = (json!(71), json!(70));
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    refused(
        &tiny,
        &format!("{TRAIN} --teacher @big"),
        expect![[r#"
            error: big cannot be the teacher of model: their tokenizers differ: the token 70 is "e" of the model, and "f" of the teacher; take a teacher with the model's tokenizer, as other models of its family have it
        "#]],
    );
}

#[test]
fn a_student_learns_from_its_teacher_and_goes_on() {
    let tiny = Session::new();
    write_rows(&tiny);
    tiny.write_model("big", 32, 5);
    let run = |out: &str, steps: &str, more: &[&str]| {
        let train = ["finetune", "--model", "model", "--data", "my.jsonl", "--objective", "distillation"];
        let own = [
            "--teacher",
            "big",
            "--divergence",
            "jensen-shannon",
            "--label-weight",
            "0.2",
            "--method",
            "full",
        ];
        let loop_of = ["--batch-size", "4", "--accumulation", "2", "--schedule", "constant", "--warmup", "0"];
        let end = ["--lr", "1e-2", "--samples", "0", "--evaluate-every", "2", "--steps", steps, "--out", out];
        let ended = tiny.run_words(&[&train[..], &own, &loop_of, &end, more].concat());
        assert_eq!(ended.status, 0, "{}", ended.err);
        (tiny.losses(out), ended.err)
    };
    let (whole, said) = run("whole", "4", &[]);
    assert!(said.contains("the teacher is big"), "{said}");
    assert!(whole[3].1 < whole[0].1 - 0.01, "{whole:?}");
    let text = String::from_utf8(tiny.bytes("whole/losses.jsonl")).unwrap();
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let of = |key: &str| line[key].as_f64().unwrap();
        let (loss, divergence, labels) = match line["loss"].as_f64() {
            Some(loss) => (loss, of("teacher_divergence"), of("cross_entropy")),
            None => {
                (of("validation_loss"), of("validation_teacher_divergence"), of("validation_cross_entropy"))
            }
        };
        assert!((loss - 0.2 * labels - 0.8 * divergence).abs() < 1e-6, "{line}");
    }
    let page = String::from_utf8(tiny.bytes("whole/index.html")).unwrap();
    assert!(
        page.contains("Divergence from the teacher") && page.contains("Loss of the labels"),
        "the page's curves"
    );
    let record: Value = serde_json::from_slice(&tiny.bytes("whole/run.json")).unwrap();
    assert_eq!(record["teacher"]["files"].as_array().map(Vec::len), Some(1), "{record}");
    // In parts, by either command.
    run("parts", "2", &[]);
    assert_eq!(run("parts", "4", &["--resume"]).0, whole);
    run("folder", "2", &[]);
    tiny.succeed("resume folder --set training.steps=4 --quiet");
    assert_eq!(tiny.losses("folder"), whole);
    // Layer by layer from its files.
    let (offloaded, said) = run("offloaded", "4", &["--teacher-place", "offloaded"]);
    assert!(said.contains("its layers are loaded when they run"), "{said}");
    assert_eq!(offloaded, whole);
    // Another teacher under the same name.
    run("changed", "2", &[]);
    tiny.write_model("big", 32, 6);
    let error = tiny.fail("resume changed --set training.steps=4");
    assert!(error.contains("are not those that the run in changed has learned from"), "{error}");
}

#[test]
fn a_plan_counts_the_teacher() {
    let tiny = Session::new();
    write_rows(&tiny);
    tiny.write_model("big", 64, 5);
    let plan = |more: &str| -> Value {
        let (out, _) = tiny
            .succeed(&format!("--json finetune --model model --data my.jsonl --steps 1 --dry-run {more}"));
        serde_json::from_str(out.lines().next().unwrap()).unwrap()
    };
    let plain = plan("");
    let of_teacher = plan("--objective distillation --teacher big");
    let peak = |plan: &Value| plan["plan"]["peak_bytes"].as_u64().unwrap_or_else(|| panic!("{plan}"));
    // The embedding alone.
    assert!(peak(&of_teacher) > peak(&plain) + 4096 * 64 * 4, "{of_teacher}");
}

#[test]
fn a_teacher_that_is_asked_once_is_not_needed_again() {
    let tiny = Session::new();
    write_rows(&tiny);
    tiny.write_model("big", 32, 5);
    let run = |out: &str, steps: &str, more: &[&str]| {
        let train = ["finetune", "--model", "model", "--data", "my.jsonl", "--objective", "distillation"];
        let own = ["--label-weight", "0.2", "--method", "full", "--batch-size", "4", "--accumulation", "2"];
        let loop_of = ["--schedule", "constant", "--warmup", "0", "--lr", "1e-2", "--samples", "0"];
        let end = ["--evaluate-every", "2", "--steps", steps, "--out", out];
        tiny.run_words(&[&train[..], &own, &loop_of, &end, more].concat())
    };
    let losses = |out: &str, steps: &str, more: &[&str]| {
        let ended = run(out, steps, more);
        assert_eq!(ended.status, 0, "{}", ended.err);
        (tiny.losses(out), ended.err)
    };
    // All tokens are the teacher, to the rounding of fp16.
    let (each, _) = losses("each", "4", &["--teacher", "big"]);
    let (all, said) = losses("all", "4", &["--teacher", "big", "--teacher-top-k", "4096"]);
    assert!(said.contains("the teacher big has read"), "{said}");
    for ((_, each), (_, all)) in each.iter().zip(&all) {
        assert!((each - all).abs() < 2e-3 * each, "{each} {all}");
    }
    // A few tokens, in a folder that another training uses without the teacher.
    let files = ["--teacher-top-k", "16", "--teacher-files", "answers"];
    let (some, _) = losses("some", "4", &[&["--teacher", "big"], &files[..]].concat());
    std::fs::rename(tiny.path("big"), tiny.path("gone")).unwrap();
    assert_eq!(losses("again", "4", &files).0, some);
    // And one that goes on.
    losses("parts", "2", &files);
    tiny.succeed("resume parts --set training.steps=4 --quiet");
    assert_eq!(tiny.losses("parts"), some);
    for (more, expected) in [
        (
            &["--teacher-top-k", "8", "--teacher-files", "answers"][..],
            "its k is 16, and this training's is 8",
        ),
        (&["--teacher-top-k", "16", "--teacher-files", "none"], "`objective.teacher` is missing"),
        (&["--teacher-top-k", "16"], "`objective.teacher` (--teacher) is absent"),
        (&["--teacher-files", "answers", "--teacher", "gone"], "give `objective.teacher_top_k`"),
        (
            &["--teacher", "gone", "--teacher-top-k", "16", "--divergence", "reverse-kl"],
            "only the forward divergence",
        ),
    ] {
        let error = run("no", "4", more).err;
        assert!(error.contains(expected), "{error}");
    }
}
