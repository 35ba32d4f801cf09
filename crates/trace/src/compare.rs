//! Explains why one training step is faster than another, from the [`Composition`]s of two traces.
//!
//! The parts of a step add up to its duration, so the difference of two steps is the sum of the differences of their parts.
//! Medians add up only approximately; the remainder is a contribution of its own. Within a part, the operators whose self time
//! changed most are named.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};

use super::composition::{Composition, Phase};
use super::quantity::human;

/// The change of a part of the step, or of an operator.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The name of the part or operator; `uneven steps` for the remainder of the medians.
    pub name: String,
    /// Additional seconds of the later step; negative if it is faster.
    pub seconds: f64,
    /// Operators called in the part, or calls of the operator: before and after.
    pub calls: (f64, f64),
}

/// The explained difference of two compositions. Its `Display` is a sentence, and a second one about operators:
///
/// `step 41.2 ms → 33.0 ms (−19.9 %): optimizer −6.1 ms (312 → 4 operators), forward −2.0 ms`
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Seconds of the median steps, before and after.
    pub step_seconds: (f64, f64),
    /// The parts of the step, largest change first. They add up to the difference of the steps.
    pub phases: Vec<Change>,
    /// Operators by self time, largest change first.
    pub operators: Vec<Change>,
    /// Bytes allocated in the median step, before and after.
    pub allocated_bytes: (f64, f64),
}

/// Changes below this share of the step are not reported.
const MIN_SHARE: f64 = 0.01;
/// Number of operators that the sentence names.
const NAMED: usize = 3;

impl Comparison {
    /// Compares two compositions.
    #[must_use]
    pub fn between(before: &Composition, after: &Composition) -> Self {
        let step_seconds = (before.median.seconds, after.median.seconds);
        let mut phases: Vec<Change> = Phase::ALL
            .iter()
            .map(|&phase| {
                let (old, new) = (before.phase(phase), after.phase(phase));
                let (seconds, calls) = (new.seconds - old.seconds, (old.calls, new.calls));
                Change { name: phase.name().to_owned(), seconds, calls }
            })
            .collect();
        let explained: f64 = phases.iter().map(|change| change.seconds).sum();
        let seconds = step_seconds.1 - step_seconds.0 - explained;
        phases.push(Change { name: "uneven steps".to_owned(), seconds, calls: (0.0, 0.0) });
        let names: BTreeSet<&str> = [before, after]
            .iter()
            .flat_map(|composition| composition.operators.iter().map(|operator| operator.name.as_str()))
            .collect();
        let mut operators: Vec<Change> = names
            .into_iter()
            .map(|name| {
                let totals = |composition: &Composition| {
                    composition
                        .operator(name)
                        .map_or((0.0, 0.0), |operator| (operator.seconds, operator.calls))
                };
                let (old, new) = (totals(before), totals(after));
                Change { name: name.to_owned(), seconds: new.0 - old.0, calls: (old.1, new.1) }
            })
            .collect();
        for changes in [&mut phases, &mut operators] {
            changes.sort_by(|a, b| b.seconds.abs().total_cmp(&a.seconds.abs()));
        }
        let allocated_bytes = (before.median.allocated_bytes, after.median.allocated_bytes);
        Self { step_seconds, phases, operators, allocated_bytes }
    }

    /// Returns the change relative to the earlier step: −0.2 for a fifth less.
    #[must_use]
    pub fn relative(&self) -> f64 {
        let (before, after) = self.step_seconds;
        if before > 0.0 { after / before - 1.0 } else { 0.0 }
    }

    /// Returns the changes of at least [`MIN_SHARE`] of the earlier step.
    fn significant<'a>(&self, changes: &'a [Change]) -> impl Iterator<Item = &'a Change> {
        let least = MIN_SHARE * self.step_seconds.0;
        changes.iter().filter(move |change| change.seconds.abs() >= least)
    }
}

/// Formats a change, such as `−6.1 ms`, with a minus sign as wide as a plus.
fn signed(value: f64, unit: &str) -> String {
    let sign = if value < 0.0 { "−" } else { "+" };
    format!("{sign}{}", human(value.abs(), unit))
}

