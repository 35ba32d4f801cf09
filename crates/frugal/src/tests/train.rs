//! Data and values of a training from scratch that do not fit.

use expect_test::{Expect, expect};

use super::end;

#[path = "../../tests/it/texts.rs"]
mod texts;

use texts::write_texts;

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
            error: schedule: 4 steps with a warm-up of 4; expected more steps than warm-up, or a constant shape
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
