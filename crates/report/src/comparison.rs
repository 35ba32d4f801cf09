//! Ratios of this project's figures to a peer's, round by round.
//!
//! A machine's speed drifts. Two programs that alternate drift together, so each ratio is computed within one round, and
//! the figure is the median of the rounds' ratios, with their spread and, from two rounds on, a 95 % interval: of order statistics from six
//! rounds on, below by Student's t over the logarithms.

use crate::measurements::{IMPLEMENTATION_KEY, ROUND_KEY, distinct, newest};
use crate::record::{Case, Metric, Record};
use crate::spec::{Comparison, Ratio};
use crate::statistics;

/// Returns the ratios that `comparison` asks for, one record per group of cases and ratio.
///
/// The result's case is the group's values, then the keys that `ours` fixes. A group whose rounds never have both
/// sides gives a record "not measured" with the reason. Where the two sides are different implementations, the ratio's
/// note names the PyTorch of the comparison.
///
/// ```
/// use report::{Case, Environment, Metric, Record, comparison};
///
/// let specs: report::Specs = toml::from_str(r#"
///     [[comparison]]
///     name = "swiglu-time"
///     title = "SwiGLU against PyTorch"
///     about = "Forward and backward."
///     peer = "swiglu.py"
///     rounds = 2
///     ratio = [{ metric = "step_seconds", as = "step_time_ratio", per = ["batch"],
///                ours = { impl = "frugal" }, theirs = { impl = "pytorch" } }]
/// "#)?;
/// let record = |name: &str, round: u32, seconds: f64| Record {
///     experiment: "swiglu-time".into(),
///     case: Case::new().with("impl", name).with("batch", 8).with("round", round),
///     metric: Metric::exact("step_seconds", "s", seconds),
///     environment: Environment::detect("cpu", None),
/// };
/// let records = [record("frugal", 0, 1.0), record("pytorch", 0, 2.0),
///                record("frugal", 1, 3.0), record("pytorch", 1, 4.0)];
/// let ratios = comparison::ratios(&specs.comparisons[0], &records);
/// assert_eq!(ratios[0].metric.value, Some((0.5 + 0.75) / 2.0));
/// assert_eq!(ratios[0].case, Case::new().with("batch", 8).with("impl", "frugal"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn ratios(comparison: &Comparison, records: &[Record]) -> Vec<Record> {
    let records: Vec<_> = newest(records).into_iter().filter(|r| r.experiment == comparison.name).collect();
    comparison.ratios.iter().flat_map(|ratio| ratios_of(ratio, &records)).collect()
}

fn ratios_of(ratio: &Ratio, records: &[Record]) -> Vec<Record> {
    let ours: Vec<_> =
        records.iter().filter(|r| r.metric.name == ratio.metric && ratio.ours.matches(&r.case)).collect();
    let theirs: Vec<_> =
        records.iter().filter(|r| r.metric.name == ratio.metric && ratio.theirs.matches(&r.case)).collect();
    let groups = distinct(ours.iter().filter_map(|record| record.case.project(&ratio.per)));
    let mut results = Vec::new();
    for group in groups {
        let mine: Vec<_> = ours.iter().filter(|r| r.case.matches(&group)).collect();
        let wanted = group.without(|key| ratio.theirs.fixes(key));
        let peers: Vec<_> = theirs.iter().filter(|r| r.case.matches(&wanted)).collect();
        let of_rounds: Vec<Result<f64, String>> =
            mine.iter().map(|record| ratio_of_round(ratio, record, &mine, &peers)).collect();
        let case = ratio.ours.fixed().fold(group, |case, (key, value)| case.with(key, value.clone()));
        let values: Vec<f64> = of_rounds.iter().filter_map(|r| r.as_ref().ok().copied()).collect();
        let why = of_rounds.into_iter().find_map(Result::err);
        let notes = [against(&mine, &peers), why.as_ref().map(|why| format!("a round is excluded: {why}"))];
        let metric = if values.is_empty() {
            Metric::not_measured(&ratio.name, "ratio", &why.unwrap_or("no record".into()))
        } else {
            let note = notes.into_iter().flatten().reduce(|first, second| format!("{first}; {second}"));
            let interval = statistics::median_interval(&values).or_else(|| statistics::log_interval(&values));
            Metric { note, interval, ..Metric::of_samples(&ratio.name, "ratio", &values) }
        };
        let last = mine.iter().max_by_key(|r| r.environment.unix_time).expect("a group has a record of ours");
        results.push(Record { case, metric, ..(**last).clone() });
    }
    results
}

