//! Python's methods of texts and lists, for templates.
//!
//! The methods that `minijinja_contrib::pycompat` lacks, or has otherwise than Python; the others are left to it. A method that makes a text of
//! a length that its arguments give pays for it before the text is made, so that a template cannot take all memory.

use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::python_format;

/// Calls a method that the engine does not know.
///
/// # Errors
/// No such method; arguments that it does not take; a text that is too long.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let result = match value.as_str() {
        Some(text) => text_method(state, text, method, args)?,
        None if value.kind() == ValueKind::Seq => of_list(value, method, args)?,
        None if value.kind() == ValueKind::Map && method == "copy" && args.is_empty() => Some(value.clone()),
        None => None,
    };
    match result {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Reads arguments by position or by name.
fn bound<const N: usize>(args: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (by_position, by_name): (Rest<Value>, Kwargs) = from_args(args)?;
    if by_position.len() > N {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut values: [Option<Value>; N] = std::array::from_fn(|at| by_position.get(at).cloned());
    for (value, name) in values.iter_mut().zip(names) {
        if by_name.has(name) {
            *value = Some(by_name.get(name)?);
        }
    }
    by_name.assert_all_used()?;
    Ok(values)
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// Pays for a text of some bytes before it is made.
pub(super) fn pay(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / 64)
}

fn of_list(list: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match (method, args) {
        ("index", [item]) => {
            let at = list.try_iter()?.position(|other| other == *item);
            at.map(|at| Some(Value::from(at))).ok_or_else(|| invalid(format!("{item} is not in the list")))
        }
        ("copy", []) => Ok(Some(list.try_iter()?.collect())),
        _ => Ok(None),
    }
}

fn text_method(state: &State, text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "format" => {
            python_format::pay_for_fields(state, FormatStyle::StrFormat, text, args)?;
            return Ok(None);
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" | "rpartition" => partition(text, method, args)?,
        "find" | "rfind" | "index" | "rindex" | "count" => found(text, method, args)?,
        "startswith" | "endswith" if args.len() > 1 => Value::from(has_affix(text, method, args)?),
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            zero_filled(state, text, width)?.into()
        }
        "ljust" | "rjust" | "center" => justified(state, text, method, args)?.into(),
        "expandtabs" => with_blanks(state, text, args)?.into(),
        "title" => Value::from(titled(text)),
        "swapcase" => {
            let swapped = text.chars().flat_map(|c| {
                let swapped: Vec<char> = match c.is_uppercase() {
                    true => c.to_lowercase().collect(),
                    false => c.to_uppercase().collect(),
                };
                swapped
            });
            Value::from(swapped.collect::<String>())
        }
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss").replace('ς', "σ")),
        "split" | "rsplit" => split(text, method, args)?,
        "splitlines" => {
            let [keeps] = bound(args, ["keepends"])?;
            let keeps = keeps.is_some_and(|keeps| keeps.is_true());
            Value::from(
                lines(text)
                    .map(|(line, end)| if keeps { &text[line.start..end] } else { &text[line] })
                    .map(Value::from)
                    .collect::<Vec<_>>(),
            )
        }
        "isdecimal" | "isdigit" | "isnumeric" | "istitle" | "isidentifier" | "isprintable" => {
            let () = from_args(args)?;
            Value::from(is_of_kind(text, method))
        }
        _ => return Ok(None),
    }))
}

/// `partition` and `rpartition`: the text before the first or last separator, the separator, and the text after it.
fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    let parts = match (method, text.split_once(separator), text.rsplit_once(separator)) {
        ("partition", Some((before, after)), _) => [before, separator, after],
        ("partition", ..) => [text, "", ""],
        (_, _, Some((before, after))) => [before, separator, after],
        _ => ["", "", text],
    };
    Ok(Value::from(Tuple::new(parts.map(Value::from).to_vec())))
}

/// `startswith` and `endswith` with a range: whether it begins or ends with an affix, or with one of several.
fn has_affix(text: &str, method: &str, args: &[Value]) -> Result<bool, Error> {
    let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let (_, part) = part(text, start, end).unwrap_or((0, ""));
    let matches = |affix: &str| match method {
        "startswith" => part.starts_with(affix),
        _ => part.ends_with(affix),
    };
    Ok(match affix.as_str() {
        Some(affix) => matches(affix),
        None => affix.try_iter()?.any(|affix| affix.as_str().is_some_and(matches)),
    })
}

/// `zfill`: zeros between the sign and the digits, up to a width.
fn zero_filled(state: &State, text: &str, width: usize) -> Result<String, Error> {
    let zeros = width.saturating_sub(text.chars().count());
    pay(state, zeros)?;
    let (sign, digits) = if text.starts_with(['+', '-']) { text.split_at(1) } else { ("", text) };
    Ok(format!("{sign}{}{digits}", "0".repeat(zeros)))
}

/// `ljust`, `rjust` and `center`.
fn justified(state: &State, text: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = fill.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(invalid("the fill character must be exactly one character long"));
    }
    let (length, width) = (text.chars().count(), usize::try_from(width).unwrap_or(0));
    let added = width.saturating_sub(length);
    pay(state, added.saturating_mul(fill.len()))?;
    // CPython puts the odd character to the left if the width is odd.
    let left = match method {
        "ljust" => 0,
        "rjust" => added,
        _ => added / 2 + (added & width & 1),
    };
    Ok(format!("{}{text}{}", fill.repeat(left), fill.repeat(added - left)))
}

