//! Claims, and whether they hold on a set of records.

use std::collections::HashMap;
use std::fmt;

use crate::measurements::{Measurements, distinct};
use crate::part::OtherReport;
use crate::record::Record;
use crate::run::{RunOutcome, RunState};
use crate::spec::{Claim, DeviceKind, Op, Specs};
use crate::unit;

/// The verdict on a claim.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The worst value is within the limit.
    Holds {
        /// The worst value.
        value: f64,
    },
    /// The limit is within the 95 % interval of the worst value: the rounds do not tell on which side it is.
    Tie {
        /// The worst value.
        value: f64,
        /// The interval.
        interval: (f64, f64),
    },
    /// The worst value is outside the limit.
    FallsShort {
        /// The worst value.
        value: f64,
    },
    /// A value is missing.
    NotMeasured {
        /// Why.
        why: String,
    },
}

/// A claim with its verdict.
///
/// Its `Display` is one line: `claim fused-ce/time-vs-eager 0.97 <= 1.00 holds (against PyTorch 2.15.0)`, and
/// `holds (on NVIDIA H200)` where the value is another report's.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedClaim {
    /// The claim.
    pub claim: Claim,
    /// The unit of value and limit.
    pub unit: String,
    /// The verdict.
    pub verdict: Verdict,
    /// A note on the deciding value, such as which PyTorch a ratio is relative to.
    pub note: Option<String>,
    /// The machine of the deciding value, where another report has it.
    pub machine: Option<String>,
}

/// Checks every claim of `specs` against `records`, in the order of registration.
///
/// The worst matching record decides; if its interval covers the limit, the claim is a tie. A missing value gives "not measured" unless a measured value falls short. `runs`
/// has the reason why an experiment left no record.
pub fn check(specs: &Specs, records: &[Record], runs: &[RunOutcome]) -> Vec<CheckedClaim> {
    let mut of_experiments = HashMap::new();
    let check = |claim: &Claim| {
        if let Some(devices) = several_gpus(&claim.experiment, records) {
            return unmeasured(claim, format!("the records are of {devices}"));
        }
        let measured = of_experiments
            .entry(claim.experiment.clone())
            .or_insert_with_key(|experiment| Measurements::select(specs, experiment, records));
        check_one(claim, measured, runs)
    };
    specs.claims.iter().map(check).collect()
}

/// [`check`], where a claim that `records` do not measure takes the verdict of the first other report that measures it.
pub fn check_anywhere(
    specs: &Specs,
    records: &[Record],
    runs: &[RunOutcome],
    others: &[OtherReport],
) -> Vec<CheckedClaim> {
    let mut checked = check(specs, records, runs);
    for other in others {
        for open in checked.iter_mut().filter(|checked| !checked.is_measured()) {
            let measured = Measurements::select(specs, &open.claim.experiment, &other.records);
            let there = check_one(&open.claim, &measured, &[]);
            if there.is_measured() {
                let machine = other.machine_of(&open.claim.experiment).to_owned();
                *open = CheckedClaim { machine: Some(machine), ..there };
            }
        }
    }
    checked
}

fn check_one(claim: &Claim, measured: &Measurements, runs: &[RunOutcome]) -> CheckedClaim {
    let matching: Vec<_> = measured
        .records()
        .iter()
        .filter(|record| record.metric.name == claim.metric && claim.case.matches(&record.case))
        .filter(|record| claim.device.is_none_or(|device| device.is_of(&record.environment)))
        .collect();
    let badness = |value: f64| claim.op.badness(value, claim.limit);
    let worst = matching
        .iter()
        .filter_map(|record| Some((record.metric.value?, &record.metric)))
        .max_by(|(a, _), (b, _)| badness(*a).total_cmp(&badness(*b)));
    let tied = worst
        .and_then(|(value, metric)| Some((value, metric.interval?)))
        .filter(|(_, (low, high))| *low < *high && (*low..=*high).contains(&claim.limit));
    let (worst, note) = worst.map_or((None, None), |(value, metric)| (Some(value), metric.note.clone()));
    let missing = matching.iter().find(|record| record.metric.value.is_none());
    let verdict = match (tied, worst, missing) {
        (Some((value, interval)), ..) => Verdict::Tie { value, interval },
        (_, Some(value), _) if !claim.op.holds(value, claim.limit) => Verdict::FallsShort { value },
        (.., Some(record)) => {
            Verdict::NotMeasured { why: record.metric.note.clone().unwrap_or_else(|| "no value".into()) }
        }
        (_, Some(value), None) => Verdict::Holds { value },
        (_, None, None) => Verdict::NotMeasured { why: why_no_record(claim, runs) },
    };
    let unit = matching.first().map_or_else(|| claim.unit.clone(), |record| record.metric.unit.clone());
    let note = note.filter(|_| !matches!(verdict, Verdict::NotMeasured { .. }));
    CheckedClaim { claim: claim.clone(), unit, verdict, note, machine: None }
}

