//! `frugal data stats`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use anyhow::bail;
use clap::Args;
use frugal::config::MixtureSource;
use frugal::rows::Counts;
use frugal::training::masked_rows::Mixture;
use serde_json::{Value, json};

use super::{Source, SourceArgs, learned};
use crate::common_flags::Common;
use crate::output::figures::grouped;
use crate::output::print_fields;

#[derive(Args)]
pub(super) struct Stats {
    #[command(flatten)]
    source: SourceArgs,
}

pub(super) fn run(common: &Common, arguments: &Stats) -> anyhow::Result<()> {
    let source = &arguments.source;
    let fields = match source.mixture()? {
        None => Measured::of(&source.open(common)?)?.fields(),
        Some(mixture) => {
            let measured = mixture.iter().map(|of| Measured::of(&source.open_at(common, &of.source)?));
            mixed(&mixture, &measured.collect::<anyhow::Result<Vec<_>>>()?)?
        }
    };
    print_fields(common.json, fields);
    Ok(())
}

/// A field: its name, its text and its JSON value.
type Field = (String, String, Value);

/// The shares of the sources of a mixture.
fn mixed(mixture: &[MixtureSource], measured: &[Measured]) -> anyhow::Result<Vec<Field>> {
    let weights: Vec<f64> = mixture.iter().map(|source| source.weight).collect();
    let order = Mixture::new(&weights)?;
    let (period, counts) = order.period();
    let rows: usize = measured.iter().map(|measured| measured.all.rows).sum();
    let mean = |of: &Measured, number: usize| number as f64 / of.all.rows.max(1) as f64;
    // The tokens and learned tokens of a source in one row of the mixture.
    let parts: Vec<[f64; 3]> = measured
        .iter()
        .zip(counts)
        .map(|(of, count)| {
            let share = f64::from(*count) / period as f64;
            [share, share * mean(of, of.all.tokens), share * mean(of, of.all.trained)]
        })
        .collect();
    let total = |at: usize| parts.iter().map(|part| part[at]).sum::<f64>().max(f64::MIN_POSITIVE);
    let mut fields = Vec::new();
    for ((source, of), part) in mixture.iter().zip(measured).zip(&parts) {
        let [share, tokens, trained] = [part[0], part[1] / total(1), part[2] / total(2)];
        let epochs = share * rows as f64 / of.all.rows.max(1) as f64;
        let text = format!(
            "{:.1} % of the rows, {:.1} % of the tokens, {:.1} % of the learned tokens; its {} rows {epochs:.2} times an epoch{}",
            100.0 * share,
            100.0 * tokens,
            100.0 * trained,
            grouped(of.all.rows as u64),
            if of.wrong > 0 {
                format!("; {} wrong records (`{}`)", grouped(of.wrong), of.check)
            } else {
                String::new()
            },
        );
        let value = json!({
            "weight": source.weight, "rows": of.all.rows, "tokens": of.all.tokens, "share_of_rows": share, "share_of_tokens": tokens,
            "share_of_learned_tokens": trained, "epochs": epochs, "wrong_records": of.wrong,
        });
        fields.push((source.source.clone(), text, value));
    }
    let tokens = (rows as f64 * total(1)).round() as u64;
    fields.push(count("rows of an epoch", rows));
    fields.push(("tokens of an epoch".to_owned(), grouped(tokens), json!(tokens)));
    Ok(fields)
}

fn count(name: &str, count: usize) -> Field {
    (name.to_owned(), grouped(count as u64), json!(count))
}

/// What the records of a source are.
struct Measured {
    all: Counts,
    lengths: Lengths,
    answers: Lengths,
    longest: (usize, String),
    wrong: u64,
    /// The command that lists wrong records.
    check: String,
}

impl Measured {
    fn of(source: &Source) -> anyhow::Result<Self> {
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
        Ok(Self { all, lengths, answers, longest, wrong, check: source.check.clone() })
    }

    fn fields(self) -> Vec<Field> {
        let Self { all, longest, wrong, .. } = &self;
        let share = 100.0 * all.trained as f64 / all.tokens.max(1) as f64;
        let learned = format!("{} ({share:.1} %)", grouped(all.trained as u64));
        let mut fields = vec![
            count("records", all.records),
            count("rows", all.rows),
            count("tokens", all.tokens),
            ("learned tokens".to_owned(), learned, json!(all.trained)),
            self.lengths.distribution("tokens of a row"),
            self.answers.distribution("learned tokens of a row"),
        ];
        if longest.0 > 0 {
            let text = format!("{} ({} tokens)", longest.1, grouped(longest.0 as u64));
            fields.push(("longest row".to_owned(), text, json!(longest.1)));
        }
        for (name, number) in [
            ("left out, too long", all.skipped),
            ("cut, too long", all.truncated),
            ("divided, too long", all.split),
            ("left out, nothing to learn", all.without_label),
            ("with an empty answer", all.empty_answers),
            ("with a weight other than 1", all.weighted),
        ] {
            if number > 0 {
                fields.push(count(name, number));
            }
        }
        if *wrong > 0 {
            let text = format!("{} (`{}` lists them)", grouped(*wrong), self.check);
            fields.push(("wrong records".to_owned(), text, json!(wrong)));
        }
        fields
    }
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
    fn distribution(&self, name: &str) -> Field {
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
        (name.to_owned(), text, json!({ "min": least, "median": median, "p95": p95, "max": most }))
    }
}
