//! `training loading`: the whole training with each way of loading data.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress, Sink};
use training::strategy::Strategy;

use super::sizes::{Sizes, Which};
use super::whole_training::{Outcome, Training, train};

const EXPERIMENT: &str = "loading";

#[derive(clap::Args)]
pub(crate) struct Loading {
    #[command(flatten)]
    which: Which,
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

pub(crate) fn run(common: &CommonArgs, arguments: &Loading) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, crate::environment::of(device)?, arguments.which.scale)?;
    let scale = arguments.which.scale;
    let sizes = Sizes::of(scale);
    let strategies = if arguments.strategies.is_empty() { &Strategy::ALL[..] } else { &arguments.strategies };
    let case = |strategy: Strategy| Case::new().with("strategy", strategy.to_string());
    let corpus = sizes.corpus(&arguments.which)?;
    corpus.put(&mut sink, EXPERIMENT, scale)?;
    let training = Training {
        model: sizes.model.clone(),
        batch_size: sizes.batch_size,
        epochs: arguments.epochs,
        lr: if scale == Scale::Paper { 1e-4 } else { 1e-3 },
        warmup: 10,
        evaluate_every: sizes.evaluate_every,
        workers: if device.is_cuda() { 2 } else { 1 },
        device,
        seed: common.seed,
    };
    let rounds = arguments.rounds.unwrap_or(sizes.rounds);
    let mut progress = Progress::new(rounds * strategies.len() as u64 + 1);
    // The first training of a process sets libtorch up and lets the allocator grow; it is not among those measured.
    progress.message(&format!("{}, warm-up", corpus.name));
    train(&corpus, strategies[0], &training)?;
    progress.step();
    let mut outcomes: Vec<Vec<Outcome>> = vec![Vec::new(); strategies.len()];
    for round in 0..rounds {
        for turn in 0..strategies.len() {
            // Each round begins with another strategy, so that none is always the first or the last.
            let index = (turn + round as usize * strategies.len() / rounds as usize) % strategies.len();
            progress.message(&format!("{}, {}, round {}", corpus.name, strategies[index], round + 1));
            outcomes[index].push(train(&corpus, strategies[index], &training)?);
            progress.step();
        }
    }
    // What every strategy has reached.
    let target = outcomes.iter().flatten().map(Outcome::best_loss).fold(f64::NEG_INFINITY, f64::max);
    for (&strategy, outcomes) in strategies.iter().zip(&outcomes) {
        sink.put(EXPERIMENT, &case(strategy), totals(outcomes, target))?;
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
            sink.put(EXPERIMENT, &case, metrics)?;
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
    let of_last = |of: fn(f64, f64) -> f64| last.map_or(f64::NAN, |point| of(point.loss, point.accuracy));
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
