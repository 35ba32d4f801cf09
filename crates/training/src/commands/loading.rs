//! `training loading`: the whole training with each way of loading data.

use report::cli::{CommonArgs, Scale};
use report::{Case, Metric, Progress};
use training::experiment::loading::{Outcome, Training, train};
use training::experiment::strategy::Strategy;

use super::sink::Sink;
use super::sizes::{Data, Sizes, Which};

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
}

pub(crate) fn run(common: &CommonArgs, arguments: &Loading) -> anyhow::Result<()> {
    let device = runtime::device::select(&common.device)?;
    runtime::memory::track_cpu()?;
    let mut sink = Sink::new(common, device)?;
    let Which { scale, data } = arguments.which;
    let experiment = match data {
        Data::Embedded => "loading",
        Data::Wikitext2 => "loading-wikitext2",
    };
    let sizes = Sizes::of(scale);
    let strategies = if arguments.strategies.is_empty() { &Strategy::ALL[..] } else { &arguments.strategies };
    let case = |strategy: Strategy| Case::new().with("strategy", strategy.to_string());
    let corpus = match sizes.corpus(data)? {
        Ok(corpus) => corpus,
        Err(why) => {
            for &strategy in strategies {
                let missing = |(name, unit)| Metric::not_measured(name, unit, &why);
                sink.put(experiment, &case(strategy), TOTALS.into_iter().map(missing).collect())?;
            }
            return Ok(());
        }
    };
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
    let mut progress = Progress::new(strategies.len() as u64);
    let mut outcomes = Vec::new();
    for &strategy in strategies {
        progress.message(&format!("{}, {strategy}", corpus.name));
        outcomes.push((strategy, train(&corpus, strategy, &training)?));
        progress.step();
    }
    // What every strategy has reached.
    let target = outcomes.iter().map(|(_, outcome)| outcome.best_loss()).fold(f64::NEG_INFINITY, f64::max);
    for (strategy, outcome) in &outcomes {
        sink.put(experiment, &case(*strategy), totals(outcome, target))?;
        for point in &outcome.curve {
            let case = case(*strategy).with("step", point.step);
            let metrics = vec![
                Metric::exact("training_seconds", "s", point.seconds),
                Metric::exact("training_tokens", "token", point.tokens as f64),
                Metric::exact("validation_loss", "nat", point.loss),
                Metric::exact("validation_accuracy", "ratio", point.accuracy),
            ];
            sink.put(experiment, &case, metrics)?;
        }
    }
    Ok(())
}

const TOTALS: [(&str, &str); 12] = [
    ("total_seconds", "s"),
    ("tokens_per_second", "token/s"),
    ("steps", "count"),
    ("padding_share", "ratio"),
    ("peak_bytes", "B"),
    ("final_loss", "nat"),
    ("final_perplexity", "ratio"),
    ("final_accuracy", "ratio"),
    ("target_loss", "nat"),
    ("seconds_to_target", "s"),
    ("loader_wait_share", "ratio"),
    ("loader_work_share", "ratio"),
];

fn totals(outcome: &Outcome, target: f64) -> Vec<Metric> {
    let &Outcome { steps, seconds, tokens, padding, peak_bytes, waited_seconds, loader, .. } = outcome;
    let last = outcome.curve.last();
    let of_last = |of: fn(f64, f64) -> f64| last.map_or(f64::NAN, |point| of(point.loss, point.accuracy));
    let values = [
        seconds,
        tokens as f64 / seconds,
        steps as f64,
        padding as f64 / (tokens + padding) as f64,
        peak_bytes as f64,
        of_last(|loss, _| loss),
        of_last(|loss, _| loss.exp()),
        of_last(|_, accuracy| accuracy),
        target,
        outcome.seconds_to(target).unwrap_or(f64::NAN),
        waited_seconds / seconds,
        loader.worked_seconds / seconds,
    ];
    let metric = |((name, unit), value): ((&str, &str), f64)| {
        if value.is_finite() {
            Metric::exact(name, unit, value)
        } else {
            Metric::not_measured(name, unit, "the training never came to it")
        }
    };
    TOTALS.into_iter().zip(values).map(metric).collect()
}
