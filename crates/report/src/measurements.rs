//! The records of one section, ready to be shown: the newest of each measurement, the rounds of a comparison joined.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::comparison;
use crate::record::{Case, Metric, Record};
use crate::spec::Specs;

/// The case key that counts the turns of a comparison.
pub const ROUND_KEY: &str = "round";

/// The case key that distinguishes the two sides of a comparison.
pub const IMPLEMENTATION_KEY: &str = "impl";

/// The records of one experiment or comparison; of two with the same case and metric, the newest.
#[derive(Clone, Debug, Default)]
pub struct Measurements {
    records: Vec<Record>,
    /// Where the measurement of a case's identity and a metric is.
    places: HashMap<(String, String), usize>,
}

impl Measurements {
    /// Returns the records of `experiment` among `records`, with the ratios and joined rounds where it is a comparison.
    pub fn select(specs: &Specs, experiment: &str, records: &[Record]) -> Self {
        let mine = newest(records.iter().filter(|record| record.experiment == experiment));
        match specs.comparison(experiment) {
            None => Self::from_records(&mine),
            Some(comparison) => {
                let mut joined = comparison::join_rounds(&mine);
                joined.extend(comparison::ratios(comparison, &mine));
                Self::from_records(&joined)
            }
        }
    }

    /// Returns the newest of each measurement among `records`, of whatever experiment they are.
    pub fn from_records(records: &[Record]) -> Self {
        let records = newest(records);
        let place = |(i, r): (usize, &Record)| ((r.case.identity(), r.metric.name.clone()), i);
        let places = records.iter().enumerate().map(place).collect();
        Self { records, places }
    }

    /// Returns every record, in the order in which its case and metric were first measured.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns every case once, in the order of first records.
    pub fn cases(&self) -> impl Iterator<Item = &Case> {
        let mut seen = HashSet::new();
        self.records.iter().map(|record| &record.case).filter(move |case| seen.insert(case.identity()))
    }

    /// Returns the measurement of `metric` in exactly `case`.
    pub fn metric(&self, case: &Case, metric: &str) -> Option<&Metric> {
        self.places.get(&(case.identity(), metric.to_owned())).map(|&place| &self.records[place].metric)
    }

    /// Returns the unit of `metric`, from its first record.
    pub fn unit(&self, metric: &str) -> Option<&str> {
        self.records.iter().find(|r| r.metric.name == metric).map(|r| r.metric.unit.as_str())
    }

    /// Returns the names of all metrics, in the order of first records.
    pub fn metrics(&self) -> Vec<&str> {
        distinct(self.records.iter().map(|r| r.metric.name.as_str()))
    }

    /// Returns the names of all case keys, in the order of first records.
    pub fn keys(&self) -> Vec<&str> {
        distinct(self.records.iter().flat_map(|r| r.case.0.keys().map(String::as_str)))
    }
}

/// Returns the newest record of each experiment, case and metric, at the position of the first. If two are equally new,
/// the later in the list counts.
pub fn newest<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<Record> {
    let mut place = HashMap::new();
    let mut kept: Vec<Record> = Vec::new();
    for record in records {
        let identity = (record.experiment.as_str(), record.case.identity(), record.metric.name.as_str());
        match place.get(&identity) {
            None => {
                place.insert(identity, kept.len());
                kept.push(record.clone());
            }
            Some(&at) => {
                let old: &mut Record = &mut kept[at];
                if record.environment.unix_time >= old.environment.unix_time {
                    *old = record.clone();
                }
            }
        }
    }
    kept
}

impl Case {
    /// Returns a text that equal cases share: keys sorted, whole numbers written as such (`8` and `8.0` agree).
    pub fn identity(&self) -> String {
        let mut pairs: Vec<_> =
            self.0.iter().map(|(key, value)| format!("{key:?}={}", canonical(value))).collect();
        pairs.sort();
        pairs.join(",")
    }

    /// The part of this case with the given keys, in their order; `None` where one is missing.
    pub(crate) fn project<S: AsRef<str>>(&self, keys: &[S]) -> Option<Case> {
        keys.iter()
            .try_fold(Case::new(), |part, key| Some(part.with(key.as_ref(), self.get(key.as_ref())?.clone())))
    }

    /// This case without the keys that `drop` picks.
    pub(crate) fn without(&self, drop: impl Fn(&str) -> bool) -> Case {
        Case(self.0.iter().filter(|(key, _)| !drop(key)).map(|(k, v)| (k.clone(), v.clone())).collect())
    }

    /// Returns the case as text for a reader: `batch 8, SaveOne`. A number needs its key beside it, a text speaks for itself.
    pub fn describe(&self) -> String {
        let part = |(key, value): (&String, &Value)| match value {
            Value::String(text) => text.clone(),
            other => format!("{} {}", words(key), plain(other)),
        };
        self.0.iter().map(part).collect::<Vec<_>>().join(", ")
    }
}

fn canonical(value: &Value) -> String {
    match value.as_f64() {
        Some(number) => format!("{number}"),
        None => value.to_string(),
    }
}

/// A case value without quotes.
pub(crate) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A snake-case name as words.
pub(crate) fn words(name: &str) -> String {
    name.replace('_', " ")
}

pub(crate) fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    items.fold(Vec::new(), |mut kept, item| {
        if !kept.contains(&item) {
            kept.push(item);
        }
        kept
    })
}
