//! `lora techniques` and `lora optimizers`: the first steps of a fine-tuning with a pretrained model's weights, with one thing changed at a
//! time.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Args;
use frugal::run_folder::{LOSSES, RunRecord};
use report::{Case, Metric};
use serde_json::Value;

use crate::driver::Bench;
use crate::{installed, started_program};

/// Problems that are trained on, and that the validation loss is of.
const PROBLEMS: [usize; 2] = [400, 24];

/// A name, how rows lie, and what differs. The losses of a step are compared with those of the first variant whose rows lie in the same way.
type Variant = (&'static str, &'static [&'static str], &'static [&'static str]);

/// Rows of packed problems, two a step.
const PACKED: &[&str] = &["--packing", "1024", "--batch-size", "2", "--accumulation", "1"];
/// Rows of one problem, 16 a step.
const SEPARATE: &[&str] = &["--batch-size", "4", "--accumulation", "4"];
/// One row of packed problems.
const SHORT: &[&str] = &["--packing", "640", "--batch-size", "1", "--accumulation", "1"];

const TECHNIQUES: [Variant; 8] = [
    ("fp32", PACKED, &["--dtype", "float32"]),
    ("fp32 weights, bf16 autocast", PACKED, &["--dtype", "float32", "--precision", "bf16"]),
    ("bf16 weights", PACKED, &["--dtype", "bfloat16"]),
    ("NF4 weights", PACKED, &["--dtype", "nf4"]),
    ("bf16 weights, plain loss", PACKED, &["--dtype", "bfloat16", "--loss", "plain"]),
    ("bf16 weights, recomputed layers", PACKED, &["--dtype", "bfloat16", "--activations", "recompute"]),
    ("bf16 weights, rows padded", SEPARATE, &["--dtype", "bfloat16", "--padded"]),
    ("bf16 weights, rows without padding", SEPARATE, &["--dtype", "bfloat16"]),
];

const OPTIMIZERS: [Variant; 8] = [
    ("AdamW, fp32 weights", SHORT, &["--dtype", "float32"]),
    ("AdamW, fp32 copies", SHORT, &["--dtype", "bfloat16", "--master-weights", "true"]),
    ("AdamW", SHORT, &["--dtype", "bfloat16", "--master-weights", "stochastic"]),
    (
        "AdamW, 8-bit states",
        SHORT,
        &["--dtype", "bfloat16", "--master-weights", "stochastic", "--optimizer", "adamw8bit"],
    ),
    (
        "AdamW, 8-bit states, updates in backward",
        SHORT,
        &[
            "--dtype",
            "bfloat16",
            "--master-weights",
            "stochastic",
            "--optimizer",
            "adamw8bit",
            "--fused-optimizer",
        ],
    ),
    (
        "Lion",
        SHORT,
        &["--dtype", "bfloat16", "--master-weights", "stochastic", "--optimizer", "lion", "--lr", "4e-6"],
    ),
    (
        "Adafactor",
        SHORT,
        &["--dtype", "bfloat16", "--master-weights", "stochastic", "--optimizer", "adafactor"],
    ),
    ("Muon", SHORT, &["--dtype", "bfloat16", "--master-weights", "stochastic", "--optimizer", "muon"]),
];

#[derive(Args)]
pub(crate) struct Techniques {
    #[command(flatten)]
    inputs: Inputs,
    /// Optimizer steps
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..))]
    steps: u64,
}

#[derive(Args)]
pub(crate) struct Optimizers {
    #[command(flatten)]
    inputs: Inputs,
    /// Optimizer steps
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(2..))]
    steps: u64,
}

#[derive(Args)]
struct Inputs {
    /// A GGUF file, or the name of one that `cargo xtask setup --models` downloads
    #[arg(long, value_name = "FILE", default_value = installed::SMALL)]
    model: PathBuf,
    /// A folder with GSM8K's train.jsonl [default: the folder FRUGAL_GSM8K]
    #[arg(long, value_name = "FOLDER")]
    problems: Option<PathBuf>,
}

/// LoRA, with one technique changed at a time.
pub(crate) fn run(bench: &mut Bench, arguments: &Techniques) -> anyhow::Result<()> {
    measure(bench, &arguments.inputs, arguments.steps, &["--dropout", "0"], &TECHNIQUES)
}

/// All weights, by several optimizers.
pub(crate) fn run_optimizers(bench: &mut Bench, arguments: &Optimizers) -> anyhow::Result<()> {
    // Updates during backward come before the norm of all gradients is known.
    let shared = ["--method", "full", "--clip", "0", "--schedule", "constant"];
    measure(bench, &arguments.inputs, arguments.steps, &shared, &OPTIMIZERS)
}

