//! Formats seconds and bytes.

/// A value with its unit, `s` or `B`, in three significant digits: `3.41 ms`, `1.25 GiB`.
pub(super) fn human(value: f64, unit: &str) -> String {
    const KIB: f64 = 1024.0;
    let multiples: &[(f64, &str)] = match unit {
        "s" => &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
        _ => &[
            (KIB * KIB * KIB * KIB, "TiB"),
            (KIB * KIB * KIB, "GiB"),
            (KIB * KIB, "MiB"),
            (KIB, "KiB"),
            (1.0, "B"),
        ],
    };
    // 0.9995 ms is written as 1.00 ms, so the unit changes a little before.
    let least = if value == 0.0 && unit == "s" { 0 } else { multiples.len() - 1 };
    let multiple = multiples.iter().find(|(divisor, _)| value.abs() >= divisor * 0.9995);
    let (divisor, symbol) = multiple.unwrap_or(&multiples[least]);
    let quotient = value / divisor;
    let is_integer = *divisor == 1.0 && quotient == quotient.trunc();
    let digits_before = (quotient.abs() * 1.0005).log10().floor();
    let decimals = if is_integer || quotient == 0.0 { 0 } else { (2.0 - digits_before).max(0.0) as usize };
    format!("{quotient:.decimals$} {symbol}")
}

#[cfg(test)]
mod tests {
    use super::human;

    #[test]
    fn values_have_three_digits_and_the_nearest_unit() {
        let seconds = [0.0, 2.0, 12.345, 0.0123, 9.996e-4, 4.2e-6, 3e-9].map(|value| human(value, "s"));
        assert_eq!(seconds, ["0 s", "2 s", "12.3 s", "12.3 ms", "1.00 ms", "4.20 µs", "3.00 ns"]);
        let bytes = [0.0, 512.0, 1536.0, 1.25 * f64::from(1 << 30)].map(|value| human(value, "B"));
        assert_eq!(bytes, ["0 B", "512 B", "1.50 KiB", "1.25 GiB"]);
    }
}
