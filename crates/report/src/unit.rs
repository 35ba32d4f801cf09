//! Human-readable figures: bytes in binary multiples, everything else in decimal ones.

/// A divisor and the symbol that it brings: 1 GiB, 1 ms, 1 TFLOP/s.
#[derive(Clone, Debug, PartialEq)]
pub struct Multiple {
    /// The divisor of values.
    pub divisor: f64,
    /// The text after the quotient; empty for pure numbers.
    pub symbol: String,
}

const KIB: f64 = 1024.0;

/// Returns the multiple of `unit` in which `magnitude` is a number of one to three or four digits before the point.
pub fn multiple(magnitude: f64, unit: &str) -> Multiple {
    let steps: &[(f64, &str)] = match unit {
        "B" => &[
            (KIB * KIB * KIB * KIB, "TiB"),
            (KIB * KIB * KIB, "GiB"),
            (KIB * KIB, "MiB"),
            (KIB, "KiB"),
            (1.0, "B"),
        ],
        "s" => &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
        "FLOP" | "FLOP/s" | "B/s" => {
            &[(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")]
        }
        "ratio" | "count" | "exact" => &[(1.0, "")],
        other => return Multiple { divisor: 1.0, symbol: other.to_owned() },
    };
    let magnitude = magnitude.abs();
    // The compute of whole trainings is written with an exponent.
    if unit == "FLOP" && magnitude >= 1e18 {
        return Multiple { divisor: 1.0, symbol: unit.to_owned() };
    }
    // 0.9995 ms is written as 1.000 ms, so the step is taken a little before.
    let (divisor, symbol) = steps.iter().find(|(d, _)| magnitude >= d * 0.9995).unwrap_or(match magnitude {
        0.0 => &steps[if unit == "s" { 0 } else { steps.len() - 1 }],
        _ => &steps[steps.len() - 1],
    });
    let symbol =
        if unit.starts_with("FLOP") || unit == "B/s" { format!("{symbol}{unit}") } else { (*symbol).into() };
    Multiple { divisor: *divisor, symbol }
}

/// Returns the multiple of `unit` that is written as `symbol`.
pub fn multiple_named(symbol: &str, unit: &str) -> Option<Multiple> {
    let sizes = (-10..6).map(|power| 1000f64.powi(power)).chain((0..5).map(|power| KIB.powi(power)));
    sizes.map(|size| multiple(size, unit)).find(|multiple| multiple.symbol == symbol)
}

/// Returns one multiple for all of `values`, in which none of them needs more than five digits before the point or starts
/// behind the first decimal; `None` where they are too far apart for that.
pub fn shared_multiple(values: &[f64], unit: &str) -> Option<Multiple> {
    let mut sizes: Vec<f64> = values.iter().map(|v| v.abs()).filter(|v| *v > 0.0 && v.is_finite()).collect();
    sizes.sort_by(f64::total_cmp);
    let (Some(&smallest), Some(&largest)) = (sizes.first(), sizes.last()) else {
        return Some(multiple(0.0, unit));
    };
    let (low, middle, high) =
        (multiple(smallest, unit), multiple(sizes[(sizes.len() - 1) / 2], unit), multiple(largest, unit));
    if low == high {
        return Some(low);
    }
    [middle, low].into_iter().find(|m| smallest / m.divisor >= 0.0995 && largest / m.divisor < 1e4)
}

/// Returns a value with its unit, in three significant digits: `1.25 GiB`, `3.41 ms`. Ratios have three decimals (`0.970`),
/// counts are whole (`40,000,000`), and what is `exact` has five (`10.00013`).
pub fn human(value: f64, unit: &str) -> String {
    let multiple = multiple(value, unit);
    let quotient = value / multiple.divisor;
    with_symbol(&fixed(quotient, decimals(&[quotient], &multiple, unit)), &multiple.symbol)
}

pub(crate) fn with_symbol(number: &str, symbol: &str) -> String {
    if symbol.is_empty() { number.to_owned() } else { format!("{number} {symbol}") }
}

/// Returns how many decimals show every one of `quotients`, values by their `multiple`, in three significant digits or more.
///
/// Figures that are read one under the other have the same decimals: at least one, unless all are whole, and three at
/// most, unless even the largest would vanish.
pub fn decimals(quotients: &[f64], multiple: &Multiple, unit: &str) -> usize {
    let sizes = || quotients.iter().map(|v| v.abs()).filter(|v| *v > 0.0 && v.is_finite());
    if multiple.divisor == 1.0 && unit != "ratio" && sizes().all(|v| v == v.trunc()) {
        return 0;
    }
    let wanted = |size: f64| (2.0 - (size * 1.0005).log10().floor()).max(0.0) as usize;
    match unit {
        "ratio" => 3,
        // Five decimals, unless all are so small that only an exponent shows them.
        "exact" if sizes().all(|size| size < 1e-3) => 12,
        "exact" => 5,
        _ => {
            let (smallest, largest) =
                sizes().fold((f64::INFINITY, 0.0), |(a, b): (f64, f64), v| (a.min(v), b.max(v)));
            if largest == 0.0 { 0 } else { wanted(smallest).min(3.max(wanted(largest))).min(12) }
        }
    }
}

/// Returns a number with `decimals` decimals and commas between the thousands. What would need many more digits, or is too
/// small for them, is written with an exponent.
pub fn fixed(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    if value == 0.0 && decimals >= 9 {
        return "0".to_owned();
    }
    if value.abs() >= 1e15 || decimals >= 9 {
        return format!("{value:.2e}");
    }
    let text = grouped(&format!("{value:.decimals$}"));
    // What is rounded to zero has no sign.
    match text.strip_prefix('-') {
        Some(rest) if rest.chars().all(|c| matches!(c, '0' | '.')) => rest.to_owned(),
        _ => text,
    }
}

/// Returns a value and its limit in one multiple, the limit's, with the same number of decimals. Whole counts are written in
/// full, and so are bytes where `exact` asks for it.
pub fn pair(value: f64, limit: f64, unit: &str, decimals: usize, exact: bool) -> (String, String) {
    let multiple = multiple(if limit == 0.0 { value } else { limit }, unit);
    let is_integer = |v: f64| v == v.trunc() && v.abs() < 1e15;
    if (matches!(unit, "count" | "") || exact && unit == "B") && is_integer(value) && is_integer(limit) {
        let symbol = if unit == "B" { "B" } else { "" };
        return (
            with_symbol(&grouped(&format!("{value}")), symbol),
            with_symbol(&grouped(&format!("{limit}")), symbol),
        );
    }
    let show =
        |v: f64| with_symbol(&grouped(&format!("{:.decimals$}", v / multiple.divisor)), &multiple.symbol);
    (show(value), show(limit))
}

/// Returns how many decimals, two at least, write a limit as it was stated: 0.997 needs three. One that needs more than five has
/// two, and five where it is `exact`.
pub fn decimals_of_limit(limit: f64, unit: &str) -> usize {
    let quotient = limit / multiple(limit, unit).divisor;
    let enough = (2..6).find(|&decimals| format!("{quotient:.decimals$}").parse() == Ok(quotient));
    enough.unwrap_or(if unit == "exact" { 5 } else { 2 })
}

/// Commas between the thousands of a decimal number's whole part.
pub(crate) fn grouped(number: &str) -> String {
    let (sign, digits) = number.strip_prefix('-').map_or(("", number), |digits| ("-", digits));
    let (integer, fraction) = digits.find('.').map_or((digits, ""), |at| digits.split_at(at));
    let mut text = String::from(sign);
    for (index, digit) in integer.chars().enumerate() {
        if index > 0 && (integer.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text + fraction
}

/// Returns the name of a metric as a heading, without the unit that its last word repeats: `backward_seconds` is `backward`.
pub fn heading(metric: &str, unit: &str) -> String {
    let suffix = match unit {
        "s" => "_seconds".to_owned(),
        "B" => "_bytes".to_owned(),
        "FLOP" => "_flops".to_owned(),
        // Ratios and counts are named without a unit.
        "ratio" | "count" | "" => return metric.replace('_', " "),
        other => format!("_{other}"),
    };
    metric.strip_suffix(&suffix).filter(|rest| !rest.is_empty()).unwrap_or(metric).replace('_', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_for_people() {
        const MIB: f64 = 1024.0 * 1024.0;
        for (value, unit, shown) in [
            (0.0, "B", "0 B"),
            (1000.0, "B", "1,000 B"),
            (1536.0, "B", "1.50 KiB"),
            (12.5 * MIB, "B", "12.5 MiB"),
            (1023.9 * MIB, "B", "1.00 GiB"),
            (0.0, "s", "0 s"),
            (2.5, "s", "2.50 s"),
            (0.9996, "s", "1.00 s"),
            (0.03412, "s", "34.1 ms"),
            (4.2e-5, "s", "42.0 µs"),
            (-0.5, "s", "-500 ms"),
            (1.18e11, "FLOP/s", "118 GFLOP/s"),
            (0.97, "ratio", "0.970"),
            (-0.0, "ratio", "0.000"),
            (-0.0004, "ratio", "0.000"),
            (40e9, "count", "40,000,000,000"),
            (143.93, "days", "144 days"),
            (1.0e-8, "", "1.00e-8"),
            (1.0e-8, "exact", "1.00e-8"),
            (10.000133514404297, "exact", "10.00013"),
            (f64::INFINITY, "s", "inf s"),
            (1e300, "s", "1.00e300 s"),
        ] {
            assert_eq!(human(value, unit), shown, "{value} {unit}");
        }
    }

    #[test]
    fn an_exact_limit_keeps_its_digits() {
        for (limit, shown) in [(10.000133514404297, "10.00013"), (9.953125, "9.95312"), (4.0, "4.00")] {
            let decimals = decimals_of_limit(limit, "exact");
            assert_eq!(pair(limit, limit, "exact", decimals, true).0, shown);
        }
    }

    #[test]
    fn one_multiple_where_every_value_stays_readable() {
        let symbol = |values: &[f64]| shared_multiple(values, "s").map(|multiple| multiple.symbol);
        assert_eq!(symbol(&[0.2, 3.0, 4.0]).as_deref(), Some("s"));
        assert_eq!(symbol(&[0.02, 0.03, 4.0]).as_deref(), Some("ms"));
        assert_eq!(symbol(&[0.02, 3.0, 80.0]), None);
        assert_eq!(symbol(&[]).as_deref(), Some("s"));
    }

    #[test]
    fn a_heading_does_not_repeat_the_unit() {
        for (metric, unit, shown) in [
            ("backward_seconds", "s", "backward"),
            ("peak_bytes", "B", "peak"),
            ("bytes", "B", "bytes"),
            ("training_days", "days", "training"),
            ("step_time_ratio", "ratio", "step time ratio"),
        ] {
            assert_eq!(heading(metric, unit), shown);
        }
    }
}
