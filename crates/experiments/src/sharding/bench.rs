//! `sharding bench`: steps over two ranks, for a comparison with PyTorch's DDP and FSDP2.

use report::cli::CommonArgs;
use report::{Case, Metric, Progress, Sink};

use super::model::Sizes;
use super::rank::{self, ALONE, STAGES};

/// Variants that are not run.
const MISSING: [(&str, &str); 1] = [("ZeRO-3", "this program does not run it")];
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
    let variants: Vec<&str> = [ALONE].into_iter().chain(STAGES).collect();
    let mut progress = Progress::new((arguments.tokens.len() * (1 + variants.len())) as u64);
    for &tokens in &arguments.tokens {
        let sizes = Sizes { hidden: 512, feed_forward: 1408, layers: 8, vocabulary: 1024, tokens };
        let case = |variant: &str| Case::new().with("tokens_per_rank", tokens).with("variant", variant);
        progress.message(&format!("{tokens} tokens per rank, time"));
        let measured = rank::measure(RANKS, &sizes, &variants, arguments.steps, &[])?;
        let of_rank_0 = &measured[0];
        let alone = &of_rank_0[0].seconds;
        for one in of_rank_0 {
            let mut metrics = vec![Metric::of_samples("step_seconds", "s", &one.seconds)];
            if one.variant != ALONE {
                let exposed: Vec<f64> =
                    one.seconds.iter().zip(alone).map(|(seconds, alone)| 1.0 - alone / seconds).collect();
                metrics.push(Metric::of_samples("exposed_share", "ratio", &exposed));
            }
            sink.put("sharding-bench", &case(&one.variant), metrics)?;
            for (step, loss) in one.losses.iter().enumerate().filter(|_| one.variant != ALONE) {
                let case = case(&one.variant).with("step", step + 1);
                sink.put("sharding-bench", &case, vec![Metric::exact("loss", "nats", *loss)])?;
            }
        }
        progress.step();
        for variant in &variants {
            progress.message(&format!("{tokens} tokens per rank, memory of {variant}"));
            let measured = rank::measure(RANKS, &sizes, &[variant], 1, &[])?;
            let peak = measured.iter().flatten().map(|one| one.peak_bytes).max().unwrap_or(0);
            sink.put("sharding-bench", &case(variant), vec![Metric::exact("peak_bytes", "B", peak as f64)])?;
            progress.step();
        }
        for (variant, why) in MISSING {
            let metrics = [("step_seconds", "s"), ("exposed_share", "ratio"), ("peak_bytes", "B")];
            let metrics = metrics.map(|(name, unit)| Metric::not_measured(name, unit, why));
            sink.put("sharding-bench", &case(variant), metrics.into())?;
        }
    }
    Ok(())
}
