//! `planning large`: fine-tunes a model that is larger than its budget, with the program.

use models::DecoderConfig;
use report::cli::Scale;
use report::{Case, Metric};
use tch::Kind;

use super::sandbox::Sandbox;
use crate::driver::Bench;
use crate::shape::Shape;

/// Rows of the data; each is a step.
const ROWS: usize = 16;

#[derive(clap::Args)]
pub(crate) struct Large {
    /// Steps of a training [default: by scale]
    #[arg(long)]
    steps: Option<usize>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Large) -> anyhow::Result<()> {
    let seven_billion = || Shape::Large.config();
    let (shape, config, length, budget) = match bench.scale {
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
    bench.expect(3);
    bench.message(&format!("writing {shape} in bf16"));
    sandbox.write_random_model("model", &config, Kind::BFloat16)?;
    sandbox.write_rows("rows.jsonl", ROWS, length, bench.seed)?;
    bench.step();
    for (dtype, flags) in [("bf16", &[][..]), ("NF4", &["--dtype", "nf4"])] {
        bench.message(&format!("{shape}, {dtype}, within {budget}"));
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
        bench.step();
        let case = Case::new().with("shape", shape).with("dtype", dtype).with("budget", budget);
        let Some(trained) = trained else {
            bench.put(&case, vec![Metric::not_measured("step_seconds", "s", "nothing fits")])?;
            continue;
        };
        bench.print(&format!("{dtype}: {}", trained.chosen.clone().unwrap_or_default()));
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
        bench.put(&case, metrics)?;
    }
    Ok(())
}
