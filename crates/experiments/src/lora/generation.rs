//! `lora generation`: tokens per second of generation with a pretrained model's weights, in the types that GGUF files have.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::ensure;
use clap::Args;
use kernels::nf4::Scales;
use kernels::physical;
use kernels::quantized::blocks;
use report::{Case, Metric};
use tch::Kind;

use super::decode::{Prompts, seconds};
use crate::driver::Bench;
use crate::installed::{self, GgufFolder};
use crate::started_program;

/// A type without a file: the projections in NF4, the rest in bf16.
const NF4: &str = "nf4";

#[derive(Args)]
pub(crate) struct Generation {
    /// A GGUF file, or the name of one that `cargo xtask setup --models` downloads
    #[arg(long, value_name = "FILE", default_value = installed::ASSIGNMENT)]
    model: PathBuf,
    /// Types of the weights: those of `frugal export --type`, and nf4
    #[arg(long, value_delimiter = ',', default_value = "bf16,q8_0,q4_k_m,nf4")]
    types: Vec<String>,
    /// Prompts per batch
    #[arg(long, value_delimiter = ',', default_value = "1,4,8", value_parser = clap::value_parser!(i64).range(1..))]
    batch: Vec<i64>,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(i64).range(1..))]
    prompt: i64,
    /// New tokens per prompt
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(2..))]
    new_tokens: u32,
    /// Measured repeats
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Generation) -> anyhow::Result<()> {
    let Some(model) = installed::find(&arguments.model) else {
        let metric =
            Metric::not_measured("tokens_per_second", "tokens/s", &installed::missing(&arguments.model));
        return bench.put(&Case::new(), vec![metric]);
    };
    let name = arguments.model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    bench.expect(arguments.types.len() * arguments.batch.len());
    let program = started_program::path()?;
    for kind in &arguments.types {
        bench.message(&format!("{name} in {kind}: reading weights"));
        let scratch = tempfile::tempdir()?;
        let file = scratch.path().join("model.gguf");
        let (weights, dtype) = match kind.as_str() {
            NF4 => (&model, Scales::Nested.kind()),
            other => {
                let mut export = Command::new(&program);
                export.args(["export", "--format", "gguf", "--type", other, "--model"]).arg(&model);
                let status = export.arg("--out").arg(&file).stdout(Stdio::null()).status()?;
                ensure!(status.success(), "{export:?} failed with {status}");
                let is_float = ["f32", "f16", "bf16"].contains(&other);
                (&file, if is_float { Kind::BFloat16 } else { blocks::KIND })
            }
        };
        let folder = GgufFolder::new(weights)?;
        let model = folder.open()?.load(Some(dtype), bench.device)?;
        for &rows in &arguments.batch {
            bench.message(&format!("{name} in {kind}, {rows} at a time"));
            let prompts = Prompts { rows, tokens: arguments.prompt, new: arguments.new_tokens };
            // The first time fills caches.
            seconds(&model, prompts)?;
            let mut tokens = Vec::new();
            let mut read = Vec::new();
            for _ in 0..arguments.repeats {
                tokens.push(seconds(&model, prompts)?[1]);
                read.extend(physical::read_bandwidth(bench.device)?.rate());
            }
            let rates: Vec<f64> = tokens.iter().map(|seconds| rows as f64 / seconds).collect();
            let case =
                Case::new().with("model", name.as_str()).with("type", kind.as_str()).with("batch", rows);
            let metrics = vec![
                Metric::of_samples("token_seconds", "s", &tokens),
                Metric::of_samples("tokens_per_second", "tokens/s", &rates),
                Metric::of_samples("read_bandwidth", "B/s", &read),
            ];
            bench.put(&case, metrics)?;
            bench.step();
        }
    }
    Ok(())
}
