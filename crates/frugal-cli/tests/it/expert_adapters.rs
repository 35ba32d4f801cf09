//! Adapters on the experts of a mixture, and the load-balancing loss, in the program: trained, resumed, merged and exported.

use frugal::llama_cpp::Request;
use lora::LoraConfig;
use models::{DecoderConfig, Llama, hugging_face, tensors_file};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::export_gguf::{llama_cpp, result, write_tokenizer};
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
    tiny.succeed("export --format gguf-lora --model moe --adapter whole --out lora.gguf");
}

/// A mixture with random weights, and adapters of its experts whose B is not zero.
fn adapted(tiny: &Tiny, family: &str, parameters: &[&str]) {
    let mut config = json!({
        "model_type": family, "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": false, "num_experts_per_tok": 2, "intermediate_size": 96,
    });
    let own = match family {
        "gpt_oss" => json!({ "num_local_experts": 4, "sliding_window": 16 }),
        _ => json!({ "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": true }),
    };
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    runtime::random::seed(5).unwrap();
    let mut model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let folder = tiny.path(family);
    hugging_face::save(&model, &folder, hugging_face::SHARD_BYTES).unwrap();
    write_tokenizer(&folder);
    let lora = LoraConfig {
        target_modules: Some(["q_proj"].into()),
        target_parameters: Some(parameters.iter().map(|name| format!("experts.{name}")).collect()),
        r: 3,
        lora_alpha: 6.0,
        seed: 7,
        init_lora_weights: false.into(),
        ..LoraConfig::default()
    };
    lora.install(&mut model).unwrap().save(&folder.join("adapter")).unwrap();
}

/// A wrong order of rows, columns or experts would load silently: log-probabilities are compared with this program's.
#[test]
fn llama_cpp_applies_adapters_of_experts() {
    let Some(llama_cpp) = llama_cpp() else { return };
    for family in ["qwen3_moe", "gpt_oss"] {
        for parameters in [&["gate_up_proj", "down_proj"][..], &["gate_up_proj"], &["down_proj"]] {
            let tiny = Tiny::new();
            adapted(&tiny, family, parameters);
            let command = format!(
                "export --model {family} --format gguf-lora --adapter {family}/adapter --out lora.gguf --verify --json"
            );
            let figure =
                result(&tiny.succeed(&command).0)["verified"]["largest_difference"].as_f64().unwrap();
            // What the adapter changes.
            tiny.succeed(&format!("export --model {family} --format gguf --type f32 --out base.gguf"));
            let (base, lora) = (tiny.path("base.gguf"), tiny.path("lora.gguf"));
            let prompts = [(10..60).collect::<Vec<u32>>()];
            let of = |lora: Option<&std::path::Path>| {
                let request = Request {
                    model: &base,
                    lora,
                    prompts: &prompts,
                    texts: &[],
                    forced: 40,
                    vocabulary: 259,
                    threads: 1,
                };
                llama_cpp.compute(&request).unwrap().log_probabilities.remove(0)
            };
            let (plain, adapted) = (of(None), of(Some(&lora)));
            let change = plain.iter().zip(&adapted).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            eprintln!("{family}, {parameters:?}: {figure:.1e} of a change by {change:.1e}");
            assert!(figure < 1e-4 && change > 1e-2, "{family}, {parameters:?}: {figure}, {change}");
        }
    }
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
}

/// What experts' adapters take is predicted as any other adapters: for a plan, a dry run and a budget.
#[test]
fn adapters_of_experts_are_planned() {
    let tiny = Tiny::new();
    mixture(&tiny);
    let json = |arguments: &str| serde_json::from_str::<Value>(&tiny.succeed(arguments).0).unwrap();
    let plan = format!("plan --model moe {EXPERTS} --length 32 --json");
    let (few, many) = (json(&plan), json(&plan.replace("--r 2", "--r 32")));
    let kept = |plan: &Value| {
        let ways = plan["variants"].as_array().unwrap();
        let keep_all = ways.iter().find(|way| way["variant"] == "keep all");
        keep_all.and_then(|way| way["peak_bytes"].as_u64()).unwrap_or_else(|| panic!("{plan}"))
    };
    // A and B of two tensors of 4 experts in 2 layers, with a gradient and two numbers of state each.
    let numbers = 2 * 4 * 30 * (64 + 2 * 64 + 64 + 64);
    assert!(kept(&many) - kept(&few) >= 16 * numbers, "{few} {many}");
    let (_, notes) = tiny.succeed(&format!("finetune --model moe {TRAINING} {EXPERTS} --steps 1 --dry-run"));
    assert!(!notes.contains("is not predicted"), "{notes}");
    let flops = json(
        "plan flops --model moe --targets none --target-parameters gate_up_proj --r 2 --length 32 --json",
    );
    let names: Vec<&str> =
        flops["products"].as_array().unwrap().iter().map(|row| row["product"].as_str().unwrap()).collect();
    assert!(names.contains(&"mlp.experts.gate_up_proj adapter"), "{names:?}");
}
