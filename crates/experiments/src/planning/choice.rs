//! `planning choice`: the plan that `frugal finetune` chooses under a budget, against every other way to run the same step; in one process, or
//! over ranks that `frugal launch` starts.
//!
//! Each variant is a training of its own under the same budget; rounds alternate over the variants. Its time is the least, over the
//! rounds, of the median step. A variant that the budget refuses does not fit.

use models::DecoderConfig;
use report::cli::Scale;
use report::{Case, Metric};
use tch::Kind;

use super::sandbox::{Sandbox, Trained};
use crate::driver::Bench;

/// Rows of the data.
const ROWS: usize = 64;

#[derive(clap::Args)]
pub(crate) struct Choice {
    /// Processes that train together
    #[arg(long, default_value_t = 1)]
    pub(crate) ranks: usize,
    /// Steps of a training [default: by scale]
    #[arg(long)]
    steps: Option<usize>,
    /// Rounds over the variants [default: by scale]
    #[arg(long)]
    rounds: Option<usize>,
}

/// A model, a method, and a budget.
struct Job {
    model: &'static str,
    config: DecoderConfig,
    kind: Kind,
    method: &'static str,
    rows: usize,
    length: usize,
    /// `None` for the default one. Of several ranks, that of each.
    budget: Option<&'static str>,
    ranks: usize,
}

