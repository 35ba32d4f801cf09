//! Sentences whose figures are computed from records.
//!
//! The words follow the 95 % interval of the figure: one that covers no difference counts as no difference, whatever its sign; it is
//! undecided unless the interval is within 5 %.

mod words;

use std::cmp::Ordering;

use crate::estimate::{self, Certainty, NARROW};
use crate::filter::Filter;
use crate::measurements::{Measurements, plain};
use crate::record::{Case, Record};
use crate::spec::{Finding, Operand, Piece, Quantity, Template, Wording};
use crate::unit;
use words::{Change, Value};

/// A sentence of a finding, or why it is missing.
#[derive(Clone, Debug, PartialEq)]
pub struct Sentence {
    /// The words.
    pub text: String,
    /// Whether every figure in it was measured.
    pub measured: bool,
}

/// Returns the texts of [`render`].
pub fn sentences(finding: &Finding, measured: &Measurements) -> Vec<String> {
    render(finding, measured).into_iter().map(|sentence| sentence.text).collect()
}

/// Returns the sentences of one finding over the records of its section, in the order of the groups' first records.
///
/// A group that lacks a value gets the sentence `<group>: not measured (<why>)`. A group whose two sides are the same
/// cases gets none. A finding with `over` has one sentence for all its groups.
pub fn render(finding: &Finding, measured: &Measurements) -> Vec<Sentence> {
    let keys = if finding.over.is_empty() { &finding.per } else { &finding.over };
    let mut groups: Vec<Case> = Vec::new();
    for case in measured.cases().filter(|case| finding.of.matches(case)) {
        if let Some(group) = case.project(keys)
            && !groups.contains(&group)
        {
            groups.push(group);
        }
    }
    if groups.is_empty() {
        return vec![missing(&Case::new(), "no record")];
    }
    if finding.over.is_empty() {
        groups.iter().filter_map(|group| Group { finding, measured, case: group }.sentence()).collect()
    } else {
        vec![over_all(finding, measured, &groups)]
    }
}

fn missing(group: &Case, why: &str) -> Sentence {
    let group = group.describe();
    let colon = if group.is_empty() { "" } else { ": " };
    Sentence { text: format!("{group}{colon}not measured ({why})"), measured: false }
}

/// Why a group has no sentence: a value is missing, or its two sides are one.
enum Lack {
    Value(String),
    Difference,
}

impl From<String> for Lack {
    fn from(why: String) -> Self {
        Self::Value(why)
    }
}

struct Group<'a> {
    finding: &'a Finding,
    measured: &'a Measurements,
    case: &'a Case,
}

impl Group<'_> {
    fn sentence(&self) -> Option<Sentence> {
        match self.template().and_then(|template| Ok((template, self.values(template)?))) {
            Ok((template, values)) => {
                let columns: Vec<Vec<Value>> = values.into_iter().map(|value| vec![value]).collect();
                let text = write(template, &columns, |key| self.key(key));
                Some(match text {
                    Ok(text) => Sentence { text, measured: true },
                    Err(why) => missing(self.case, &why),
                })
            }
            Err(Lack::Value(why)) => Some(missing(self.case, &why)),
            Err(Lack::Difference) => None,
        }
    }

    /// The words that the sign of the deciding figure chooses.
    fn template(&self) -> Result<&Template, Lack> {
        match &self.finding.wording {
            Wording::Always(text) => Ok(text),
            Wording::BySign { decides, less, more, same } => Ok(match self.sign(decides)? {
                Ordering::Less => less,
                Ordering::Greater => more,
                Ordering::Equal => same,
            }),
        }
    }

    /// On which side of its baseline a value is; equal where its interval covers the baseline.
    fn sign(&self, decides: &Operand) -> Result<Ordering, Lack> {
        let change = self.change(decides)?;
        Ok(if change.within { Ordering::Equal } else { change.ratio.total_cmp(&1.0) })
    }

    /// The values of the template's quantities, in their order.
    fn values(&self, template: &Template) -> Result<Vec<Value>, Lack> {
        let quantity = |piece: &Piece| match piece {
            Piece::Quantity(quantity, operand) => Some(self.value(*quantity, operand)),
            _ => None,
        };
        template.0.iter().filter_map(quantity).collect()
    }

    fn value(&self, quantity: Quantity, operand: &Operand) -> Result<Value, Lack> {
        let amount = |record: &Record| {
            Value::Amount(record.metric.value.unwrap_or_default(), record.metric.unit.clone())
        };
        Ok(match quantity {
            Quantity::Of => amount(&self.side(&self.finding.of, &operand.metric)?),
            Quantity::Percent => Value::Percent(
                self.side(&self.finding.of, &operand.metric)?.metric.value.unwrap_or_default() * 100.0,
            ),
            Quantity::Against => {
                let record = self.side(&self.finding.of, &operand.metric)?;
                amount(&self.baseline(&record, &operand.metric)?)
            }
            Quantity::Ratio => Value::Amount(self.change(operand)?.ratio, "ratio".into()),
            Quantity::Change => Value::Change(self.change(operand)?),
            Quantity::Time => Value::Time(self.change(operand)?),
            Quantity::Rate => Value::Rate(self.change(operand)?),
        })
    }

    /// How the group's value relates to its baseline.
    fn change(&self, operand: &Operand) -> Result<Change, Lack> {
        let record = self.side(&self.finding.of, &operand.metric)?;
        let value = record.metric.value.unwrap_or_default();
        let (base, certainty, shown) = match operand.baseline {
            Some(number) => (number, estimate::certainty(&record.metric), number.to_string()),
            None => {
                let against = self.baseline(&record, &operand.metric)?;
                let base = against.metric.value.unwrap_or_default();
                let shown = unit::human(base, &against.metric.unit);
                (base, estimate::of_ratio(&record.metric, &against.metric), shown)
            }
        };
        let ratio = if value == base { 1.0 } else { value / base };
        if !ratio.is_finite() {
            let value = unit::human(value, &record.metric.unit);
            return Err(Lack::Value(format!("{value} is divided by {shown}")));
        }
        // Of a number the interval is the value's, of a record the ratio's.
        let (none, least, most) = match operand.baseline {
            Some(number) => (number, number / NARROW, number * NARROW),
            None => (1.0, 1.0 / NARROW, NARROW),
        };
        let (within, unclear) = match certainty {
            Certainty::Interval(low, high) if value != base && low <= none && none <= high => {
                (true, low < least.min(most) || high > least.max(most))
            }
            _ => (false, false),
        };
        // Without a spread it was computed.
        let single = certainty == Certainty::Single && record.metric.spread.is_some();
        let what = unit::heading(&operand.metric, &record.metric.unit);
        Ok(Change { ratio, within, unclear, single, what })
    }

    /// The baseline of the group's value `of`, which is another case.
    fn baseline(&self, record: &Record, metric: &str) -> Result<Record, Lack> {
        let filter = self.finding.against.as_ref().ok_or(Lack::Difference)?;
        let against = self.side(filter, metric)?;
        if record.case == against.case { Err(Lack::Difference) } else { Ok(against) }
    }

    /// Returns the one measurement of `metric` that `filter` takes, or why it is missing.
    fn side(&self, filter: &Filter, metric: &str) -> Result<Record, String> {
        // A list of values leaves it to the group which of them is meant.
        let wanted = self.case.without(|key| filter.0.get(key).is_some_and(|value| !value.is_array()));
        let takes =
            |r: &&Record| r.metric.name == metric && filter.matches(&r.case) && r.case.matches(&wanted);
        let matching: Vec<&Record> = self.measured.records().iter().filter(takes).collect();
        match matching.as_slice() {
            [] => Err(format!("no record of {metric}")),
            [one] if one.metric.value.is_some() => Ok((*one).clone()),
            [one] => Err(one.metric.note.clone().unwrap_or_else(|| format!("no value of {metric}"))),
            several => {
                Err(format!("{} records of {metric} match; add a key that distinguishes them", several.len()))
            }
        }
    }

    fn key(&self, key: &str) -> Result<String, String> {
        if key == "per" {
            return Ok(self.case.describe());
        }
        let filters = [Some(&self.finding.of), self.finding.against.as_ref()];
        let value =
            self.case.get(key).or_else(|| filters.into_iter().flatten().find_map(|filter| filter.0.get(key)));
        value.map(plain).ok_or_else(|| format!("the case has no key {key}"))
    }
}

