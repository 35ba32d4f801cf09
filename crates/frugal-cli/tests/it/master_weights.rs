//! Trained weights in bf16 and fp16 learn as those in fp32 do: with fp32 master weights, and with stochastic rounding.

use frugal::Config;
use frugal::config::MasterWeights;
use serde_json::{Value, json};

use crate::tiny_folder::{self, Tiny};

const TRAIN: &str = "finetune --model model --data rows.jsonl --method full --batch-size 8 --accumulation 1 --held-out 0 --samples 0 \
                     --schedule constant --warmup 0 --lr 2e-4 --seed 3";

/// Rows of token ids that a step can learn from.
fn tiny() -> Tiny {
    let tiny = Tiny::new();
    let row = |first: usize| {
        let ids: Vec<usize> = (0..24).map(|at| 10 + (first + at * at) % 97).collect();
        json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
    };
    std::fs::write(tiny.path("rows.jsonl"), (0..8).map(row).collect::<String>()).unwrap();
    tiny
}

/// By how much the loss falls in a training.
fn fall(tiny: &Tiny, out: &str, flags: &str) -> f64 {
    tiny.succeed(&format!("{TRAIN} --steps 40 --out {out} {flags}"));
    let losses = tiny.losses(out);
    losses[0].1 - losses[losses.len() - 1].1
}

/// The oracle is the training in fp32.
#[test]
fn the_loss_of_16_bit_weights_falls_as_that_of_fp32() {
    let tiny = tiny();
    let exact = fall(&tiny, "exact", "--dtype float32");
    let mut shares = Vec::new();
    for (number, flags) in [
        "--dtype bfloat16",
        "--dtype bfloat16 --master-weights stochastic",
        "--dtype float16",
        "--dtype float16 --master-weights stochastic",
        "--dtype bfloat16 --master-weights stochastic --optimizer-on host --offload host",
        "--dtype bfloat16 --optimizer-on host --offload file --clip 0",
    ]
    .into_iter()
    .enumerate()
    {
        let share = fall(&tiny, &format!("run{number}"), flags) / exact;
        shares.push((flags, share));
    }
    let lost = fall(&tiny, "lost", "--dtype bfloat16 --master-weights false") / exact;
    assert!(shares.iter().all(|(_, share)| (share - 1.0).abs() < 0.05), "{shares:?}, without {lost}");
    assert!(lost < 0.8, "{lost}: the test shows nothing");
}

/// Where a decision was made, a run's configuration has it, the first lines say it, and a resume keeps it and the bits.
#[test]
fn a_run_says_and_keeps_how_its_weights_are_rounded() {
    let tiny = tiny();
    let written =
        |out: &str| Config::read(&tiny.path(out).join("config.toml")).unwrap().optimizer.master_weights;
    let of = |out: &str, flags: &str| {
        let (_, said) = tiny.succeed(&format!("{TRAIN} --out {out} {flags}"));
        (said, written(out))
    };
    let (said, way) = of("copies", "--dtype bfloat16 --steps 2");
    assert!(said.contains("the bfloat16 weights are trained with fp32 master weights"), "{said}");
    assert_eq!(way, MasterWeights::Always);
    let text = String::from_utf8(tiny.bytes("copies/config.toml")).unwrap();
    assert!(text.contains("\nmaster_weights = true # the plan\n"), "{text}");
    let (said, way) = of("exact", "--dtype float32 --steps 2");
    assert!(!said.contains("master weights"), "{said}");
    assert_eq!(way, MasterWeights::Auto);
    let (said, _) = of("lost", "--dtype bfloat16 --steps 2 --set optimizer.master_weights=false");
    assert!(said.contains("optimizer.master_weights = false: the bfloat16 weights lose"), "{said}");

    let stochastic = "--dtype bfloat16 --master-weights stochastic";
    let (said, way) = of("whole", &format!("{stochastic} --steps 6"));
    assert!(said.contains("the bfloat16 weights are rounded stochastically"), "{said}");
    assert_eq!(way, MasterWeights::Stochastic);
    // A resume of a run whose configuration says it, by the command that says nothing.
    of("resumed", &format!("{stochastic} --steps 3"));
    tiny.succeed("resume resumed --set training.steps=6");
    of("files", &format!("{stochastic} --steps 6 --offload file --optimizer-on host"));
    let model = |out: &str| tiny.bytes(&format!("{out}/model/model.safetensors"));
    for other in ["resumed", "files"] {
        assert!(model(other) == model("whole"), "{other}");
    }
    // Another seed: of the rounding, where one batch has all rows.
    tiny.succeed(&format!("{} --out seeded {stochastic} --steps 6", TRAIN.replace("--seed 3", "--seed 4")));
    assert!(model("seeded") != model("whole"));
}

/// The bytes of the plan are those of the recipe, and a dry run shows the run's.
#[test]
fn the_plan_counts_master_weights() {
    let tiny = tiny();
    let plan = |flags: &str| -> Value {
        let (told, _) = tiny.succeed(&format!("{TRAIN} --dtype bfloat16 --steps 2 --json --dry-run {flags}"));
        tiny_folder::lines(&told).into_iter().find_map(|line| line.get("plan").cloned()).unwrap()
    };
    let (copies, stochastic) = (plan(""), plan("--master-weights stochastic"));
    assert_eq!(
        (&copies["master_weights"], &stochastic["master_weights"]),
        (&json!(true), &json!("stochastic"))
    );
    assert_eq!(plan("--master-weights true")["peak_bytes"], copies["peak_bytes"]);
    let (told, _) = tiny.succeed(&format!("{TRAIN} --dtype bfloat16 --steps 2 --json --out run"));
    let lines = tiny_folder::lines(&told);
    let run = lines.iter().find_map(|line| line.get("plan")).unwrap();
    assert_eq!(run["peak_bytes"], copies["peak_bytes"]);
}
