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
    /// Each token after the first is predicted once, and each part is learned without the text before it. Where the row begins with the
    /// model's begin token, every part does, as a row of a [text file](super::text): such a model predicts text without it badly.
    /// Elsewhere the last token of one part is the first of the next. (TRL and transformers' `run_clm` cut the concatenated texts, and
    /// their later parts have no begin token.)
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

/// Divides a row into rows of at most `longest` tokens, at least 2. If the first token is `begin`, that of each part is, in the place of the
/// last token of the part before.
pub(super) fn split(row: &MaskedRow, longest: usize, begin: Option<u32>) -> Vec<MaskedRow> {
    let step = longest.max(2) - 1;
    let first = row.tokens.first().copied().filter(|first| begin.map(i64::from) == Some(*first));
    let starts = (0..row.tokens.len().saturating_sub(1)).step_by(step);
    starts
        .map(|start| {
            let part = start..row.tokens.len().min(start + step + 1);
            let mut part = MaskedRow {
                tokens: row.tokens[part.clone()].to_vec(),
                labels: row.labels[part].to_vec(),
                weight: row.weight,
            };
            if let Some(first) = first {
                (part.tokens[0], part.labels[0]) = (first, row.labels[0]);
            }
            part
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
            let row = MaskedRow::new(tokens.clone(), tokens);
            for begin in [None, Some(0), Some(3)] {
                let parts = split(&row, longest, begin);
                assert!(
                    parts.iter().all(|part| (2..=longest).contains(&part.tokens.len())),
                    "{length} {longest}"
                );
                let predicted: Vec<i64> = parts.iter().flat_map(|part| part.labels[1..].to_vec()).collect();
                assert_eq!(predicted, row.tokens[1..], "{length} {longest} {begin:?}");
                let tokens = parts.iter().flat_map(|part| part.tokens[1..].to_vec());
                assert_eq!(tokens.collect::<Vec<i64>>(), row.tokens[1..]);
                // Without a begin token, the token before.
                let mut last = 0;
                for part in &parts {
                    assert_eq!(
                        part.tokens[0],
                        if begin == Some(0) { 0 } else { last },
                        "{length} {longest} {begin:?}"
                    );
                    last = *part.tokens.last().unwrap();
                }
            }
        }
    }

    #[test]
    fn a_part_of_a_prompt_has_no_label_at_its_begin_token() {
        let row = MaskedRow::new(vec![9, 1, 2, 3, 4], vec![-100, -100, 2, 3, 4]);
        let parts = split(&row, 3, Some(9));
        let tokens: Vec<_> = parts.iter().map(|part| part.tokens.clone()).collect();
        let labels: Vec<_> = parts.into_iter().map(|part| part.labels).collect();
        assert_eq!(tokens, [[9, 1, 2], [9, 3, 4]]);
        assert_eq!(labels, [[-100, -100, 2], [-100, 3, 4]]);
    }
}
