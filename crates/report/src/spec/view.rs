//! Tables, plots and findings: what a section shows of its records.

use std::collections::BTreeMap;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::template::{Operand, Template};
use crate::filter::Filter;

/// A table: one row per combination of case keys, one column per metric.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Caption.
    pub title: String,
    /// Which cases; all if missing.
    #[serde(default)]
    pub filter: Filter,
    /// The case keys that make a row; all keys if missing.
    #[serde(default)]
    pub rows: Vec<String>,
    /// The metrics that make columns; all metrics if missing.
    #[serde(default)]
    pub columns: Vec<String>,
    /// A case key whose values become columns, one of each metric.
    #[serde(default)]
    pub pivot: Option<String>,
    /// The multiple in which a metric's column is written, such as `GiB`; chosen from the values if missing.
    #[serde(default)]
    pub units: BTreeMap<String, String>,
}

/// How a plot draws its points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlotKind {
    /// Points joined along x, one line per series.
    Line,
    /// Points.
    Scatter,
    /// Horizontal bars, one group per value of `x`, one bar per series.
    Bar,
    /// Horizontal bars made of the metrics in `stack`, one per value of `x`.
    StackedBar,
    /// Spans of time: a row per value of the case key `y`, in it a bar from the metric `x` to the metric `end`
    /// for each case. Panels share one axis, which starts at zero.
    ///
    /// A span is one case with a metric for its start and one for its end, in the same unit, for example
    /// `{method, stream, what, index}` with `start` and `end` in `s`. `series` colours the bars (a legend stands above where
    /// there are at most eight), `label` writes a case key's value into bars that are wide enough for it.
    Timeline,
}

/// A plot of the records of one section.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, remote = "Self")]
pub struct Plot {
    /// Part of the file name `plots/<experiment>-<name>.svg`.
    #[serde(deserialize_with = "file_name")]
    pub name: String,
    /// Caption.
    pub title: String,
    /// How the points are drawn.
    pub kind: PlotKind,
    /// A case key or a metric. For bars: the case key whose values name the bars. For a timeline: the metric at which a
    /// span starts.
    pub x: String,
    /// A case key or a metric; empty for a stacked bar. For a timeline: the case key whose values name the rows.
    #[serde(default)]
    pub y: String,
    /// The metric at which a span of a timeline ends; empty for other plots.
    #[serde(default)]
    pub end: String,
    /// The metrics of a stacked bar, from the axis outwards.
    #[serde(default)]
    pub stack: Vec<String>,
    /// The case key that distinguishes series.
    #[serde(default)]
    pub series: Option<String>,
    /// Case keys whose combinations get a panel each.
    #[serde(default)]
    pub facet: Vec<String>,
    /// Whether the Pareto front is drawn (less is better on both axes).
    #[serde(default)]
    pub pareto: bool,
    /// Logarithmic x axis.
    #[serde(default)]
    pub log_x: bool,
    /// Logarithmic y axis.
    #[serde(default)]
    pub log_y: bool,
    /// Which cases; all if missing.
    #[serde(default)]
    pub filter: Filter,
    /// The case key whose value is written beside each point, or into each bar of a timeline.
    #[serde(default)]
    pub label: Option<String>,
    /// Whether the spans of a timeline, whose times are in seconds, are also written as `traces/<experiment>-<name>.json`.
    #[serde(default)]
    pub trace: bool,
}

impl<'de> Deserialize<'de> for Plot {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The derived function, which reads the fields.
        let plot = Self::deserialize(deserializer)?;
        plot.mistake().map_or(Ok(plot), |mistake| Err(D::Error::custom(mistake)))
    }
}

impl Plot {
    /// Returns the first field that does not go with the kind of the plot, and the remedy.
    fn mistake(&self) -> Option<String> {
        let Self { name, kind, pareto, trace, .. } = self;
        let is_stacked = *kind == PlotKind::StackedBar;
        let has_bars = is_stacked || *kind == PlotKind::Bar;
        let is_timeline = *kind == PlotKind::Timeline;
        let is_log = self.log_x || self.log_y;
        let (has_y, has_end, has_stack) = (!self.y.is_empty(), !self.end.is_empty(), !self.stack.is_empty());
        #[rustfmt::skip]
        let mistakes = [
            (is_stacked && !has_stack, "stacked bar", "names no metrics; add `stack = [\"metric\", …]`"),
            (is_stacked && has_y, "stacked bar", "has `y`; remove it, its values are the metrics in `stack`"),
            (is_stacked && self.series.is_some(), "stacked bar", "has `series`; remove it, or make it a panel each with `facet`"),
            (!is_stacked && !has_y, "plot", "has no `y`; add the case key or metric to plot"),
            (!is_stacked && has_stack, "plot", "has `stack`; remove it, or set `kind = \"stacked-bar\"`"),
            (is_timeline && !has_end, "timeline", "has no `end`; add the metric at which a span ends (`x` is that at which it starts)"),
            (!is_timeline && has_end, "plot", "has `end`; remove it, or set `kind = \"timeline\"`"),
            (!is_timeline && *trace, "plot", "has `trace`; remove it, or set `kind = \"timeline\"`"),
            (is_timeline && is_log, "timeline", "asks for a logarithmic axis; remove it, the length of a span is its time"),
            (has_bars && is_log, "plot", "asks for a logarithmic axis; remove it, the length of a bar is read from zero"),
            (*pareto && *kind != PlotKind::Scatter, "plot", "asks for `pareto`; remove it, or set `kind = \"scatter\"`"),
        ];
        let (_, what, mistake) = mistakes.into_iter().find(|(applies, ..)| *applies)?;
        Some(format!("the {what} `{name}` {mistake}"))
    }
}

