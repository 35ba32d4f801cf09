//! Sentences whose figures are computed from records.

use serde::Deserialize;

use crate::filter::Filter;
use crate::measurements::{Measurements, plain};
use crate::record::{Case, Record};
use crate::spec::Finding;
use crate::unit;

/// A sentence with placeholders for computed quantities.
///
/// | written | becomes |
/// |---|---|
/// | `{per}` | the group's case: `batch 8, SaveOne` |
/// | `{level}` | the value of that case key in the group, or in the `of` filter |
/// | `{of:peak_bytes}` | the value: `1.25 GiB` |
/// | `{against:peak_bytes}` | the baseline value |
/// | `{ratio:peak_bytes}` | `of / against`: `0.760` |
/// | `{less:peak_bytes}` | `24.0 % less`, or `… more`, or `the same` |
/// | `{more:peak_bytes}` | the same words, for sentences that expect more |
/// | `{{`, `}}` | a brace |
///
/// Where a change is not larger than both spreads together, the sentence ends with `(within the spread: backward)`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Text(String),
    Key(String),
    Quantity(Quantity, String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Quantity {
    Of,
    Against,
    Ratio,
    Change,
}

impl TryFrom<String> for Template {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(['{', '}']) {
            let brace = &rest[at..=at];
            plain.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err("the text has a `}` without its `{`; write `}}` for a brace".into());
            }
            let Some(end) = rest.find('}') else {
                return Err("the text has a `{` without its `}`; write `{{` for a brace".into());
            };
            if !plain.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
            }
            pieces.push(Piece::parse(&rest[..end])?);
            rest = &rest[end + 1..];
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self(pieces))
    }
}

impl Piece {
    fn parse(inside: &str) -> Result<Self, String> {
        let Some((quantity, metric)) = inside.split_once(':') else {
            return match inside {
                "" => Err("the text has an empty `{}`; name a case key or a quantity".into()),
                key => Ok(Self::Key(key.into())),
            };
        };
        let quantity = match quantity {
            "of" => Quantity::Of,
            "against" => Quantity::Against,
            "ratio" => Quantity::Ratio,
            "less" | "more" => Quantity::Change,
            other => {
                return Err(format!(
                    "the text asks for the unknown quantity `{other}`; known: of, against, ratio, less, more"
                ));
            }
        };
        if metric.is_empty() {
            return Err(format!(
                "the text has `{{{inside}}}` without a metric; write `{{{inside}backward_seconds}}`"
            ));
        }
        Ok(Self::Quantity(quantity, metric.into()))
    }
}

impl Template {
    /// The first quantity that is a relation of two values, as it is written.
    pub(crate) fn first_that_needs_against(&self) -> Option<String> {
        self.0.iter().find_map(|piece| match piece {
            Piece::Quantity(Quantity::Against, metric) => Some(format!("`{{against:{metric}}}`")),
            Piece::Quantity(Quantity::Ratio, metric) => Some(format!("`{{ratio:{metric}}}`")),
            Piece::Quantity(Quantity::Change, metric) => {
                Some(format!("`{{less:{metric}}}` or `{{more:{metric}}}`"))
            }
            _ => None,
        })
    }
}

/// The sentences of one finding over the records of its section, in the order of the groups' first records.
///
/// A group that lacks a value gets the sentence `<group>: not measured (<why>)`. A group whose two sides are the same
/// cases gets none.
pub fn sentences(finding: &Finding, measured: &Measurements) -> Vec<String> {
    let mut groups: Vec<Case> = Vec::new();
    for case in measured.cases().filter(|case| finding.of.matches(case)) {
        if let Some(group) = case.project(&finding.per)
            && !groups.contains(&group)
        {
            groups.push(group);
        }
    }
    if groups.is_empty() {
        return vec!["not measured (no record)".into()];
    }
    groups.iter().filter_map(|group| sentence(finding, measured, group)).collect()
}

