//! The data of a training from scratch in every form, and what does not fit.

use expect_test::{Expect, expect};

use serde_json::Value;

use super::end;
use super::session::Session;
use super::tiny_folder::{self, losses};

#[path = "../../tests/it/texts.rs"]
mod texts;

use texts::{LENGTH, VOCABULARY, write_texts};

/// A model with few positions.
const LLAMA: &str = r#"{
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
    "hidden_act": "silu", "torch_dtype": "float32"
}"#;

#[test]
fn what_does_not_fit_is_said_before_anything_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    write_texts(folder.path());
    let folder = folder.path();
    let at = |name: &str| folder.join(name).display().to_string();
    let data = dataloading::embedded::folder().unwrap();
    let check = |arguments: String, expected: Expect| {
        let (status, said) = end(["train"].into_iter().chain(arguments.split_whitespace()));
        assert_eq!(status, 1, "{arguments}: {said}");
        let said = said.replace(&*folder.to_string_lossy(), "FOLDER");
        expected.assert_eq(&said.replace(&*data.to_string_lossy(), "data"));
    };
    check(
        "--data embedded --vocabulary 100".into(),
        expect![[r#"
        error: vocabulary: 100 was requested, but the tokenizer data/tokenizer.json has 4096; leave the vocabulary out, or request 4096
    "#]],
    );
    check(
        format!("--data {} --vocabulary 100", at("store")),
        expect![[r#"
        error: vocabulary: 100 was requested, but the token store FOLDER/store has 300; leave the vocabulary out, or request 300
    "#]],
    );
    check(
        format!("--data embedded --validation {}", at("store")),
        expect![[r#"
        error: vocabulary: the tokenizer has 4096 tokens and the token store FOLDER/store has 300; give the tokenizer that the store was made with
    "#]],
    );
    check(
        format!("--data {} --validation {}", at("store"), at("lines.txt")),
        expect![[r#"
        error: tokenizer: FOLDER/lines.txt is text, but the training data is a token store without a tokenizer; give the store's tokenizer.json
    "#]],
    );
    let embedded = dataloading::embedded::folder().unwrap().join("tokenizer.json");
    check(
        format!("--data {} --tokenizer {}", at("store"), embedded.display()),
        expect![[r#"
        error: vocabulary: the tokenizer has 4096 tokens and the token store FOLDER/store has 300; give the tokenizer that the store was made with
    "#]],
    );
    check(
        format!("--data {} --evaluate-every 5", at("store")),
        expect![[r#"
            error: --evaluate-every, and no validation data; give some as --validation, or leave it out
        "#]],
    );
    check(
        format!("--data {}", at("nowhere.txt")),
        expect![[r#"
            error: --data FOLDER/nowhere.txt: there is no such file or folder; expected synthetic, embedded, or a path
        "#]],
    );
    check(
        format!("--data {}", at("objects.jsonl")),
        expect![[r#"
        error: FOLDER/objects.jsonl: line 1: no field 'text'; the fields here are: answer, question
    "#]],
    );
    check(
        format!("--data {} --length 1000000", at("lines.txt")),
        expect![[r#"
            error: --length 1000000: the training data has 1424 tokens; give at most that many, or more data
        "#]],
    );
    check(
        "--data synthetic --epochs 2".into(),
        expect![[r#"
        error: --epochs has no meaning for synthetic data, which has no files and no end; leave it out, or name --data
    "#]],
    );
    check(
        "--width 16 --steps 4 --schedule cosine --warmup 4".into(),
        expect![[r#"
            error: `optimizer.warmup` (--warmup) is 4 of the training's 4 steps; expected fewer than all steps, since the learning rate decays after it, or `optimizer.schedule = "constant"` (--schedule constant)
        "#]],
    );
    std::fs::write(folder.join("config.json"), LLAMA).unwrap();
    check(
        format!("--length 1000 --model {}", at("config.json")),
        expect![[r#"
            error: --length 1000: the model of `FOLDER/config.json` has 64 positions; give at most that many
        "#]],
    );
}

/// What a training prints.
fn lines(session: &Session, arguments: &str) -> Vec<Value> {
    let (out, _) = session.succeed(&format!("train --json --heads 2 {arguments}"));
    tiny_folder::lines(&out)
}

#[test]
fn lines_objects_and_a_store_of_the_same_texts_train_to_the_same_bits() {
    let session = Session::new();
    let lines = |arguments: &str| lines(&session, arguments);
    let folder = tempfile::tempdir().unwrap();
    write_texts(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let common = format!("--width 16 --length {LENGTH} --batch 16 --epochs 2");
    let first = lines(&format!("--data {} --vocabulary {VOCABULARY} {common}", at("lines.txt")));
    let of_lines = losses(&first);
    assert!(of_lines.len() >= 6, "{of_lines:?}");
    let (first, last) = (of_lines[0], of_lines[of_lines.len() - 1]);
    assert!((first - 300f64.ln()).abs() < 1.0 && last < first, "{of_lines:?}");
    for others in [
        format!("--data {} --field answer --vocabulary {VOCABULARY}", at("objects.jsonl")),
        format!("--data {} --tokenizer {}", at("lines.txt"), at("tokenizer.json")),
        format!("--data {} --tokenizer {}", at("store"), at("tokenizer.json")),
        format!("--data {}", at("store")),
    ] {
        let lines = lines(&format!("{others} {common}"));
        assert_eq!(losses(&lines), of_lines, "{others}");
    }
    // Text to measure on is cut by the tokenizer of the training's.
    let measured = format!(
        "--data {} --validation {} --tokenizer {}",
        at("store"),
        at("lines.txt"),
        at("tokenizer.json")
    );
    let lines = lines(&format!("{measured} {common} --evaluate-every 4"));
    assert!(lines.iter().any(|line| line["validation_loss"].as_f64().is_some_and(|loss| loss < first)));
    assert_eq!(losses(&lines), of_lines, "to measure changes nothing");
}

#[test]
fn every_way_of_making_batches_trains_both_models() {
    let session = Session::new();
    write_texts(&session.path(""));
    let ways =
        ["base", "standard", "balanced:5", "sequenced", "packed"].map(|strategy| ("gpt2-like", strategy));
    // Models differ in what they do with the documents of a row.
    for (model, strategy) in ways.into_iter().chain([("gpt2", "sequenced"), ("gpt2", "packed")]) {
        let arguments = format!("--data store --width 16 --steps 2 --model {model} --strategy {strategy}");
        let losses = losses(&lines(&session, &arguments));
        assert_eq!(losses.len(), 2, "{arguments}");
        assert!(losses.iter().all(|loss| (loss - 300f64.ln()).abs() < 1.0), "{arguments}: {losses:?}");
    }
}

#[test]
fn the_data_and_the_tokenizer_are_said() {
    let tiny = Session::new();
    write_texts(&tiny.path(""));
    for (arguments, lines) in [
        ("--data synthetic", &["data: synthetic (a generated language of 128 tokens)"][..]),
        (
            "--data lines.txt --validation lines.txt",
            &[
                "data: lines.txt (a document in each line; ",
                "; validation: lines.txt",
                "tokenizer: trained on the data, ",
            ],
        ),
        (
            "--data lines.txt --tokenizer model/tokenizer.json",
            &["tokenizer: model/tokenizer.json, 4,096 tokens"],
        ),
        (
            "--data store",
            &["data: store (a token store; ", "tokenizer: the one that made the token store, 300 tokens"],
        ),
        (
            "--data embedded",
            &["data: embedded (the encyclopedia; ", "tokenizer: the embedded one, 4,096 tokens"],
        ),
    ] {
        let (_, said) = tiny.succeed(&format!("train {arguments} --steps 1 --length 8 --device cpu"));
        assert!(said.starts_with("data: "), "{arguments}: {said}");
        for line in lines {
            assert!(said.contains(line), "{arguments}: {said}");
        }
    }
}
