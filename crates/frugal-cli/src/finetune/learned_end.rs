//! The token with which a training ends answers.

use std::collections::BTreeMap;

use frugal::dataloading::{IGNORE_INDEX, Tokenizer};
use frugal::training::masked_rows::MaskedRows;

/// The share of the rows whose answers have to end with a token before it is the one that ends answers.
const MOST: f64 = 0.5;

/// Returns the special token with which the answers of most rows end. `turn_end`, the template's, is the one if it ends any: long rows
/// may be cut before it.
///
/// # Errors
/// Rows that cannot be read.
pub(super) fn learned_end(
    rows: &MaskedRows,
    tokenizer: &Tokenizer,
    turn_end: Option<i64>,
) -> anyhow::Result<Option<i64>> {
    let added: Vec<i64> =
        tokenizer.added_tokens().iter().filter_map(|token| tokenizer.id(token)).map(i64::from).collect();
    let mut ends: BTreeMap<i64, usize> = BTreeMap::new();
    for row in rows.iter() {
        let row = row?;
        // A template may write a line break after the token that ends a turn.
        let learned = row.labels.iter().rev().skip_while(|label| **label == IGNORE_INDEX);
        if let Some(end) = learned.take(3).find(|label| added.contains(label)) {
            *ends.entry(*end).or_default() += 1;
        }
    }
    if let Some(end) = turn_end.filter(|end| ends.contains_key(end)) {
        return Ok(Some(end));
    }
    let most = ends.into_iter().max_by_key(|(_, count)| *count);
    Ok(most.filter(|(_, count)| *count as f64 >= MOST * rows.len() as f64).map(|(end, _)| end))
}

/// Says that answers end with a token that does not end a generation of the model.
pub(super) fn note(end: i64, tokenizer: &Tokenizer, end_tokens: &[i64]) -> String {
    let name = u32::try_from(end).ok().and_then(|id| tokenizer.token(id)).unwrap_or_default();
    let known = match end_tokens {
        [] => "it lists none".to_owned(),
        known => format!("it lists {}", known.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
    };
    format!(
        "note: answers end with `{name}` ({end}), which is not in the model's `eos_token_id` ({known}); this run, and what is merged or \
         exported of it, also stop there"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use frugal::dataloading::embedded;
    use frugal::training::masked_rows::MaskedRow;

    #[test]
    fn the_token_that_ends_most_answers_is_found() {
        let tokenizer = Tokenizer::from_file(&embedded::folder().unwrap().join("tokenizer.json")).unwrap();
        let end = i64::from(tokenizer.id("<|endoftext|>").unwrap());
        let row = |labels: &[i64]| {
            MaskedRow::new(labels.iter().map(|label| (*label).max(0)).collect(), labels.to_vec())
        };
        let rows = [row(&[IGNORE_INDEX, 70, end]), row(&[70, 71, end, 72]), row(&[70, 71])];
        let learned_end = |rows: &[MaskedRow], turn_end| {
            learned_end(&MaskedRows::of(rows).unwrap(), &tokenizer, turn_end).unwrap()
        };
        assert_eq!(learned_end(&rows, None), Some(end));
        assert_eq!(learned_end(&rows[1..], Some(end)), Some(end));
        assert_eq!(learned_end(&rows[2..], Some(end)), None, "ends with no such token");
        assert_eq!(learned_end(&[], None), None);
        let note = note(end, &tokenizer, &[5, 6]);
        assert!(
            note.contains(&format!("`<|endoftext|>` ({end})")) && note.contains("it lists 5, 6"),
            "{note}"
        );
    }
}
