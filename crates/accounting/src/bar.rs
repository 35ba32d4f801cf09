//! A stacked bar chart of letters for the terminal.
//!
//! ```
//! let bar = accounting::bar::stacked(&[('P', 30), ('G', 10)], 80, 16);
//! assert_eq!(bar, "[PPPPPPGG········]");
//! ```

/// Draws a bar of `width` letters for `whole`, with each part's letter in proportion to its share, then dots. Parts
/// beyond `whole` are cut off with a `>`.
pub fn stacked(parts: &[(char, u64)], whole: u64, width: usize) -> String {
    let mut bar = String::from("[");
    let (mut reached, mut drawn) = (0u128, 0usize);
    let whole = u128::from(whole.max(1));
    for &(letter, bytes) in parts {
        reached += u128::from(bytes);
        // The ends are rounded, not the lengths, so that the lengths add up.
        let end =
            usize::try_from((reached * width as u128 + whole / 2) / whole).unwrap_or(usize::MAX).min(width);
        bar.extend(std::iter::repeat_n(letter, end.saturating_sub(drawn)));
        drawn = drawn.max(end);
    }
    bar.extend(std::iter::repeat_n('·', width - drawn));
    bar.push(if reached > whole { '>' } else { ']' });
    bar
}

#[cfg(test)]
mod tests {
    use super::stacked;

    #[test]
    fn bars_have_the_given_width() {
        assert_eq!(stacked(&[('A', 1), ('B', 1), ('C', 1)], 3, 10), "[AAABBBBCCC]");
        assert_eq!(stacked(&[('A', 0), ('B', 5)], 10, 4), "[BB··]");
        assert_eq!(stacked(&[('A', 50), ('B', 70)], 100, 10), "[AAAAABBBBB>");
        assert_eq!(stacked(&[('A', u64::MAX), ('B', u64::MAX)], 1, 4), "[AAAA>");
        assert_eq!(stacked(&[], 0, 3), "[···]");
    }
}
