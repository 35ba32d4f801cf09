//! Flags and names of models that `frugal plan` and trainings refuse or understand.

use serde_json::Value;

use super::session::Session;

#[test]
fn wrong_names_are_refused_with_the_right_ones() {
    let session = Session::new();
    for (arguments, status, words) in [
        (
            "plan --model qwen2.5-0.5b --hardware h100 --targets q_proj,foo",
            1,
            "`foo` matches none of the model's projections",
        ),
        (
            "finetune --model qwen2.5-0.5b --data problems --out x",
            1,
            "qwen2.5-0.5b is a preset of `frugal plan`: sizes without weights",
        ),
        ("generate --model Qwen2.5-0.5b --prompt a", 1, "is a preset of `frugal plan`"),
        ("plan --model qwen2.5-0.5b --method qlora", 1, "(QLoRA) is --method lora with --dtype nf4"),
        (
            "plan --model qwen2.5-0.5b --hardware h100 --recompute-what mlp",
            1,
            "--recompute-what changes nothing without",
        ),
        (
            "finetune --model model --data problems --out x --recompute-what mlp",
            1,
            "`activations.recompute` (--recompute-what)",
        ),
        ("plan --model qwen2.5-0.5b --load-in-4bit", 2, "`frugal plan` has --dtype nf4 with --method lora"),
        ("finetune --model model --data problems --out x --bf16", 2, "--dtype bfloat16 for the weights"),
    ] {
        let ended = session.run(arguments);
        assert_eq!(ended.status, status, "{arguments}: {}", ended.err);
        assert!(ended.err.contains(words), "{arguments}: {}", ended.err);
    }
    let ended = session.run("plan --model qwen2.5-0.5b --hardware h100");
    assert!(!ended.err.contains("device:"), "{}", ended.err);
}

#[test]
fn a_plan_takes_the_folder_of_a_run_and_the_dtype_of_its_model() {
    let session = Session::new();
    let train = "finetune --model model --data problems --steps 1 --accumulation 1 --samples 0";
    session.succeed(&format!("{train} --out adapted"));
    session.succeed(&format!("{train} --method full --dtype bfloat16 --out full"));
    let plan = |model: &str| -> Value {
        let (out, _) = session.succeed(&format!("plan --model {model} --hardware h100 --length 24 --json"));
        serde_json::from_str(out.lines().last().unwrap()).unwrap()
    };
    let model = plan("model");
    for same in ["model/config.json", "adapted"] {
        let other = plan(same);
        assert_eq!(
            (&other["parameters"], &other["model_bytes"]),
            (&model["parameters"], &model["model_bytes"]),
            "{same}"
        );
        assert_eq!(other["variants"], model["variants"], "{same}");
    }
    let full = plan("full");
    assert_eq!(full["parameters"], model["parameters"]);
    assert_eq!(full["model_bytes"].as_u64().unwrap() * 2, model["model_bytes"].as_u64().unwrap());
    // What the training would be refused for, its dry run is.
    let ended = session.run(&format!("{train} --out adapted --dry-run"));
    assert!(ended.status == 1 && ended.err.contains("adapted holds a finished run"), "{}", ended.err);
}

#[test]
fn an_objective_over_pairs_is_planned_for_both_rows() {
    let session = Session::new();
    let plan = |flags: &str| -> Value {
        let arguments = "plan --model qwen2.5-0.5b --hardware h100 --length 512 --json";
        let (out, _) = session.succeed(&format!("{arguments} {flags}"));
        serde_json::from_str(out.lines().last().unwrap()).unwrap()
    };
    let keep = |plan: &Value, value: &str| {
        let variants = plan["variants"].as_array().unwrap();
        variants.iter().find(|variant| variant["variant"] == "keep all").unwrap()[value].as_f64().unwrap()
    };
    let rows = plan("--method lora --dropout 0 --batch-size 8");
    let pairs = plan("--method lora --dropout 0 --batch-size 4 --objective dpo");
    assert_eq!(keep(&pairs, "peak_bytes"), keep(&rows, "peak_bytes"));
    // The reference reads each batch, too.
    let share = keep(&pairs, "step_seconds") / keep(&rows, "step_seconds");
    assert!((1.2..1.8).contains(&share), "{share}");
    let grpo = session.run("plan --model qwen2.5-0.5b --hardware h100 --objective grpo");
    assert!(grpo.status != 0 && grpo.err.contains("depends on the questions"), "{}", grpo.err);
}
