//! `sharding rows`: rows that ranks divide among them: memory, bytes that are sent, and time against one process with whole rows.

use report::{Case, Metric};

use super::cost::memory;
use super::model::Sizes;
use super::rank::{self, ALONE, Measured, RECOMPUTED};
use crate::driver::Bench;

/// The trainings: ZeRO stage over the ranks, and the same in one process.
const STAGES: [(&str, &str); 2] = [("ZeRO-2", ALONE), ("ZeRO-3 recomputed", RECOMPUTED)];

#[derive(clap::Args)]
pub(crate) struct RowsArgs {
    /// Ranks that divide each row
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    ranks: Vec<usize>,
    /// Tokens of a row [default: 32 at scale smoke, 1024 and 4096 at full]
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<i64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &RowsArgs) -> anyhow::Result<()> {
    let (sizes, steps, usual): (_, _, &[i64]) = bench.sized([
        (Sizes::TINY, 1, &[32]),
        (Sizes::SMALL, 3, &[1024]),
        (Sizes::SMALL, 3, &[1024, 4096]),
        (Sizes::LARGE, 3, &[4096, 16384]),
    ]);
    let lengths = if arguments.tokens.is_empty() { usual } else { &arguments.tokens };
    let mut cases = Vec::new();
    for &tokens in lengths {
        for stage in STAGES {
            cases.extend(arguments.ranks.iter().map(|&ranks| (Sizes { tokens, ..sizes }, stage, ranks)));
        }
    }
    let label = |(sizes, (stage, _), ranks): &(Sizes, _, usize)| {
        format!("rows of {} tokens, {stage}, {ranks} ranks", sizes.tokens)
    };
    // Of one process, by length and stage.
    let mut alone: Vec<(i64, &str, Vec<f64>, f64)> = Vec::new();
    bench.each(cases, label, |bench, (sizes, (stage, one_process), ranks)| {
        let variant = if ranks == 1 { one_process } else { stage };
        let divided = ["--sequence-ranks".to_owned(), ranks.to_string()];
        let measured = rank::measure(ranks, &sizes, &[variant], steps, &divided)?;
        let measured: Vec<&Measured> = measured.iter().flatten().collect();
        let mut metrics = memory(&sizes, variant, (ranks, ranks), &measured)?;
        let seconds = &measured[0].seconds;
        metrics.push(Metric::of_samples("step_seconds", "s", seconds));
        let rates: Vec<f64> = seconds.iter().map(|seconds| sizes.tokens as f64 / seconds).collect();
        metrics.push(Metric::of_samples("tokens_per_second", "tokens/s", &rates));
        let loss = measured[0].losses.last().copied().unwrap_or(f64::NAN);
        if ranks == 1 {
            alone.push((sizes.tokens, stage, seconds.clone(), loss));
        }
        let whole = alone.iter().find(|(tokens, name, ..)| (*tokens, *name) == (sizes.tokens, stage));
        if let Some((_, _, whole, whole_loss)) = whole {
            let ratios: Vec<f64> = whole.iter().zip(seconds).map(|(whole, own)| whole / own).collect();
            metrics.push(Metric::of_samples("speed_vs_one_process", "ratio", &ratios));
            metrics.push(Metric::exact("loss_difference", "nat", (loss - whole_loss).abs()));
        }
        let case = Case::new().with("stage", stage).with("tokens", sizes.tokens).with("ranks", ranks);
        bench.put(&case, metrics)
    })
}
