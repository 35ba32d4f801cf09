//! Notes on valid records: the number of records with each, and the first of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Findings about records, by their words.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Notes(BTreeMap<String, Note>);

/// The records of a finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    records: usize,
    /// The place of the first record.
    first: String,
}

impl Notes {
    /// Adds a finding about a record.
    pub(super) fn note(&mut self, finding: String, place: impl ToString) {
        let note = self.0.entry(finding).or_insert_with(|| Note { records: 0, first: place.to_string() });
        note.records += 1;
    }

    /// Adds the findings about later records.
    pub(super) fn add(&mut self, later: &Self) {
        for (finding, note) in &later.0 {
            match self.0.get_mut(finding) {
                Some(own) => own.records += note.records,
                None => drop(self.0.insert(finding.clone(), note.clone())),
            }
        }
    }

    /// Returns a line for each finding: the words, how many records have it, and the first of them.
    pub fn lines(&self) -> Vec<String> {
        let line = |(finding, note): (&String, &Note)| match note.records {
            1 => format!("{finding} (1 record: {})", note.first),
            records => format!("{finding} ({records} records, the first: {})", note.first),
        };
        self.0.iter().map(line).collect()
    }
}
