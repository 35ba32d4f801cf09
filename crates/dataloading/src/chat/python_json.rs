//! JSON as Python's `json.dumps` writes it, for the filter `tojson` of chat templates.
//!
//! It differs from `serde_json` in the separators (`", "` and `": "`), in the numbers (`1.0`, `1e-05`, `NaN`) and in the escapes: no
//! HTML characters, and characters outside ASCII only with `ensure_ascii`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The deepest nesting that is written.
const DEEPEST: usize = 256;
/// Bytes of the longest text, and of all texts of a rendering.
const LONGEST: usize = 256 << 20;
/// Bytes of the longest separator, and of one level of indentation.
const WIDEST: usize = 64;

/// The arguments of transformers' `tojson`.
#[derive(Debug, Clone)]
struct Options {
    ensure_ascii: bool,
    /// The text of one level of indentation.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The filter `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    value: &Value,
    positional_ascii: Option<bool>,
    positional_indent: Option<Value>,
    arguments: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii = positional_ascii.or(arguments.get("ensure_ascii")?).unwrap_or(false);
    let named: Option<Value> = arguments.get("indent")?;
    let indent = match positional_indent.or(named).filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) if text.len() <= WIDEST => text.to_owned(),
            (None, Some(count)) if count <= WIDEST => " ".repeat(count),
            _ => return Err(invalid("the indentation of tojson is neither a small number nor a short text")),
        }),
    };
    let given: Option<Vec<String>> = arguments.get("separators")?;
    let (item_separator, key_separator) = match given.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) if item.len().max(key.len()) <= WIDEST => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("the separators of tojson are not two short texts")),
    };
    let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    arguments.assert_all_used()?;
    let options = Options { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut text = String::new();
    options.write(value, 0, &mut text)?;
    Ok(text)
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

impl Options {
    fn write(&self, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(invalid(format!("tojson of a value that is nested more than {DEEPEST} levels deep")));
        }
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), text),
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    let name = match key.kind() {
                        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                        ValueKind::None => "null".to_owned(),
                        ValueKind::Bool => key.is_true().to_string(),
                        ValueKind::Number => number(&key),
                        kind => {
                            return Err(invalid(format!("tojson of a mapping with a key of type {kind}")));
                        }
                    };
                    entries.push((name, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|(one, _), (other, _)| one.cmp(other));
                }
                self.group(['{', '}'], entries.into_iter(), depth, text, |(name, value), text| {
                    self.string(&name, text);
                    text.push_str(&self.key_separator);
                    self.write(&value, depth + 1, text)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.group(['[', ']'], value.try_iter()?, depth, text, |value, text| {
                    self.write(&value, depth + 1, text)
                })?;
            }
            kind => {
                return Err(invalid(format!("tojson of a value of type {kind}, which JSON does not have")));
            }
        }
        Ok(())
    }

    /// Writes brackets around items, with separators and line breaks.
    fn group<T>(
        &self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = T>,
        depth: usize,
        text: &mut String,
        write: impl Fn(T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |depth: usize, text: &mut String| {
            if let Some(indent) = &self.indent {
                text.push('\n');
                (0..depth).for_each(|_| text.push_str(indent));
            }
        };
        text.push(open);
        let mut is_empty = true;
        for item in items {
            if !is_empty {
                text.push_str(&self.item_separator);
            }
            is_empty = false;
            new_line(depth + 1, text);
            write(item, text)?;
            // A list may have one long text many times.
            if text.len() > LONGEST {
                return Err(invalid(format!("tojson makes more than {} MiB", LONGEST >> 20)));
            }
        }
        if !is_empty {
            new_line(depth, text);
        }
        text.push(close);
        Ok(())
    }

    fn string(&self, string: &str, text: &mut String) {
        text.push('"');
        for c in string.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(text, "\\u{unit:04x}");
                    }
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => python_float(float),
        _ => value.to_string(),
    }
}

/// Returns a float as Python's `repr` writes it: the shortest digits that give the same number, with an exponent below 1e-4 and from
/// 1e16 on.
pub(super) fn python_float(number: f64) -> String {
    if !number.is_finite() {
        let sign = if number < 0.0 { "-" } else { "" };
        return if number.is_nan() { "NaN".to_owned() } else { format!("{sign}Infinity") };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }
}
