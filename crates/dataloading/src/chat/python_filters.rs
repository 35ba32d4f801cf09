//! Jinja2's filters and tests that the engine lacks, or has otherwise.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::python_methods;

/// Bytes of the longest text of a value, and of all texts of a rendering.
const LONGEST: usize = 256 << 20;

/// Adds them to an environment.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("title", title);
    environment.add_filter("wordcount", |text: String| {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("center", |state: &mut State, text: &Value, width: Option<i64>| {
        let text = Value::from(written(text)?);
        python_methods::call(state, &text, "center", &[Value::from(width.unwrap_or(80))])
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("round", round);
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, |value: &Value| -> Result<String, Error> {
            let escaped = written(value)?.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            Ok(escaped.replace('\'', "&#39;").replace('"', "&#34;"))
        });
    }
    environment.add_filter("striptags", minijinja_contrib::filters::striptags);
    environment.add_filter("attr", |value: &Value, name: &str| match value.kind() {
        // The keys of a mapping are no attributes.
        ValueKind::Map => Ok(Value::UNDEFINED),
        _ => value.get_attr(name),
    });
    // It breaks lines where Python does not.
    environment.remove_filter("pprint");
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    // Python's iterables, sequences and numbers.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    // Functions and macros are the engine's only objects that are neither data nor texts.
    environment.add_test("callable", |value: &Value| {
        value.kind() == ValueKind::Plain && value.as_object().is_some()
    });
}

/// Returns the text of a value, which may have one long text many times.
///
/// # Errors
/// It is longer than what a rendering may make.
pub(super) fn written(value: &Value) -> Result<String, Error> {
    struct Bounded(String);
    impl Write for Bounded {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            if self.0.len() + text.len() > LONGEST {
                return Err(fmt::Error);
            }
            self.0.push_str(text);
            Ok(())
        }
    }
    let mut text = Bounded(String::new());
    match write!(text, "{value}") {
        Ok(()) => Ok(text.0),
        Err(_) => {
            let reason = format!("the text of a value has more than {} MiB", LONGEST >> 20);
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        }
    }
}

/// `int(value, default=0, base=10)`: the default where the value is no number.
fn int(value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Result<Value, Error> {
    let default =
        default.map_or_else(|| named.get::<Option<Value>>("default"), |default| Ok(Some(default)))?;
    let base = base.map_or_else(|| named.get::<Option<u32>>("base"), |base| Ok(Some(base)))?.unwrap_or(10);
    named.assert_all_used()?;
    if base == 1 || base > 36 {
        return Err(Error::new(ErrorKind::InvalidOperation, "the base of int is 0, or 2 to 36"));
    }
    let truncated = |number: f64| {
        let number = number.trunc();
        (number.abs() < 1e38).then_some(Value::from(number as i128))
    };
    let number = match value.as_str() {
        Some(text) => {
            python_int(text, base).map(Value::from).or_else(|| python_float(text).and_then(truncated))
        }
        None if value.is_integer() => Some(value.clone()),
        None if value.kind() == ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok().and_then(truncated),
    };
    Ok(number.or(default).unwrap_or_else(|| Value::from(0)))
}

/// Python's `int(text, base)`; `None` where it raises, or the number has more than 127 bits.
fn python_int(text: &str, base: u32) -> Option<i128> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixed = |letter: char| {
        digits.strip_prefix('0').and_then(|rest| rest.strip_prefix([letter, letter.to_ascii_uppercase()]))
    };
    let prefixes = [(16, 'x'), (8, 'o'), (2, 'b')];
    let prefix = prefixes.iter().find_map(|(prefix_base, letter)| {
        prefixed(*letter).filter(|_| base == 0 || base == *prefix_base).map(|digits| (*prefix_base, digits))
    });
    let (base, digits) = prefix.unwrap_or((if base == 0 { 10 } else { base }, digits));
    let is_grouped =
        |digits: &str| !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    if digits.starts_with(['+', '-']) || !is_grouped(digits) {
        return None;
    }
    i128::from_str_radix(&format!("{sign}{}", digits.replace('_', "")), base).ok()
}