/// Writes a sentence for all groups, whose quantities are ranges. Groups that lack a value are counted at its end.
fn over_all(finding: &Finding, measured: &Measurements, groups: &[Case]) -> Sentence {
    let template = match &finding.wording {
        Wording::Always(text) => text,
        Wording::BySign { decides, less, more, same } => {
            let sign = |case| Group { finding, measured, case }.sign(decides).ok();
            let signs: Vec<Ordering> = groups.iter().filter_map(sign).collect();
            match () {
                () if signs.is_empty() => {
                    return missing(&Case::new(), &format!("no record of {}", decides.metric));
                }
                () if signs.contains(&Ordering::Less) => less,
                () if signs.contains(&Ordering::Greater) => more,
                () => same,
            }
        }
    };
    let (mut rows, mut lacking) = (Vec::new(), Vec::new());
    for case in groups {
        match (Group { finding, measured, case }).values(template) {
            Ok(values) => rows.push(values),
            Err(Lack::Value(why)) => lacking.push((case, why)),
            Err(Lack::Difference) => {}
        }
    }
    if rows.is_empty() {
        let none = Case::new();
        let (case, why) = lacking.into_iter().next().unwrap_or((&none, "no record".into()));
        return missing(case, &why);
    }
    let count = rows.len();
    let columns: Vec<Vec<Value>> =
        (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column].clone()).collect()).collect();
    let first = Group { finding, measured, case: &Case::new() };
    let key = |key: &str| if key == "groups" { Ok(count.to_string()) } else { first.key(key) };
    match write(template, &columns, key) {
        Ok(mut text) => {
            if !lacking.is_empty() {
                // The reason in full is at the table's cell.
                let short = |why: &String| why.split([':', ';']).next().unwrap_or_default().to_owned();
                let group = |(case, why): &(&Case, String)| format!("{}: {}", case.describe(), short(why));
                text +=
                    &format!(" (not measured: {})", lacking.iter().map(group).collect::<Vec<_>>().join(", "));
            }
            Sentence { text, measured: true }
        }
        Err(why) => missing(&Case::new(), &why),
    }
}

/// The template with each quantity's values in words, and the reservations at the end.
fn write(
    template: &Template,
    columns: &[Vec<Value>],
    key: impl Fn(&str) -> Result<String, String>,
) -> Result<String, String> {
    let mut text = String::new();
    let mut column = columns.iter();
    let mut equal = false;
    for piece in &template.0 {
        text += &match piece {
            // Faster than, but as fast as.
            Piece::Text(plain) if equal && plain.starts_with(" than") => plain.replacen(" than", " as", 1),
            Piece::Text(plain) => plain.clone(),
            Piece::Key(name) => key(name)?,
            Piece::Quantity(..) => words::describe(column.next().map_or(&[][..], Vec::as_slice)),
        };
        equal = text.ends_with(" as fast") || text.ends_with(" as slow") || text.ends_with(" as long");
    }
    Ok(text + &words::reservations(columns))
}