/// The names of the GPUs that measured `experiment`, where they are several: figures of two are not of one machine.
fn several_gpus(experiment: &str, records: &[Record]) -> Option<String> {
    let mine = records.iter().filter(|record| record.experiment == experiment);
    let gpus = distinct(mine.map(|record| &*record.environment.device).filter(|device| *device != "cpu"));
    (gpus.len() > 1).then(|| gpus.join(" and "))
}

fn unmeasured(claim: &Claim, why: String) -> CheckedClaim {
    let verdict = Verdict::NotMeasured { why };
    CheckedClaim { claim: claim.clone(), unit: claim.unit.clone(), verdict, note: None, machine: None }
}

fn why_no_record(claim: &Claim, runs: &[RunOutcome]) -> String {
    match runs.iter().find(|run| run.experiment == claim.experiment).map(|run| &run.state) {
        Some(RunState::Skipped { why }) => why.clone(),
        Some(RunState::Failed { .. }) => format!("{} failed", claim.experiment),
        _ => match claim.device {
            Some(DeviceKind::Gpu) => "no record of a GPU".into(),
            Some(DeviceKind::Cpu) => "no record of a CPU".into(),
            None => "no record".into(),
        },
    }
}

impl CheckedClaim {
    /// Whether there is a value.
    pub fn is_measured(&self) -> bool {
        !matches!(self.verdict, Verdict::NotMeasured { .. })
    }

    /// Remarks on the verdict: the machine where another report has the value, the note, or why there is no value.
    pub fn remarks(&self) -> Option<String> {
        let machine = self.machine.as_ref().map(|machine| format!("on {machine}"));
        let words = match &self.verdict {
            Verdict::NotMeasured { why } => Some(why),
            _ => self.note.as_ref(),
        };
        let interval = match self.verdict {
            Verdict::Tie { interval: (low, high), .. } => {
                let shown = |value: f64| unit::pair(value, value, &self.unit, 2, false).0;
                Some(format!("95 % interval {} to {}", shown(low), shown(high)))
            }
            _ => None,
        };
        let all: Vec<String> = machine.into_iter().chain(interval).chain(words.cloned()).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// `holds`, `tie`, `falls short` or `not measured`.
    pub fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Holds { .. } => "holds",
            Verdict::Tie { .. } => "tie",
            Verdict::FallsShort { .. } => "falls short",
            Verdict::NotMeasured { .. } => "not measured",
        }
    }

    /// Returns the value and the limit as shown: with the decimals of the stated limit, and more where they are needed to
    /// show on which side the value is.
    pub fn figures(&self) -> (Option<String>, String) {
        let Claim { op, limit, .. } = self.claim;
        let stated = unit::decimals_of_limit(limit, &self.unit);
        let exact = op == Op::Equal;
        match self.verdict {
            Verdict::NotMeasured { .. } => (None, unit::pair(limit, limit, &self.unit, stated, exact).1),
            Verdict::Holds { value } | Verdict::Tie { value, .. } | Verdict::FallsShort { value } => {
                let mut shown = unit::pair(value, limit, &self.unit, stated, exact);
                for decimals in stated + 1..=9 {
                    if op.holds(value, limit) || shown.0 != shown.1 {
                        break;
                    }
                    shown = unit::pair(value, limit, &self.unit, decimals, exact);
                }
                (Some(shown.0), shown.1)
            }
        }
    }
}

impl fmt::Display for CheckedClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, limit) = self.figures();
        let Claim { name, op, .. } = &self.claim;
        match value {
            None => write!(f, "claim {name} {}", self.word())?,
            Some(value) => write!(f, "claim {name} {value} {} {limit} {}", op.symbol(), self.word())?,
        }
        self.remarks().iter().try_for_each(|remarks| write!(f, " ({remarks})"))
    }
}
