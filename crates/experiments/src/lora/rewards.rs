//! `lora rewards`: a pretrained model learns sums from grades of its own answers, by the program that a user has.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Args;
use frugal::run_folder::{LOSSES, RunRecord};
use frugal::tasks::gsm8k::Accuracy;
use report::{Case, Metric};
use serde_json::{Value, json};

use crate::driver::Bench;
use crate::{installed, started_program};

/// Sums that are learned from, and others whose greedy answers are graded.
const SUMS: [usize; 2] = [1600, 200];
/// Both numbers of a sum, from 10 on.
const NUMBERS: usize = 90;
/// Sums of a step, and answers to each.
const QUESTIONS: u64 = 4;
const ANSWERS: u64 = 8;

#[derive(Args)]
pub(crate) struct Rewards {
    /// A GGUF file, or the name of one that `cargo xtask setup --models` downloads
    #[arg(long, value_name = "FILE", default_value = installed::SMALL)]
    model: PathBuf,
    /// Optimizer steps
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Steps between evaluations
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    evaluate_every: u64,
    /// Learning rate
    #[arg(long, default_value_t = 5e-4)]
    lr: f64,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Rewards) -> anyhow::Result<()> {
    let Some(model) = installed::find(&arguments.model) else {
        let missing = installed::missing(&arguments.model);
        return bench.put(&Case::new(), vec![Metric::not_measured("accuracy", "ratio", &missing)]);
    };
    let scratch = tempfile::tempdir()?;
    write_sums(scratch.path())?;
    let out = scratch.path().join("out");
    let mut program = Command::new(started_program::path()?);
    program.current_dir(scratch.path()).args([
        "finetune",
        "--device",
        "cpu",
        "--quiet",
        "--objective",
        "grpo",
    ]);
    program.args(["--grader", "number", "--questions", "train.jsonl", "--validation", "validation.jsonl"]);
    program.args(["--dtype", "bfloat16", "--dropout", "0", "--accumulation", "1", "--max-new-tokens", "24"]);
    for (flag, value) in [
        ("--batch-size", QUESTIONS * ANSWERS),
        ("--group-size", ANSWERS),
        ("--steps", arguments.steps),
        ("--evaluate-every", arguments.evaluate_every),
    ] {
        program.args([flag, &value.to_string()]);
    }
    program.args(["--lr", &arguments.lr.to_string()]).arg("--model").arg(&model).arg("--out").arg(&out);
    let status = program.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "{program:?} failed with {status}");
    let lines = std::fs::read_to_string(out.join(LOSSES))?;
    let lines = lines.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let record = RunRecord::read(&out)?.context("the run left no record")?;
    let outcome = record.outcome.context("the run left no outcome")?;
    put_evaluations(bench, &lines, arguments.steps, outcome.peak_bytes as f64)
}

/// Writes different sums into two files, each question with its answer.
fn write_sums(folder: &Path) -> anyhow::Result<()> {
    // 7919 has no factor with 90² in common, so no sum comes twice.
    let mut sums = (0..NUMBERS * NUMBERS).map(|number| number * 7919 % (NUMBERS * NUMBERS));
    for (name, count) in ["train.jsonl", "validation.jsonl"].into_iter().zip(SUMS) {
        let lines: Vec<String> = sums
            .by_ref()
            .take(count)
            .map(|sum| {
                let (a, b) = (10 + sum / NUMBERS, 10 + sum % NUMBERS);
                json!({ "question": format!("What is {a} + {b}?"), "answer": (a + b).to_string() })
                    .to_string()
            })
            .collect();
        std::fs::write(folder.join(name), lines.join("\n"))?;
    }
    Ok(())
}

/// Records each evaluation, and the sampled answers of the steps before it.
fn put_evaluations(bench: &mut Bench, lines: &[Value], last: u64, peak: f64) -> anyhow::Result<()> {
    let (mut rewards, mut lengths, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for line in lines {
        let of = |key: &str| line[key].as_f64();
        if let (Some(reward), Some(length), Some(seconds)) =
            (of("reward"), of("answer_tokens"), of("seconds"))
        {
            rewards.push(reward);
            lengths.push(length);
            // Answers are sampled and learned.
            rates.push((QUESTIONS * ANSWERS) as f64 * length / seconds);
        }
        let Some(share) = of("validation_reward") else { continue };
        let accuracy = Accuracy { right: (share * SUMS[1] as f64).round() as usize, of: SUMS[1] };
        let (from, to) = accuracy.interval();
        let mut metrics = vec![
            Metric::exact("accuracy", "ratio", accuracy.share()),
            Metric::exact("accuracy_from", "ratio", from),
            Metric::exact("accuracy_to", "ratio", to),
        ];
        if !rewards.is_empty() {
            metrics.push(Metric::of_samples("reward", "ratio", &rewards));
            metrics.push(Metric::of_samples("answer_tokens", "tokens", &lengths));
            metrics.push(Metric::of_samples("tokens_per_second", "tokens/s", &rates));
        }
        let step = line["step"].as_u64().context("no step")?;
        if step == last {
            metrics.push(Metric::exact("peak_bytes", "B", peak));
        }
        bench.put(&Case::new().with("model", "SmolLM2-135M").with("step", step), metrics)?;
        rewards.clear();
        lengths.clear();
        rates.clear();
    }
    Ok(())
}
