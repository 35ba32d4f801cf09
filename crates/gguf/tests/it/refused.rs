//! What cannot be converted is refused by name, before a file is written.

use expect_test::{Expect, expect};
use gguf::{FileType, Model};
use serde_json::{Value, json};

use crate::tiny_model::{HIDDEN, ROWS, Tiny, write_tensors};

/// The error of a model of a family with changes to a file.
fn error(family: &str, file: &str, change: impl FnOnce(&mut Value)) -> String {
    let tiny = Tiny::of(family);
    tiny.change(file, change);
    let opened = Model::open(tiny.folder.path());
    let error = opened.and_then(|model| model.convert(FileType::F16).map(drop)).unwrap_err().to_string();
    error
        .replace(&format!("{}/", tiny.folder.path().display()), "")
        .replace(&*tiny.folder.path().to_string_lossy(), "FOLDER")
}

fn refused(family: &str, key: &str, value: Value, expected: Expect) {
    expected.assert_eq(&error(family, "config.json", |config| config[key] = value));
}

#[test]
fn options_that_llama_cpp_would_read_differently_are_refused() {
    refused(
        "llama",
        "model_type",
        json!("mamba"),
        expect![
            "the `model_type` is not supported: `mamba`; the families that can be converted are llama, mistral, granite, smollm3, qwen2, qwen3, qwen3_moe, gpt_oss, qwen3_5_moe_text, qwen3_5_text, olmo2, phi3, gemma2, gemma3_text, gemma4_text"
        ],
    );
    refused(
        "qwen2",
        "head_dim",
        json!(8),
        expect![
            "`head_dim` of a `qwen2` is not supported: 8; llama.cpp computes it as hidden_size / num_attention_heads"
        ],
    );
    refused(
        "llama",
        "hidden_act",
        json!("gelu"),
        expect![[
            r#"`hidden_act` of a `llama` is not supported: "gelu"; llama.cpp computes `silu` for this family"#
        ]],
    );
    refused(
        "gemma3_text",
        "query_pre_attn_scalar",
        json!(24),
        expect![
            "`query_pre_attn_scalar` of a `gemma3_text` is not supported: 24; llama.cpp takes 16 for this model"
        ],
    );
    refused(
        "gemma3_text",
        "layer_types",
        json!(["full_attention", "sliding_attention"]),
        expect![[
            r#"`layer_types` of a `gemma3_text` is not supported: ["full_attention","sliding_attention"]; llama.cpp takes every 6th layer as the other kind"#
        ]],
    );
    refused(
        "smollm3",
        "no_rope_layers",
        json!([1, 0]),
        expect![
            "`no_rope_layers` of a `smollm3` is not supported: [1,0]; llama.cpp takes every 4th layer as the other kind"
        ],
    );
    // Layers that follow from a number, and what transformers does not do where the file says null.
    for (family, key, value) in [
        ("gemma3_text", "sliding_window_pattern", json!(2)),
        ("gemma3_text", "sliding_window", json!(null)),
        ("gemma2", "sliding_window", json!(null)),
        ("gemma2", "attn_logit_softcapping", json!(null)),
        ("gemma2", "final_logit_softcapping", json!(null)),
        ("smollm3", "no_rope_layer_interval", json!(2)),
        ("gemma3_text", "use_bidirectional_attention", json!(true)),
    ] {
        let error = error(family, "config.json", |config| {
            let fields = config.as_object_mut().unwrap();
            fields.remove("layer_types");
            fields.remove("no_rope_layers");
            fields.insert(key.to_owned(), value);
        });
        assert!(error.starts_with(&format!("`{key}` of a `{family}` is not supported: ")), "{error}");
    }
    refused(
        "llama",
        "rope_scaling",
        json!({ "type": "dynamic", "factor": 2.0 }),
        expect![
            "the `rope_type` of a `llama` is not supported: `dynamic`; known are default, linear, llama3, yarn"
        ],
    );
    refused(
        "llama",
        "partial_rotary_factor",
        json!(0.5),
        expect![
            "`partial_rotary_factor` of a `llama` is not supported: 0.5; llama.cpp rotates whole heads of this family"
        ],
    );
    refused(
        "llama",
        "quantization_config",
        json!({ "quant_method": "bitsandbytes" }),
        expect![
            "a quantised model is not supported: quantization_config of `bitsandbytes`; merge the adapter into the unquantised base, and convert that"
        ],
    );
    refused(
        "llama",
        "num_key_value_heads",
        json!(3),
        expect![
            "config.json: decoder: `num_key_value_heads` 3 does not divide `num_attention_heads` 4; take a divisor"
        ],
    );
    refused(
        "llama",
        "rms_norm_eps",
        json!(null),
        expect!["config.json: `rms_norm_eps` is missing; expected a number"],
    );
    refused(
        "llama",
        "num_hidden_layers",
        json!(3),
        expect![
            "FOLDER: 9 tensors that config.json asks for are missing, such as `model.layers.2.self_attn.q_proj.weight`"
        ],
    );
    refused(
        "llama",
        "num_hidden_layers",
        json!(1),
        expect![
            "a tensor of a `llama` is not supported: `model.layers.1.input_layernorm.weight`; llama.cpp has no place for it (12 such tensors); an adapter has to be merged first, and other models cannot be converted"
        ],
    );
    refused(
        "llama",
        "vocab_size",
        json!(301),
        expect!["FOLDER: `lm_head.weight` has the shape [300, 64]; config.json gives [301, 64]"],
    );
}

