//! `training loading`: the whole training with each way of loading data.

use report::cli::Scale;
use report::{Case, Metric};
use training::strategy::Strategy;

use super::sizes::Sizes;
use super::whole_training::{Outcome, Training, train};
use crate::corpus::DataArgs;
use crate::driver::Bench;

#[derive(clap::Args)]
pub(crate) struct Loading {
    #[command(flatten)]
    data: DataArgs,
    /// These strategies only: base, standard, balanced:K, sequenced, packed
    #[arg(long, value_delimiter = ',', value_parser = |text: &str| text.parse::<Strategy>())]
    strategies: Vec<Strategy>,
    /// How often the training data is gone through
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Trainings with each strategy, in turns [default: 1, 2 at full, 3 at paper]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: Option<u64>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &Loading) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let scale = bench.scale;
    let sizes = Sizes::new(scale);
    let strategies = if arguments.strategies.is_empty() { &Strategy::ALL[..] } else { &arguments.strategies };
    let case = |strategy: Strategy| Case::new().with("strategy", strategy.to_string());
    let corpus = sizes.corpus(&arguments.data, scale)?;
    corpus.put(bench)?;
    let training = Training {
        model: sizes.model.clone(),
        batch_size: sizes.batch_size,
        epochs: arguments.epochs,
        lr: if scale == Scale::Paper { 1e-4 } else { 1e-3 },
        warmup: 10,
        evaluate_every: sizes.evaluate_every,
        workers: if device.is_cuda() { 2 } else { 1 },
        device,
        seed: bench.seed,
    };
    let rounds = arguments.rounds.unwrap_or(sizes.rounds) as usize;
    // The first training of a process sets libtorch up and lets the allocator grow; it is not among those measured.
    bench.message(&format!("{}, warm-up", corpus.name));
    train(&corpus, strategies[0], &training)?;
    let label = |strategy: &Strategy| format!("{}, {strategy}", corpus.name);
    let outcomes =
        bench.in_turns(rounds, strategies, label, |_, strategy| train(&corpus, *strategy, &training))?;
    // The loss that every strategy has reached.
    let target = outcomes.iter().flatten().map(Outcome::best_loss).fold(f64::NEG_INFINITY, f64::max);
    for (&strategy, outcomes) in strategies.iter().zip(&outcomes) {
        bench.put(&case(strategy), totals(outcomes, target))?;
        for (index, point) in outcomes[0].curve.iter().enumerate() {
            let case = case(strategy).with("step", point.step);
            // The rounds differ in their time; on CUDA a little in their losses too.
            let seconds: Vec<f64> = outcomes.iter().map(|outcome| outcome.curve[index].seconds).collect();
            let metrics = vec![
                Metric::of_samples("training_seconds", "s", &seconds),
                Metric::exact("training_tokens", "token", point.tokens as f64),
                Metric::exact("validation_loss", "nat", point.loss),
                Metric::exact("validation_accuracy", "ratio", point.accuracy),
            ];
            bench.put(&case, metrics)?;
        }
    }
    Ok(())
}

const TOTALS: [(&str, &str); 13] = [
    ("total_seconds", "s"),
    ("tokens_per_second", "tokens/s"),
    ("steps", "count"),
    ("padding_share", "ratio"),
    ("peak_bytes", "B"),
    ("peak_with_evaluation_bytes", "B"),
    ("final_loss", "nat"),
    ("final_perplexity", "ratio"),
    ("final_accuracy", "ratio"),
    ("target_loss", "nat"),
    ("seconds_to_target", "s"),
    ("loader_wait_share", "ratio"),
    ("loader_work_share", "ratio"),
];

/// The figures of one strategy over all rounds.
fn totals(outcomes: &[Outcome], target: f64) -> Vec<Metric> {
    let rounds: Vec<[f64; TOTALS.len()]> = outcomes.iter().map(|outcome| values(outcome, target)).collect();
    let metric = |(index, (name, unit)): (usize, (&str, &str))| {
        let samples: Vec<f64> = rounds.iter().map(|values| values[index]).collect();
        if samples.iter().all(|value| value.is_finite()) {
            Metric::of_samples(name, unit, &samples)
        } else {
            Metric::not_measured(name, unit, "the training never came to it")
        }
    };
    TOTALS.into_iter().enumerate().map(metric).collect()
}

fn values(outcome: &Outcome, target: f64) -> [f64; TOTALS.len()] {
    let &Outcome { steps, seconds, tokens, padding, waited_seconds, loader, .. } = outcome;
    let last = outcome.curve.last();
    let of_last =
        |value: fn(f64, f64) -> f64| last.map_or(f64::NAN, |point| value(point.loss, point.accuracy));
    [
        seconds,
        tokens as f64 / seconds,
        steps as f64,
        padding as f64 / (tokens + padding) as f64,
        outcome.peak_bytes as f64,
        outcome.peak_with_evaluation_bytes as f64,
        of_last(|loss, _| loss),
        of_last(|loss, _| loss.exp()),
        of_last(|_, accuracy| accuracy),
        target,
        outcome.seconds_to(target).unwrap_or(f64::NAN),
        waited_seconds / seconds,
        loader.worked_seconds / seconds,
    ]
}
