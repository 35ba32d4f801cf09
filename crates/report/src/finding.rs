//! Sentences whose figures are computed from records.

use crate::filter::Filter;
use crate::measurements::{Measurements, plain};
use crate::record::{Case, Record};
use crate::spec::{Finding, Piece, Quantity};
use crate::unit;

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