/// `expandtabs`: blanks up to the next multiple of the tab size.
fn with_blanks(state: &State, text: &str, args: &[Value]) -> Result<String, Error> {
    let [size] = bound(args, ["tabsize"])?;
    let size = size.map_or(Ok(8), usize::try_from)?;
    pay(state, size.saturating_mul(text.matches('\t').count()))?;
    let (mut expanded, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let blanks = size - column % size;
                expanded.push_str(&" ".repeat(blanks));
                column += blanks;
            }
            c => {
                expanded.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(expanded)
}

/// `isdecimal`, `isdigit`, `isnumeric`, `istitle`, `isidentifier` and `isprintable`.
fn is_of_kind(text: &str, method: &str) -> bool {
    let is_superscript =
        |c: char| matches!(c, '²' | '³' | '¹' | '\u{2070}'..='\u{2079}' | '\u{2080}'..='\u{2089}');
    let is_start = |c: char| c == '_' || c.is_alphabetic();
    let all = |is: &dyn Fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    match method {
        "isdecimal" => all(&is_decimal),
        "isdigit" => all(&|c| is_decimal(c) || is_superscript(c)),
        "isnumeric" => all(&char::is_numeric),
        "istitle" => text.chars().any(|c| c.is_uppercase() || c.is_lowercase()) && titled(text) == text,
        "isidentifier" => {
            text.starts_with(is_start) && text.chars().all(|c| is_start(c) || c.is_alphanumeric())
        }
        _ => text.chars().all(|c| !c.is_control() && (c == ' ' || !c.is_whitespace())),
    }
}

/// Whether a character is a decimal digit of ASCII or of a script whose digits come in tens.
fn is_decimal(c: char) -> bool {
    c.is_ascii_digit() || (c.is_numeric() && c.to_digit(10).is_none() && is_in_ten(c))
}

/// Whether a numeric character is one of ten in a row, as the digits of a script are.
fn is_in_ten(c: char) -> bool {
    const TENS: [u32; 20] = [
        0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xe50, 0xed0,
        0xf20, 0x1040, 0x17e0, 0x1810, 0xff10, 0x1d7ce,
    ];
    TENS.iter().any(|first| (*first..first + 10).contains(&u32::from(c)))
}

/// Returns the text with a capital at the start of each run of letters, as `str.title` does: also after an apostrophe.
fn titled(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut is_within = false;
    for c in text.chars() {
        let is_cased = c.is_uppercase() || c.is_lowercase();
        if is_within {
            titled.extend(c.to_lowercase());
        } else {
            titled.extend(c.to_uppercase());
        }
        is_within = is_cased;
    }
    titled
}

/// Returns the part of a text between two indices of characters, as a slice of Python's, and the index of its first character; `None`
/// if the start is behind the text.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    if start.is_none() && end.is_none() {
        return Some((0, text));
    }
    let length = text.chars().count() as i64;
    let index = |at: i64| if at < 0 { (at + length).max(0) } else { at };
    let (start, end) = (index(start.unwrap_or(0)), index(end.unwrap_or(length)).min(length));
    if start > end {
        return None;
    }
    let byte = |at: i64| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    Some((start as usize, &text[byte(start)..byte(end)]))
}

fn found(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let Some((first, part)) = part(text, start, end) else {
        return match method {
            "count" => Ok(0.into()),
            "find" | "rfind" => Ok((-1).into()),
            _ => Err(invalid("substring not found")),
        };
    };
    let at = match method {
        "count" if what.is_empty() => return Ok((part.chars().count() + 1).into()),
        "count" => return Ok(part.matches(what).count().into()),
        "find" | "index" => part.find(what),
        _ => part.rfind(what),
    };
    match at {
        Some(at) => Ok((first + part[..at].chars().count()).into()),
        None if method.ends_with("find") => Ok((-1).into()),
        None => Err(invalid("substring not found")),
    }
}

fn split(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [separator, most] = bound(args, ["sep", "maxsplit"])?;
    let most = most.map_or(Ok(-1), i64::try_from)?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let separator = separator.filter(|separator| !separator.is_none());
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some(separator) => {
            let Some(separator) = separator.as_str().filter(|separator| !separator.is_empty()) else {
                return Err(invalid("the separator of split is empty or no text"));
            };
            let pieces = most.saturating_add(1);
            match method {
                "split" => parts.extend(text.splitn(pieces, separator)),
                _ => {
                    parts.extend(text.rsplitn(pieces, separator));
                    parts.reverse();
                }
            }
        }
        None if method == "split" => {
            let mut rest = text.trim_start();
            while !rest.is_empty() {
                if parts.len() == most {
                    parts.push(rest);
                    break;
                }
                let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
                parts.push(&rest[..end]);
                rest = rest[end..].trim_start();
            }
        }
        None => {
            let mut rest = text.trim_end();
            while !rest.is_empty() {
                if parts.len() == most {
                    parts.push(rest);
                    break;
                }
                let start = rest.char_indices().rfind(|(_, c)| c.is_whitespace());
                let start = start.map_or(0, |(at, c)| at + c.len_utf8());
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end();
            }
            parts.reverse();
        }
    }
    Ok(parts.into_iter().map(Value::from).collect::<Vec<_>>().into())
}

/// The lines of a text with the ends of their line breaks; all of Python's line breaks count.
fn lines(text: &str) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> + '_ {
    let is_break = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == text.len() {
            return None;
        }
        let rest = &text[at..];
        let end = rest.find(is_break).unwrap_or(rest.len());
        let length = match &rest[end..] {
            tail if tail.starts_with("\r\n") => 2,
            tail => tail.chars().next().map_or(0, char::len_utf8),
        };
        let line = at..at + end;
        at += end + length;
        Some((line, at))
    })
}
