//! Rows that are longer than the longest one.

use serde::{Deserialize, Serialize};
use training::masked_rows::MaskedRow;

/// Handling of a row that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Overlong {
    /// End with an error that names the row.
    #[default]
    Error,
    /// Leave the row out, and count it.
    Skip,
    /// Divide the row.
    ///
    /// The last token of one part is the first of the next, so that every token is predicted once. Each part is learned without the
    /// text before it.
    Split,
    /// Keep only the beginning of the row.
    Truncate,
}

impl Overlong {
    /// Returns its name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Skip => "skip",
            Self::Split => "split",
            Self::Truncate => "truncate",
        }
    }
}

/// Divides a row into rows of at most `longest` tokens, at least 2.
pub(super) fn split(row: &MaskedRow, longest: usize) -> Vec<MaskedRow> {
    let step = longest.max(2) - 1;
    let starts = (0..row.tokens.len().saturating_sub(1)).step_by(step);
    starts
        .map(|start| {
            let part = start..row.tokens.len().min(start + step + 1);
            MaskedRow { tokens: row.tokens[part.clone()].to_vec(), labels: row.labels[part].to_vec() }
        })
        .collect()
}

/// Cuts a row to its first `longest` tokens.
pub(super) fn truncate(mut row: MaskedRow, longest: usize) -> MaskedRow {
    row.tokens.truncate(longest);
    row.labels.truncate(longest);
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_of_a_divided_row_is_predicted_once() {
        for (length, longest) in [(2, 2), (7, 2), (7, 3), (9, 5), (10, 9), (10, 10), (10, 11)] {
            let tokens: Vec<i64> = (0..length).collect();
            let row = MaskedRow { labels: tokens.clone(), tokens };
            let parts = split(&row, longest);
            assert!(
                parts.iter().all(|part| (2..=longest).contains(&part.tokens.len())),
                "{length} {longest}"
            );
            let predicted: Vec<i64> = parts.iter().flat_map(|part| part.labels[1..].to_vec()).collect();
            assert_eq!(predicted, row.tokens[1..], "{length} {longest}");
        }
    }
}
