//! `planning weights`: a full fine-tuning in fp32, and in bf16 under each way in which its weights can take small updates.

use anyhow::Context;
use models::DecoderConfig;
use report::{Case, Metric};
use tch::Kind;

use super::sandbox::Sandbox;
use crate::driver::Bench;

/// Names and flags; the others are compared with the first.
const TRAININGS: [(&str, &[&str]); 4] = [
    ("fp32", &["--dtype", "float32"]),
    ("bf16, master weights", &["--dtype", "bfloat16", "--master-weights", "true"]),
    ("bf16, stochastic rounding", &["--dtype", "bfloat16", "--master-weights", "stochastic"]),
    ("bf16, rounded", &["--dtype", "bfloat16", "--master-weights", "false"]),
];

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let sandbox = Sandbox::new()?;
    let (config, steps, seeds) = bench.sized([
        (DecoderConfig::llama(4096, 64, 176, 2, 2), 4, 1),
        (DecoderConfig::llama(4096, 256, 704, 4, 4), 100, 1),
        (DecoderConfig::llama(4096, 256, 704, 6, 4), 300, 2),
        (DecoderConfig::llama(4096, 256, 704, 6, 4), 300, 2),
    ]);
    sandbox.write_model("random", &config, Kind::Float)?;
    sandbox.copy_data("before.txt", "corpus/train.txt")?;
    sandbox.copy_data("after.txt", "small-problems/stories.txt")?;
    let training = |model: &str, data: &str, lr: &str, seed: u64, more: &[&str]| -> Vec<String> {
        let (steps, seed) = (steps.to_string(), seed.to_string());
        let words = ["finetune", "--model", model, "--data", data, "--method", "full", "--steps", &steps];
        let sizes = ["--max-length", "128", "--batch-size", "4", "--accumulation", "1", "--lr", lr];
        let rest = ["--evaluate-every", &steps, "--samples", "0", "--seed", &seed];
        words.iter().chain(&sizes).chain(&rest).chain(more).map(|word| (*word).to_owned()).collect()
    };
    bench.expect(1 + seeds as usize * TRAININGS.len());
    bench.message("before");
    sandbox.losses(&training("random", "before.txt", "1e-3", bench.seed, &[]), Some("base"))?;
    bench.step();
    for seed in 0..seeds {
        let mut reference = None;
        for (name, flags) in TRAININGS {
            bench.message(&format!("{name}, seed {seed}"));
            let words = training("base", "after.txt", "2e-5", bench.seed + seed, flags);
            let losses = sandbox.losses(&words, None)?;
            let (first, last) = losses.first().zip(losses.last()).context("no validation loss")?;
            let fall = first - last;
            let case = Case::new().with("weights", name).with("seed", seed);
            let metrics = vec![
                Metric::exact("first_loss", "nat", *first),
                Metric::exact("last_loss", "nat", *last),
                Metric::exact("fall", "nat", fall),
                Metric::exact("fall_vs_fp32", "ratio", fall / *reference.get_or_insert(fall)),
            ];
            bench.put(&case, metrics)?;
            bench.step();
        }
    }
    Ok(())
}
