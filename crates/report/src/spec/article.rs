//! The one page: what it begins with, and an article for each assignment.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::view::file_name;
use crate::filter::Filter;

/// What the page begins with.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Front {
    /// Description of the project, in Markdown.
    pub about: String,
    /// How to read the figures, in Markdown; below the first table.
    pub reading: String,
    /// The machines. Each has a column.
    #[serde(rename = "machine")]
    pub machines: Vec<Machine>,
    /// The names of all drawn things, each with one colour on the whole page.
    pub colours: BTreeMap<String, usize>,
    /// The techniques against the best peer.
    pub table: Grid,
    /// The picture of the first screen.
    pub figure: Figure,
    /// Why records of a machine have more than one revision; missing where each has one.
    #[serde(default)]
    pub several_revisions: Option<String>,
}

/// A machine: a column of every table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The name by which a value refers to it.
    pub name: String,
    /// Its heading.
    pub title: String,
    /// A part of the name of the GPU or processor that its records have.
    pub matches: String,
}

/// An article: a question with its answer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Article {
    /// Its anchor.
    #[serde(deserialize_with = "file_name")]
    pub name: String,
    /// Heading.
    pub title: String,
    /// The part whose appendix has everything else, and whose rows say what is not measured.
    pub part: String,
    /// The question, in Markdown.
    pub question: String,
    /// The idea with its formula, in Markdown.
    pub idea: String,
    /// `[article.value]`: the figures that its sentences name.
    #[serde(default, rename = "value")]
    pub values: BTreeMap<String, Measure>,
    /// `[[article.exhibit]]`: its figures and tables.
    #[serde(default, rename = "exhibit")]
    pub exhibits: Vec<Exhibit>,
    /// `[[article.follows]]`: what follows.
    #[serde(default)]
    pub follows: Vec<Says>,
    /// `[[article.surprised]]`: what surprised.
    #[serde(default)]
    pub surprised: Vec<Says>,
}

/// A measured value, or the ratio of two.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Measure {
    /// The machine, by its name.
    pub machine: Option<String>,
    /// The experiment or comparison.
    pub experiment: Option<String>,
    /// The metric.
    pub metric: Option<String>,
    /// The case.
    pub of: Filter,
    /// The case of the baseline: that of `of`, but for these keys. An empty text leaves a key out. The value is the ratio.
    pub against: Option<Filter>,
    /// Case keys, over whose combinations the value is a range.
    pub over: Vec<String>,
}

/// A figure, a table, or both, with the sizes of what was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exhibit {
    /// What it shows, as a sentence.
    pub title: String,
    /// Model, rows, length, steps, dtype and data, as the program has them at the records' scale.
    pub setting: String,
    /// The figure.
    #[serde(default)]
    pub figure: Option<Figure>,
    /// The table.
    #[serde(default)]
    pub table: Option<Grid>,
}

/// A sentence: always the same, or chosen by a value's interval against 1.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Says {
    /// The sentence, in Markdown, with values in braces.
    pub text: Option<String>,
    /// The value that chooses among the following.
    pub decides: Option<String>,
    /// Where its interval is below 1.
    pub less: Option<String>,
    /// Where it is above.
    pub more: Option<String>,
    /// Where it is within 5 % of 1.
    pub same: Option<String>,
    /// Where it covers 1 and is wide, or there is one run.
    pub unclear: Option<String>,
}

/// A table of values.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Grid {
    /// Heading of the labels.
    pub heading: String,
    /// What all cells share.
    pub all: Measure,
    /// The machines. Every column is repeated for each.
    pub machines: Vec<String>,
    /// `[[….row]]`.
    #[serde(rename = "row")]
    pub rows: Vec<GridRow>,
    /// `[[….column]]`.
    #[serde(rename = "column")]
    pub columns: Vec<GridColumn>,
}

/// A row of a table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GridRow {
    /// Its label, in Markdown.
    pub label: String,
    /// A remark below the label.
    pub note: String,
    /// What its cells share.
    pub all: Measure,
    /// Its metric for each quantity that a column names.
    pub metrics: BTreeMap<String, String>,
    /// The peers. The fastest on a machine is the baseline there.
    pub peers: Vec<Peer>,
}

/// A program to compare with.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its name.
    pub label: String,
    /// Its case, as in a measure.
    pub against: Filter,
}

/// A column of a table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GridColumn {
    /// Heading.
    pub title: String,
    /// The quantity, whose metric a row gives.
    pub quantity: Option<String>,
    /// What its cells share.
    pub all: Measure,
    /// The multiple in which its values are written; chosen for each value if missing.
    pub unit: Option<String>,
}

