//! Comparison of two runs: what changed, by how much, and whether by more than the spread.

use crate::markdown;
use crate::measurements::{Measurements, distinct};
use crate::record::{Case, Metric, Record};
use crate::spec::Specs;
use crate::unit;

/// A measurement in two runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The experiment's name.
    pub experiment: String,
    /// Which case of it.
    pub case: Case,
    /// The measurement of the old run.
    pub old: Metric,
    /// The measurement of the new run.
    pub new: Metric,
}

/// A measurement that only one of two runs has.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpaired {
    /// The experiment's name.
    pub experiment: String,
    /// Which case of it.
    pub case: Case,
    /// The measurement.
    pub metric: Metric,
}

/// The differences of two runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// The measurements that differ: those outside the spread first, each part sorted by the size of the change.
    pub changed: Vec<Change>,
    /// Number of measurements that are equal to the last digit.
    pub same: usize,
    /// Measurements of the new run only.
    pub added: Vec<Unpaired>,
    /// Measurements of the old run only.
    pub removed: Vec<Unpaired>,
}

impl Change {
    /// Returns the change in percent of the old value; `None` where a value is missing or the old one is zero.
    pub fn percent(&self) -> Option<f64> {
        let percent = 100.0 * (self.new.value? / self.old.value? - 1.0);
        percent.is_finite().then_some(percent)
    }

    /// Returns whether the values differ by more than both spreads together, or one of them is missing.
    pub fn outside_spread(&self) -> bool {
        match (self.old.value, self.new.value) {
            (Some(old), Some(new)) => {
                (new - old).abs() > self.old.spread.unwrap_or(0.0) + self.new.spread.unwrap_or(0.0)
            }
            (old, new) => old.is_some() != new.is_some(),
        }
    }
}

/// Compares two runs. Rounds of a comparison count as one measurement, and its ratios are compared too.
pub fn compare(specs: &Specs, old: &[Record], new: &[Record]) -> Changes {
    let mut changes = Changes::default();
    for experiment in distinct(old.iter().chain(new).map(|record| record.experiment.as_str())) {
        let (before, after) =
            (Measurements::select(specs, experiment, old), Measurements::select(specs, experiment, new));
        let lone = |record: &Record| Unpaired {
            experiment: experiment.into(),
            case: record.case.clone(),
            metric: record.metric.clone(),
        };
        for record in after.records() {
            match before.metric(&record.case, &record.metric.name) {
                None => changes.added.push(lone(record)),
                Some(old) if old.value == record.metric.value => changes.same += 1,
                Some(old) => changes.changed.push(Change {
                    experiment: experiment.into(),
                    case: record.case.clone(),
                    old: old.clone(),
                    new: record.metric.clone(),
                }),
            }
        }
        let gone = |record: &&Record| after.metric(&record.case, &record.metric.name).is_none();
        changes.removed.extend(before.records().iter().filter(gone).map(lone));
    }
    let size = |change: &Change| change.percent().map_or(f64::INFINITY, f64::abs);
    changes
        .changed
        .sort_by(|a, b| b.outside_spread().cmp(&a.outside_spread()).then(size(b).total_cmp(&size(a))));
    changes
}

impl Changes {
    /// Renders the differences as Markdown, readable on a terminal.
    pub fn markdown(&self) -> String {
        let outside = self.changed.iter().filter(|change| change.outside_spread()).count();
        let shared = self.changed.len() + self.same;
        let mut text = format!("{outside} of {shared} measurements changed by more than their spread.\n");
        if !self.changed.is_empty() {
            let header = ["experiment", "case", "metric", "old", "new", "change", "outside the spread"];
            let rows: Vec<_> = self.changed.iter().map(Change::row).collect();
            let right = [false, false, false, true, true, true, false];
            text += &format!("\n{}", markdown::grid(&header.map(str::to_owned), &rows, &right));
        }
        for (title, lone) in [("Only in the new run", &self.added), ("Only in the old run", &self.removed)] {
            if !lone.is_empty() {
                let header = ["experiment", "case", "metric", "value"].map(str::to_owned);
                let rows: Vec<_> = lone.iter().map(Unpaired::row).collect();
                text += &format!(
                    "\n{title}:\n\n{}",
                    markdown::grid(&header, &rows, &[false, false, false, true])
                );
            }
        }
        text
    }
}

impl Change {
    fn row(&self) -> Vec<String> {
        vec![
            self.experiment.clone(),
            self.case.describe(),
            unit::heading(&self.new.name, &self.new.unit),
            show(&self.old),
            show(&self.new),
            self.percent().map_or_else(|| "–".into(), |percent| format!("{percent:+.1} %")),
            if self.outside_spread() { "yes" } else { "no" }.into(),
        ]
    }
}

impl Unpaired {
    fn row(&self) -> Vec<String> {
        let name = unit::heading(&self.metric.name, &self.metric.unit);
        vec![self.experiment.clone(), self.case.describe(), name, show(&self.metric)]
    }
}

fn show(metric: &Metric) -> String {
    match (metric.value, &metric.note) {
        (Some(value), _) => unit::human(value, &metric.unit),
        (None, Some(why)) => format!("not measured ({why})"),
        (None, None) => "not measured".into(),
    }
}
