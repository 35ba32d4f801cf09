//! The date of a rendering, for the function `strftime_now` of chat templates.
//!
//! Templates such as Llama 3.2's write today's date into the prompt. Rows must not depend on the day on which they are made, so a
//! [`Date`] is a value: a training keeps the one of its first start.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 24 * 60 * 60;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A day of the Gregorian calendar.
///
/// ```
/// use dataloading::chat::Date;
///
/// let date: Date = "2026-11-23".parse()?;
/// assert_eq!(date.strftime("%d %b %Y")?, "23 Nov 2026");
/// assert_eq!(date.to_string(), "2026-11-23");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Date {
    year: u32,
    month: u32,
    day: u32,
}

impl Date {
    /// Returns today's date in UTC.
    pub fn today() -> Self {
        Self::of_unix_time(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }

    /// Returns the date in UTC of so many seconds since 1970.
    pub fn of_unix_time(seconds: u64) -> Self {
        Self::from_days(seconds / DAY)
    }

    /// Returns the date that is `days` days after 1970-01-01, by Hinnant's algorithm over eras of 400 years, in which a year begins in
    /// March so that the leap day is its last.
    fn from_days(days: u64) -> Self {
        let since_era = days + 719_468;
        let era = since_era / 146_097;
        let of_era = since_era % 146_097;
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let day = of_year - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        Self { year: year as u32, month: month as u32, day: day as u32 }
    }

    fn is_leap(self) -> bool {
        self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400))
    }

    /// Returns the day of the year, from 1.
    fn day_of_year(self) -> u32 {
        const BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        BEFORE[self.month as usize - 1] + self.day + u32::from(self.month > 2 && self.is_leap())
    }

    /// Returns the day of the week, from Sunday (Sakamoto's method).
    fn weekday(self) -> usize {
        const SHIFT: [u32; 12] = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4];
        let year = self.year - u32::from(self.month < 3);
        ((year + year / 4 - year / 100 + year / 400 + SHIFT[self.month as usize - 1] + self.day) % 7) as usize
    }

    /// Formats as Python's `datetime.strftime` does; the time is midnight.
    ///
    /// # Errors
    /// A code other than `%a %A %b %B %d %D %e %F %H %I %j %m %M %p %S %T %u %w %y %Y %%`, with or without `-`.
    pub fn strftime(self, format: &str) -> Result<String, String> {
        let Self { year, month, day } = self;
        let (month_name, weekday) = (MONTHS[month as usize - 1], self.weekday());
        let mut text = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut code = chars.next();
            let padded = code != Some('-');
            if !padded {
                code = chars.next();
            }
            let mut two = |number: u32| {
                let _ = if padded { write!(text, "{number:02}") } else { write!(text, "{number}") };
            };
            match code {
                Some('d') => two(day),
                Some('m') => two(month),
                Some('y') => two(year % 100),
                Some('H' | 'M' | 'S') => two(0),
                Some('I') => two(12),
                Some('j') if padded => text += &format!("{:03}", self.day_of_year()),
                Some('j') => text += &self.day_of_year().to_string(),
                Some('e') => text += &format!("{day:2}"),
                Some('Y') => text += &year.to_string(),
                Some('b' | 'h') => text += &month_name[..3],
                Some('B') => text += month_name,
                Some('a') => text += &WEEKDAYS[weekday][..3],
                Some('A') => text += WEEKDAYS[weekday],
                Some('w') => text += &weekday.to_string(),
                Some('u') => text += &(if weekday == 0 { 7 } else { weekday }).to_string(),
                Some('p') => text += "AM",
                Some('F') => text += &self.to_string(),
                Some('D') => text += &format!("{month:02}/{day:02}/{:02}", year % 100),
                Some('T') => text += "00:00:00",
                Some('%') => text.push('%'),
                other => {
                    let code = other.map_or_else(String::new, String::from);
                    return Err(format!("the date format `{format}` has `%{code}`, which is not supported"));
                }
            }
        }
        Ok(text)
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl FromStr for Date {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let mut parts = text.split('-').map(|part| {
                part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u32>().ok()).flatten()
            });
            let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
            let date = Self { year, month, day };
            let longest = match month {
                2 => 28 + u32::from(date.is_leap()),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            let is_date = parts.next().is_none()
                && (1970..=9999).contains(&year)
                && (1..=12).contains(&month)
                && (1..=longest).contains(&day);
            is_date.then_some(date)
        };
        parse().ok_or_else(|| format!("`{text}` is no date; expected one such as 2026-11-23"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, text) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (19_782, "2024-02-29"),
            (20_453, "2025-12-31"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            let date = Date::from_days(days);
            assert_eq!(date.to_string(), text);
            assert_eq!(text.parse(), Ok(date));
        }
    }

    #[test]
    fn formats_are_pythons() {
        let date: Date = "2024-07-04".parse().unwrap();
        let text = date.strftime("%d %b %Y|%-d %B %y|%A %a|%F %T|%j|%e|%w%u|%I %p|100%%").unwrap();
        assert_eq!(text, "04 Jul 2024|4 July 24|Thursday Thu|2024-07-04 00:00:00|186| 4|44|12 AM|100%");
        assert!(date.strftime("%Q").unwrap_err().contains("`%Q`"));
        assert!(date.strftime("%").is_err());
        for wrong in ["2024-02-30", "2023-02-29", "24-1-1", "2024-1", "2024-01-01-01", "+2024-01-01", ""] {
            assert!(wrong.parse::<Date>().is_err(), "{wrong}");
        }
    }
}