/// How a figure draws.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FigureKind {
    /// Horizontal bars from zero, one for each item, with intervals.
    #[default]
    Bars,
    /// Points over two ratios; the items of one thing are joined.
    Pareto,
    /// Lines over a case key; an item is a line.
    Lines,
    /// The plot of an experiment's section.
    Plot,
}

/// A figure: panels beside each other, with the same items in each.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Figure {
    /// How it draws.
    pub kind: FigureKind,
    /// What it shows, in a sentence that says what to see.
    pub caption: String,
    /// What all items share.
    pub all: Measure,
    /// `[[….panel]]`.
    #[serde(rename = "panel")]
    pub panels: Vec<Panel>,
    /// `[[….item]]`.
    #[serde(rename = "item")]
    pub items: Vec<Item>,
    /// The metric to the right of a Pareto figure; the case key of lines; the experiment and plot, as `experiment/plot`.
    pub x: String,
    /// Words below the axis to the right.
    pub x_title: String,
    /// Words at the axis upwards.
    pub y_title: String,
    /// Whether the axis to the right of lines is logarithmic.
    pub log_x: bool,
    /// Whether all panels have the axis of the largest value.
    pub shared: bool,
}

/// A panel.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Panel {
    /// Heading.
    pub title: String,
    /// What its items share.
    pub all: Measure,
    /// The metric to the right, where panels differ in it.
    pub x: Option<String>,
}

/// A bar, a point or a line in each panel.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Item {
    /// Its label.
    pub label: String,
    /// The thing whose colour it has.
    pub thing: String,
    /// Its case.
    pub all: Measure,
    /// The machines in whose panels it is; all if missing.
    pub machines: Vec<String>,
    /// The metric to the right, where items differ in it.
    pub x: Option<String>,
}

impl Measure {
    /// This, with what `other` has more or instead.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let merge = |a: &Filter, b: &Filter| {
            let mut all = a.clone();
            for (key, value) in &b.0.0 {
                all.0.0.insert(key.clone(), value.clone());
            }
            all
        };
        let against = match (&self.against, &other.against) {
            (Some(a), Some(b)) => Some(merge(a, b)),
            (a, b) => b.clone().or_else(|| a.clone()),
        };
        Self {
            machine: other.machine.clone().or_else(|| self.machine.clone()),
            experiment: other.experiment.clone().or_else(|| self.experiment.clone()),
            metric: other.metric.clone().or_else(|| self.metric.clone()),
            of: merge(&self.of, &other.of),
            against,
            over: if other.over.is_empty() { self.over.clone() } else { other.over.clone() },
        }
    }

    /// The case, without the keys that an empty text leaves out.
    pub(crate) fn case(&self) -> Filter {
        let mut case = self.of.clone();
        case.0.0.retain(|_, value| value.as_str() != Some(""));
        case
    }

    /// The whole case of the baseline.
    pub(crate) fn baseline(&self) -> Option<Filter> {
        let against = self.against.as_ref()?;
        let mut all = self.of.clone();
        for (key, value) in &against.0.0 {
            all.0.0.insert(key.clone(), value.clone());
        }
        all.0.0.retain(|_, value| value.as_str() != Some(""));
        Some(all)
    }
}

impl Front {
    /// Every measure that names an experiment.
    pub(crate) fn measures(&self) -> Vec<&Measure> {
        let mut all = Vec::new();
        self.table.collect(&mut all);
        self.figure.collect(&mut all);
        all
    }
}

impl Article {
    /// Every measure that may name an experiment.
    pub(crate) fn measures(&self) -> Vec<&Measure> {
        let mut all: Vec<&Measure> = self.values.values().collect();
        for exhibit in &self.exhibits {
            exhibit.table.iter().for_each(|table| table.collect(&mut all));
            exhibit.figure.iter().for_each(|figure| figure.collect(&mut all));
        }
        all
    }
}

impl Grid {
    fn collect<'a>(&'a self, all: &mut Vec<&'a Measure>) {
        all.push(&self.all);
        all.extend(self.rows.iter().map(|row| &row.all));
        all.extend(self.columns.iter().map(|column| &column.all));
    }
}

impl Figure {
    fn collect<'a>(&'a self, all: &mut Vec<&'a Measure>) {
        all.push(&self.all);
        all.extend(self.panels.iter().map(|panel| &panel.all));
        all.extend(self.items.iter().map(|item| &item.all));
    }
}
