//! Figures in words: one value, or the range of several.

use crate::measurements::distinct;
use crate::unit;

/// A computed quantity of a sentence.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// A value with its unit.
    Amount(f64, String),
    Percent(f64),
    /// Less or more.
    Change(Change),
    /// Slower or faster, of a time.
    Time(Change),
    /// Slower or faster, of a rate.
    Rate(Change),
}

/// How a value relates to its baseline.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// The value divided by the baseline.
    pub(super) ratio: f64,
    /// Whether they differ, and the interval covers no difference.
    pub(super) within: bool,
    /// Whether that interval is wide.
    pub(super) unclear: bool,
    /// Whether one of them is a single run, which has no interval.
    pub(super) single: bool,
    /// The quantity that changes, in words.
    pub(super) what: String,
}

impl Change {
    /// In percent of the baseline; 0 where the interval covers no difference.
    fn percent(&self) -> f64 {
        if self.within { 0.0 } else { 100.0 * (self.ratio - 1.0) }
    }
}

/// The words of one value, or of the range of several, which are of one kind.
pub(super) fn describe(values: &[Value]) -> String {
    match values {
        [] => String::new(),
        [Value::Amount(..), ..] => {
            let amounts: Vec<(f64, &str)> = values.iter().filter_map(Value::amount).collect();
            range(&amounts, |(value, unit)| unit::human(*value, unit), |(value, _)| *value)
        }
        [Value::Percent(_), ..] => {
            let percents: Vec<f64> = values
                .iter()
                .filter_map(|v| if let Value::Percent(p) = v { Some(*p) } else { None })
                .collect();
            range(&percents, |percent| format!("{percent:.1} %"), |percent| *percent)
        }
        [Value::Change(_), ..] => signed(&percents(values), "less", "more"),
        [Value::Time(_), ..] => speed(&percents(values).iter().map(|percent| -percent).collect::<Vec<_>>()),
        [Value::Rate(_), ..] => speed(&percents(values)),
    }
}

impl Value {
    fn amount(&self) -> Option<(f64, &str)> {
        if let Self::Amount(value, unit) = self { Some((*value, unit)) } else { None }
    }

    fn change(&self) -> Option<&Change> {
        match self {
            Self::Change(change) | Self::Time(change) | Self::Rate(change) => Some(change),
            _ => None,
        }
    }
}

fn percents(values: &[Value]) -> Vec<f64> {
    let percent = |value: &Value| match value {
        // Half of the time is twice as fast, half of the rate is twice as slow.
        Value::Time(change) | Value::Rate(change) if change.ratio < 1.0 && !change.within => {
            100.0 * (1.0 - 1.0 / change.ratio)
        }
        _ => value.change().map_or(0.0, Change::percent),
    };
    values.iter().map(percent).collect()
}

/// `104 to 384 MiB`.
fn range<T>(values: &[T], show: impl Fn(&T) -> String, size: impl Fn(&T) -> f64) -> String {
    let least = values.iter().min_by(|a, b| size(a).total_cmp(&size(b))).map(&show).unwrap_or_default();
    let most = values.iter().max_by(|a, b| size(a).total_cmp(&size(b))).map(&show).unwrap_or_default();
    if least == most {
        return least;
    }
    match (least.split_once(' '), most.split_once(' ')) {
        (Some((number, unit)), Some((_, same))) if unit == same => format!("{number} to {most}"),
        _ => format!("{least} to {most}"),
    }
}

/// `3.5 % slower`, `as fast`, and in factors where all are twice as fast: `4.4 to 5.6 times as fast`.
fn speed(percents: &[f64]) -> String {
    if percents.iter().all(|percent| *percent == 0.0) {
        return "just as fast".into();
    }
    let factors =
        |sign: f64| percents.iter().map(|percent| 1.0 + sign * percent / 100.0).collect::<Vec<f64>>();
    let in_words = |factors: &[f64], word: &str| {
        format!("{} times as {word}", range(factors, |factor| format!("{factor:.2}"), |factor| *factor))
    };
    if percents.iter().all(|percent| *percent >= 100.0) {
        return in_words(&factors(1.0), "fast");
    }
    if percents.iter().all(|percent| *percent <= -100.0) {
        return in_words(&factors(-1.0), "slow");
    }
    signed(percents, "slower", "faster")
}

/// `3.5 to 54.9 % more`, `between 3.5 % less and 54.9 % more`, `up to 54.9 % more`, `neither more nor less`.
fn signed(percents: &[f64], negative: &str, positive: &str) -> String {
    let least = percents.iter().copied().fold(f64::INFINITY, f64::min);
    let most = percents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (less, more) = (size(least), size(most));
    match (least.total_cmp(&0.0), most.total_cmp(&0.0)) {
        _ if least == 0.0 && most == 0.0 => format!("neither {positive} nor {negative}"),
        _ if least == 0.0 => format!("up to {more} % {positive}"),
        _ if most == 0.0 => format!("up to {less} % {negative}"),
        (std::cmp::Ordering::Greater, _) if less == more => format!("{more} % {positive}"),
        (std::cmp::Ordering::Greater, _) => format!("{less} to {more} % {positive}"),
        (_, std::cmp::Ordering::Less) if less == more => format!("{less} % {negative}"),
        (_, std::cmp::Ordering::Less) => format!("{more} to {less} % {negative}"),
        _ => format!("between {less} % {negative} and {more} % {positive}"),
    }
}

fn size(percent: f64) -> String {
    let size = percent.abs();
    if size < 0.05 { "under 0.1".into() } else { unit::grouped(&format!("{size:.1}")) }
}

/// Reservations about the changes: which the interval leaves undecided, which it says are none, and which are of single runs.
pub(super) fn reservations(columns: &[Vec<Value>]) -> String {
    let about = |takes: fn(&Change) -> bool| {
        let name = |column: &Vec<Value>| {
            let changes: Vec<&Change> = column.iter().filter_map(Value::change).collect();
            let count = changes.iter().filter(|change| takes(change)).count();
            let what = changes.first().map(|change| change.what.clone()).unwrap_or_default();
            match (count, changes.len()) {
                (0, _) => None,
                (all, groups) if all == groups => Some(what),
                (some, groups) => Some(format!("{what} in {some} of {groups}")),
            }
        };
        distinct(columns.iter().filter_map(name))
    };
    let mut text = String::new();
    for (words, names) in [
        ("undecided by the 95 % interval", about(|change| change.unclear)),
        ("no difference by the 95 % interval", about(|change| change.within && !change.unclear)),
        ("single runs", about(|change| change.single && !change.within)),
    ] {
        if !names.is_empty() {
            text += &format!(" ({words}: {})", names.join(", "));
        }
    }
    text
}
