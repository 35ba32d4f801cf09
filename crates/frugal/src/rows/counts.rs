//! Rows of files, and counts over the records that they are made of.

use training::masked_rows::MaskedRows;

use super::notes::Notes;

/// Counts over the records of files, and notes.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    /// Records.
    pub records: usize,
    /// Rows to train on.
    pub rows: usize,
    /// Tokens of these rows.
    pub tokens: usize,
    /// Tokens of them that are learned.
    pub trained: usize,
    /// Rows that were too long and left out.
    pub skipped: usize,
    /// Rows that were too long and cut.
    pub truncated: usize,
    /// Rows that were too long and divided.
    pub split: usize,
    /// Rows and records that are left out because nothing of them is learned.
    pub without_label: usize,
    /// Records with an answer that is empty, from which the model learns to end at once.
    #[serde(default)]
    pub empty_answers: usize,
    /// Rows with another weight than 1.
    #[serde(default)]
    pub weighted: usize,
    /// Notes of records.
    #[serde(default)]
    pub notes: Notes,
}

impl Counts {
    /// Adds others.
    pub fn add(&mut self, other: &Self) {
        self.records += other.records;
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.trained += other.trained;
        self.skipped += other.skipped;
        self.truncated += other.truncated;
        self.split += other.split;
        self.without_label += other.without_label;
        self.empty_answers += other.empty_answers;
        self.weighted += other.weighted;
        self.notes.add(&other.notes);
    }
}

/// Rows of files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rows {
    /// The rows, in the order of the records.
    pub rows: MaskedRows,
    /// Counts over the records, and notes.
    pub counts: Counts,
}
