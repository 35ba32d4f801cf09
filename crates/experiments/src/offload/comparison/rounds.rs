//! Metrics of the rounds of a variant.

use report::Metric;

use super::Passes;

/// A pass of a variant in a round.
#[derive(Clone, Copy)]
pub(super) struct Sample {
    pub(super) passes: Passes,
    pub(super) moved: Option<Moved>,
}

/// The transfers of a pass, from its trace.
#[derive(Clone, Copy)]
pub(super) struct Moved {
    pub(super) link_rate: Option<f64>,
    pub(super) overlap: f64,
    pub(super) transfer_seconds: f64,
    pub(super) compute_seconds: f64,
    pub(super) unexplained_seconds: f64,
    pub(super) late: f64,
    pub(super) loaded: f64,
    pub(super) stored: f64,
}

/// Speed relative to the reference's, round by round, each side with so many seconds more.
pub(super) fn ratios(
    [reference, rounds]: [&[Sample]; 2],
    [more_of_it, more]: [f64; 2],
) -> impl Iterator<Item = f64> {
    let pairs = reference.iter().zip(rounds);
    pairs.map(move |(reference, round)| {
        (reference.passes.total() + more_of_it) / (round.passes.total() + more)
    })
}

/// The share of a step in which what computes waits between two layers, and no transfer is why.
pub(super) fn unexplained(rounds: &[Sample]) -> Metric {
    samples(
        "unexplained_share",
        "ratio",
        rounds.iter().filter_map(|round| Some(round.moved?.unexplained_seconds / round.passes.total())),
    )
}

pub(super) fn moved(rounds: &[Sample]) -> Vec<Metric> {
    let all: Vec<Moved> = rounds.iter().filter_map(|round| round.moved).collect();
    let bytes = |name: &str, counter: fn(&Moved) -> f64| {
        samples(name, "B", rounds.iter().map(move |round| round.moved.as_ref().map_or(0.0, counter)))
    };
    let mut metrics =
        vec![bytes("loaded_bytes", |moved| moved.loaded), bytes("stored_bytes", |moved| moved.stored)];
    let rates: Vec<f64> = all.iter().filter_map(|moved| moved.link_rate).collect();
    if rates.is_empty() {
        return metrics;
    }
    let idle =
        rounds.iter().filter_map(|round| Some(1.0 - round.moved?.compute_seconds / round.passes.total()));
    metrics.extend([
        Metric::of_samples("link_rate", "B/s", &rates),
        samples("overlap", "ratio", all.iter().map(|moved| moved.overlap)),
        samples("transfer_seconds", "s", all.iter().map(|moved| moved.transfer_seconds)),
        samples("beside_layers", "ratio", idle),
        samples("late_loads", "count", all.iter().map(|moved| moved.late)),
    ]);
    metrics
}

pub(super) fn samples(name: &str, unit: &str, values: impl Iterator<Item = f64>) -> Metric {
    Metric::of_samples(name, unit, &values.collect::<Vec<_>>())
}
