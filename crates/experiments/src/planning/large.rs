//! `planning large`: fine-tunes a model that is larger than its budget, with the program.

use models::DecoderConfig;
use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use tch::Kind;

use super::sandbox::Sandbox;
use crate::shape::Shape;

const EXPERIMENT: &str = "plan-large";

/// Rows of the data, one of which is a step.
const ROWS: usize = 16;

#[derive(clap::Args)]
pub(crate) struct Large {
    /// How large it is: full and paper are Qwen2.5-7B's shape within 4 GiB, and 15 GB on the disk, twice with the layers in NF4
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,
    /// Steps of a training [default: by scale]
    #[arg(long)]
    steps: Option<usize>,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Large) -> anyhow::Result<()> {
    let mut sink = Sink::new(common, crate::environment::of(tch::Device::Cpu)?, arguments.scale)?;
    let seven_billion = || Shape::Large.config();
    let (shape, config, length, budget) = match arguments.scale {
        Scale::Smoke => ("tiny", Shape::Tiny.config()?, 32, "1GiB"),
        Scale::Laptop => (
            "4 of Qwen2.5-7B's blocks",
            DecoderConfig { num_hidden_layers: 4, vocab_size: 32_768, ..seven_billion()? },
            128,
            "2GiB",
        ),
        Scale::Full | Scale::Paper => ("Qwen2.5-7B", seven_billion()?, 256, "4GiB"),
    };
    // The program calibrates its prediction with three.
    let steps = arguments.steps.unwrap_or(5);
    let sandbox = Sandbox::new()?;
    let mut progress = Progress::new(3);
    progress.message(&format!("writing {shape} in bf16"));
    sandbox.write_random_model("model", &config, Kind::BFloat16)?;
    sandbox.write_rows("rows.jsonl", ROWS, length, common.seed)?;
    progress.step();
    for (dtype, flags) in [("bf16", &[][..]), ("NF4", &["--dtype", "nf4"])] {
        progress.message(&format!("{shape}, {dtype}, within {budget}"));
        let (length_text, steps_text) = (length.to_string(), steps.to_string());
        let mut given =
            vec!["--model", "model", "--data", "rows.jsonl", "--budget", budget, "--steps", &steps_text];
        given.extend([
            "--batch-size",
            "1",
            "--accumulation",
            "1",
            "--max-length",
            &length_text,
            "--dropout",
            "0",
        ]);
        given.extend(["--held-out", "0", "--samples", "0", "--log-every", "1"]);
        given.extend(flags);
        let given: Vec<String> = given.into_iter().map(str::to_owned).collect();
        let trained = sandbox.train(&given)?;
        progress.step();
        let case = Case::new().with("shape", shape).with("dtype", dtype).with("budget", budget);
        let Some(trained) = trained else {
            sink.put(EXPERIMENT, &case, vec![Metric::not_measured("step_seconds", "s", "nothing fits")])?;
            continue;
        };
        progress.print(&format!("{dtype}: {}", trained.chosen.clone().unwrap_or_default()));
        let tokens = length as f64;
        let allowed = accounting::quantity::parse_bytes(budget)? as f64;
        let metrics = vec![
            Metric::exact("step_seconds", "s", trained.step_seconds),
            Metric::exact("tokens_per_second", "tokens/s", tokens / trained.step_seconds),
            Metric::exact("held_bytes", "B", trained.held_bytes),
            Metric::exact("held_ratio", "ratio", trained.held_bytes / allowed),
            Metric::exact("seconds", "s", trained.seconds),
            Metric::exact("first_loss", "nat", trained.losses.0),
            Metric::exact("last_loss", "nat", trained.losses.1),
        ];
        let case = case.with("plan", trained.chosen.unwrap_or_default()).with("steps", steps as u64);
        sink.put(EXPERIMENT, &case, metrics)?;
    }
    Ok(())
}