impl Display for Comparison {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (before, after) = self.step_seconds;
        let percent = 100.0 * self.relative();
        let sign = if percent < 0.0 { "−" } else { "+" };
        write!(f, "step {} → {} ({sign}{:.1} %)", human(before, "s"), human(after, "s"), percent.abs())?;
        let phases: Vec<String> = self
            .significant(&self.phases)
            .map(|Change { name, seconds, calls: (old, new) }| {
                let calls = if old == new { String::new() } else { format!(" ({old} → {new} operators)") };
                format!("{name} {}{calls}", signed(*seconds, "s"))
            })
            .collect();
        if phases.is_empty() {
            write!(f, ": no part changed by as much as a hundredth of the step")?;
        } else {
            write!(f, ": {}", phases.join(", "))?;
        }
        let operators: Vec<String> = self
            .significant(&self.operators)
            .take(NAMED)
            .map(|Change { name, seconds, calls: (old, new) }| {
                let calls = if old == new { format!("{old} ×") } else { format!("{old} → {new} ×") };
                format!("{name} {} ({calls})", signed(*seconds, "s"))
            })
            .collect();
        if !operators.is_empty() {
            write!(f, "; by operator: {}", operators.join(", "))?;
        }
        let (old, new) = self.allocated_bytes;
        if (new - old).abs() >= MIN_SHARE * old.max(1.0) {
            write!(f, "; allocated {} → {}", human(old, "B"), human(new, "B"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;
    use crate::{OperatorTime, StepTimes};

    fn composition(phases: [f64; 6], calls: [usize; 6], operators: &[(&str, f64, f64)]) -> Composition {
        let seconds = phases.iter().sum();
        let median =
            StepTimes { seconds, phases, calls, allocated_bytes: seconds * 1e9, ..StepTimes::default() };
        let operators = operators
            .iter()
            .map(|&(name, calls, time)| OperatorTime {
                name: name.into(),
                calls,
                seconds: time,
                share: time / seconds,
            })
            .collect();
        Composition { steps: vec![median], median, operators }
    }

    #[test]
    fn the_explanation_is_computed_from_the_compositions() {
        let before = composition(
            [0.001, 0.010, 0.020, 0.001, 0.0092, 0.0],
            [1, 60, 90, 3, 312, 0],
            &[("aten::mm", 30.0, 0.025), ("aten::mul_", 160.0, 0.005)],
        );
        let after = composition(
            [0.001, 0.0081, 0.020, 0.001, 0.0031, 0.0],
            [1, 60, 90, 3, 4, 0],
            &[("aten::mm", 30.0, 0.023), ("aten::_fused_adamw_", 1.0, 0.003)],
        );
        let comparison = Comparison::between(&before, &after);
        expect!["step 41.2 ms → 33.2 ms (−19.4 %): optimizer −6.10 ms (312 → 4 operators), forward −1.90 ms; by operator: aten::mul_ −5.00 ms (160 → 0 ×), aten::_fused_adamw_ +3.00 ms (0 → 1 ×), aten::mm −2.00 ms (30 ×); allocated 39.3 MiB → 31.7 MiB"].assert_eq(&comparison.to_string());
        let sum: f64 = comparison.phases.iter().map(|change| change.seconds).sum();
        assert!((sum - (0.0332 - 0.0412)).abs() < 1e-12, "{sum}");
        // Exchanged compositions negate the changes.
        let back = Comparison::between(&after, &before);
        assert_eq!(back.phases[0].calls, (4.0, 312.0));
        assert!((back.phases[0].seconds - 0.0061).abs() < 1e-12);
    }

    #[test]
    fn equal_compositions_have_no_explanation() {
        let same = composition([0.0, 0.01, 0.02, 0.0, 0.0, 0.0], [0, 1, 2, 0, 0, 0], &[]);
        expect!["step 30.0 ms → 30.0 ms (+0.0 %): no part changed by as much as a hundredth of the step"]
            .assert_eq(&Comparison::between(&same, &same).to_string());
    }
}
