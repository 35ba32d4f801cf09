//! Questions with reference answers, and graders that compare a model's answer with them.
//!
//! | grader | when an answer is right |
//! |---|---|
//! | [`Grader::Exact`] | it is the reference, but for blanks at its ends and their number between words |
//! | [`Grader::Contains`] | it contains the reference, whatever the case |
//! | [`Grader::Number`] | its last number equals the reference's last: `$1,000.` and `1000.0` are equal |
//! | [`Grader::Regex`] | the reference, a regular expression, matches somewhere in it |
//!
//! ```
//! use frugal::tasks::questions::{Grader, Reference};
//!
//! let reference = Reference::new(Grader::Number, "She has 1,000 pears.")?;
//! assert!(reference.accepts("10 * 100 = 1000.0"));
//! assert!(!reference.accepts("a thousand"));
//! # Ok::<(), String>(())
//! ```

use regex::Regex;

/// A way of grading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grader {
    /// The same text.
    Exact,
    /// The reference is within the answer.
    Contains,
    /// The last numbers are equal.
    Number,
    /// The reference is a regular expression that matches.
    Regex,
}

/// A reference answer, prepared for a grader.
#[derive(Debug, Clone)]
pub struct Reference(Prepared);

#[derive(Debug, Clone)]
enum Prepared {
    Exact(String),
    Contains(String),
    Number(f64),
    Regex(Regex),
}

impl Reference {
    /// Prepares a reference answer.
    ///
    /// # Errors
    /// The problem: it is empty, has no number, or is not a regular expression.
    pub fn new(grader: Grader, text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Err("the answer is empty, and nothing can be compared with it".to_owned());
        }
        Ok(Self(match grader {
            Grader::Exact => Prepared::Exact(spaced(text)),
            Grader::Contains => Prepared::Contains(spaced(text).to_lowercase()),
            Grader::Number => Prepared::Number(
                last_number(text).ok_or_else(|| format!("there is no number in the answer `{text}`"))?,
            ),
            Grader::Regex => Prepared::Regex(Regex::new(text).map_err(|error| {
                format!("the answer is no regular expression: {}", spaced(&error.to_string()))
            })?),
        }))
    }

    /// Returns whether an answer is right.
    pub fn accepts(&self, answer: &str) -> bool {
        match &self.0 {
            Prepared::Exact(reference) => spaced(answer) == *reference,
            Prepared::Contains(reference) => spaced(answer).to_lowercase().contains(reference),
            Prepared::Number(reference) => {
                // Decimal numbers of different lengths are rounded to neighbouring values.
                last_number(answer)
                    .is_some_and(|number| (number - reference).abs() <= 1e-9 * reference.abs().max(1.0))
            }
            Prepared::Regex(reference) => reference.is_match(answer),
        }
    }
}

/// A text with one blank between its words.
fn spaced(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the last number of a text: `.5`, `1,000.0`, `1e-3`. A minus is a sign where nothing that has a value is before it, so that
/// `10-20` ends with 20; commas are within a number where three digits follow each.
fn last_number(text: &str) -> Option<f64> {
    let chars: Vec<char> = text.chars().collect();
    let digits =
        |from: usize| chars[from.min(chars.len())..].iter().take_while(|c| c.is_ascii_digit()).count();
    let (mut at, mut last) = (0, None);
    while at < chars.len() {
        let is_fraction = chars[at] == '.' && digits(at + 1) > 0;
        if !chars[at].is_ascii_digit() && !is_fraction {
            at += 1;
            continue;
        }
        let start = at;
        at += digits(at);
        if (1..=3).contains(&(at - start)) {
            while chars.get(at) == Some(&',') && digits(at + 1) == 3 {
                at += 4;
            }
        }
        if chars.get(at) == Some(&'.') {
            at += if digits(at + 1) > 0 { 1 + digits(at + 1) } else { 0 };
        }
        if let Some('e' | 'E') = chars.get(at) {
            let sign = usize::from(matches!(chars.get(at + 1), Some('+' | '-')));
            let end = at + 1 + sign + digits(at + 1 + sign);
            let is_exponent = end > at + 1 + sign && !chars.get(end).is_some_and(|c| c.is_alphanumeric());
            at = if is_exponent { end } else { at };
        }
        let has_value = |c: &char| c.is_alphanumeric() || matches!(c, ')' | ']' | '%');
        let is_negative = start > 0
            && matches!(chars[start - 1], '-' | '\u{2212}')
            && !start.checked_sub(2).is_some_and(|before| has_value(&chars[before]));
        let number: String = chars[start..at].iter().filter(|c| **c != ',').collect();
        last = number.parse().ok().map(|number: f64| if is_negative { -number } else { number }).or(last);
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graders_accept_what_they_say() {
        let table = [
            (Grader::Exact, "Paris", " Paris\n", true),
            (Grader::Exact, "New  York", "New York", true),
            (Grader::Exact, "Paris", "paris", false),
            (Grader::Exact, "Paris", "Paris.", false),
            (Grader::Contains, "paris", "It is PARIS, of course.", true),
            (Grader::Contains, "new york", "New\nYork", true),
            (Grader::Contains, "Paris", "Pari", false),
            (Grader::Number, "1,000", "it costs $1000.", true),
            (Grader::Number, "#### 18", "9 + 9 = 18.0", true),
            (Grader::Number, "-3", "it is -3 degrees", true),
            (Grader::Number, "18", "18 or 19", false),
            (Grader::Number, "18", "eighteen", false),
            (Grader::Number, "0.3", "0.30", true),
            (Grader::Number, "20", "between 10-20", true),
            (Grader::Number, "-20", "between 10-20", false),
            (Grader::Number, "0.5", "it is .5", true),
            (Grader::Number, "-0.5", "x = -.5.", true),
            (Grader::Number, "5", "the primes 2,3,5", true),
            (Grader::Number, "235", "2,3,5", false),
            (Grader::Number, "1234567.5", "1,234,567.5", true),
            (Grader::Number, "-3", "it is \u{2212}3 °C", true),
            (Grader::Number, "3", "step-3", true),
            (Grader::Number, "0.001", "1e-3", true),
            (Grader::Number, "2", "10 km in 2e", true),
            (Grader::Number, "3", "version 1.2.3", false),
            (Grader::Regex, "(?i)^yes\\b", "Yes, it does", true),
            (Grader::Regex, "^yes$", "yes, it does", false),
        ];
        for (grader, reference, answer, right) in table {
            let accepted = Reference::new(grader, reference).unwrap().accepts(answer);
            assert_eq!(accepted, right, "{grader:?} {reference} {answer}");
        }
    }

    #[test]
    fn references_that_cannot_be_compared_are_refused() {
        let refusal = |grader, text: &str| Reference::new(grader, text).unwrap_err();
        assert_eq!(refusal(Grader::Number, "many"), "there is no number in the answer `many`");
        assert!(
            refusal(Grader::Regex, "a(b")
                .starts_with("the answer is no regular expression: regex parse error")
        );
        assert!(refusal(Grader::Exact, " \n").starts_with("the answer is empty"));
    }
}
