//! Values and effects with their 95 % intervals.
//!
//! | measured | estimate | interval |
//! |---|---|---|
//! | the rounds of a comparison | the median of the rounds' ratios, each of two programs that took turns | Student's t over the logarithms of the ratios |
//! | two sets of samples | the ratio of their medians | from both standard errors, with the smaller number of degrees of freedom |
//! | samples of one case | their median | from its standard error |
//! | bytes, counts, anything that another run repeats | the value | none: it is exact |
//! | one run of a time or a rate | the value | none: nothing follows from it |
//!
//! A record keeps median and half of the interquartile range $s$ of $n$ samples; the standard error of the median is then
//! $1.2533 \cdot s / 0.6745 / \sqrt{n}$ for samples of a normal distribution.

use crate::filter::Filter;
use crate::measurements::{ROUND_KEY, distinct};
use crate::record::{Case, Metric, Record};
use crate::statistics::{log_interval, summarize, t_quantile};
use serde_json::Value;

/// How far both ends of an interval may be from 1 to say that there is no difference.
pub(crate) const NARROW: f64 = 1.05;

/// A value with what is known about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// The value: a measurement, or a ratio.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
    /// What another run would give.
    pub certainty: Certainty,
    /// Number of rounds, or of samples.
    pub n: usize,
}

/// What another run would give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Certainty {
    /// The same.
    Exact,
    /// A value in this interval, with 95 % probability.
    Interval(f64, f64),
    /// Not known: a single run.
    Single,
}

/// What an interval says about a ratio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Below 1.
    Less,
    /// Above 1.
    More,
    /// Neither, by an interval within 5 % of 1.
    Same,
    /// The interval covers 1 and is wide, or there is none.
    Unclear,
}

impl Estimate {
    /// Returns on which side of 1 the interval is.
    pub fn direction(&self) -> Direction {
        let (low, high) = match self.certainty {
            Certainty::Exact => (self.value, self.value),
            Certainty::Interval(low, high) => (low, high),
            Certainty::Single => return Direction::Unclear,
        };
        let exact = low == high;
        match () {
            () if high < 1.0 && (!exact || high < 0.995) => Direction::Less,
            () if low > 1.0 && (!exact || low > 1.005) => Direction::More,
            () if low >= 1.0 / NARROW && high <= NARROW => Direction::Same,
            () => Direction::Unclear,
        }
    }

    /// One divided by this.
    #[must_use]
    pub fn inverse(self) -> Self {
        let certainty = match self.certainty {
            Certainty::Interval(low, high) => Certainty::Interval(1.0 / high, 1.0 / low),
            other => other,
        };
        Self { value: 1.0 / self.value, certainty, ..self }
    }
}

/// Returns the one value of `metric` that `of` takes among `records`.
pub fn value(records: &[&Record], metric: &str, of: &Filter) -> Result<Estimate, String> {
    let side = Side::of(records, metric, of)?;
    let unit = side.unit.clone();
    if let [(_, only)] = side.rounds.as_slice() {
        return Ok(Estimate {
            value: only.value.unwrap_or_default(),
            unit,
            certainty: certainty(only),
            n: only.n,
        });
    }
    let values: Vec<f64> = side.rounds.iter().filter_map(|(_, metric)| metric.value).collect();
    let value = summarize(&values).map_or(0.0, |summary| summary.median);
    Ok(Estimate { value, unit, certainty: of_rounds(&values), n: values.len() })
}

