//! Findings that are printed once for many records: errors that repeat, and rows that are there twice.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;

use frugal::dataloading;
use frugal::dataloading::records::{self, Detected, RecordFormat};
use frugal::training::masked_rows::MaskedRow;
use sha2::{Digest, Sha256};

use crate::output::figures::{counted, grouped};

/// Places that a line names.
const SHOWN: usize = 3;

/// Findings by what is wrong, without where.
#[derive(Default)]
pub(super) struct Repeats {
    /// In the order of their first records.
    reasons: Vec<Repeated>,
    known: HashMap<String, usize>,
}

struct Repeated {
    kind: &'static str,
    reason: String,
    /// The first records after the one that was reported.
    places: Vec<String>,
    /// Number of records after the one that was reported.
    count: u64,
}

impl Repeats {
    /// Adds the error of a record; returns false if the same error was reported for another record.
    pub(super) fn is_new_error(&mut self, error: &frugal::Error) -> bool {
        match error {
            frugal::Error::Data(dataloading::Error::Record { from, location, reason }) => {
                self.is_new("error", &format!("{from}: {location}"), reason)
            }
            _ => true,
        }
    }

    /// Adds a note on a record; returns false if the same note was reported for another one.
    pub(super) fn is_new(&mut self, kind: &'static str, place: &str, reason: &str) -> bool {
        match self.known.entry(reason.to_owned()) {
            Entry::Vacant(free) => {
                free.insert(self.reasons.len());
                self.reasons.push(Repeated { kind, reason: reason.to_owned(), places: Vec::new(), count: 0 });
                true
            }
            Entry::Occupied(known) => {
                let repeated = &mut self.reasons[*known.get()];
                repeated.count += 1;
                if repeated.places.len() < SHOWN {
                    repeated.places.push(place.to_owned());
                }
                false
            }
        }
    }

    /// A line, with its kind, for each finding about several records.
    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let several = self.reasons.iter().filter(|repeated| repeated.count > 0);
        several
            .map(|Repeated { kind, reason, places, count }| {
                let (records, places) = (counted(*count, "record"), listed(places, *count));
                (*kind, format!("the same in {records} more ({places}): {reason}"))
            })
            .collect()
    }
}

/// Records that have other formats than most.
#[derive(Default)]
pub(super) struct OtherFormats(Vec<(RecordFormat, Vec<String>, u64)>);

impl OtherFormats {
    /// Reads the records of files again, which is needed only where the first ones have several formats.
    pub(super) fn of(files: &[PathBuf], detected: &Detected, field: &str) -> anyhow::Result<Self> {
        let mut found = Self::default();
        if detected.formats.len() < 2 {
            return Ok(found);
        }
        for record in records::read_all(files)?.flatten() {
            // Wrong records have errors of their own.
            let Ok(format) = detected.format(&record, field) else { continue };
            let at = found.0.iter().position(|(own, ..)| *own == format).unwrap_or_else(|| {
                found.0.push((format, Vec::new(), 0));
                found.0.len() - 1
            });
            let (_, places, count) = &mut found.0[at];
            *count += 1;
            if places.len() < SHOWN {
                places.push(record.location.to_string());
            }
        }
        found.0.sort_by_key(|(.., count)| std::cmp::Reverse(*count));
        Ok(found)
    }

    /// A warning for each format but the most frequent.
    pub(super) fn lines(&self) -> Vec<String> {
        let [(most, _, most_count), others @ ..] = &self.0[..] else { return Vec::new() };
        let line = |(format, places, count): &(RecordFormat, Vec<String>, u64)| {
            let verb = if *count == 1 { "has" } else { "have" };
            format!(
                "warning: {} {verb} {format}, and {} {most}: {}",
                counted(*count, "record"),
                grouped(*most_count),
                listed(places, *count)
            )
        };
        others.iter().map(line).collect()
    }
}

/// Rows that are equal, token by token and label by label.
#[derive(Default)]
pub(super) struct Duplicates {
    /// The place of the first row of each digest, of the first [`REMEMBERED`] different rows.
    first: HashMap<[u8; 16], Box<str>>,
    /// Later rows, and the first of each.
    shown: Vec<String>,
    count: u64,
    is_full: bool,
}

/// Different rows that later ones are compared with: some 150 MB of memory.
const REMEMBERED: usize = 1 << 20;

impl Duplicates {
    pub(super) fn add(&mut self, place: &str, row: &MaskedRow) {
        let mut digest = Sha256::new();
        // Of equal lengths, so that they cannot run into each other.
        row.tokens.iter().chain(&row.labels).for_each(|id| digest.update(id.to_le_bytes()));
        let mut key = [0; 16];
        key.copy_from_slice(&digest.finalize()[..16]);
        match self.first.entry(key) {
            Entry::Vacant(free) if !self.is_full => {
                free.insert(place.into());
                self.is_full = self.first.len() == REMEMBERED;
            }
            Entry::Vacant(_) => {}
            Entry::Occupied(first) => {
                self.count += 1;
                if self.shown.len() < SHOWN {
                    self.shown.push(format!("{place} repeats {}", first.get()));
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
            let (are, rows) = (
                if self.count == 1 { "is a duplicate" } else { "are duplicates" },
                counted(rows as u64, "row"),
            );
            let among = match self.is_full {
                true => format!(
                    " (each was compared with the first {} different rows)",
                    grouped(REMEMBERED as u64)
                ),
                false => String::new(),
            };
            let listed = listed(&self.shown, self.count);
            format!("warning: {} of {rows} {are}{among}: {listed}", grouped(self.count))
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
        let row = |tokens: [i64; 3], labels: [i64; 3]| MaskedRow::new(tokens.into(), labels.into());
        found.add("line 1", &row([1, 2, 3], [-100, 2, 3]));
        found.add("line 2", &row([1, 2, 3], [-100, -100, 3]));
        found.add("line 3", &row([1, 2, 4], [-100, 2, 4]));
        assert_eq!((found.count(), found.line(3)), (0, None), "other labels, or other tokens");
        found.add("line 4", &row([1, 2, 3], [-100, 2, 3]));
        let line = "warning: 1 of 4 rows is a duplicate: line 4 repeats line 1";
        assert_eq!(found.line(4).as_deref(), Some(line));
        for number in 5..=9 {
            found.add(&format!("line {number}"), &row([1, 2, 4], [-100, 2, 4]));
        }
        let line = "warning: 6 of 9 rows are duplicates: line 4 repeats line 1, line 5 repeats line 3, line 6 repeats line 3, and 3 more";
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
        let new: Vec<bool> = (1..=100).map(|line| repeats.is_new_error(&error(line, refused))).collect();
        assert_eq!(new.iter().filter(|one| **one).count(), 1);
        assert!(new[0] && repeats.is_new_error(&error(101, "another")));
        let line = format!(
            "the same in 99 records more (a.jsonl: line 2, a.jsonl: line 3, a.jsonl: line 4, and 96 more): {refused}"
        );
        assert_eq!(repeats.lines(), [("error", line)]);
    }
}
