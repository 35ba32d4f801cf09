//! Qwen3.5's linear attention in the program: what is adapted, and what llama.cpp computes from an export.

use lora::{LoraConfig, Names};
use models::module::parameters;
use models::{DecoderConfig, Llama, hugging_face};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::export_gguf::{llama_cpp, result, write_tokenizer};
use crate::tiny_folder::Tiny;

/// A Qwen3.5 with two value heads for each key head, and an adapter of all of its projections.
fn gated_delta_net(tiny: &Tiny) {
    let folder = tiny.path("qwen35");
    let config = json!({
        "model_type": "qwen3_5_text", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "full_attention_interval": 3,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    });
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    runtime::random::seed(5).unwrap();
    let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let _no_grad = tch::no_grad_guard();
    for (name, tensor) in parameters(&model) {
        let mut tensor = tensor.shallow_clone();
        if name.ends_with("A_log") {
            // Slow decays, so that the state matters.
            let _ = tensor.f_uniform_(-4.0, -2.0).unwrap();
        } else if name.ends_with("norm.weight") || name.ends_with("dt_bias") {
            tensor += Tensor::randn_like(&tensor) * 0.3;
        }
    }
    hugging_face::save(&model, &folder, hugging_face::SHARD_BYTES).unwrap();
    write_tokenizer(&folder);
    let mut adapted = model;
    let lora = LoraConfig {
        target_modules: Some(Names::Pattern("all-linear".to_owned())),
        r: 3,
        seed: 7,
        ..LoraConfig::default()
    };
    let adapters = lora.install(&mut adapted).unwrap();
    for (name, tensor) in parameters(&adapted) {
        if name.contains("lora_B") {
            let mut tensor = tensor.shallow_clone();
            tensor += Tensor::randn_like(&tensor) * 0.1;
        }
    }
    adapters.save(&folder.join("adapter")).unwrap();
}

#[test]
fn llama_cpp_computes_gated_delta_nets() {
    let Some(_) = llama_cpp() else { return };
    let tiny = Tiny::new();
    gated_delta_net(&tiny);
    let export = |rest: &str| {
        let (out, _) = tiny.succeed(&format!("export --model qwen35 --verify --json {rest}"));
        let figure = result(&out)["verified"]["largest_difference"].as_f64().unwrap();
        eprintln!("{rest}: {figure:.1e}");
        figure
    };
    assert!(export("--format gguf --type f32 --out f32.gguf") <= 1e-4);
    // llama.cpp rounds activations to 8 bits, too, whose error grows in random weights; --verify knows how far that may go.
    assert!(export("--format gguf --type q8_0 --out q8.gguf") <= 2.0);
    assert!(export("--format gguf-lora --adapter qwen35/adapter --out lora.gguf") <= 1e-4);
    assert!(export("--format gguf --type f32 --adapter qwen35/adapter --out merged.gguf") <= 1e-4);
    // The file is read again, with the values of the folder but for the rounding of the decays.
    let read = |path: &str| -> f64 {
        let prompt = "export --format gguf --type f32 --verify --json --out again.gguf --overwrite --model";
        let (out, _) = tiny.succeed(&format!("{prompt} {path}"));
        result(&out)["verified"]["largest_difference"].as_f64().unwrap()
    };
    assert!(read("f32.gguf") <= 1e-4);
}

/// Three quarters of a Qwen3.5 would stay as they are if the default named the projections of ordinary attention alone.
#[test]
fn linear_attention_is_adapted_by_default() {
    let tiny = Tiny::new();
    gated_delta_net(&tiny);
    let rows: String = (0..8)
        .map(|row| format!("{}\n", json!({ "prompt": format!("{row} is"), "completion": "a number" })))
        .collect();
    std::fs::write(tiny.path("rows.jsonl"), rows).unwrap();
    let options = "--data rows.jsonl --steps 1 --batch-size 2 --held-out 0 --samples 0 --no-baseline";
    let (_, notes) = tiny.succeed(&format!("finetune --model qwen35 {options} --out adapted"));
    assert!(notes.contains("in_proj_qkv, in_proj_z and out_proj, too: 4 of 6 layers"), "{notes}");
    let config: Value =
        serde_json::from_slice(&std::fs::read(tiny.path("adapted").join("adapter_config.json")).unwrap())
            .unwrap();
    let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"];
    assert_eq!(config["target_modules"], json!(targets));
    let (_, notes) = tiny.succeed(&format!("finetune --model qwen35 {options} --out named --targets q_proj"));
    assert!(!notes.contains("in_proj_qkv"), "{notes}");
}
