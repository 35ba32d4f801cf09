//! Every invalid question is an error with the value, the expectation and the remedy.

use std::path::Path;

use accounting::decoder_flops::{Recomputation, Workload, step};
use accounting::memory::zero::ZeroStage;
use accounting::model::{Family, Sizes};
use accounting::textbook::{self, OnHost};
use accounting::{Decoder, presets};
use expect_test::{Expect, expect};

fn check(error: impl ToString, expected: Expect) {
    expected.assert_eq(&error.to_string());
}

fn parse(text: &str) -> String {
    Decoder::parse(Path::new("config.json"), text).unwrap_err().to_string()
}

const LLAMA: &str = r#"{"model_type": "llama", "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 160}"#;

/// The error for [`LLAMA`] with one field replaced.
fn llama_with(field: &str, value: &str) -> String {
    let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_str(LLAMA).unwrap();
    config.insert(field.into(), serde_json::from_str(value).unwrap());
    parse(&serde_json::to_string(&config).unwrap())
}

#[test]
fn a_file_that_is_not_a_config_is_refused() {
    check(
        parse("{\"model_type\": "),
        expect![
            "config.json: not JSON (EOF while parsing a value at line 1 column 15); copy or download it again"
        ],
    );
    check(
        parse("[1, 2]"),
        expect!["config.json: an array, not an object; give the path of a model's config.json"],
    );
    check(
        parse("{}"),
        expect![
            "config.json: field `model_type` is missing; known are llama, qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, gpt_oss, mistral, smollm3, granite, olmo2, gemma3_text, gemma2, gemma4_text, phi3, gpt2, gpt2-like"
        ],
    );
    check(
        parse(r#"{"model_type": "mamba"}"#),
        expect![
            "config.json: field `model_type` is `mamba`, which is unknown; known are llama, qwen2, qwen3, qwen3_moe, qwen3_5_text, qwen3_5_moe_text, gpt_oss, mistral, smollm3, granite, olmo2, gemma3_text, gemma2, gemma4_text, phi3, gpt2, gpt2-like"
        ],
    );
    check(
        Decoder::read(Path::new("/nowhere/config.json")).unwrap_err(),
        expect![
            "/nowhere/config.json: No such file or directory (os error 2); give the path of a model's config.json"
        ],
    );
}

#[test]
fn an_invalid_field_is_refused() {
    assert_eq!(
        Decoder::parse(Path::new("config.json"), LLAMA).unwrap().parameters().unwrap(),
        2 * (3 * 64 * 160 + 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64) + 2 * 500 * 64 + 64
    );
    check(
        llama_with("hidden_size", "null"),
        expect!["config.json: `hidden_size`: invalid type: null, expected i64 at line 1 column 57"],
    );
    check(
        llama_with("num_hidden_layers", "0"),
        expect!["config.json: decoder: `num_hidden_layers` is 0; expected at least 1"],
    );
    check(
        llama_with("num_hidden_layers", "-2"),
        expect!["config.json: decoder: `num_hidden_layers` is -2; expected at least 1"],
    );
    check(
        llama_with("intermediate_size", "1.5"),
        expect![
            "config.json: `intermediate_size`: invalid type: floating point `1.5`, expected i64 at line 1 column 149"
        ],
    );
    check(
        llama_with("vocab_size", "\"many\""),
        expect![[
            r#"config.json: `vocab_size`: invalid type: string "many", expected i64 at line 1 column 41"#
        ]],
    );
    check(
        llama_with("tie_word_embeddings", "1"),
        expect![
            "config.json: `tie_word_embeddings`: invalid type: integer `1`, expected a boolean at line 1 column 173"
        ],
    );
    check(
        llama_with("hidden_size", "65"),
        expect![
            "config.json: decoder: `num_attention_heads` 8 does not divide `hidden_size` 65; take a divisor, or give `head_dim`"
        ],
    );
    check(
        llama_with("num_key_value_heads", "3"),
        expect![
            "config.json: decoder: `num_key_value_heads` 3 does not divide `num_attention_heads` 8; take a divisor"
        ],
    );
    check(
        llama_with("intermediate_size", "18446744073709551615"),
        expect![
            "config.json: `intermediate_size`: invalid value: integer `18446744073709551615`, expected i64 at line 1 column 166"
        ],
    );
    check(
        llama_with("num_hidden_layers", "18446744073709551616"),
        expect![
            "config.json: `num_hidden_layers`: invalid type: floating point `1.8446744073709552e+19`, expected i64 at line 1 column 98"
        ],
    );
}

#[test]
fn inconsistent_sizes_are_refused() {
    let gpt2 = || *presets::find("gpt2").unwrap();
    let wrong = |shape: Sizes| Decoder::new(shape).unwrap_err();
    check(wrong(Sizes { heads: 0, ..gpt2() }), expect!["heads is 0; give a number of at least 1"]);
    check(
        wrong(Sizes { kv_heads: 5, ..gpt2() }),
        expect![
            "12 heads are not a multiple of 5 key-value heads; give key-value heads that divide the heads"
        ],
    );
    check(
        wrong(Sizes { kv_heads: 4, ..gpt2() }),
        expect![
            "gpt2 has 4 key-value heads for 12 heads; give as many key-value heads as heads, or the family qwen2 or llama"
        ],
    );
    check(
        wrong(Sizes { embedding: 100, ..gpt2() }),
        expect![
            "the embedding is 100 wide and the hidden size is 768; give them the same width, or the family gpt2-like"
        ],
    );
    check(
        wrong(Sizes { family: Family::Gpt2Like, ..gpt2() }),
        expect![
            "gpt2-like cannot tie its output projection, which has another input than the embedding; give it untied embeddings"
        ],
    );
    check(
        wrong(Sizes { layers: u64::MAX, ..gpt2() }),
        expect![
            "parameters of all blocks: 18446744073709551615 × 3072 does not fit in 64 bits; give smaller sizes"
        ],
    );
}

#[test]
fn invalid_workloads_are_refused() {
    let gpt2 = presets::find("gpt2").unwrap();
    let llama = presets::find("llama-3-8b").unwrap();
    let flops = |model, batch, sequence| {
        step(model, Workload { batch, sequence }, &Recomputation::default()).unwrap_err()
    };
    check(flops(&gpt2, 0, 1), expect!["batch is 0; give a number of at least 1"]);
    check(flops(&gpt2, 1, 0), expect!["sequence is 0; give a number of at least 1"]);
    check(
        flops(&gpt2, 1, 1025),
        expect![
            "a sequence of 1025 tokens has no position vectors beyond 1024; give a sequence of at most 1024, or a model of that context"
        ],
    );
    check(
        flops(&llama, u64::MAX, 2),
        expect!["tokens of a step: 18446744073709551615 × 2 does not fit in 64 bits; give smaller sizes"],
    );
    let on_paper = |step: textbook::Step| textbook::memory(&llama, &step).unwrap_err();
    let work = Workload { batch: 1 << 44, sequence: 1024 };
    check(
        on_paper(textbook::Step { work, ..textbook::Step::default() }),
        expect![
            "bytes of a step on paper: 18014398509481984 × 4096 × 2 does not fit in 64 bits; give smaller sizes"
        ],
    );
    let host = OnHost { block_inputs: true, ..OnHost::default() };
    check(
        on_paper(textbook::Step { host, ..textbook::Step::default() }),
        expect![
            "block inputs can be on the host only where blocks keep nothing else; recompute in full, or keep the activations on the device"
        ],
    );
    check(
        ZeroStage::from_number(4).unwrap_err(),
        expect![
            "ZeRO stage 4 does not exist; stages are 0 (nothing is divided), 1 (optimizer state), 2 (and gradients), 3 (and parameters)"
        ],
    );
    check(
        on_paper(textbook::Step { devices: 0, ..textbook::Step::default() }),
        expect!["the number of devices is 0; give a number of at least 1"],
    );
}