/// Which PyTorch `peers` ran on, and which libtorch `mine` linked where that is another. `None` where both are the same
/// implementation, or none is known.
fn against(mine: &[&&Record], peers: &[&&Record]) -> Option<String> {
    let implementations = |records: &[&&Record]| {
        distinct(records.iter().map(|record| record.case.get(IMPLEMENTATION_KEY).cloned()))
    };
    if implementations(mine) == implementations(peers) {
        return None;
    }
    let versions = |records: &[&&Record]| {
        distinct(records.iter().filter_map(|record| record.environment.torch.clone())).join(", ")
    };
    let packages = distinct(peers.iter().flat_map(|record| &record.environment.packages));
    let packages: String = packages.iter().map(|(name, version)| format!(", {name} {version}")).collect();
    let (ours, theirs) = (versions(mine), versions(peers));
    match (theirs.is_empty(), ours.is_empty() || ours == theirs) {
        (true, _) => None,
        (false, true) => Some(format!("against PyTorch {theirs}{packages}")),
        (false, false) => Some(format!("against PyTorch {theirs}{packages}; ours links libtorch {ours}")),
    }
}

fn ratio_of_round(
    ratio: &Ratio,
    record: &Record,
    mine: &[&&Record],
    peers: &[&&Record],
) -> Result<f64, String> {
    let round = record.case.get(ROUND_KEY);
    let same_round = |r: &&&&Record| r.case.get(ROUND_KEY) == round;
    if mine.iter().filter(same_round).count() > 1 {
        return Err(
            "several of our cases are in one round; add a key that distinguishes them to `per`".into()
        );
    }
    let mut others = peers.iter().filter(same_round);
    let (Some(peer), None) = (others.next(), others.next()) else {
        let matching = peers.iter().filter(same_round).count();
        return Err(if matching == 0 {
            format!("no record of {} to divide by", ratio.metric)
        } else {
            format!(
                "{matching} records to divide by in one round; add a key that distinguishes them to `per`"
            )
        });
    };
    let value = |r: &Record| {
        r.metric
            .value
            .ok_or_else(|| r.metric.note.clone().unwrap_or_else(|| format!("no value of {}", ratio.metric)))
    };
    let quotient = value(record)? / value(peer)?;
    if quotient.is_finite() { Ok(quotient) } else { Err("the divisor is zero".into()) }
}

/// The rounds of each case as one record: their median, spread and number. Records without a round stay as they are.
pub(crate) fn join_rounds(records: &[Record]) -> Vec<Record> {
    let mut joined: Vec<(Case, Vec<&Record>)> = Vec::new();
    for record in records {
        let case = record.case.without(|key| key == ROUND_KEY);
        let here =
            joined.iter_mut().find(|(c, rounds)| *c == case && rounds[0].metric.name == record.metric.name);
        match here {
            Some((_, rounds)) => rounds.push(record),
            None => joined.push((case, vec![record])),
        }
    }
    let join = |(case, rounds): (Case, Vec<&Record>)| {
        let last =
            rounds.iter().max_by_key(|r| r.environment.unix_time).expect("there is one record at least");
        if rounds.len() == 1 {
            return Record { case, ..(*last).clone() };
        }
        let values: Vec<f64> = rounds.iter().filter_map(|r| r.metric.value).collect();
        let note = rounds.iter().find_map(|r| r.metric.note.clone());
        let metric = Metric { note, ..Metric::of_samples(&last.metric.name, &last.metric.unit, &values) };
        Record { case, metric, ..(*last).clone() }
    };
    joined.into_iter().map(join).collect()
}
