//! `lora techniques`: the first steps of a fine-tuning with a pretrained model's weights, with one technique changed at a time.

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

/// The first is what the others are compared with.
const VARIANTS: [(&str, &[&str]); 7] = [
    ("fp32", &["--dtype", "float32", "--packing", "1024", "--batch-size", "2"]),
    (
        "fp32 weights, bf16 autocast",
        &["--dtype", "float32", "--packing", "1024", "--batch-size", "2", "--precision", "bf16"],
    ),
    ("bf16 weights", &["--dtype", "bfloat16", "--packing", "1024", "--batch-size", "2"]),
    ("NF4 weights", &["--dtype", "nf4", "--packing", "1024", "--batch-size", "2"]),
    (
        "bf16 weights, plain loss",
        &["--dtype", "bfloat16", "--packing", "1024", "--batch-size", "2", "--loss", "plain"],
    ),
    (
        "bf16 weights, recomputed layers",
        &["--dtype", "bfloat16", "--packing", "1024", "--batch-size", "2", "--activations", "recompute"],
    ),
    ("bf16 weights, rows padded", &["--dtype", "bfloat16", "--batch-size", "10", "--micro-batch-size", "5"]),
];

#[derive(Args)]
pub(crate) struct Techniques {
    /// A GGUF file, or the name of one that `cargo xtask setup --models` downloads
    #[arg(long, value_name = "FILE", default_value = installed::SMALL)]
    model: PathBuf,
    /// A folder with GSM8K's train.jsonl [default: the folder FRUGAL_GSM8K]
    #[arg(long, value_name = "FOLDER")]
    problems: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..))]
    steps: u64,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Techniques) -> anyhow::Result<()> {
    let (model, problems) =
        match (installed::find(&arguments.model), installed::gsm8k(arguments.problems.as_deref())) {
            (Some(model), Ok(problems)) => (model, problems),
            (None, _) => return skip(bench, &installed::missing(&arguments.model)),
            (_, Err(missing)) => return skip(bench, missing),
        };
    let scratch = tempfile::tempdir()?;
    let data = scratch.path().join("data");
    write_problems(&problems, &data)?;
    bench.expect(VARIANTS.len());
    let mut reference: Option<Vec<f64>> = None;
    for (variant, flags) in VARIANTS {
        bench.message(variant);
        let out = scratch.path().join(variant.replace([' ', ','], "-"));
        let mut program = Command::new(started_program::path()?);
        program.args([
            "finetune",
            "--device",
            "cpu",
            "--quiet",
            "--no-baseline",
            "--samples",
            "0",
            "--dropout",
            "0",
        ]);
        program.args([
            "--steps",
            &arguments.steps.to_string(),
            "--accumulation",
            "1",
            "--format",
            "question-answer",
        ]);
        program.args(flags).arg("--model").arg(&model).arg("--data").arg(&data).arg("--out").arg(&out);
        let status = program.stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        ensure!(status.success(), "{program:?} failed with {status}");
        let run = Run::read(&out)?;
        let mut metrics = run.metrics()?;
        // Rows that are padded are others than those that are packed.
        let is_packed = flags.contains(&"--packing");
        let reference = reference.get_or_insert_with(|| run.losses.clone());
        if is_packed {
            let differences = run.losses.iter().zip(&*reference).map(|(loss, other)| (loss - other).abs());
            metrics.push(Metric::exact("loss_difference", "nat", differences.fold(0.0, f64::max)));
        }
        bench.put(&Case::new().with("variant", variant), metrics)?;
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
