//! Budgets of a training, as its process holds them.

use serde_json::Value;

use crate::tiny_folder::{self, Tiny};

/// Validation rows that are longer than the training's go through the model fewer at a time, where the budget needs that.
#[test]
fn an_evaluation_is_split_to_fit_the_budget() {
    let tiny = Tiny::new();
    let row = |tokens: usize| {
        let ids: Vec<usize> = (0..tokens).map(|at| 10 + at % 900).collect();
        serde_json::json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
    };
    std::fs::write(tiny.path("short.jsonl"), row(8).repeat(8)).unwrap();
    std::fs::write(tiny.path("long.jsonl"), row(1000).repeat(8)).unwrap();
    let config = tiny.bytes("model/config.json");
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["max_position_embeddings"] = 2048.into();
    std::fs::write(tiny.path("model/config.json"), config.to_string()).unwrap();
    let train = |out: &str, budget: u64| -> (Value, f64) {
        let command = "finetune --model model --data short.jsonl --validation long.jsonl --steps 2 --batch-size 8 --json";
        let (told, _) = tiny.succeed(&format!("{command} --accumulation 1 --out {out} --budget {budget}"));
        let lines = tiny_folder::lines(&told);
        let plan = lines.iter().find_map(|line| line.get("plan")).unwrap().clone();
        let losses = std::fs::read_to_string(tiny.path(out).join("losses.jsonl")).unwrap();
        let loss = losses
            .lines()
            .rev()
            .find_map(|line| serde_json::from_str::<Value>(line).unwrap()["validation_loss"].as_f64());
        (plan, loss.unwrap_or_else(|| panic!("{losses}")))
    };
    let (plan, loss) = train("whole", 4 << 30);
    assert_eq!(plan["evaluation_rows_at_once"], 8, "{plan}");
    let bytes = |plan: &Value, key: &str| plan[key].as_u64().unwrap_or_else(|| panic!("{plan}"));
    let wanted = bytes(&plan, "evaluation_peak_bytes") * 3 / 5;
    let beside = |plan: &Value| bytes(plan, "budget_bytes") - bytes(plan, "tensor_bytes");
    // What is reserved beside tensors depends on the budget.
    let (near, _) = train("near", beside(&plan) + wanted);
    let (split, again) = train("split", beside(&near) + wanted);
    let rows = split["evaluation_rows_at_once"].as_u64().unwrap();
    assert!((1..8).contains(&rows), "{split}");
    assert!((again / loss - 1.0).abs() < 1e-5, "{again} {loss}");
}

/// Such a run would fail again, so it is not one that was interrupted.
#[test]
fn a_run_without_enough_memory_is_listed_as_failed() {
    let tiny = Tiny::new();
    let flags = "--width 1024 --heads 4 --length 256 --batch-size 64 --steps 3 --budget 600MiB --device cpu";
    let ended = tiny.run(&format!("train --model gpt2-like --data synthetic {flags} --out run"));
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(
        ended.status.code() == Some(3) && said.contains("the training needs more than the budget"),
        "{said}"
    );
    let (table, _) = tiny.succeed("runs ls run");
    assert!(table.trim_end().ends_with("  failed: out of memory"), "{table}");
    let (out, _) = tiny.succeed("runs ls run --json");
    let run = &tiny_folder::lines(&out)[0];
    assert_eq!((&run["state"], &run["reason"]), (&"failed".into(), &"out of memory".into()));
    let (shown, _) = tiny.succeed("runs show run");
    assert!(shown.contains("failed: out of memory"), "{shown}");
}
