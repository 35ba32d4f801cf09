//! `'%d' % x` and `'{:>8}'.format(x)`: Python's ways to format texts, for templates.
//!
//! The engine has both ways, but neither the operator `%` between a text and its values, nor a bound for widths: `'{:>1999999999}'`
//! takes 2 GB. So [`rewrite`] makes a filter of the operator, and [`pay_for_fields`] pays for what the fields ask for before they are
//! written.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Rest, Tuple};
use minijinja::{Error, State, Value};

use super::python_filters::written;
use super::python_methods::pay;

/// Name of the filter that stands for the operator.
pub(super) const FILTER: &str = "frugal_percent";

/// The most digits after a point, and characters of a field. More are the typing mistakes of a template.
const WIDEST: usize = 1 << 20;

/// Returns what the fields of a format ask for: the text between a field's colon and its end, or between `%` and its letter.
fn specifications(style: FormatStyle, text: &str) -> impl Iterator<Item = &str> {
    let opener = if style == FormatStyle::Printf { '%' } else { '{' };
    text.split(opener).skip(1).map(move |field| match style {
        FormatStyle::Printf => {
            // `%(name)s`
            let field =
                field.split_once(')').filter(|_| field.starts_with('(')).map_or(field, |(_, rest)| rest);
            let end = field.char_indices().find(|(_, c)| c.is_alphabetic());
            &field[..end.map_or(field.len(), |(at, c)| at + c.len_utf8())]
        }
        FormatStyle::StrFormat => {
            field.split('}').next().and_then(|field| field.split_once(':')).map_or("", |(_, rest)| rest)
        }
    })
}

/// Pays for the fields of a format: its widths and digits, and its values.
///
/// # Errors
/// A field wider than a million characters; fields that are too many or too wide together; a width for a text beyond ASCII, because
/// the engine counts bytes and Python characters.
pub(super) fn pay_for_fields(
    state: &State,
    style: FormatStyle,
    text: &str,
    values: &[Value],
) -> Result<(), Error> {
    let refused = |reason: String| Err(Error::new(minijinja::ErrorKind::InvalidOperation, reason));
    let (mut bytes, mut fields, mut is_wide) = (0usize, 0usize, false);
    for specification in specifications(style, text) {
        fields += 1;
        for digits in specification.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
            let number = digits.parse::<usize>().unwrap_or(usize::MAX);
            if number > WIDEST {
                return refused(format!("a field of {digits} characters; the widest is {WIDEST}"));
            }
            bytes = bytes.saturating_add(number);
            is_wide |= !specification.ends_with(|c: char| "diuxXobeEfFgGnc".contains(c));
        }
    }
    let mut longest = 0;
    for value in values {
        let length = match (value.as_str(), value.is_number()) {
            (Some(text), _) if is_wide && !text.is_ascii() => {
                return refused("a width for a text beyond ASCII; use ljust, rjust or center".to_owned());
            }
            (Some(text), _) => text.len(),
            (None, true) => 64,
            (None, false) => written(value)?.len(),
        };
        longest = longest.max(length);
    }
    pay(state, bytes.saturating_add(fields.saturating_mul(longest)))
}

/// The operator `%` of a text and its values, each an argument.
///
/// # Errors
/// Values that do not fit the fields; those of [`pay_for_fields`].
pub(super) fn percent(state: &State, text: String, values: Rest<Value>) -> Result<String, Error> {
    let values: Vec<Value> = match &values[..] {
        [one] => match one.downcast_object_ref::<Tuple>() {
            Some(_) => one.try_iter()?.collect(),
            None => vec![one.clone()],
        },
        several => several.to_vec(),
    };
    pay_for_fields(state, FormatStyle::Printf, &text, &values)?;
    format(FormatStyle::Printf, &text, &values)
}

/// Returns a template in which `'…' % values` within tags and expressions is a filter. The left side must be a text in quotes, else
/// `%` is the remainder of numbers.
pub(super) fn rewrite(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'{') => code(rest, "}}", &mut text),
            Some(b'%') => {
                let length = code(rest, "%}", &mut text);
                let words = rest[2..length].trim_matches(['-', '+', '%', '}', ' ', '\n', '\t']);
                if words == "raw" {
                    let end = rest[length..].find("endraw").map_or(rest.len(), |end| length + end);
                    text.push_str(&rest[length..end]);
                    end
                } else {
                    length
                }
            }
            _ => 1,
        };
        if matches!(rest.as_bytes().get(1), Some(b'{' | b'%')) {
            rest = &rest[length..];
            continue;
        }
        text.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    text.push_str(rest);
    text
}

