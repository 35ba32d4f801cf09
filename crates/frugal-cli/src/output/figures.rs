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

/// `9.1 s`, `4 min 10 s`, `3 h 37 min`, `2 d 5 h`.
pub(crate) fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 59.95 {
        return report::unit::human(seconds, "s");
    }
    let whole = seconds.round() as u64;
    let (minutes, hours, days) = (whole / 60, whole / 3600, whole / 86_400);
    match (days, hours, minutes) {
        (0, 0, _) => format!("{minutes} min {} s", whole % 60),
        (0, ..) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units() {
        let all = [0.25, 9.14, 61.0, 250.4, 13_020.0, 200_000.0].map(duration);
        assert_eq!(all, ["250 ms", "9.14 s", "1 min 1 s", "4 min 10 s", "3 h 37 min", "2 d 7 h"]);
    }

    #[test]
    fn counts_and_shares_are_grouped() {
        assert_eq!((&*counted(1, "step"), &*counted(2000, "step")), ("1 step", "2,000 steps"));
        assert_eq!(share(1_081_344, 495_114_112), "1,081,344 of 495,114,112 (0.22 %)");
        assert_eq!(share(0, 0), "0 of 0 (0.00 %)");
    }
}
