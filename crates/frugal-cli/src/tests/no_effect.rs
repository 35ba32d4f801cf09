//! Settings that change nothing or cannot be meant: a note, or an error with what is meant.

use super::session::Session;

const FINETUNE: &str = "finetune --model model --data rows.jsonl --steps 1 --dry-run";

fn session() -> Session {
    let tiny = Session::new();
    std::fs::write(tiny.path("rows.jsonl"), "{\"prompt\": \"Ann has\", \"completion\": \" 5 pears.\"}\n")
        .unwrap();
    tiny
}

#[test]
fn targets_that_match_nothing_are_refused_by_info_as_by_finetune() {
    let tiny = session();
    let words = "error: `target_modules` (--targets): `dwon_proj` matches none of the model's projections; did you mean `down_proj`?";
    for command in ["info model", FINETUNE] {
        let error = tiny.fail(&format!("{command} --targets q_proj,dwon_proj"));
        assert!(error.contains(words), "{command}: {error}");
    }
    // Blanks after commas are none of the names.
    for command in ["info model", FINETUNE] {
        let words: Vec<&str> = command.split(' ').chain(["--targets", "q_proj, v_proj"]).collect();
        let ended = tiny.run_words(&words);
        assert_eq!(ended.status, 0, "{}", ended.err);
    }
    // Without flags a small model is described, whatever its widths.
    tiny.succeed("info model");
}

#[test]
fn an_alternative_of_a_pattern_that_matches_nothing_is_noted() {
    let tiny = session();
    let note = "note: `target_modules` (--target-pattern): with its alternative `vv_proj` the pattern matches none of the model's \
                projections; did you mean `v_proj`?\n";
    for command in ["info model", FINETUNE] {
        let (_, said) = tiny.succeed(&format!("{command} --target-pattern .*(q_proj|vv_proj)"));
        assert_eq!(said.matches(note).count(), 1, "{command}: {said}");
        let (_, said) = tiny.succeed(&format!("{command} --target-pattern .*(q_proj|v_proj)"));
        assert!(!said.contains("note:"), "{command}: {said}");
    }
}

/// PEFT has no use of it alone, and refuses it.
#[test]
fn a_pattern_of_layers_without_layers_is_refused() {
    let tiny = session();
    let error = tiny.fail(&format!("{FINETUNE} --set adapter.layers_pattern=\"layers\""));
    assert!(
        error.contains("`layers_pattern` is layers without `layers_to_transform`, which it belongs to; expected both or neither"),
        "{error}"
    );
    tiny.succeed(&format!(
        "{FINETUNE} --set adapter.layers_pattern=\"layers\" --set adapter.layers_to_transform=[1]"
    ));
}

#[test]
fn master_weights_of_fp32_weights_are_noted() {
    let tiny = session();
    let note =
        "note: `optimizer.master_weights` (--master-weights) changes nothing: what is trained is in fp32";
    for (flags, is_noted) in [
        ("--method full --master-weights true", true),
        ("--method full --set optimizer.master_weights=\"stochastic\"", true),
        ("--master-weights true", true),
        ("--method full --dtype bfloat16 --master-weights true", false),
        ("--method full --master-weights false", false),
        ("--method full", false),
    ] {
        let (_, said) = tiny.succeed(&format!("{FINETUNE} {flags}"));
        assert_eq!(said.contains(note), is_noted, "{flags}: {said}");
    }
}

#[test]
fn a_learning_rate_above_one_is_noted() {
    let tiny = session();
    let note = "note: `optimizer.lr` (--lr) is 20000, which is very large: a step of AdamW changes each weight by about the learning rate";
    for (flags, is_noted) in [("--lr 2e4", true), ("--lr 1", false), ("--lr 2e4 --optimizer sgd", false)] {
        let (_, said) = tiny.succeed(&format!("{FINETUNE} {flags}"));
        assert_eq!(said.contains(note), is_noted, "{flags}: {said}");
    }
    let (_, said) = tiny.succeed("train --data synthetic --steps 1 --lr 2e4");
    assert!(said.contains(note), "{said}");
}
