//! A Gemma 4 in the program: what llama.cpp computes from an export, and new tokens that it has no rows for.

use lora::LoraConfig;
use models::module::{parameters, tensors};
use models::{DecoderConfig, Llama, hugging_face};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::export_gguf::{llama_cpp, result, write_tokenizer};
use crate::tiny_folder::Tiny;

/// Two layers that attend to the keys of those before them, and an input of each layer from a second embedding. An adapter of all
/// projections, those of the layers' inputs too.
fn gemma4(tiny: &Tiny, name: &str, vocabulary: i64) {
    let (sliding, full) = ("sliding_attention", "full_attention");
    let config = json!({
        "model_type": "gemma4_text", "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": true, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": vocabulary, "sliding_window": 8,
        "layer_types": [sliding, full, sliding, full, sliding, full], "max_position_embeddings": 512, "initializer_range": 0.2,
        "final_logit_softcapping": 6.0, "bos_token_id": 1, "eos_token_id": 2,
    });
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    runtime::random::seed(5).unwrap();
    let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let folder = tiny.path(name);
    {
        let _no_grad = tch::no_grad_guard();
        for named in tensors(&model) {
            let mut tensor = named.tensor.shallow_clone();
            if named.name.ends_with("q_norm.weight") {
                // Scores have no factor: a steep softmax would enlarge every rounding.
                let _ = tensor.f_fill_(0.25).unwrap();
            } else if named.name.ends_with("norm.weight") || named.name.ends_with("layer_scalar") {
                let _ = tensor.f_uniform_(0.7, 1.3).unwrap();
            }
        }
    }
    hugging_face::save(&model, &folder, hugging_face::SHARD_BYTES).unwrap();
    write_tokenizer(&folder);
    let projections = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "per_layer_input_gate",
        "per_layer_projection",
    ];
    let lora =
        LoraConfig { target_modules: Some(projections.into()), r: 3, seed: 7, ..LoraConfig::default() };
    let mut adapted = model;
    let adapters = lora.install(&mut adapted).unwrap();
    let _no_grad = tch::no_grad_guard();
    for (_, tensor) in parameters(&adapted).into_iter().filter(|(name, _)| name.contains("lora_B")) {
        let mut tensor = tensor.shallow_clone();
        tensor += Tensor::randn_like(&tensor) * 0.1;
    }
    adapters.save(&folder.join("adapter")).unwrap();
}

/// llama.cpp looks the GELU up in a table over fp16, whose rounding moves log-probabilities by some 1e-3.
#[test]
fn llama_cpp_computes_a_gemma_4() {
    let Some(_) = llama_cpp() else { return };
    let tiny = Tiny::new();
    gemma4(&tiny, "gemma4", 300);
    let export = |model: &str, rest: &str| {
        let (out, _) = tiny.succeed(&format!("export --model {model} --verify --json {rest}"));
        let figure = result(&out)["verified"]["largest_difference"].as_f64().unwrap();
        eprintln!("{model}, {rest}: {figure:.1e}");
        figure
    };
    assert!(export("gemma4", "--format gguf --type f32 --out f32.gguf") <= 5e-3);
    // llama.cpp rounds activations to 8 bits, too.
    assert!(export("gemma4", "--format gguf --type q8_0 --out q8.gguf") <= 3e-1);
    assert!(export("gemma4", "--format gguf-lora --adapter gemma4/adapter --out lora.gguf") <= 5e-3);
    assert!(export("gemma4", "--format gguf --type f32 --adapter gemma4/adapter --out merged.gguf") <= 5e-3);
    // The file is read again.
    assert!(export("f32.gguf", "--format gguf --type f32 --out again.gguf") <= 5e-3);
}

#[test]
fn new_tokens_that_enlarge_the_second_embedding_are_refused() {
    let tiny = Tiny::new();
    let rows: String = (0..8)
        .map(|row| format!("{}\n", json!({ "prompt": format!("{row} is"), "completion": "a <|call|>" })))
        .collect();
    std::fs::write(tiny.path("rows.jsonl"), rows).unwrap();
    std::fs::write(tiny.path("tokens.txt"), "<|call|>\n").unwrap();
    let options = "--data rows.jsonl --new-tokens tokens.txt --steps 1 --batch-size 2 --held-out 0 --samples 0 --no-baseline";
    // The tokenizer has 259 tokens.
    gemma4(&tiny, "full", 259);
    let ended = tiny.run(&format!("finetune --model full {options} --out refused"));
    let error = String::from_utf8(ended.stderr).unwrap();
    assert!(
        ended.status.code() == Some(1)
            && error.contains(
                "need 260 rows, and the model has 259: its second embedding, `embed_tokens_per_layer`"
            ),
        "{error}"
    );
    assert!(!tiny.path("refused").exists());
    // A spare row is trained.
    gemma4(&tiny, "spare", 260);
    let (_, notes) = tiny.succeed(&format!("finetune --model spare {options} --out trained"));
    assert!(notes.contains("1 token added, in spare rows of the vocabulary of 260"), "{notes}");
}