/// Returns `metric` of the cases that `of` takes, divided by that of `against`.
pub fn effect(records: &[&Record], metric: &str, of: &Filter, against: &Filter) -> Result<Estimate, String> {
    let (ours, theirs) = (Side::of(records, metric, of)?, Side::of(records, metric, against)?);
    if of == against {
        return Ok(Estimate {
            value: 1.0,
            unit: "ratio".into(),
            certainty: Certainty::Exact,
            n: ours.rounds.len(),
        });
    }
    let mut pairs: Vec<(&Metric, &Metric)> = Vec::new();
    for (round, mine) in &ours.rounds {
        pairs.extend(
            theirs.rounds.iter().filter(|(other, _)| other == round).map(|(_, other)| (*mine, *other)),
        );
    }
    let quotient = |(mine, other): &(&Metric, &Metric)| Some(mine.value? / other.value?);
    let ratios: Vec<f64> = pairs.iter().filter_map(quotient).collect();
    if ratios.is_empty() || ratios.iter().any(|ratio| !ratio.is_finite() || *ratio <= 0.0) {
        return Err(format!("{metric} cannot be divided"));
    }
    let unit = "ratio".to_owned();
    if let ([(mine, other)], [ratio]) = (pairs.as_slice(), ratios.as_slice()) {
        let certainty = of_ratio(mine, other);
        return Ok(Estimate { value: *ratio, unit, certainty, n: mine.n.min(other.n) });
    }
    let value = summarize(&ratios).map_or(1.0, |summary| summary.median);
    Ok(Estimate { value, unit, certainty: of_rounds(&ratios), n: ratios.len() })
}

/// What is known of the ratio of two measurements.
pub(crate) fn of_ratio(mine: &Metric, other: &Metric) -> Certainty {
    let (Some(a), Some(b)) = (mine.value, other.value) else { return Certainty::Single };
    match (certainty(mine), certainty(other)) {
        (Certainty::Exact, Certainty::Exact) => Certainty::Exact,
        (Certainty::Single, _) | (_, Certainty::Single) => Certainty::Single,
        _ => {
            let error = standard_error(mine).unwrap_or(0.0).hypot(standard_error(other).unwrap_or(0.0));
            let measured = [mine, other].into_iter().filter(|metric| standard_error(metric).is_some());
            let degrees = measured.map(|metric| metric.n).min().unwrap_or(1).saturating_sub(1);
            let wide = if error == 0.0 { 1.0 } else { (t_quantile(degrees) * error).exp() };
            Certainty::Interval(a / b / wide, a / b * wide)
        }
    }
}

/// The measurements of one case, by round.
struct Side<'a> {
    rounds: Vec<(Value, &'a Metric)>,
    unit: String,
}

