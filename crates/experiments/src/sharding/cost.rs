//! `sharding cost`: memory, transfers and time by ZeRO stage and number of ranks.

use accounting::decoder_flops::Workload;
use accounting::memory::logits::Loss;
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::offload::sizes::{self, Choices};
use accounting::offload::{Method, OptimizerPlace, Rates, Setup, Start, simulate};
use accounting::recompute::NormKernel;
use accounting::sharding::Layout;
use accounting::{Decoder, Dtype, sequence_parallel};
use report::{Case, Metric};

use super::model::Sizes;
use super::rank::{self, ALONE, Measured, RECOMPUTED, SLOTS, STAGES, seconds_alone};
use super::timeline;
use crate::driver::Bench;

/// Ranks of the timeline.
const SHOWN: usize = 2;
/// The size of a group that is pretended, with a single rank that runs.
const MANY: usize = 1024;

#[derive(clap::Args)]
pub(crate) struct CostArgs {
    /// Numbers of ranks: 1, 2 and 4 if missing, 1 and 2 at scale smoke
    #[arg(long, value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Measure memory and transfers only
    #[arg(long)]
    memory: bool,
}

pub(crate) fn run(bench: &mut Bench, arguments: &CostArgs) -> anyhow::Result<()> {
    let (sizes, steps, usual, shown): (_, _, &[usize], _) = bench.sized([
        (Sizes::TINY, 2, &[1, 2], &STAGES[2..3]),
        (Sizes::SMALL, 3, &[1, 2, 4], &STAGES[..3]),
        (Sizes::LARGE, 7, &[1, 2, 4], &STAGES[..3]),
        (Sizes::LARGE, 7, &[1, 2, 4], &STAGES[..3]),
    ]);
    let mut figures = Vec::new();
    for &ranks in if arguments.ranks.is_empty() { usual } else { &arguments.ranks } {
        let alone = [ALONE].into_iter().filter(|_| ranks == 1);
        figures.extend(alone.chain(STAGES).map(|stage| Figure::Memory(stage, ranks)));
        figures.push(Figure::Time(ranks));
    }
    figures.extend(STAGES.map(|stage| Figure::Memory(stage, MANY)));
    figures.extend(shown.iter().copied().map(Figure::Timeline));
    figures.retain(|figure| !arguments.memory || matches!(figure, Figure::Memory(..)));
    let cost = Cost { sizes, steps };
    bench.each(figures, label, |bench, figure| match figure {
        Figure::Memory(stage, ranks) => cost.memory(stage, ranks, bench),
        Figure::Time(ranks) => cost.time(ranks, bench),
        Figure::Timeline(stage) => cost.timeline(stage, bench),
    })
}

fn label(figure: &Figure) -> String {
    match figure {
        Figure::Memory(stage, MANY) => format!("memory, {stage}, one of {MANY} ranks"),
        Figure::Memory(stage, ranks) => format!("memory, {stage}, {ranks} ranks"),
        Figure::Time(ranks) => format!("time, {ranks} ranks"),
        Figure::Timeline(stage) => format!("timeline, {stage}"),
    }
}

/// The training that is measured.
struct Cost {
    sizes: Sizes,
    steps: usize,
}

