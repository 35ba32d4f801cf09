//! Parsing and formatting of numbers of bytes, parameters, tokens and FLOPs.
//!
//! ```
//! use accounting::quantity::{parse_bytes, parse_count};
//!
//! assert_eq!(parse_bytes("80GB")?, 80_000_000_000);
//! assert_eq!(parse_bytes("24 GiB")?, 24 << 30);
//! assert_eq!(parse_count("1.5T")?, 1_500_000_000_000);
//! # Ok::<(), accounting::Error>(())
//! ```

use crate::Error;

/// Parses a number of bytes: `80GB` (10⁹ each), `24GiB` (2³⁰ each), or plain bytes.
///
/// # Errors
/// Another text, 0, or a number beyond 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, Error> {
    const UNITS: [(&str, u64); 10] = [
        ("", 1),
        ("b", 1),
        ("kb", 1000),
        ("mb", 1_000_000),
        ("gb", 1_000_000_000),
        ("tb", 1_000_000_000_000),
        ("kib", 1 << 10),
        ("mib", 1 << 20),
        ("gib", 1 << 30),
        ("tib", 1 << 40),
    ];
    let is_letter_alone = text.trim_end().ends_with(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let remedy = match is_letter_alone {
        true => "write the whole unit, for example 80GB (10^9 each) or 24GiB (2^30 each)",
        false => "write for example 80GB or 24GiB",
    };
    parse(text, &UNITS, "a number of bytes of 1 to 2^64 - 1", remedy)
}

/// Parses a number of parameters or tokens: `70B` (10⁹), `15T`, `400K`, `124.4M`, or plain digits.
///
/// # Errors
/// Another text, 0, or a number beyond 64 bits.
pub fn parse_count(text: &str) -> Result<u64, Error> {
    const UNITS: [(&str, u64); 5] =
        [("", 1), ("k", 1000), ("m", 1_000_000), ("b", 1_000_000_000), ("t", 1_000_000_000_000)];
    parse(text, &UNITS, "a whole number of 1 to 2^64 - 1", "write for example 1024, 70B or 15T")
}

fn parse(text: &str, units: &[(&str, u64)], what: &'static str, remedy: &'static str) -> Result<u64, Error> {
    let wrong = || Error::Quantity { what, given: text.into(), remedy };
    let compact: String = text.chars().filter(|c| !c.is_whitespace() && *c != '_').collect();
    let digits = compact.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(compact.len());
    let (number, unit) = compact.split_at(digits);
    let unit = unit.to_ascii_lowercase();
    let (_, factor) = units.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    // Integer arithmetic on integer and fraction, so that the result is exact.
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    if integer.is_empty() || fraction.len() > 12 {
        return Err(wrong());
    }
    let scale = 10u128.pow(fraction.len() as u32);
    let numerator: u128 = format!("{integer}{fraction}").parse().map_err(|_| wrong())?;
    let value = numerator.checked_mul(u128::from(*factor)).ok_or_else(wrong)?;
    // 63.3 MiB are no whole number of bytes, and a number without a unit has to be whole.
    let rest = if *factor > 1 { 0 } else { value % scale };
    match (rest, u64::try_from(value / scale)) {
        (0, Ok(0)) => Err(Error::Quantity { what, given: text.into(), remedy: "write a number above 0" }),
        (0, Ok(value)) => Ok(value),
        _ => Err(wrong()),
    }
}

/// Formats bytes with three significant digits and a binary unit.
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // 1023.5 would be shown as "1024".
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{} {}", three_digits(value), UNITS[unit]) }
}

/// Formats a count: `124 M`, `7.62 B`.
pub fn count_text(count: u64) -> String {
    let value = count as f64;
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{} K", three_digits(value / 1e3)),
        1_000_000..1_000_000_000 => format!("{} M", three_digits(value / 1e6)),
        1_000_000_000..1_000_000_000_000 => format!("{} B", three_digits(value / 1e9)),
        _ => format!("{} T", three_digits(value / 1e12)),
    }
}

/// Formats a number in groups of three digits: `1,557,611,200`.
pub fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a positive number with three significant digits, or all digits of its whole part.
fn three_digits(value: f64) -> String {
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_parsed_exactly() {
        assert_eq!(parse_count("124439808").unwrap(), 124_439_808);
        assert_eq!(parse_count("124.4M").unwrap(), 124_400_000);
        assert_eq!(parse_count("400k").unwrap(), 400_000);
        assert_eq!(parse_bytes("1.5 GiB").unwrap(), 3 << 29);
        assert_eq!(parse_bytes("0.5KiB").unwrap(), 512);
        assert_eq!(parse_bytes("63.3MiB").unwrap(), 66_374_860, "the whole bytes of it");
        assert_eq!(parse_bytes("80_000").unwrap(), 80_000);
        for wrong in
            ["", "GB", "-3", "3 apples", "1.5", "1e9", "1..2", ".5G", "99999999999T", "0", "0GB", "1.5.2K"]
        {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn quantities_are_formatted() {
        let bytes = [0, 512, 1023, 1024, 1 << 20, (1 << 30) - 1, 2304 << 20, 80_000_000_000, u64::MAX];
        assert_eq!(
            bytes.map(bytes_text),
            [
                "0 B", "512 B", "1023 B", "1.00 KiB", "1.00 MiB", "1.00 GiB", "2.25 GiB", "74.5 GiB",
                "16.0 EiB"
            ]
        );
        assert_eq!([999, 124_439_808, 7_615_616_512].map(count_text), ["999", "124 M", "7.62 B"]);
        assert_eq!([7, 999, 1000, 1_557_611_200].map(grouped), ["7", "999", "1,000", "1,557,611,200"]);
    }
}
