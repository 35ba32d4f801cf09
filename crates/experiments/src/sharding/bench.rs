//! `sharding bench`: steps over two ranks, for a comparison with PyTorch's DDP and FSDP2; and over one, beside no sharding.

use report::cli::CommonArgs;
use report::{Case, Metric, Progress, Sink};

use super::model::Sizes;
use super::rank::{self, ALONE, RECOMPUTED, STAGES, seconds_alone};

const EXPERIMENT: &str = "sharding-bench";
const RANKS: usize = 2;

#[derive(clap::Args)]
pub(crate) struct Bench {
    /// Tokens of each rank in a step
    #[arg(long, value_delimiter = ',', default_value = "128,512")]
    tokens: Vec<i64>,
    /// Measured steps
    #[arg(long, default_value_t = 8)]
    steps: usize,
}

pub(crate) fn run(common: &CommonArgs, arguments: &Bench) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, None)?;
    let variants: Vec<&str> = [ALONE, RECOMPUTED].into_iter().chain(STAGES).collect();
    let mut progress = Progress::new((arguments.tokens.len() * (2 + variants.len())) as u64);
    for &tokens in &arguments.tokens {
        let sizes = Sizes { tokens, ..Sizes::LARGE };
        let case = |variant: &str| Case::new().with("tokens_per_rank", tokens).with("variant", variant);
        progress.message(&format!("{tokens} tokens per rank, time"));
        let of_rank_0 = rank::measure(RANKS, &sizes, &variants, arguments.steps, &[])?.swap_remove(0);
        for one in &of_rank_0 {
            let mut metrics = vec![Metric::of_samples("step_seconds", "s", &one.seconds)];
            if STAGES.contains(&one.variant.as_str()) {
                let alone = seconds_alone(&of_rank_0, &one.variant);
                let exposed: Vec<f64> =
                    one.seconds.iter().zip(alone).map(|(seconds, alone)| 1.0 - alone / seconds).collect();
                metrics.push(Metric::of_samples("exposed_share", "ratio", &exposed));
            }
            sink.put(EXPERIMENT, &case(&one.variant), metrics)?;
            let over_ranks = STAGES.contains(&one.variant.as_str());
            for (step, loss) in one.losses.iter().enumerate().filter(|_| over_ranks) {
                let case = case(&one.variant).with("step", step + 1);
                sink.put(EXPERIMENT, &case, vec![Metric::exact("loss", "nats", *loss)])?;
            }
            for (direction, projection) in one.projections.iter().enumerate() {
                let case = case(&one.variant).with("projection", direction + 1);
                sink.put(EXPERIMENT, &case, vec![Metric::exact("parameters", "", *projection)])?;
            }
        }
        progress.step();
        progress.message(&format!("{tokens} tokens, one rank"));
        let of_rank_0 = rank::measure(1, &sizes, &variants, arguments.steps, &[])?.swap_remove(0);
        for one in of_rank_0.iter().filter(|one| STAGES.contains(&one.variant.as_str())) {
            let alone = seconds_alone(&of_rank_0, &one.variant);
            let ratios: Vec<f64> =
                one.seconds.iter().zip(alone).map(|(seconds, alone)| seconds / alone).collect();
            let metric = Metric::of_samples("one_rank_vs_alone", "ratio", &ratios);
            sink.put(EXPERIMENT, &case(&one.variant), vec![metric])?;
        }
        progress.step();
        for variant in &variants {
            progress.message(&format!("{tokens} tokens per rank, memory of {variant}"));
            let measured = rank::measure(RANKS, &sizes, &[variant], 1, &[])?;
            let peak = measured.iter().flatten().map(|one| one.peak_bytes).max().unwrap_or(0);
            sink.put(EXPERIMENT, &case(variant), vec![Metric::exact("peak_bytes", "B", peak as f64)])?;
            progress.step();
        }
    }
    Ok(())
}