/// Appends an expression or a tag with its operators rewritten; returns its length in the source.
fn code(source: &str, close: &str, out: &mut String) -> usize {
    let mut at = 2;
    out.push_str(&source[..2]);
    // Whether a product stands before: `a * '…' % b` is another thing.
    let mut after_product = false;
    while at < source.len() {
        let rest = &source[at..];
        if rest.starts_with(close) {
            out.push_str(close);
            return at + close.len();
        }
        if rest.starts_with(['"', '\'']) {
            let length = quoted(rest);
            out.push_str(&rest[..length]);
            at += length;
            let after = source[at..].trim_start();
            let is_operator = after.starts_with('%') && !after.starts_with("%}") && !after.starts_with("%-}");
            if is_operator && !after_product {
                let values = after[1..].trim_start();
                let length = operand(values);
                let list = values[..length].trim_end();
                let inner = list.strip_prefix('(').and_then(|list| list.strip_suffix(')'));
                let inner = inner.filter(|_| operand_end(list) == list.len()).unwrap_or(list);
                let mut nested = String::new();
                code(&format!("{{{{{inner}}}}}"), "}}", &mut nested);
                let nested = nested.get(2..nested.len().saturating_sub(2)).unwrap_or(inner);
                out.push_str(&format!("|{FILTER}({})", nested.trim_end().trim_end_matches(',')));
                at = source.len() - values.len() + list.len();
            }
            after_product = false;
            continue;
        }
        let c = rest.chars().next().unwrap_or(' ');
        if !c.is_whitespace() {
            after_product = matches!(c, '*' | '/' | '%');
        }
        out.push(c);
        at += c.len_utf8();
    }
    at
}

/// The length of a text in quotes.
fn quoted(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut at = 1;
    while at < text.len() {
        match text.as_bytes()[at] {
            b'\\' => at += 1,
            byte if byte == quote => return at + 1,
            _ => {}
        }
        at += 1;
    }
    text.len()
}

/// The length of the right side of an operator: a value with its attributes, calls, indices and filters.
fn operand(text: &str) -> usize {
    let sign = text.len() - text.trim_start_matches(['-', '+', ' ']).len();
    let mut at = sign + operand_end(&text[sign..]);
    loop {
        let rest = text[at..].trim_start();
        let skipped = text.len() - at - rest.len();
        if let Some(filter) = rest.strip_prefix('|') {
            let name = filter.trim_start();
            at += skipped + 1 + (filter.len() - name.len()) + operand_end(name);
        } else {
            return at;
        }
    }
}

/// The length of a value with its attributes, calls and indices.
fn operand_end(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' if at == 0 => at += quoted(text),
            b'(' | b'[' | b'{' if bytes[at] != b'{' || at == 0 => at = bracketed(text, at),
            b'_' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | 0x80.. => at += 1,
            _ => break,
        }
    }
    at
}

/// The end of a bracket that opens at a byte.
fn bracketed(text: &str, start: usize) -> usize {
    let (bytes, mut depth, mut at) = (text.as_bytes(), 0usize, start);
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => {
                at += quoted(&text[at..]);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_operator_of_texts_in_quotes_is_rewritten() {
        for (source, expected) in [
            ("{{ '%d' % x }}", "{{ '%d'|F(x) }}"),
            ("{{ '%d' % (x, y[0]) }}", "{{ '%d'|F(x, y[0]) }}"),
            ("{{ '%d' % (x,) }}", "{{ '%d'|F(x) }}"),
            ("{{ '%s' % x|upper ~ 'a' }}", "{{ '%s'|F(x|upper) ~ 'a' }}"),
            ("{{ '%s' % a.b('%')[1] + c }}", "{{ '%s'|F(a.b('%')[1]) + c }}"),
            ("{{ '%s' % ('%d' % x) }}", "{{ '%s'|F('%d'|F(x)) }}"),
            ("{{ '%s' % (a)[0] }}", "{{ '%s'|F((a)[0]) }}"),
            ("{% if '%d' % -1 == 'a' %}%{% endif %}", "{% if '%d'|F(-1) == 'a' %}%{% endif %}"),
            (
                "{{ n % 5 }}{% set x = 'a' %}{%- set y = 'b' -%}",
                "{{ n % 5 }}{% set x = 'a' %}{%- set y = 'b' -%}",
            ),
            ("{{ 3 * '%d' % 4 }}", "{{ 3 * '%d' % 4 }}"),
            (
                "{# '%d' % x #}{% raw %}{{ '%d' % x }}{% endraw %}",
                "{# '%d' % x #}{% raw %}{{ '%d' % x }}{% endraw %}",
            ),
            ("{", "{"),
            ("{{ 'ä", "{{ 'ä"),
            ("{{ '%s' % ", "{{ '%s'|F()"),
            ("{%", "{%"),
            ("{% raw %}{{ 'a' % ", "{% raw %}{{ 'a' % "),
            ("ä{{ {'a': '%d' % d['é']} }}ö", "ä{{ {'a': '%d'|F(d['é'])} }}ö"),
        ] {
            assert_eq!(rewrite(source), expected.replace('F', FILTER), "{source}");
        }
    }
}
