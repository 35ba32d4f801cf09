//! Formats numbers.

/// `1,081,344`.
pub(crate) fn grouped(number: u64) -> String {
    accounting::quantity::grouped(number.into())
}

/// `1 step`, `1,081,344 steps`.
pub(crate) fn counted(number: u64, unit: &str) -> String {
    format!("{} {unit}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// `1,081,344 of 495,114,112 (0.22 %)`.
pub(crate) fn share(part: u64, all: u64) -> String {
    let percent = if all == 0 { 0.0 } else { 100.0 * part as f64 / all as f64 };
    format!("{} of {} ({percent:.2} %)", grouped(part), grouped(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_shares_are_grouped() {
        assert_eq!((&*counted(1, "step"), &*counted(2000, "step")), ("1 step", "2,000 steps"));
        assert_eq!(share(1_081_344, 495_114_112), "1,081,344 of 495,114,112 (0.22 %)");
        assert_eq!(share(0, 0), "0 of 0 (0.00 %)");
    }
}