fn measure(
    bench: &mut Bench,
    inputs: &Inputs,
    steps: u64,
    shared: &[&str],
    variants: &[Variant],
) -> anyhow::Result<()> {
    let (model, problems) =
        match (installed::find(&inputs.model), installed::gsm8k(inputs.problems.as_deref())) {
            (Some(model), Ok(problems)) => (model, problems),
            (None, _) => return skip(bench, &installed::missing(&inputs.model)),
            (_, Err(missing)) => return skip(bench, missing),
        };
    let scratch = tempfile::tempdir()?;
    let data = scratch.path().join("data");
    write_problems(&problems, &data)?;
    bench.expect(variants.len());
    let mut references: Vec<(&[&str], Vec<f64>)> = vec![];
    for &(variant, rows, flags) in variants {
        bench.message(variant);
        let out = scratch.path().join(variant.replace([' ', ','], "-"));
        let mut program = Command::new(started_program::path()?);
        program.args(["finetune", "--device", "cpu", "--quiet", "--no-baseline", "--samples", "0"]);
        program.args(["--steps", &steps.to_string(), "--format", "question-answer"]).args(shared);
        program
            .args(rows)
            .args(flags)
            .arg("--model")
            .arg(&model)
            .arg("--data")
            .arg(&data)
            .arg("--out")
            .arg(&out);
        let status = program.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        ensure!(status.success(), "{program:?} failed with {status}");
        let run = Run::read(&out)?;
        let mut metrics = run.metrics()?;
        match references.iter().find(|(of, _)| *of == rows) {
            None => references.push((rows, run.losses)),
            Some((_, reference)) => {
                let pairs = run.losses.iter().zip(reference);
                let differences = pairs.map(|(loss, other)| (loss - other).abs());
                metrics.push(Metric::exact("loss_difference", "nat", differences.fold(0.0, f64::max)));
                let ratio = run.losses.iter().sum::<f64>() / reference.iter().sum::<f64>();
                metrics.push(Metric::exact("loss_ratio", "ratio", ratio));
            }
        }
        bench.put(&Case::new().with("variant", variant), metrics)?;
        std::fs::remove_dir_all(&out)?;
        bench.step();
    }
    Ok(())
}

fn skip(bench: &mut Bench, missing: &str) -> anyhow::Result<()> {
    bench.put(&Case::new(), vec![Metric::not_measured("tokens_per_second", "tokens/s", missing)])
}

/// Writes the first problems as training data, and the next as validation data.
fn write_problems(problems: &Path, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir(folder)?;
    let file = problems.join("train.jsonl");
    let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let mut lines = text.lines();
    for (name, count) in ["train.jsonl", "validation.jsonl"].into_iter().zip(PROBLEMS) {
        let mut split = std::fs::File::create(folder.join(name))?;
        for line in lines.by_ref().take(count) {
            writeln!(split, "{line}")?;
        }
    }
    Ok(())
}

/// What a fine-tuning has left in its folder.
struct Run {
    record: RunRecord,
    losses: Vec<f64>,
    validation: Vec<f64>,
    /// Tokens and padding of all steps.
    tokens: f64,
    padding: f64,
    /// Tokens per second of each step after the first, which fills caches.
    rates: Vec<f64>,
}

impl Run {
    fn read(out: &Path) -> anyhow::Result<Self> {
        let record = RunRecord::read(out)?.context("the run left no record")?;
        let mut run =
            Self { record, losses: vec![], validation: vec![], tokens: 0.0, padding: 0.0, rates: vec![] };
        for line in std::fs::read_to_string(out.join(LOSSES))?.lines() {
            let value: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            run.validation.extend(value["validation_loss"].as_f64());
            let [loss, tokens, padding, seconds] =
                ["loss", "tokens", "padding", "seconds"].map(|key| value[key].as_f64());
            let (Some(loss), Some(tokens), Some(seconds)) = (loss, tokens, seconds) else { continue };
            if !run.losses.is_empty() {
                run.rates.push(tokens / seconds);
            }
            run.losses.push(loss);
            run.tokens += tokens;
            run.padding += padding.unwrap_or(0.0);
        }
        Ok(run)
    }

    fn metrics(&self) -> anyhow::Result<Vec<Metric>> {
        let outcome = self.record.outcome.as_ref().context("the run left no outcome")?;
        let validation = self.validation.last().context("no validation loss")?;
        Ok(vec![
            Metric::of_samples("tokens_per_second", "tokens/s", &self.rates),
            Metric::exact("peak_bytes", "B", outcome.peak_bytes as f64),
            Metric::exact("padding_share", "ratio", self.padding / (self.tokens + self.padding)),
            Metric::exact("validation_loss", "nat", *validation),
        ])
    }
}