impl<'a> Side<'a> {
    fn of(records: &[&'a Record], metric: &str, filter: &Filter) -> Result<Self, String> {
        let matching: Vec<&Record> =
            records.iter().filter(|r| r.metric.name == metric && filter.matches(&r.case)).copied().collect();
        let cases: Vec<Case> = distinct(matching.iter().map(|r| r.case.without(|key| key == ROUND_KEY)));
        if cases.len() > 1 {
            let names: Vec<String> = cases.iter().take(3).map(Case::describe).collect();
            return Err(format!("{} cases have {metric}: {}; name one", cases.len(), names.join(" | ")));
        }
        let Some(first) = matching.first() else { return Err(format!("no record of {metric}")) };
        let unit = first.metric.unit.clone();
        let round = |r: &&'a Record| r.case.get(ROUND_KEY).cloned().unwrap_or(Value::Null);
        let rounds: Vec<_> =
            matching.iter().filter(|r| r.metric.value.is_some()).map(|r| (round(r), &r.metric)).collect();
        match rounds.is_empty() {
            true => Err(first.metric.note.clone().unwrap_or_else(|| format!("no value of {metric}"))),
            false => Ok(Self { rounds, unit }),
        }
    }
}

/// Whether another run would give another value: a time, a rate, a loss, the memory of a process. Bytes and counts stay.
pub(crate) fn varies(metric: &Metric) -> bool {
    match metric.unit.as_str() {
        "s" | "nat" => true,
        "ratio" => ["time", "speed", "_per_second"].iter().any(|part| metric.name.contains(part)),
        "B" => metric.name.starts_with("process"),
        unit => unit.ends_with("/s"),
    }
}

/// What is known of one measurement.
pub(crate) fn certainty(metric: &Metric) -> Certainty {
    let Some(value) = metric.value else { return Certainty::Single };
    match (metric.interval, standard_error(metric)) {
        (Some((low, high)), _) => Certainty::Interval(low, high),
        (None, Some(error)) => {
            let wide = t_quantile(metric.n.saturating_sub(1)) * error * value.abs();
            Certainty::Interval(value - wide, value + wide)
        }
        (None, None) if varies(metric) => Certainty::Single,
        (None, None) => Certainty::Exact,
    }
}

/// The standard error of a median, relative to it; `None` for one sample, or for what has no spread.
fn standard_error(metric: &Metric) -> Option<f64> {
    let (value, spread) = (metric.value?, metric.spread?);
    if metric.n < 2 || spread == 0.0 && !varies(metric) {
        return None;
    }
    // Half of the interquartile range of two samples is a quarter of their distance, whose half is the error of their mean.
    let error =
        if metric.n == 2 { 2.0 * spread } else { 1.2533 * spread / 0.6745 / (metric.n as f64).sqrt() };
    (value != 0.0).then(|| error / value.abs())
}

fn of_rounds(values: &[f64]) -> Certainty {
    match log_interval(values) {
        Some((low, high)) if high > low * (1.0 + 1e-9) => Certainty::Interval(low, high),
        Some(_) => Certainty::Exact,
        None => Certainty::Single,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Environment;

    fn record(case: Case, metric: Metric) -> Record {
        Record { experiment: "e".into(), case, metric, environment: Environment::detect("cpu", None) }
    }

    fn filter(key: &str, value: &str) -> Filter {
        Filter(Case::new().with(key, value))
    }

    #[test]
    fn rounds_are_paired() {
        let mut records = Vec::new();
        for (round, slower) in [(0, 1.0), (1, 2.0), (2, 3.0)] {
            for (name, seconds) in [("a", 0.5), ("b", 1.0)] {
                let jitter = 1.0 + 0.01 * f64::from(round) * f64::from(u8::from(name == "a"));
                let case = Case::new().with("impl", name).with("round", round);
                records.push(record(case, Metric::exact("step_seconds", "s", seconds * slower * jitter)));
            }
        }
        let all: Vec<&Record> = records.iter().collect();
        let ratio = effect(&all, "step_seconds", &filter("impl", "a"), &filter("impl", "b")).unwrap();
        let Certainty::Interval(low, high) = ratio.certainty else { panic!("{ratio:?}") };
        assert!(low > 0.49 && low < 0.5 && high > 0.51 && high < 0.53, "{ratio:?}");
        assert_eq!((ratio.n, ratio.direction()), (3, Direction::Less));
        let why = value(&all, "step_seconds", &Filter::default()).unwrap_err();
        assert_eq!(why, "2 cases have step_seconds: a | b; name one");
    }

    #[test]
    fn the_direction_needs_an_interval() {
        let of =
            |certainty: Certainty| Estimate { value: 1.1, unit: "ratio".into(), certainty, n: 1 }.direction();
        assert_eq!(of(Certainty::Single), Direction::Unclear);
        assert_eq!(of(Certainty::Exact), Direction::More);
        assert_eq!(of(Certainty::Interval(1.01, 1.2)), Direction::More);
        assert_eq!(of(Certainty::Interval(0.99, 1.04)), Direction::Same);
        assert_eq!(of(Certainty::Interval(0.9, 1.2)), Direction::Unclear);
        assert_eq!(of(Certainty::Interval(0.8, 0.9)), Direction::Less);
    }

    #[test]
    fn one_run_of_a_time_says_nothing_and_bytes_are_exact() {
        let records = [
            record(Case::new(), Metric::exact("step_seconds", "s", 2.0)),
            record(Case::new(), Metric::exact("peak_bytes", "B", 2.0)),
            record(Case::new(), Metric::of_samples("forward_seconds", "s", &[1.0, 1.1, 1.2, 1.05, 1.15])),
        ];
        let all: Vec<&Record> = records.iter().collect();
        let known = |metric: &str| value(&all, metric, &Filter::default()).unwrap().certainty;
        assert_eq!(known("step_seconds"), Certainty::Single);
        assert_eq!(known("peak_bytes"), Certainty::Exact);
        let Certainty::Interval(low, high) = known("forward_seconds") else { panic!() };
        assert!(low > 0.95 && low < 1.05 && high > 1.15 && high < 1.25, "{low} {high}");
    }
}
