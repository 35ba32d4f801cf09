//! `frugal data stats`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use anyhow::bail;
use clap::Args;
use frugal::rows::Counts;
use serde_json::json;

use super::{SourceArgs, learned};
use crate::common_flags::Common;
use crate::output::figures::grouped;
use crate::output::print_fields;

#[derive(Args)]
pub(super) struct Stats {
    #[command(flatten)]
    source: SourceArgs,
}

pub(super) fn run(common: &Common, arguments: &Stats) -> anyhow::Result<()> {
    let source = arguments.source.open(common)?;
    let mut all = Counts::default();
    let (mut lengths, mut answers) = (Lengths::default(), Lengths::default());
    let (mut wrong, mut first_error) = (0u64, None);
    let mut longest = (0, String::new());
    source.each(&mut |place, encoded| {
        let (rows, counts) = match encoded {
            Ok(encoded) => encoded,
            Err(error) => {
                wrong += 1;
                first_error.get_or_insert(error);
                return Ok(ControlFlow::Continue(()));
            }
        };
        all.add(&counts);
        for row in &rows {
            if row.tokens.len() > longest.0 {
                longest = (row.tokens.len(), place.to_owned());
            }
            lengths.add(row.tokens.len());
            answers.add(learned(row));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    if let Some(error) = first_error.filter(|_| all.records == 0) {
        bail!("no record can be read; the first error of {}: {error}", grouped(wrong));
    }
    let share = 100.0 * all.trained as f64 / all.tokens.max(1) as f64;
    let count = |name, count: usize| (name, grouped(count as u64), json!(count));
    let mut fields = vec![
        count("records", all.records),
        count("rows", all.rows),
        count("tokens", all.tokens),
        ("learned tokens", format!("{} ({share:.1} %)", grouped(all.trained as u64)), json!(all.trained)),
        lengths.distribution("tokens of a row"),
        answers.distribution("learned tokens of a row"),
    ];
    if longest.0 > 0 {
        fields.push((
            "longest row",
            format!("{} ({} tokens)", longest.1, grouped(longest.0 as u64)),
            json!(longest.1),
        ));
    }
    for (name, number) in [
        ("left out, too long", all.skipped),
        ("cut, too long", all.truncated),
        ("divided, too long", all.split),
        ("left out, nothing to learn", all.without_label),
        ("with an empty answer", all.empty_answers),
    ] {
        if number > 0 {
            fields.push(count(name, number));
        }
    }
    if wrong > 0 {
        let text = format!("{} (`{}` lists them)", grouped(wrong), source.check);
        fields.push(("wrong records", text, json!(wrong)));
    }
    print_fields(common.json, fields);
    Ok(())
}

/// How often each length is there.
#[derive(Default)]
struct Lengths {
    counts: BTreeMap<usize, usize>,
    all: usize,
}

impl Lengths {
    fn add(&mut self, length: usize) {
        *self.counts.entry(length).or_default() += 1;
        self.all += 1;
    }

    /// The least, middle, 95th of 100, and greatest length.
    fn distribution(&self, name: &'static str) -> (&'static str, String, serde_json::Value) {
        let at = |share: f64| {
            let mut before = (self.all.saturating_sub(1) as f64 * share).round() as usize;
            let found = self.counts.iter().find(|(_, count)| match before.checked_sub(**count) {
                Some(rest) => {
                    before = rest;
                    false
                }
                None => true,
            });
            found.map_or(0, |(length, _)| *length)
        };
        let [least, median, p95, most] = [0.0, 0.5, 0.95, 1.0].map(at);
        let text = format!("{least} to {most}, median {median}, 95 % at most {p95}");
        (name, text, json!({ "min": least, "median": median, "p95": p95, "max": most }))
    }
}