/// A sentence whose figures are computed from records, once per group of cases.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "FindingFields")]
pub struct Finding {
    /// Case keys whose combinations get a sentence each; one sentence where this is empty.
    pub per: Vec<String>,
    /// Case keys over whose combinations the one sentence gives ranges: `3.5 to 54.9 % more`.
    pub over: Vec<String>,
    /// The cases that the sentence is about.
    pub of: Filter,
    /// The cases of the baseline. A key that is fixed here is not matched with the group's, so that
    /// every level can be measured against one baseline.
    pub against: Option<Filter>,
    /// The sentence.
    pub wording: Wording,
}

/// The words of a finding.
#[derive(Clone, Debug, PartialEq)]
pub enum Wording {
    /// A sentence whose figures carry their sign in words.
    Always(Template),
    /// The sentence that the sign of a figure chooses: `decides = "step_seconds"` or `"speed_ratio@0.95"`. A difference whose
    /// interval covers none counts as no change. Over several groups `less` is chosen where one of them is below, else `more` where one is above.
    BySign {
        /// The figure.
        decides: Operand,
        /// Where the value is below its baseline.
        less: Template,
        /// Where it is above.
        more: Template,
        /// Where it is neither.
        same: Template,
    },
}

impl Wording {
    /// Returns every sentence that may be chosen.
    pub fn templates(&self) -> Vec<&Template> {
        match self {
            Self::Always(text) => vec![text],
            Self::BySign { less, more, same, .. } => vec![less, more, same],
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FindingFields {
    #[serde(default)]
    per: Vec<String>,
    #[serde(default)]
    over: Vec<String>,
    #[serde(default)]
    of: Filter,
    #[serde(default)]
    against: Option<Filter>,
    #[serde(default)]
    text: Option<Template>,
    #[serde(default)]
    decides: Option<Operand>,
    #[serde(default)]
    less: Option<Template>,
    #[serde(default)]
    more: Option<Template>,
    #[serde(default)]
    same: Option<Template>,
}

impl TryFrom<FindingFields> for Finding {
    type Error = String;

    fn try_from(fields: FindingFields) -> Result<Self, String> {
        let FindingFields { per, over, of, against, text, decides, less, more, same } = fields;
        let wording = match (text, decides, less, more, same) {
            (Some(text), None, None, None, None) => Wording::Always(text),
            (None, Some(decides), Some(less), Some(more), Some(same)) => {
                Wording::BySign { decides, less, more, same }
            }
            _ => {
                return Err(
                    "a finding has either `text`, or `decides` with all of `less`, `more` and `same`".into(),
                );
            }
        };
        if !over.is_empty() && !per.is_empty() {
            return Err("a finding with `over` has one sentence for all groups; remove `per`".into());
        }
        if against.is_none() {
            if let Wording::BySign { decides: Operand { metric, baseline: None }, .. } = &wording {
                return Err(format!(
                    "the finding decides by `{metric}` and has no `against`; add `against = {{ … }}`, or the number to \
                     compare with: `{metric}@1`"
                ));
            }
            if let Some(quantity) =
                wording.templates().iter().find_map(|text| text.first_that_needs_against())
            {
                return Err(format!(
                    "the finding uses {quantity} and has no `against`; add `against = {{ … }}`"
                ));
            }
        }
        Ok(Self { per, over, of, against, wording })
    }
}

/// A name that becomes part of a file's name.
pub(super) fn file_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.is_empty() || !name.chars().all(plain) {
        return Err(D::Error::custom(format!(
            "the name {name:?} becomes part of a file name; use letters, digits, `-` and `_`"
        )));
    }
    Ok(name)
}

/// A number that can be compared with a measurement.
pub(super) fn finite<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let limit = f64::deserialize(deserializer)?;
    if !limit.is_finite() {
        return Err(D::Error::custom(format!("the limit {limit} cannot be checked; give a finite number")));
    }
    Ok(limit)
}

/// A number of rounds.
pub(super) fn at_least_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        0 => Err(D::Error::custom("0 rounds measure nothing; give `rounds = 1` or more")),
        rounds => Ok(rounds),
    }
}
