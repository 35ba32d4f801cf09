//! `sharding bench`: steps over two ranks, for a comparison with PyTorch's DDP and FSDP2; and over one, beside no sharding.

use report::{Case, Metric};

use super::model::Sizes;
use super::rank::{self, ALONE, Measured, RECOMPUTED, STAGES, seconds_alone};
use crate::driver::Bench;

const RANKS: usize = 2;

#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Tokens of each rank in a step
    #[arg(long, value_delimiter = ',', default_value = "128,512")]
    tokens: Vec<i64>,
    /// Measured steps
    #[arg(long, default_value_t = 8)]
    steps: usize,
}

/// The trainings alone, and those over ranks.
fn variants() -> Vec<&'static str> {
    [ALONE, RECOMPUTED].into_iter().chain(STAGES).collect()
}

/// The figures that are measured with so many tokens.
enum Figure {
    /// Steps over ranks, beside none.
    Time,
    /// Steps over one rank, beside none.
    OneRank,
    /// The peak of a variant, in processes of its own.
    Memory(&'static str),
}

pub(crate) fn run(bench: &mut Bench, arguments: &BenchArgs) -> anyhow::Result<()> {
    let figures =
        || [Figure::Time, Figure::OneRank].into_iter().chain(variants().into_iter().map(Figure::Memory));
    let cases = arguments.tokens.iter().flat_map(|&tokens| figures().map(move |figure| (tokens, figure)));
    bench.each(cases, label, |bench, (tokens, figure)| {
        let sizes = Sizes { tokens, ..Sizes::LARGE };
        let case = |variant: &str| Case::new().with("tokens_per_rank", tokens).with("variant", variant);
        let ratios = |one: &Measured, all: &[Measured], ratio: fn(f64, f64) -> f64| -> Vec<f64> {
            let alone = seconds_alone(all, &one.variant);
            one.seconds.iter().zip(alone).map(|(seconds, alone)| ratio(*seconds, *alone)).collect()
        };
        let is_over_ranks = |one: &Measured| STAGES.contains(&one.variant.as_str());
        match figure {
            Figure::Time => {
                let all = rank::measure(RANKS, &sizes, &variants(), arguments.steps, &[])?.swap_remove(0);
                for one in &all {
                    let mut metrics = vec![Metric::of_samples("step_seconds", "s", &one.seconds)];
                    if is_over_ranks(one) {
                        let exposed = ratios(one, &all, |seconds, alone| 1.0 - alone / seconds);
                        metrics.push(Metric::of_samples("exposed_share", "ratio", &exposed));
                    }
                    bench.put(&case(&one.variant), metrics)?;
                    for (step, loss) in one.losses.iter().enumerate().filter(|_| is_over_ranks(one)) {
                        let case = case(&one.variant).with("step", step + 1);
                        bench.put(&case, vec![Metric::exact("loss", "nats", *loss)])?;
                    }
                    for (direction, projection) in one.projections.iter().enumerate() {
                        let case = case(&one.variant).with("projection", direction + 1);
                        bench.put(&case, vec![Metric::exact("parameters", "", *projection)])?;
                    }
                }
            }
            Figure::OneRank => {
                let all = rank::measure(1, &sizes, &variants(), arguments.steps, &[])?.swap_remove(0);
                for one in all.iter().filter(|one| is_over_ranks(one)) {
                    let ratios = ratios(one, &all, |seconds, alone| seconds / alone);
                    let metric = Metric::of_samples("one_rank_vs_alone", "ratio", &ratios);
                    bench.put(&case(&one.variant), vec![metric])?;
                }
            }
            Figure::Memory(variant) => {
                let measured = rank::measure(RANKS, &sizes, &[variant], 1, &[])?;
                let peak = measured.iter().flatten().map(|one| one.peak_bytes).max().unwrap_or(0);
                bench.put(&case(variant), vec![Metric::exact("peak_bytes", "B", peak as f64)])?;
            }
        }
        Ok(())
    })
}

fn label((tokens, figure): &(i64, Figure)) -> String {
    match figure {
        Figure::Time => format!("{tokens} tokens per rank, time"),
        Figure::OneRank => format!("{tokens} tokens, one rank"),
        Figure::Memory(variant) => format!("{tokens} tokens per rank, memory of {variant}"),
    }
}
