//! Validation rows from training rows.
//!
//! Rows are ordered by a hash of their tokens and labels, and the first of them are held out. So which rows these are depends neither on
//! the order of the file nor on a seed, equal rows are never divided, and most of them stay the same when rows are added. Rows of one
//! record (parts of a long text, answers of one conversation) may be divided.

use std::collections::BTreeMap;

use dataloading::fingerprint::Fingerprint;
use training::masked_rows::{MaskedRow, MaskedRows};

use crate::error::Result;

/// Rows that there must be for any to be held out.
pub const MIN_ROWS: usize = 50;
/// The most rows that are held out.
pub const MAX_HELD_OUT: usize = 1000;

/// Different rows with the least hashes that are looked at.
const LOOKED_AT: usize = 1 << 16;

/// Divides groups of `together` rows into those to train on, in their order, and the `share` of them that is held out: 1 at least and
/// [`MAX_HELD_OUT`] at most. None of fewer than [`MIN_ROWS`], and none for a share of 0.
///
/// # Errors
/// Rows that cannot be read.
pub fn hold_out(rows: &MaskedRows, together: usize, share: f64) -> Result<(MaskedRows, MaskedRows)> {
    let groups = rows.len() / together;
    if share <= 0.0 || groups < MIN_ROWS {
        return Ok((rows.clone(), MaskedRows::default()));
    }
    let count = ((share * groups as f64).round() as usize).clamp(1, MAX_HELD_OUT);
    // Of each hash the number of its rows, and the first of them.
    let mut by_hash: BTreeMap<u64, (usize, Vec<u32>)> = BTreeMap::new();
    for number in 0..groups {
        let mut hash = Fingerprint::new("held-out rows");
        for row in number * together..(number + 1) * together {
            hash = hashed(hash, &rows.row(row)?);
        }
        let (equal, first) = by_hash.entry(hash.finish()).or_default();
        *equal += 1;
        if first.len() < count {
            first.push(number as u32);
        }
        if by_hash.len() > LOOKED_AT {
            by_hash.pop_last();
        }
    }
    let (mut chosen, mut left) = (Vec::new(), count);
    for (equal, numbers) in by_hash.into_values() {
        // Rows that are there more often than there is room for stay in the training.
        if equal <= left {
            left -= equal;
            chosen.extend(numbers);
        }
        if left == 0 {
            break;
        }
    }
    chosen.sort_unstable();
    let together = together as u32;
    let rows_of = |group: &u32| group * together..(group + 1) * together;
    Ok(rows.divide(&chosen.iter().flat_map(rows_of).collect::<Vec<_>>()))
}

fn hashed(before: Fingerprint, row: &MaskedRow) -> Fingerprint {
    let numbers = |values: &[i64]| values.iter().map(|value| value.cast_unsigned()).collect::<Vec<_>>();
    before.numbers(numbers(&row.tokens).into_iter()).numbers(numbers(&row.labels).into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: i64) -> MaskedRow {
        MaskedRow::new(vec![id, id + 1, id % 3], vec![-100, id + 1, id % 3])
    }

    fn rows(count: i64) -> Vec<MaskedRow> {
        (0..count).map(row).collect()
    }

    fn hold_out(rows: Vec<MaskedRow>, share: f64) -> (Vec<MaskedRow>, Vec<MaskedRow>) {
        let (train, held) = super::hold_out(&MaskedRows::of(&rows).unwrap(), 1, share).unwrap();
        (train.to_vec().unwrap(), held.to_vec().unwrap())
    }

    #[test]
    fn the_share_is_held_out_within_its_bounds() {
        for (count, share, expected) in [
            (49, 0.02, 0),
            (50, 0.02, 1),
            (60, 0.001, 1),
            (5000, 0.02, 100),
            (5000, 0.0, 0),
            (60_000, 0.02, 1000),
        ] {
            let (train, held) = hold_out(rows(count), share);
            assert_eq!((train.len(), held.len()), (count as usize - expected, expected), "{count} {share}");
            let mut ids: Vec<i64> = train.iter().chain(&held).map(|row| row.tokens[0]).collect();
            assert!(train.is_sorted_by_key(|row| row.tokens[0]), "the order stays");
            ids.sort_unstable();
            assert!(ids.into_iter().eq(0..count), "every row is in one part");
        }
    }

    #[test]
    fn the_choice_depends_on_the_rows_alone() {
        let ids = |rows: &[MaskedRow]| -> Vec<i64> {
            let mut ids: Vec<i64> = rows.iter().map(|row| row.tokens[0]).collect();
            ids.sort_unstable();
            ids
        };
        let mut reversed = rows(2000);
        reversed.reverse();
        let (_, held) = hold_out(rows(2000), 0.02);
        assert_eq!(ids(&held), ids(&hold_out(reversed, 0.02).1));
        // A tenth more rows: about a tenth of the choice is new.
        let (_, more) = hold_out(rows(2200), 0.02);
        let (held, more) = (ids(&held), ids(&more));
        assert!(held.iter().filter(|id| more.contains(id)).count() >= 36, "{held:?} {more:?}");
    }

    #[test]
    fn pairs_are_not_divided() {
        let all = MaskedRows::of(&rows(400)).unwrap();
        let (train, held) = super::hold_out(&all, 2, 0.05).unwrap();
        assert_eq!((train.len(), held.len()), (380, 20));
        for pair in held.to_vec().unwrap().chunks(2).chain(train.to_vec().unwrap().chunks(2)) {
            assert_eq!((pair[0].tokens[0] % 2, pair[1].tokens[0]), (0, pair[0].tokens[0] + 1));
        }
    }

    #[test]
    fn equal_rows_stay_together() {
        let (train, held) = hold_out(vec![row(7); 100], 0.02);
        assert_eq!((train.len(), held.len()), (100, 0));
        let twice: Vec<MaskedRow> = rows(1000).into_iter().chain(rows(1000)).collect();
        let (train, held) = hold_out(twice, 0.02);
        assert_eq!(held.len(), 40);
        assert!(held.iter().all(|row| !train.contains(row)));
    }
}
