//! Finds inefficiencies in the steps of a trace.
//!
//! Each detector looks for one inefficiency by what ran: counts, shapes, callers. It gives evidence that can be checked in the
//! trace, the time at stake as a share of the median step, and the remedy. The time at stake is the time that the inefficiency
//! takes: an upper bound of what the remedy gains. Overlapping findings each count their time in full.

use std::fmt::{self, Display, Formatter};

use super::composition::Composition;
use super::error::ProfileError;
use super::quantity::human;
use super::timeline::Timeline;
use super::trace_file::Profile;

mod boolean_indexing;
mod double_evaluation;
mod host_synchronisation;
mod idle_device;
mod loader;
mod mask;
mod math_attention;
mod odd_widths;
mod padding;
mod pageable_copies;
mod tf32;
mod tiny_operators;
mod tokenizing;
mod unfused_optimizer;
mod unused_parameters;
mod view;
mod zeroed_gradients;

use view::View;

/// TrainingFacts about a training that its trace does not show; `None` if unknown.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TrainingFacts {
    /// The fraction of positions that are padding, from 0 to 1.
    pub padding_share: Option<f64>,
    /// The loader's worker threads; 0 if the training thread loads.
    pub workers: Option<usize>,
    /// Whether batches are in pinned memory before they are copied to a device.
    pub pinned: Option<bool>,
    /// Names of trainable parameters that got no gradient.
    pub parameters_without_gradient: Option<Vec<String>>,
    /// Number of elements of those parameters.
    pub elements_without_gradient: Option<u64>,
}

/// An inefficiency found by a detector.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The detector's name.
    pub name: &'static str,
    /// The evidence, in figures.
    pub evidence: String,
    /// Occurrences in the median step; 0 if nothing is counted.
    pub per_step: f64,
    /// The time at stake as a share of the median step, from 0 to 1; `None` if the trace does not show it.
    pub share: Option<f64>,
    /// The remedy, in one sentence.
    pub remedy: String,
}

/// An entry of the table of detectors.
struct Detector {
    name: &'static str,
    /// The part of a trace that it looks at, for the message that nothing was found.
    looks_at: &'static str,
    detect: fn(&View<'_>) -> Option<Evidence>,
}

/// The result of a detector; the table adds the name.
struct Evidence {
    evidence: String,
    per_step: f64,
    share: Option<f64>,
    remedy: String,
}

const DETECTORS: &[Detector] = &[
    host_synchronisation::DETECTOR,
    zeroed_gradients::DETECTOR,
    unfused_optimizer::DETECTOR,
    odd_widths::DETECTOR,
    mask::DETECTOR,
    math_attention::DETECTOR,
    boolean_indexing::DETECTOR,
    loader::DETECTOR,
    tokenizing::DETECTOR,
    padding::DETECTOR,
    unused_parameters::DETECTOR,
    double_evaluation::DETECTOR,
    tiny_operators::DETECTOR,
    pageable_copies::DETECTOR,
    tf32::DETECTOR,
    idle_device::DETECTOR,
];

/// The findings of all detectors. Its `Display` is a list, most expensive first.
#[derive(Debug, Clone, PartialEq)]
pub struct Diagnosis {
    /// Duration of the median step in seconds.
    pub step_seconds: f64,
    /// Most expensive first; findings without a known cost come last.
    pub findings: Vec<Finding>,
    steps: usize,
    operators: f64,
}

impl Diagnosis {
    /// Runs every detector.
    ///
    /// # Errors
    /// [`ProfileError::NoSteps`].
    pub fn new(profile: &Profile, facts: &TrainingFacts) -> Result<Self, ProfileError> {
        let timeline = Timeline::new(profile)?;
        let composition = Composition::on(profile, &timeline);
        let view = View { profile, timeline: &timeline, composition: &composition, facts };
        let mut findings: Vec<Finding> = DETECTORS
            .iter()
            .filter_map(|detector| {
                let Evidence { evidence, per_step, share, remedy } = (detector.detect)(&view)?;
                let share = share.map(|share| share.clamp(0.0, 1.0));
                Some(Finding { name: detector.name, evidence, per_step, share, remedy })
            })
            .collect();
        findings.sort_by(|a, b| b.share.unwrap_or(-1.0).total_cmp(&a.share.unwrap_or(-1.0)));
        Ok(Self {
            step_seconds: composition.median.seconds,
            findings,
            steps: composition.steps.len(),
            operators: composition.calls(),
        })
    }

    /// Returns the finding of a detector, if there is one.
    #[must_use]
    pub fn finding(&self, name: &str) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.name == name)
    }

    /// Lists the names of all detectors.
    #[must_use]
    pub fn detectors() -> Vec<&'static str> {
        DETECTORS.iter().map(|detector| detector.name).collect()
    }
}

impl Display for Diagnosis {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (steps, operators) = (self.steps, self.operators);
        let step = human(self.step_seconds, "s");
        if self.findings.is_empty() {
            writeln!(
                f,
                "nothing found in {steps} steps of {step} with {operators} operators each; looked at:"
            )?;
            for Detector { name, looks_at, .. } in DETECTORS {
                writeln!(f, "  {name}: {looks_at}")?;
            }
            return Ok(());
        }
        let number = self.findings.len();
        let noun = if number == 1 { "finding" } else { "findings" };
        writeln!(f, "{number} {noun} in {steps} steps of {step}; at stake is a share of the step, at most:")?;
        for Finding { name, evidence, share, remedy, .. } in &self.findings {
            let share =
                share.map_or_else(|| "     ? ".to_owned(), |share| format!("{:>5.1} %", 100.0 * share));
            writeln!(f, "{share}  {name}: {evidence}")?;
            writeln!(f, "         → {remedy}")?;
        }
        Ok(())
    }
}
