//! Gemma 4: layers that differ, a second embedding, and a tokenizer with merges over characters.

use std::path::Path;

use decoder::DecoderConfig;
use expect_test::expect;
use gguf::{Array, FileType, Model, ModelFile, ReadOptions, Value};
use serde_json::{Value as Json, json};

use crate::tiny_model::{Tiny, value, values, write_tensors, written};

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The last two layers share the keys of the two before them, and their MLP is twice as wide.
fn config() -> Json {
    json!({
        "model_type": "gemma4_text", "vocab_size": 260, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": true, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260, "sliding_window": 8,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL], "max_position_embeddings": 256, "final_logit_softcapping": 6.0,
        "rms_norm_eps": 1e-6, "eos_token_id": 257, "bos_token_id": 256,
    })
}

/// A folder of this configuration, with the tensors that it has and those of `others`.
fn folder(config: &Json, others: &[(&str, &[u64])]) -> Tiny {
    let tiny = Tiny::of("llama");
    tiny.write("config.json", &config.to_string());
    let decoder: DecoderConfig = serde_json::from_value(config.clone()).unwrap();
    let named = |(name, shape): (String, Vec<i64>)| {
        let name = if name == "lm_head.weight" { name } else { format!("model.{name}") };
        (name, shape.into_iter().map(|size| size as u64).collect::<Vec<_>>())
    };
    let mut tensors: Vec<_> = decoder.shapes().into_iter().map(named).collect();
    tensors.extend(others.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())));
    write_tensors(&tiny.path("model.safetensors"), &tensors);
    tiny
}

fn convert(tiny: &Tiny) -> gguf::Result<gguf::Reader> {
    let model = Model::open(tiny.folder.path())?;
    Ok(written(&model.convert(FileType::F32)?, &tiny.path("out.gguf")))
}

fn options(config: Json) -> DecoderConfig {
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    DecoderConfig { other_fields: Default::default(), ..config }
}

/// What is read again is the configuration and every tensor.
fn check_read(tiny: &Tiny, path: &Path, expected: &Json) {
    let read = ModelFile::open(path, ReadOptions::default()).unwrap();
    assert_eq!(options(Json::Object(read.config().clone())), options(expected.clone()));
    for (seed, (name, shape)) in tiny.tensors().iter().enumerate() {
        let Some(tensor) = read.tensor(name) else {
            assert!(name.contains("layers.3.self_attn.k") || name.contains("layers.4.self_attn"), "{name}");
            continue;
        };
        assert_eq!(&tensor.shape, shape, "{name}");
        let mut found = Vec::new();
        let rows = if shape.len() == 1 { 1 } else { shape[0] };
        read.rows(tensor, 0..rows, &mut found).unwrap();
        assert!((0..found.len() as u64).map(|at| value(seed, at)).eq(found), "{name}");
    }
}

