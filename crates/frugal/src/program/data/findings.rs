//! What is said once of many records: errors that repeat, and rows that are there twice.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use frugal::dataloading;
use frugal::training::masked_rows::MaskedRow;
use sha2::{Digest, Sha256};

use crate::program::figures::{counted, grouped};

/// Places that a line names.
const SHOWN: usize = 3;

/// Errors by what is wrong, without where.
#[derive(Default)]
pub(super) struct Repeats {
    /// In the order of their first records.
    reasons: Vec<(String, Vec<String>, u64)>,
    known: HashMap<String, usize>,
}

impl Repeats {
    /// Adds the error of a record; false if it says of another record what was said before.
    pub(super) fn is_new(&mut self, place: &str, error: &frugal::Error) -> bool {
        let frugal::Error::Data(dataloading::Error::Record { reason, .. }) = error else { return true };
        match self.known.entry(reason.clone()) {
            Entry::Vacant(free) => {
                free.insert(self.reasons.len());
                self.reasons.push((reason.clone(), Vec::new(), 0));
                true
            }
            Entry::Occupied(known) => {
                let (_, places, count) = &mut self.reasons[*known.get()];
                *count += 1;
                if places.len() < SHOWN && !place.is_empty() {
                    places.push(place.to_owned());
                }
                false
            }
        }
    }

    /// A line for each error that several records have.
    pub(super) fn lines(&self) -> Vec<String> {
        let several = self.reasons.iter().filter(|(_, _, count)| *count > 0);
        several
            .map(|(reason, places, count)| {
                let places =
                    if places.is_empty() { String::new() } else { format!(" ({})", listed(places, *count)) };
                format!("the same in {} more{places}: {reason}", counted(*count, "record"))
            })
            .collect()
    }
}

/// Rows that are equal, token by token and label by label.
#[derive(Default)]
pub(super) struct Duplicates {
    /// The place of the first row of each digest.
    first: HashMap<[u8; 16], String>,
    /// Later rows, and the first of each.
    shown: Vec<String>,
    count: u64,
}

impl Duplicates {
    pub(super) fn add(&mut self, place: &str, row: &MaskedRow) {
        let mut digest = Sha256::new();
        // Of equal lengths, so that they cannot run into each other.
        row.tokens.iter().chain(&row.labels).for_each(|id| digest.update(id.to_le_bytes()));
        let mut key = [0; 16];
        key.copy_from_slice(&digest.finalize()[..16]);
        match self.first.entry(key) {
            Entry::Vacant(free) => {
                free.insert(place.to_owned());
            }
            Entry::Occupied(first) => {
                self.count += 1;
                if self.shown.len() < SHOWN {
                    self.shown.push(format!("{place} is {}", first.get()));
                }
            }
        }
    }

    /// Rows that were there before.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The warning, of `rows` rows in all.
    pub(super) fn line(&self, rows: usize) -> Option<String> {
        (self.count > 0).then(|| {
            let (verb, rows) = (if self.count == 1 { "is" } else { "are" }, counted(rows as u64, "row"));
            format!(
                "warning: {} of {rows} {verb} there before, token by token: {}",
                grouped(self.count),
                listed(&self.shown, self.count)
            )
        })
    }
}

/// The first few of `count`.
fn listed(shown: &[String], count: u64) -> String {
    let more = count.saturating_sub(shown.len() as u64);
    let more = if more > 0 { format!(", and {} more", grouped(more)) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_rows_are_counted_and_the_first_ones_named() {
        let mut found = Duplicates::default();
        let row =
            |tokens: [i64; 3], labels: [i64; 3]| MaskedRow { tokens: tokens.into(), labels: labels.into() };
        found.add("line 1", &row([1, 2, 3], [-100, 2, 3]));
        found.add("line 2", &row([1, 2, 3], [-100, -100, 3]));
        found.add("line 3", &row([1, 2, 4], [-100, 2, 4]));
        assert_eq!((found.count(), found.line(3)), (0, None), "other labels, or other tokens");
        found.add("line 4", &row([1, 2, 3], [-100, 2, 3]));
        let line = "warning: 1 of 4 rows is there before, token by token: line 4 is line 1";
        assert_eq!(found.line(4).as_deref(), Some(line));
        for number in 5..=9 {
            found.add(&format!("line {number}"), &row([1, 2, 4], [-100, 2, 4]));
        }
        let line = "warning: 6 of 9 rows are there before, token by token: line 4 is line 1, line 5 is line 3, line 6 is line 3, and 3 more";
        assert_eq!(found.line(9).as_deref(), Some(line));
    }

    #[test]
    fn an_error_of_many_records_is_said_once() {
        let mut repeats = Repeats::default();
        let error = |line: usize, reason: &str| -> frugal::Error {
            let (from, location) = ("a.jsonl".to_owned(), format!("line {line}"));
            dataloading::Error::Record { from, location, reason: reason.to_owned() }.into()
        };
        let refused = "chat_template.jinja, line 1: the template refuses the conversation: no users";
        let told: Vec<bool> = (1..=100)
            .map(|line| repeats.is_new(&format!("a.jsonl: line {line}"), &error(line, refused)))
            .collect();
        assert_eq!(told.iter().filter(|new| **new).count(), 1);
        assert!(told[0] && repeats.is_new("a.jsonl: line 101", &error(101, "another")));
        let line = format!(
            "the same in 99 records more (a.jsonl: line 2, a.jsonl: line 3, a.jsonl: line 4, and 96 more): {refused}"
        );
        assert_eq!(repeats.lines(), [line]);
    }
}