#[test]
fn tokenizers_that_are_not_bpe_are_refused() {
    let of = |change: fn(&mut Value)| error("llama", "tokenizer.json", change);
    expect!["the tokenizer is not supported: model type `Unigram` in tokenizer.json; only BPE can be converted: byte-level, or what SentencePiece's BPE becomes"]
        .assert_eq(&of(|tokenizer| tokenizer["model"]["type"] = "Unigram".into()));
    expect![[r#"tokenizer.json: the token "he" has the number 400, but the embedding has 300 rows; the tokenizer is another model's"#]]
        .assert_eq(&of(|tokenizer| tokenizer["model"]["vocab"]["he"] = 400.into()));
    expect!["tokenizer.json: two tokens have the number 1"]
        .assert_eq(&of(|tokenizer| tokenizer["model"]["vocab"]["he"] = 1.into()));
    let tiny = Tiny::of("llama");
    std::fs::remove_file(tiny.path("tokenizer.json")).unwrap();
    let error = Model::open(tiny.folder.path()).unwrap_err().to_string();
    assert!(error.ends_with("tokenizer.json is missing; transformers writes it with AutoTokenizer.from_pretrained(…).save_pretrained(…)"));
}

#[test]
fn weights_that_are_not_finite_or_too_large_are_refused() {
    let tiny = Tiny::with("llama", json!({ "num_hidden_layers": 1, "tie_word_embeddings": true }));
    let bytes = std::fs::read(tiny.path("model.safetensors")).unwrap();
    let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Vec<(String, Vec<u64>)> = serde_json::from_slice::<Value>(&bytes[8..8 + size])
        .unwrap()
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| !name.contains("layers.1") && !name.contains("lm_head"))
        .map(|(name, entry)| (name.clone(), serde_json::from_value(entry["shape"].clone()).unwrap()))
        .collect();
    let path = tiny.path("model.safetensors");
    write_tensors(&path, &tensors);
    let write = |value: f32, kind: FileType| {
        let mut bytes = std::fs::read(&path).unwrap();
        let size = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + size]).unwrap();
        let start = header["model.embed_tokens.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        // The last value of the embedding.
        let at = 8 + size + start + (ROWS * HIDDEN) as usize * 4 - 4;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let model = Model::open(tiny.folder.path()).unwrap();
        model.convert(kind).unwrap().write(&mut Vec::new()).map_err(|error| error.to_string())
    };
    expect!["a value of `token_embd.weight` is not supported: NaN as f32; the weights are damaged; check the training, or take an earlier checkpoint"]
        .assert_eq(&write(f32::NAN, FileType::F32).unwrap_err());
    expect!["a value of `token_embd.weight` is not supported: inf as q8_0; the weights are damaged; check the training, or take an earlier checkpoint"]
        .assert_eq(&write(f32::INFINITY, FileType::Q8_0).unwrap_err());
    expect!["a value of `token_embd.weight` is not supported: 70000 as f16; export with --type bf16 or f32"]
        .assert_eq(&write(70000.0, FileType::F16).unwrap_err());
    assert_eq!(write(70000.0, FileType::BF16), Ok(()));
    assert_eq!(write(65504.0, FileType::F16), Ok(()));
}

#[test]
fn weights_in_shards_are_found_by_their_index() {
    let tiny = Tiny::of("llama");
    std::fs::rename(tiny.path("model.safetensors"), tiny.path("model-00001-of-00001.safetensors")).unwrap();
    let index = |shard: &str| {
        tiny.write(
            "model.safetensors.index.json",
            &json!({ "weight_map": { "lm_head.weight": shard } }).to_string(),
        );
        Model::open(tiny.folder.path()).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(index("model-00001-of-00001.safetensors"), Ok(()));
    assert!(index("../secret.safetensors").unwrap_err().contains("expected a file name"));
    assert!(index("missing.safetensors").unwrap_err().contains("missing.safetensors: No such file"));
}
