//! Trainings from scratch, and what their folders say.

use serde_json::Value;

use super::session::Session;
use super::tiny_folder::{lines, losses};

fn train(tiny: &Session, arguments: &str) -> Vec<f64> {
    losses(&lines(&tiny.succeed(&format!("train --json --heads 2 {arguments}")).0))
}

#[test]
fn techniques_keep_the_losses() {
    let tiny = Session::new();
    let common = "--model gpt2 --width 16 --steps 3 --batch-size 4 --accumulation 2 --clip 1";
    let plain = train(&tiny, common);
    assert_eq!(plain.len(), 3);
    for flags in ["--activations recompute --recompute-what elementwise", "--offload host --ring 1"] {
        assert_eq!(train(&tiny, &format!("{common} {flags}")), plain, "{flags}");
    }
}

#[test]
fn the_folder_of_a_training_says_how_far_it_is() {
    let tiny = Session::new();
    tiny.succeed("train --width 16 --heads 2 --steps 3 --out scratch");
    let (out, _) = tiny.succeed("info scratch");
    assert!(out.contains("finished after 3 of 3 steps"), "{out}");
    let record = tiny.bytes("scratch/run.json");
    let (_, err) = tiny.succeed("resume scratch");
    assert_eq!(tiny.bytes("scratch/run.json"), record, "what was measured stays");
    assert!(
        err.contains("the training was finished before, after 3 steps; to continue, raise `steps` or `epochs`: in scratch/config.toml, or by `frugal resume scratch --set training.steps=N`"),
        "{err}"
    );

    let finetune = "finetune --model model --data problems --r 4 --batch-size 4 --accumulation 1 --steps 4";
    tiny.succeed(&format!("{finetune} --checkpoint-every 2 --out run"));
    std::fs::remove_dir_all(tiny.path("run/checkpoints/step-000000000004")).unwrap();
    std::fs::remove_file(tiny.path("run/adapter_config.json")).unwrap();
    let (out, _) = tiny.succeed("info run --json");
    let told = &lines(&out)[0];
    assert_eq!(told["state"], serde_json::json!({ "status": "unfinished", "step": 2, "steps": 4 }));
    assert!(told["loss"]["last"].is_number() && told["next"] == "frugal resume run", "{told}");
    let (_, err) = tiny.succeed("resume run");
    assert!(err.contains("resumes after step 2 of 4\n"), "{err}");
    let log = String::from_utf8(tiny.bytes("run/losses.jsonl")).unwrap();
    let first = losses(&lines(&log))[0];
    let first = format!("4 steps, training loss {first:.4} to");
    assert!(err.contains(&first), "the first loss is that of the first step: {err}");
    let (out, _) = tiny.succeed("info run");
    assert!(out.contains("finished after 4 of 4 steps") && out.contains("rank"), "{out}");
    assert!(out.contains("frugal generate --model run --prompt TEXT"), "{out}");
}

#[test]
fn a_config_json_is_trained_into_a_model() {
    let tiny = Session::new();
    let text = String::from_utf8(tiny.bytes("model/config.json")).unwrap();
    std::fs::write(tiny.path("shape.json"), text).unwrap();
    tiny.succeed("train --model shape.json --data embedded --steps 2 --out scratch");
    tiny.succeed("info scratch/model");
}

/// A model that a training from scratch has made is a base for all others.
#[test]
fn a_model_from_scratch_is_fine_tuned_resumed_merged_and_offloaded() {
    let tiny = Session::new();
    let mut shape: serde_json::Value = serde_json::from_slice(&tiny.bytes("model/config.json")).unwrap();
    shape["vocab_size"] = 4096.into();
    std::fs::write(tiny.path("shape.json"), shape.to_string()).unwrap();
    let rows = r#"{"prompt": "The river", "completion": " is long."}
        {"prompt": "A town", "completion": " is small."}"#;
    std::fs::write(tiny.path("my.jsonl"), rows).unwrap();
    for command in [
        "train --model shape.json --data embedded --steps 2 --out scratch",
        "finetune --model scratch/model --data my.jsonl --out run --steps 2 --precision bf16 --activations recompute",
        "resume run",
        "generate --model scratch/model --adapter run --prompt Once --max-new-tokens 4",
        "merge --model scratch/model --adapter run --out merged",
        "generate --model merged --offload file --prompt Once --max-new-tokens 4",
        "finetune --model scratch/model --data my.jsonl --out host --steps 2 --offload host --optimizer-on host",
        "finetune --model scratch/model --data my.jsonl --out full --method full --steps 2 --mlp input-only",
    ] {
        tiny.succeed(command);
    }
}

#[test]
fn a_plan_says_what_fits_without_weights() {
    let tiny = Session::new();
    // Rates that are given are not measured.
    let rates = "--flops 1e11 --link 10GB --host-bandwidth 10GB";
    let (out, _) =
        tiny.succeed(&format!("plan --model qwen2.5-0.5b --budget 3GiB --length 128 {rates} --json"));
    let told = &lines(&out)[0];
    assert!(told["chosen"].is_string() && told["variants"].as_array().unwrap().len() >= 4, "{told}");
    let (out, _) =
        tiny.succeed("plan --model model/config.json --budget 1GiB --length 64 --hardware rtx4090");
    assert!(out.contains("the fastest that fits"), "{out}");
}

#[test]
fn every_optimizer_and_schedule_trains_as_it_is_called() {
    let tiny = Session::new();
    let rates_of =
        |lines: &[Value]| lines.iter().filter_map(|line| line["learning_rate"].as_f64()).collect::<Vec<_>>();
    let mut seen = Vec::new();
    for optimizer in ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"] {
        let arguments = format!("--width 16 --steps 4 --lr 0.01 --optimizer {optimizer}");
        let lines = lines(&tiny.succeed(&format!("train --json --heads 2 {arguments}")).0);
        assert_eq!(rates_of(&lines), [0.01; 4], "{optimizer}");
        let losses = losses(&lines);
        assert_eq!(losses.len(), 4, "{optimizer}");
        assert!(!seen.contains(&losses), "{optimizer} is that of another name");
        seen.push(losses);
    }
    let close = |schedule: &str, expected: [f64; 4]| {
        let have = rates_of(&lines(
            &tiny.succeed(&format!("train --json --heads 2 --width 16 --steps 4 --lr 0.1 {schedule}")).0,
        ));
        assert_eq!(have.len(), 4);
        for (have, want) in have.iter().zip(expected) {
            assert!((have - want).abs() < 1e-12, "{schedule}: {have} {want}");
        }
    };
    close("--warmup 1", [0.05, 0.1, 0.1, 0.1]);
    close("--schedule linear", [0.1, 0.075, 0.05, 0.025]);
    close("--schedule cosine --warmup 2", [0.1 / 3.0, 0.2 / 3.0, 0.1, 0.05]);
}
