//! Adapters on the experts of a mixture, and the load-balancing loss, in the program: trained, resumed, merged and exported.

use models::{DecoderConfig, Llama, hugging_face, tensors_file};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::export_gguf::write_tokenizer;
use crate::tiny_folder::{Tiny, lines};

/// A Qwen3-MoE, and rows to train it on.
fn mixture(tiny: &Tiny) {
    let folder = tiny.path("moe");
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": false,
    });
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    runtime::random::seed(5).unwrap();
    let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    hugging_face::save(&model, &folder, hugging_face::SHARD_BYTES).unwrap();
    write_tokenizer(&folder);
    let rows: String = (0..8)
        .map(|row| format!("{}\n", json!({ "prompt": format!("{row} is"), "completion": "a number" })))
        .collect();
    std::fs::write(tiny.path("rows.jsonl"), rows).unwrap();
}

const TRAINING: &str = "--data rows.jsonl --batch-size 2 --accumulation 2 --held-out 0 --samples 0 --no-baseline --lr 1e-2 --seed 3";
const EXPERTS: &str = "--targets none --target-parameters gate_up_proj,down_proj --dropout 0 --r 2";

fn steps(tiny: &Tiny, folder: &str) -> Vec<Value> {
    let text = String::from_utf8(tiny.bytes(&format!("{folder}/losses.jsonl"))).unwrap();
    lines(&text).into_iter().filter(|line| !line["loss"].is_null()).collect()
}

/// Runs a command that is refused, and returns what it says.
fn fails(tiny: &Tiny, arguments: &str) -> String {
    let output = tiny.command(arguments).output().unwrap();
    assert!(!output.status.success(), "{arguments}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn experts_are_adapted_resumed_streamed_merged_and_exported() {
    let tiny = Tiny::new();
    mixture(&tiny);
    let train = |rest: &str| tiny.succeed(&format!("finetune --model moe {TRAINING} {rest}"));
    train(&format!("{EXPERTS} --router-aux-loss 0.01 --steps 4 --out whole"));
    let config: Value = serde_json::from_slice(&tiny.bytes("whole/adapter_config.json")).unwrap();
    assert_eq!(config["target_modules"], json!([]));
    assert_eq!(config["target_parameters"], json!(["gate_up_proj", "down_proj"]));
    let names: Vec<String> = tensors_file::read(&tiny.path("whole/adapter_model.safetensors"), Device::Cpu)
        .unwrap()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names.len(), 2 * 2 * 2);
    assert!(
        names.iter().any(|name| name.ends_with("layers.1.mlp.experts.base_layer.lora_A.weight")),
        "{names:?}"
    );
    let steps_of = |folder: &str| steps(&tiny, folder);
    assert_eq!(steps_of("whole").len(), 4);
    assert!(
        steps_of("whole").iter().all(|step| (1.5..4.0).contains(&step["router_aux_loss"].as_f64().unwrap()))
    );

    // Killed and resumed, with experts in files, and with recomputed layers: the same bits.
    let killed = format!(
        "finetune --model moe {TRAINING} {EXPERTS} --router-aux-loss 0.01 --steps 4 --out halves --checkpoint-every 1"
    );
    tiny.kill_at_step(&format!("{killed} --json"), 2);
    tiny.succeed(&format!("{killed} --resume"));
    train(&format!("{EXPERTS} --router-aux-loss 0.01 --steps 4 --out streamed --offload-experts 128KiB"));
    train(&format!("{EXPERTS} --router-aux-loss 0.01 --steps 4 --out again --activations recompute"));
    let expected = tiny.bytes("whole/adapter_model.safetensors");
    for other in ["halves", "streamed", "again"] {
        assert!(tiny.bytes(&format!("{other}/adapter_model.safetensors")) == expected, "{other}");
    }
    train(&format!("{EXPERTS} --steps 4 --out unbalanced"));
    assert!(tiny.bytes("unbalanced/adapter_model.safetensors") != expected);
    assert!(steps_of("unbalanced").iter().all(|step| step["router_aux_loss"].is_null()));
    train(&format!("{EXPERTS} --steps 1 --dtype nf4 --out four_bits"));

    // A checkpoint as an adapter, and the adapter in the model.
    tiny.succeed("export --format peft --checkpoints whole --out exported");
    let of = |path: &str| tensors_file::read(&tiny.path(path), Device::Cpu).unwrap();
    let (trained, exported) =
        (of("whole/adapter_model.safetensors"), of("exported/adapter_model.safetensors"));
    assert_eq!(
        exported.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        trained.iter().map(|(name, _)| name).collect::<Vec<_>>()
    );
    assert!(trained.iter().zip(&exported).all(|((_, one), (_, other))| one == other));
    tiny.succeed("merge --model moe --adapter whole --out merged");
    let error = fails(&tiny, "export --format gguf-lora --model moe --adapter whole --out lora.gguf");
    assert!(error.contains("`target_parameters` of an adapter in GGUF"), "{error}");
}

#[test]
fn what_is_not_possible_is_refused_by_name() {
    let tiny = Tiny::new();
    mixture(&tiny);
    let error =
        |rest: &str| fails(&tiny, &format!("finetune --model moe {TRAINING} --steps 1 --out out {rest}"));
    let dropout = error("--target-parameters gate_up_proj,down_proj");
    assert!(dropout.contains("`lora_dropout`") && dropout.contains("set it to 0"), "{dropout}");
    let typo = error("--target-parameters gate_up_prj --dropout 0");
    assert!(typo.contains("did you mean `gate_up_proj`?"), "{typo}");
    let module = error("--targets down_proj");
    assert!(module.contains("[\"down_proj\"] matches none"), "{module}");
    let negative = error("--router-aux-loss=-1");
    assert!(negative.contains("a coefficient of 0 or more"), "{negative}");
    let dense =
        fails(&tiny, &format!("finetune --model model {TRAINING} --steps 1 --out out --router-aux-loss 0.1"));
    assert!(dense.contains("the model has no router"), "{dense}");
    let plan = fails(&tiny, "plan --model moe --target-parameters gate_up_proj --dropout 0 --length 32");
    assert!(plan.contains("adapters on the experts of a mixture"), "{plan}");
}
