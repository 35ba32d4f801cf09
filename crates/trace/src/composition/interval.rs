//! Unions of intervals.

/// Returns how much of `start..end` the union of the intervals covers, in their unit; sorts them.
pub(super) fn covered(intervals: &mut [(i64, i64)], start: i64, end: i64) -> i64 {
    if !intervals.is_sorted() {
        intervals.sort_unstable();
    }
    let (mut total, mut until) = (0, start);
    for &(from, to) in intervals.iter() {
        if from >= end {
            break;
        }
        let (from, to) = (from.max(until), to.min(end));
        if to > from {
            total += to - from;
            until = to;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_union_counts_overlaps_once(
            intervals in prop::collection::vec((-5_i64..60, 0_i64..20), 0..20), start in 0_i64..20, length in 0_i64..40,
        ) {
            let mut intervals: Vec<(i64, i64)> = intervals.iter().map(|&(from, for_)| (from, from + for_)).collect();
            let end = start + length;
            let moments = (start..end).filter(|at| intervals.iter().any(|&(from, to)| from <= *at && *at < to));
            let expected = moments.count() as i64;
            prop_assert_eq!(covered(&mut intervals, start, end), expected);
        }
    }
}