/// The figures that are measured.
enum Figure {
    /// Memory and transfers of a stage over so many ranks, in processes with one training each.
    Memory(&'static str, usize),
    /// Steps of all variants over so many ranks.
    Time(usize),
    /// A stage's transfers beside its compute.
    Timeline(&'static str),
}

impl Cost {
    fn memory(&self, stage: &str, ranks: usize, bench: &mut Bench) -> anyhow::Result<()> {
        let fake = ["--fake".to_owned(), "0".to_owned(), MANY.to_string()];
        let measured = match ranks {
            MANY => rank::measure(1, &self.sizes, &[stage], 1, &fake)?,
            ranks => rank::measure(ranks, &self.sizes, &[stage], 1, &[])?,
        };
        let measured: Vec<&Measured> = measured.iter().flatten().collect();
        let case = Case::new().with("shows", "memory").with("stage", stage).with("ranks", ranks);
        bench.put(&case, memory(&self.sizes, stage, (ranks, 1), &measured)?)
    }

    fn time(&self, ranks: usize, bench: &mut Bench) -> anyhow::Result<()> {
        let variants: Vec<&str> = [ALONE, RECOMPUTED].into_iter().chain(STAGES).collect();
        let measured = rank::measure(ranks, &self.sizes, &variants, self.steps, &[])?;
        for one in &measured[0] {
            let alone = seconds_alone(&measured[0], &one.variant);
            let ratios: Vec<f64> =
                one.seconds.iter().zip(alone).map(|(seconds, alone)| seconds / alone).collect();
            let exposed: Vec<f64> = ratios.iter().map(|ratio| 1.0 - 1.0 / ratio).collect();
            let tokens = (self.sizes.tokens * ranks as i64) as f64;
            let rates: Vec<f64> = one.seconds.iter().map(|seconds| tokens / seconds).collect();
            let mut metrics = vec![
                Metric::of_samples("step_seconds", "s", &one.seconds),
                Metric::of_samples("tokens_per_second", "tokens/s", &rates),
            ];
            if STAGES.contains(&one.variant.as_str()) {
                metrics.push(Metric::of_samples("time_vs_alone", "ratio", &ratios));
                metrics.push(Metric::of_samples("exposed_share", "ratio", &exposed));
            }
            let case =
                Case::new().with("shows", "time").with("stage", one.variant.as_str()).with("ranks", ranks);
            bench.put(&case, metrics)?;
        }
        Ok(())
    }

    fn timeline(&self, stage: &str, bench: &mut Bench) -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let trace = ["--trace".to_owned(), folder.path().display().to_string()];
        let measured = rank::measure(SHOWN, &self.sizes, &[stage], 1, &trace)?;
        let case = Case::new().with("shows", "timeline").with("stage", stage);
        for (rank, Measured { spans, .. }) in measured.iter().flatten().enumerate() {
            bench.put_all(timeline::figures(&case, rank, spans))?;
            let case = Case::new().with("shows", "overlap").with("stage", stage).with("rank", rank);
            for (lane, name) in
                [("reduce", "reductions_during_compute"), ("gather", "gathers_during_compute")]
            {
                if let Some(share) = timeline::hidden(spans, lane) {
                    bench.put(&case, vec![Metric::exact(name, "ratio", share)])?;
                }
            }
        }
        Ok(())
    }
}

/// The measured memory and transfers of a stage, beside the prediction.
pub(super) fn memory(
    sizes: &Sizes,
    stage: &str,
    (ranks, sequence_ranks): (usize, usize),
    measured: &[&Measured],
) -> anyhow::Result<Vec<Metric>> {
    let peak = measured.iter().map(|one| one.peak_bytes).max().unwrap_or(0) as f64;
    let mut metrics = vec![Metric::exact("peak_bytes", "B", peak)];
    let recipe = Recipe::FP32;
    let model = Decoder::from_config(&sizes.config())?;
    let work = Workload { batch: 1, sequence: sizes.tokens.unsigned_abs() };
    let choices = Choices {
        recipe,
        loss: Loss::Eager,
        norm: NormKernel::Output,
        sequence_ranks: sequence_ranks as u64,
        ..Choices::default()
    };
    // Of the heads that ranks with parts of a row exchange, in each pass of each layer.
    let passes = if rank::is_recomputed(stage) { 3 } else { 2 };
    let of_a_pass = sequence_parallel::sent_bytes(&model, work, Dtype::Fp32, choices.sequence_ranks)?;
    let exchanged = model.layers * passes * of_a_pass;
    let mut costs = sizes::training(&model, work, &choices)?;
    // Each rank reads the tokens and labels of all micro-batches, one for each group of ranks.
    let of_others = (ranks / sequence_ranks.max(1)).saturating_sub(1) as u64;
    costs.working.constant_bytes += 2 * 8 * of_others * work.tokens()?;
    let mut overlapping = 0.0;
    let zero = match stage {
        "ZeRO-1" => Some(ZeroStage::One),
        "ZeRO-2" => Some(ZeroStage::Two),
        "ZeRO-3" | "ZeRO-3 recomputed" => Some(ZeroStage::Three),
        _ => None,
    };
    if let Some(zero) = zero {
        let (bucket_bytes, slots) = (sizes.bucket_bytes as u64, SLOTS as u64);
        let layout = Layout::of_decoder_in(&model, &recipe, zero, ranks as u64, bucket_bytes)?;
        let rank = layout.rank_bytes(0, &recipe, Optimizer::AdamW, slots)?;
        metrics.push(Metric::exact("weights_bytes", "B", rank.weights as f64));
        metrics.push(Metric::exact("slots_bytes", "B", rank.slots as f64));
        metrics.push(Metric::exact("sums_bytes", "B", rank.sums as f64));
        metrics.push(Metric::exact("optimizer_bytes", "B", rank.optimizer as f64));
        metrics.push(Metric::exact("gradients_bytes", "B", rank.gradients as f64));
        let parameters = model.parameter_tensors()?.len();
        let (mut sent, mut predicted) = (0, 0);
        for (rank, one) in measured.iter().enumerate() {
            sent += one.sent_bytes;
            predicted += layout.sent_bytes(rank as u64, 1, slots)? + exchanged;
            predicted += numbers(parameters, ranks, ranks / sequence_ranks);
        }
        metrics.push(Metric::exact("sent_bytes", "B", sent as f64));
        metrics.push(Metric::exact("predicted_sent_bytes", "B", predicted as f64));
        metrics.push(Metric::exact("sent_difference_bytes", "B", (sent as f64 - predicted as f64).abs()));
        costs = layout.costs(costs, &recipe, Optimizer::AdamW, slots)?;
        overlapping = layout.overlapping_bytes()? as f64;
    }
    let setup = Setup {
        method: Method::Resident { recompute: rank::is_recomputed(stage) },
        resident: Vec::new(),
        optimizer: OptimizerPlace::Device,
    };
    let rates = Rates { load: 1e15, store: 1e15, host_optimizer: 1e15, device_optimizer: 1e15 };
    let predicted = simulate(&costs, &rates, &setup, Start::Warm)?.device.total as f64;
    metrics.push(Metric::exact("predicted_peak_bytes", "B", predicted));
    metrics.push(Metric::exact("predicted_over_measured", "ratio", predicted / peak));
    // The reduction before has ended at the peak, or not.
    let error = (predicted - overlapping - peak).max(peak - predicted).max(0.0) / peak;
    metrics.push(Metric::exact("relative_error", "ratio", error));
    Ok(metrics)
}

/// Bytes of the numbers that a rank sends in a step beside gradients and weights, to each other rank: which parameters have a gradient,
/// a loss for each micro-batch, and whether to stop and to save.
pub(super) fn numbers(parameters: usize, ranks: usize, micro_batches: usize) -> u64 {
    8 * ((parameters + micro_batches + 2) * (ranks - 1)) as u64
}
