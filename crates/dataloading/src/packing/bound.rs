//! A lower bound on the number of rows, and the next-fit baseline.

use super::{WHAT, check_capacity};
use crate::error::{Error, Result};

/// Returns a lower bound on the rows of any packing of these lengths: the larger of the total tokens over the capacity, and
/// L₂ of Martello and Toth (1990): for each `α ≤ C/2`, documents longer than `C − α` need rows of their own, and those
/// longer than `C/2` need rows that only documents of at least `α` can share.
///
/// # Errors
/// A length exceeds the capacity, or the capacity is 0.
pub fn lower_bound(lengths: &[u32], capacity: usize) -> Result<usize> {
    let c = check_capacity(capacity)? as usize;
    let mut counts = vec![0_u64; c + 1];
    for &length in lengths {
        *counts.get_mut(length as usize).ok_or_else(|| too_long(length, capacity))? += 1;
    }
    // The number of documents and of tokens with lengths below an index.
    let (mut documents, mut tokens) = (vec![0_u64; c + 2], vec![0_u64; c + 2]);
    for length in 0..=c {
        documents[length + 1] = documents[length] + counts[length];
        tokens[length + 1] = tokens[length] + counts[length] * length as u64;
    }
    let half = c / 2;
    let mut bound = tokens[c + 1].div_ceil(c as u64);
    for alpha in 1..=half {
        let alone = documents[c + 1] - documents[c - alpha + 1];
        let large = documents[c - alpha + 1] - documents[half + 1];
        let room = large * c as u64 - (tokens[c - alpha + 1] - tokens[half + 1]);
        let small = tokens[half + 1] - tokens[alpha];
        bound = bound.max(alone + large + small.saturating_sub(room).div_ceil(c as u64));
    }
    Ok(bound as usize)
}

/// Returns the rows of next-fit: documents in the given order, with a new row whenever the next one does not fit.
///
/// # Errors
/// Same as [`lower_bound`].
pub fn next_fit(lengths: &[u32], capacity: usize) -> Result<usize> {
    let capacity = check_capacity(capacity)?;
    let (mut rows, mut room) = (0, 0);
    for &length in lengths.iter().filter(|&&length| length > 0) {
        if length > capacity {
            return Err(too_long(length, capacity as usize));
        }
        if length > room {
            (rows, room) = (rows + 1, capacity);
        }
        room -= length;
    }
    Ok(rows)
}

pub(super) fn too_long(length: u32, capacity: usize) -> Error {
    Error::Config {
        what: WHAT,
        reason: format!("a document of {length} tokens is longer than a row of {capacity}; split it first"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_and_next_fit() {
        for (lengths, capacity, bound, next) in [
            (&[6_u32, 6, 6, 2][..], 10, 3, 3),
            (&[5, 5, 5, 5], 10, 2, 2),
            (&[7, 7, 4, 4], 10, 3, 3),
            (&[4, 7, 4, 7], 10, 3, 4),
            (&[], 10, 0, 0),
            (&[1, 0, 1], 1, 2, 2),
            (&[3, 3, 3], 5, 3, 3),
        ] {
            assert_eq!(lower_bound(lengths, capacity).unwrap(), bound, "{lengths:?}");
            assert_eq!(next_fit(lengths, capacity).unwrap(), next, "{lengths:?}");
        }
        let words = "packing: a document of 11 tokens is longer than a row of 10; split it first";
        assert_eq!(lower_bound(&[11], 10).unwrap_err().to_string(), words);
        assert_eq!(next_fit(&[11], 10).unwrap_err().to_string(), words);
    }
}
