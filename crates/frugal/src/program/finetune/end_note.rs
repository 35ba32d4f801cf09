//! A note where the tuned model would not stop.

use std::collections::BTreeMap;

use frugal::dataloading::{IGNORE_INDEX, Tokenizer};
use frugal::training::masked_rows::MaskedRows;

/// The share of the rows whose answers have to end with a token before it is the one that ends answers.
const MOST: f64 = 0.5;

/// Returns a note with the remedy if answers end with a token that does not end a generation of the model.
///
/// # Errors
/// Rows that cannot be read.
pub(super) fn end_note(
    rows: &MaskedRows,
    tokenizer: &Tokenizer,
    end_tokens: &[i64],
) -> anyhow::Result<Option<String>> {
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
    let Some((end, count)) = ends.into_iter().max_by_key(|(_, count)| *count) else { return Ok(None) };
    if (count as f64) < MOST * rows.len() as f64 || end_tokens.contains(&end) {
        return Ok(None);
    }
    let name = u32::try_from(end).ok().and_then(|id| tokenizer.token(id)).unwrap_or_default();
    let known = match end_tokens {
        [] => "it lists none".to_owned(),
        known => format!("it lists {}", known.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
    };
    Ok(Some(format!(
        "note: answers end with `{name}` ({end}), which is not in the model's `eos_token_id` ({known}), so programs that generate \
         would not stop there; add {end} to `eos_token_id` in the model's generation_config.json, or generate with --stop '{name}'"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use frugal::dataloading::embedded;
    use frugal::training::masked_rows::MaskedRow;

    #[test]
    fn ends_that_the_model_does_not_know_are_noted() {
        let tokenizer = Tokenizer::from_file(&embedded::folder().unwrap().join("tokenizer.json")).unwrap();
        let end = i64::from(tokenizer.id("<|endoftext|>").unwrap());
        let row = |labels: &[i64]| MaskedRow { tokens: labels.to_vec(), labels: labels.to_vec() };
        let rows = [row(&[IGNORE_INDEX, 70, end]), row(&[70, 71, end, 72]), row(&[70, 71])];
        let end_note = |rows: &[MaskedRow], ends: &[i64]| {
            end_note(&MaskedRows::of(rows).unwrap(), &tokenizer, ends).unwrap()
        };
        let note = end_note(&rows, &[5, 6]).unwrap();
        assert!(
            note.contains(&format!("`<|endoftext|>` ({end})")) && note.contains("it lists 5, 6"),
            "{note}"
        );
        assert!(note.contains(&format!("add {end} to `eos_token_id`")), "{note}");
        assert_eq!(end_note(&rows, &[5, end]), None);
        assert_eq!(end_note(&rows[2..], &[5]), None, "ends with no such token");
        assert_eq!(end_note(&[], &[5]), None);
    }
}