/// Python's `float(text)`; `None` where it raises.
fn python_float(text: &str) -> Option<f64> {
    text.trim().replace('_', "").parse().ok()
}

/// `float(value, default=0.0)`.
fn float(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let default =
        default.map_or_else(|| named.get::<Option<Value>>("default"), |default| Ok(Some(default)))?;
    named.assert_all_used()?;
    let number = match value.as_str() {
        Some(text) => python_float(text),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(number.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0)))
}

/// `round(value, precision=0, method="common")`.
fn round(
    value: &Value,
    precision: Option<i32>,
    method: Option<String>,
    named: Kwargs,
) -> Result<Value, Error> {
    let precision =
        precision.map_or_else(|| named.get::<Option<i32>>("precision"), |value| Ok(Some(value)))?;
    let method = method.map_or_else(|| named.get::<Option<String>>("method"), |value| Ok(Some(value)))?;
    named.assert_all_used()?;
    let precision = precision.unwrap_or(0).clamp(-308, 308);
    let is_common = method.as_deref().is_none_or(|method| method == "common");
    if is_common && value.is_integer() && precision >= 0 {
        return Ok(value.clone());
    }
    let number = f64::try_from(value.clone())?;
    let scale = 10f64.powi(precision);
    let rounded = match method.as_deref() {
        // Half to even, of the number's exact decimal digits.
        None | Some("common") if precision >= 0 => {
            format!("{number:.*}", precision.unsigned_abs() as usize).parse().unwrap_or(number)
        }
        None | Some("common") => (number * scale).round_ties_even() / scale,
        Some("floor") => (number * scale).floor() / scale,
        Some("ceil") => (number * scale).ceil() / scale,
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "method must be common, ceil or floor"));
        }
    };
    Ok(Value::from(rounded))
}

/// `truncate(text, length=255, killwords=False, end="...", leeway=5)`.
fn truncate(
    text: String,
    length: Option<usize>,
    in_words: Option<bool>,
    end: Option<String>,
    named: Kwargs,
) -> Result<String, Error> {
    let length = length.map_or_else(|| named.get::<Option<usize>>("length"), |value| Ok(Some(value)))?;
    let in_words =
        in_words.map_or_else(|| named.get::<Option<bool>>("killwords"), |value| Ok(Some(value)))?;
    let end = end.map_or_else(|| named.get::<Option<String>>("end"), |value| Ok(Some(value)))?;
    let (length, end) = (length.unwrap_or(255), end.unwrap_or_else(|| "...".to_owned()));
    let leeway = named.get::<Option<usize>>("leeway")?.unwrap_or(5);
    named.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !in_words.unwrap_or(false) => words.to_owned(),
        _ => kept,
    };
    Ok(kept + &end)
}

/// Each word with a capital first and small letters after it. Unlike `str.title`, an apostrophe ends no word.
fn title(text: String) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut is_start = true;
    for c in text.chars() {
        if c == '-' || c.is_whitespace() || matches!(c, '(' | '{' | '[' | '<') {
            is_start = true;
            titled.push(c);
        } else if std::mem::take(&mut is_start) {
            titled.extend(c.to_uppercase());
        } else {
            titled.extend(c.to_lowercase());
        }
    }
    titled
}

/// A text with its bytes in `%XX`, or a mapping or pairs as a query.
fn urlencode(value: &Value) -> Result<String, Error> {
    let quoted = |value: &Value, is_query: bool| -> Result<String, Error> {
        let mut quoted = String::new();
        for byte in written(value)?.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    quoted.push(byte.into())
                }
                b'/' if !is_query => quoted.push('/'),
                b' ' if is_query => quoted.push('+'),
                byte => quoted.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(quoted)
    };
    let pair = |key: &Value, value: &Value| -> Result<String, Error> {
        Ok(format!("{}={}", quoted(key, true)?, quoted(value, true)?))
    };
    let mut pairs = Vec::new();
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                pairs.push(pair(&key, &value.get_item(&key)?)?);
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                pairs.push(pair(&item.get_item_by_index(0)?, &item.get_item_by_index(1)?)?);
            }
        }
        _ => return quoted(value, false),
    }
    Ok(pairs.join("&"))
}