/// A way to run a step, as flags.
type Variant = (&'static str, &'static [&'static str]);

/// The program's own choice.
const CHOSEN: Variant = ("chosen", &[]);

/// The other ways for frozen layers.
const FROZEN: [Variant; 7] = [
    ("keep all", &["--activations", "keep"]),
    ("recompute elementwise operations", &["--activations", "recompute", "--recompute-what", "elementwise"]),
    ("recompute MLPs", &["--activations", "recompute", "--recompute-what", "mlp"]),
    ("recompute every second layer", &["--activations", "every-k"]),
    ("recompute all", &["--activations", "recompute"]),
    ("one row at a time", &["--activations", "keep", "--micro-batch-size", "1"]),
    ("layers in files", &["--offload", "file"]),
];

/// The other ways for trained layers.
const TRAINED: [Variant; 8] = [
    FROZEN[0],
    FROZEN[1],
    FROZEN[2],
    FROZEN[3],
    FROZEN[4],
    FROZEN[5],
    ("layers in host memory", &["--offload", "host", "--optimizer-on", "host"]),
    ("layers and optimizer in files", &["--offload", "file", "--optimizer-on", "host"]),
];

/// The other ways over ranks.
const DIVIDED: [Variant; 8] = [
    ("ZeRO-1, keep all", &["--zero-stage", "1", "--activations", "keep"]),
    ("ZeRO-1, recompute every second layer", &["--zero-stage", "1", "--activations", "every-k"]),
    ("ZeRO-1, recompute all", &["--zero-stage", "1", "--activations", "recompute"]),
    ("ZeRO-1, one row at a time", &["--zero-stage", "1", "--activations", "keep", "--micro-batch-size", "1"]),
    ("ZeRO-2, keep all", &["--zero-stage", "2", "--activations", "keep"]),
    ("ZeRO-2, recompute all", &["--zero-stage", "2", "--activations", "recompute"]),
    ("ZeRO-3, keep all", &["--zero-stage", "3", "--activations", "keep"]),
    ("ZeRO-3, recompute all", &["--zero-stage", "3", "--activations", "recompute"]),
];

impl Job {
    fn variants(&self, scale: Scale) -> impl Iterator<Item = Variant> {
        let others = match self.method {
            _ if self.ranks > 1 => &DIVIDED[..],
            "full" => &TRAINED[..],
            _ => &FROZEN,
        };
        let tried = if scale == Scale::Smoke { 2 } else { others.len() };
        std::iter::once(CHOSEN).chain(others[..tried].iter().copied())
    }

    /// Such as `SmolLM2-135M, full, 4 × 256 tokens, within 3GiB`.
    fn name(&self) -> String {
        let Self { model, method, rows, length, ranks, .. } = self;
        let budget = self.budget.map_or("80 % of the free memory".to_owned(), str::to_owned);
        match ranks {
            1 => format!("{model}, {method}, {rows} × {length} tokens, within {budget}"),
            _ => format!(
                "{model}, {method}, {rows} × {length} tokens on each of {ranks} ranks, within {budget} each"
            ),
        }
    }

    fn arguments(&self, steps: usize, variant: Variant) -> Vec<String> {
        let rows = self.rows.to_string();
        let (steps, ranks) = (steps.to_string(), self.ranks.to_string());
        let mut arguments = vec!["--model", "model", "--data", "rows.jsonl", "--method", self.method];
        arguments.extend(["--batch-size", &rows, "--accumulation", &ranks, "--steps", &steps]);
        arguments.extend(["--dropout", "0"].into_iter().filter(|_| self.method == "lora"));
        arguments.extend(["--held-out", "0", "--log-every", "1", "--samples", "0"]);
        arguments.extend(self.budget.iter().flat_map(|budget| ["--budget", *budget]));
        arguments.extend(variant.1);
        arguments.into_iter().map(str::to_owned).collect()
    }
}

/// The cases of a scale.
fn jobs(scale: Scale, ranks: usize) -> Vec<Job> {
    let tied = |config: DecoderConfig, kv_heads| DecoderConfig {
        num_key_value_heads: kv_heads,
        tie_word_embeddings: true,
        ..config
    };
    let tiny = || tied(DecoderConfig::qwen2(4096, 128, 704, 4, 2), 1);
    let smol = || tied(DecoderConfig::llama(49_152, 576, 1536, 30, 9), 3);
    let qwen = || tied(DecoderConfig::qwen2(151_936, 896, 4864, 24, 14), 2);
    let job = |model, config, kind, method, length, budget| Job {
        model,
        config,
        kind,
        method,
        rows: if ranks > 1 { 2 } else { 4 },
        length,
        budget,
        ranks,
    };
    let (wide, narrow) = (Kind::Float, Kind::BFloat16);
    if scale == Scale::Smoke {
        return vec![job("tiny", tiny(), wide, "lora", 32, None)];
    }
    if ranks > 1 {
        return vec![
            job("SmolLM2-135M", smol(), wide, "lora", 128, None),
            job("SmolLM2-135M", smol(), wide, "lora", 128, Some("900MiB")),
            job("SmolLM2-135M", smol(), wide, "lora", 128, Some("720MiB")),
            job("SmolLM2-135M", smol(), wide, "full", 128, None),
            job("SmolLM2-135M", smol(), wide, "full", 128, Some("1800MiB")),
            job("Qwen2.5-0.5B", qwen(), narrow, "lora", 128, Some("1250MiB")),
        ];
    }
    vec![
        job("SmolLM2-135M", smol(), wide, "lora", 128, None),
        job("SmolLM2-135M", smol(), wide, "lora", 128, Some("1000MiB")),
        job("SmolLM2-135M", smol(), wide, "lora", 128, Some("600MiB")),
        job("SmolLM2-135M", smol(), wide, "full", 128, None),
        job("SmolLM2-135M", smol(), wide, "full", 256, Some("2560MiB")),
        job("Qwen2.5-0.5B", qwen(), narrow, "lora", 128, Some("1000MiB")),
    ]
}

pub(crate) fn run(bench: &mut Bench, arguments: &Choice) -> anyhow::Result<()> {
    let is_smoke = bench.scale == Scale::Smoke;
    let steps = arguments.steps.unwrap_or(if is_smoke { 6 } else { 7 });
    let rounds = arguments.rounds.unwrap_or(if is_smoke { 1 } else { 2 });
    let ranks = arguments.ranks;
    let jobs = jobs(bench.scale, ranks);
    let sandbox = Sandbox::new()?;
    bench.expect(rounds * jobs.iter().map(|job| job.variants(bench.scale).count()).sum::<usize>());
    for job in jobs {
        sandbox.write_model("model", &job.config, job.kind)?;
        sandbox.write_rows("rows.jsonl", ROWS, job.length, bench.seed)?;
        let mut times: Vec<(Variant, Vec<Trained>)> =
            job.variants(bench.scale).map(|variant| (variant, Vec::new())).collect();
        for round in 0..rounds {
            for (variant, trained) in &mut times {
                bench.message(&format!("{}, {}: {}", job.model, job.method, variant.0));
                // A configuration that did not fit once is not tried again.
                if round == 0 || !trained.is_empty() {
                    trained.extend(sandbox.train_over(&job.arguments(steps, *variant), ranks)?);
                }
                bench.step();
            }
        }
        sandbox.remove("model")?;
        put(bench, &job, &times)?;
    }
    Ok(())
}

fn put(bench: &mut Bench, job: &Job, times: &[(Variant, Vec<Trained>)]) -> anyhow::Result<()> {
    let case = Case::new().with("shows", "choice").with("job", job.name());
    let seconds = |trained: &[Trained]| trained.iter().map(|one| one.step_seconds).min_by(f64::total_cmp);
    for ((name, _), trained) in times {
        let metric = seconds(trained).map_or_else(
            || Metric::not_measured("step_seconds", "s", "it does not fit"),
            |seconds| Metric::exact("step_seconds", "s", seconds),
        );
        let case = Case::new().with("shows", "variants").with("job", job.name()).with("variant", *name);
        bench.put(&case, vec![metric])?;
    }
    let (_, chosen) = &times[0];
    let best = times.iter().filter_map(|(variant, trained)| Some((variant.0, seconds(trained)?)));
    let best = best.min_by(|(_, a), (_, b)| a.total_cmp(b));
    let (Some(chosen_seconds), Some((fastest, least))) = (seconds(chosen), best) else {
        return bench.put(&case, vec![Metric::not_measured("time_ratio", "ratio", "nothing fits")]);
    };
    let plan = chosen.iter().find_map(|one| one.chosen.clone()).unwrap_or_default();
    let fitting = times.iter().filter(|(_, trained)| !trained.is_empty()).count();
    let mut metrics = vec![
        Metric::exact("step_seconds", "s", chosen_seconds),
        Metric::exact("best_seconds", "s", least),
        Metric::exact("time_ratio", "ratio", chosen_seconds / least),
        Metric::exact("tried", "", times.len() as f64),
        Metric::exact("fitting", "", fitting as f64),
    ];
    metrics.push(error_of("predicted_time_error", chosen, |(before, _)| before));
    metrics.push(error_of("calibrated_time_error", chosen, |(_, after)| after));
    bench.put(&case.with("plan", plan).with("fastest", fastest), metrics)
}

/// The largest error, over the trainings, of a time that each of them predicted for its own steps.
fn error_of(name: &str, trained: &[Trained], predicted: fn((f64, f64)) -> f64) -> Metric {
    let errors =
        trained.iter().filter_map(|one| Some((predicted(one.predicted?) / one.step_seconds - 1.0).abs()));
    match errors.max_by(f64::total_cmp) {
        Some(error) => Metric::exact(name, "ratio", error),
        None => Metric::not_measured(name, "ratio", "the training is too short to calibrate"),
    }
}
