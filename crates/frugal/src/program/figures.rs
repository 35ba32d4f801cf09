//! Formats numbers.

/// `1 081 344`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// `1 081 344 of 495 114 112 (0.22 %)`.
pub(crate) fn share(part: u64, all: u64) -> String {
    let percent = if all == 0 { 0.0 } else { 100.0 * part as f64 / all as f64 };
    format!("{} of {} ({percent:.2} %)", grouped(part), grouped(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_three() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1 000"), (494_032_768, "494 032 768")] {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(share(1_081_344, 495_114_112), "1 081 344 of 495 114 112 (0.22 %)");
        assert_eq!(share(0, 0), "0 of 0 (0.00 %)");
    }
}