fn sentence(finding: &Finding, measured: &Measurements, group: &Case) -> Option<String> {
    let (mut text, mut unsure) = (String::new(), Vec::new());
    for piece in &finding.text.0 {
        let figure = match piece {
            Piece::Text(plain) => Ok(plain.clone()),
            Piece::Key(key) if key == "per" => Ok(group.describe()),
            Piece::Key(key) => group
                .get(key)
                .or_else(|| finding.of.0.get(key))
                .or_else(|| finding.against.as_ref()?.0.get(key))
                .map(plain)
                .ok_or_else(|| format!("the case has no key {key}")),
            Piece::Quantity(Quantity::Of, metric) => {
                side(measured, group, &finding.of, metric).map(|of| show(&of))
            }
            Piece::Quantity(quantity, metric) => {
                let baseline = finding.against.as_ref()?;
                let sides = side(measured, group, &finding.of, metric)
                    .and_then(|of| Ok((of, side(measured, group, baseline, metric)?)));
                match sides {
                    Ok((of, against)) if of.case == against.case => return None,
                    Ok((of, against)) => {
                        if *quantity == Quantity::Change && within_spread(&of, &against) {
                            unsure.push(unit::heading(metric, &of.metric.unit));
                        }
                        relation(*quantity, &of, &against)
                    }
                    Err(why) => Err(why),
                }
            }
        };
        match figure {
            Ok(figure) => text.push_str(&figure),
            Err(why) => {
                let group = group.describe();
                let colon = if group.is_empty() { "" } else { ": " };
                return Some(format!("{group}{colon}not measured ({why})"));
            }
        }
    }
    if !unsure.is_empty() {
        text += &format!(" (within the spread: {})", unsure.join(", "));
    }
    Some(text)
}

/// The one measurement of `metric` in `group` that `filter` takes, or why there is none.
fn side(measured: &Measurements, group: &Case, filter: &Filter, metric: &str) -> Result<Record, String> {
    let wanted = group.without(|key| filter.fixes(key));
    let takes = |r: &&Record| r.metric.name == metric && filter.matches(&r.case) && r.case.matches(&wanted);
    let found: Vec<&Record> = measured.records().iter().filter(takes).collect();
    match found.as_slice() {
        [] => Err(format!("no record of {metric}")),
        [one] if one.metric.value.is_some() => Ok((*one).clone()),
        [one] => Err(one.metric.note.clone().unwrap_or_else(|| format!("no value of {metric}"))),
        several => {
            Err(format!("{} records of {metric} match; add a key that distinguishes them", several.len()))
        }
    }
}

fn within_spread(of: &Record, against: &Record) -> bool {
    let spread = of.metric.spread.unwrap_or(0.0) + against.metric.spread.unwrap_or(0.0);
    matches!((of.metric.value, against.metric.value), (Some(a), Some(b)) if a != b && (a - b).abs() <= spread)
}

fn show(record: &Record) -> String {
    record.metric.value.map_or_else(String::new, |value| unit::human(value, &record.metric.unit))
}

fn relation(quantity: Quantity, of: &Record, against: &Record) -> Result<String, String> {
    let (Some(value), Some(base)) = (of.metric.value, against.metric.value) else {
        return Err("no value".into());
    };
    if quantity == Quantity::Against {
        return Ok(show(against));
    }
    let ratio = value / base;
    if !ratio.is_finite() {
        return Err(format!("{} is divided by {}", show(of), show(against)));
    }
    if quantity == Quantity::Ratio {
        return Ok(format!("{ratio:.3}"));
    }
    if value == base {
        return Ok("the same".into());
    }
    let percent = 100.0 * (ratio - 1.0);
    let word = if percent < 0.0 { "less" } else { "more" };
    let size = percent.abs();
    let figure = if size < 0.05 { "under 0.1".into() } else { format!("{size:.1}") };
    Ok(format!("{figure} % {word}"))
}