#[test]
fn layers_that_differ_are_written_and_read() {
    // Files have the keys of layers that share those of others; nothing reads them.
    let unused: [(&str, &[u64]); 3] = [
        ("model.layers.3.self_attn.k_proj.weight", &[32, 64]),
        ("model.layers.3.self_attn.k_norm.weight", &[16]),
        ("model.layers.4.self_attn.v_proj.weight", &[64, 64]),
    ];
    let tiny = folder(&config(), &unused);
    let file = convert(&tiny).unwrap();
    let of_layer = |start: &str| -> String {
        let tensors = file.header().tensors.iter().filter(|tensor| tensor.name.starts_with(start));
        tensors.map(|tensor| format!("{} {:?}\n", tensor.name, tensor.shape)).collect()
    };
    expect![[r#"
        blk.4.attn_norm.weight [64]
        blk.4.attn_output.weight [64, 128]
        blk.4.attn_q.weight [128, 64]
        blk.4.attn_q_norm.weight [32]
        blk.4.ffn_down.weight [64, 64]
        blk.4.ffn_gate.weight [64, 64]
        blk.4.ffn_norm.weight [64]
        blk.4.ffn_up.weight [64, 64]
        blk.4.inp_gate.weight [16, 64]
        blk.4.layer_output_scale.weight [1]
        blk.4.post_attention_norm.weight [64]
        blk.4.post_ffw_norm.weight [64]
        blk.4.post_norm.weight [64]
        blk.4.proj.weight [64, 16]
    "#]]
    .assert_eq(&of_layer("blk.4."));
    expect![[r#"
        per_layer_model_proj.weight [80, 64]
        per_layer_proj_norm.weight [16]
        per_layer_token_embd.weight [260, 80]
    "#]]
    .assert_eq(&of_layer("per_layer"));
    // The first quarter of the pairs of a wide head rotate.
    let divisors = values(&file, "rope_freqs.weight");
    assert_eq!((divisors[..4].to_vec(), divisors[4..].to_vec()), (vec![1.0; 4], vec![1e30; 12]));
    let get = |key: &str| file.header().get(&format!("gemma4.{key}")).cloned();
    for (key, expected) in [
        ("attention.key_length", 32u32),
        ("attention.value_length", 32),
        ("attention.key_length_swa", 16),
        ("attention.value_length_swa", 16),
        ("attention.shared_kv_layers", 2),
        ("attention.sliding_window", 8),
        ("embedding_length_per_layer_input", 16),
        ("rope.dimension_count", 32),
        ("rope.dimension_count_swa", 16),
    ] {
        assert_eq!(get(key), Some(expected.into()), "{key}");
    }
    let list = |sizes: [u32; 5]| Some(Value::Array(Array::U32(sizes.to_vec())));
    assert_eq!(get("feed_forward_length"), list([32, 32, 32, 64, 64]));
    assert_eq!(get("attention.head_count_kv"), list([2; 5]));
    let pattern = Value::Array(Array::Bool(vec![true, true, false, true, false]));
    assert_eq!(get("attention.sliding_window_pattern"), Some(pattern));
    assert_eq!(
        (get("rope.freq_base"), get("rope.freq_base_swa")),
        (Some(Value::F32(1e6)), Some(Value::F32(1e4)))
    );
    assert_eq!(get("final_logit_softcapping"), Some(Value::F32(6.0)));
    check_read(&tiny, &tiny.path("out.gguf"), &config());
}

#[test]
fn values_that_are_keys_are_written_and_read() {
    let mut config = config();
    for (name, value) in [
        ("attention_k_eq_v", json!(true)),
        ("num_global_key_value_heads", json!(1)),
        ("num_kv_shared_layers", json!(0)),
        ("use_double_wide_mlp", json!(false)),
        ("hidden_size_per_layer_input", json!(0)),
        ("final_logit_softcapping", json!(null)),
        ("tie_word_embeddings", json!(false)),
    ] {
        config[name] = value;
    }
    let tiny = folder(&config, &[]);
    let file = convert(&tiny).unwrap();
    assert!(file.position("blk.2.attn_v.weight").is_none() && file.position("blk.1.attn_v.weight").is_some());
    let heads = Value::Array(Array::U32(vec![2, 2, 1, 2, 1]));
    assert_eq!(file.header().get("gemma4.attention.head_count_kv"), Some(&heads));
    // llama.cpp's default is a cap.
    assert_eq!(file.header().get("gemma4.final_logit_softcapping"), Some(&Value::F32(0.0)));
    check_read(&tiny, &tiny.path("out.gguf"), &config);
}

#[test]
fn what_llama_cpp_would_compute_differently_is_refused() {
    let error = |changes: &[(&str, Json)]| {
        let mut config = config();
        for (name, value) in changes {
            config[*name] = value.clone();
        }
        convert(&folder(&config, &[])).unwrap_err().to_string()
    };
    expect!["`num_kv_shared_layers` of a `gemma4_text` is not supported: 2; llama.cpp takes the keys of the last two layers before these, and expects the first of the two to have a window and the second to have none"]
        .assert_eq(&error(&[("layer_types", json!([SLIDING, FULL, SLIDING, SLIDING, FULL]))]));
    expect!["`vocab_size_per_layer_input` of a `gemma4_text` is not supported: 300; llama.cpp expects as many rows as `vocab_size`"]
        .assert_eq(&error(&[("vocab_size_per_layer_input", json!(300))]));
    let rope = json!({
        "full_attention": { "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25 },
        "sliding_attention": { "rope_type": "linear", "rope_theta": 1e4, "factor": 2.0 },
    });
    expect!["the `rope_type` of layers with a window of a `gemma4_text` is not supported: `linear`; llama.cpp does not scale their frequencies"]
        .assert_eq(&error(&[("rope_parameters", rope)]));
    let error = error(&[("attention_bias", json!(true))]);
    assert!(error.contains("llama.cpp has no place for it"), "{error}");
}

/// The tokens of SentencePiece, merged by rank: `ab` before `bc`, and a line break that merges with nothing.
fn tokenizer() -> Json {
    let texts = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "a",
        "b",
        "c",
        "▁",
        "\n",
        "ab",
        "bc",
        "▁a",
        "\n\n",
        "<|channel>",
    ];
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let vocab: serde_json::Map<String, Json> = texts
        .iter()
        .map(|text| (*text).to_owned())
        .chain(bytes)
        .zip(0..)
        .map(|(text, id)| (text, json!(id)))
        .collect();
    let added = |id: u32, text: &str| {
        json!({
            "id": id, "content": text, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
        })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<pad>"), added(1, "<eos>"), added(2, "<bos>"), added(3, "<unk>"), added(13, "<|channel>")],
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
        "pre_tokenizer": { "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false },
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" }, { "type": "Fuse" }
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": [["a", "b"], ["b", "c"], ["▁", "a"], ["\n", "\n"]]
        }
    })
}

#[test]
fn its_tokenizer_keeps_the_merges() {
    let mut config = config();
    (config["vocab_size"], config["vocab_size_per_layer_input"]) = (json!(270), json!(270));
    (config["bos_token_id"], config["eos_token_id"]) = (json!(2), json!(1));
    let tiny = folder(&config, &[]);
    tiny.write("tokenizer.json", &tokenizer().to_string());
    let file = convert(&tiny).unwrap();
    let get = |key: &str| file.header().get(&format!("tokenizer.ggml.{key}")).cloned().unwrap();
    assert_eq!(get("model"), "gemma4".into());
    let merges = ["a b", "b c", "▁ a", "\n \n"].map(str::to_owned).to_vec();
    assert_eq!(get("merges"), Value::Array(Array::String(merges)));
    assert_eq!(get("add_space_prefix"), Value::Bool(false));
    let Value::Array(Array::I32(kinds)) = get("token_type") else { panic!("no types") };
    // Normal, control, unknown, bytes; llama.cpp shows the last one.
    assert_eq!((kinds[4], kinds[1], kinds[3], kinds[14], kinds[13]), (1, 3, 2, 6, 4));
    // What is read again divides texts as the original.
    let read = ModelFile::open(&tiny.path("out.gguf"), ReadOptions::default()).unwrap();
    let files = read.companion_files().unwrap();
    let text = &files.iter().find(|(name, _)| *name == "tokenizer.json").unwrap().1;
    let again: tokenizers::Tokenizer = text.parse().unwrap();
    let original: tokenizers::Tokenizer = tokenizer().to_string().parse().unwrap();
    for text in ["abc", "bc ab", "a\n\nb", "\n\n\n a  b", "é", "<|channel>abc"] {
        let ids =
            |tokenizer: &tokenizers::Tokenizer| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
        assert_eq!(ids(&again), ids(&original), "{text:?}");
    }
}
