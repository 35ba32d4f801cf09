//! The tag `{% generation %}`, with which a template marks what the model writes.
//!
//! transformers adds this tag to Jinja; `minijinja` cannot parse tags that it does not know. So the tag is rewritten to a filter block,
//! `{% filter … %}`, with its whitespace marks (`{%-`, `-%}`, `+%}`) and on its line. The filter encloses its text in two
//! noncharacters, which [`take_spans`] removes from the rendered text and turns into spans.

use std::ops::Range;

/// Name of the filter.
pub(super) const FILTER: &str = "frugal_generation";
/// Begins and ends the text of a block. Unicode reserves them for use inside a program.
pub(super) const OPEN: char = '\u{fdd0}';
/// See [`OPEN`].
pub(super) const CLOSE: char = '\u{fdd1}';

/// Returns a template with its generation tags rewritten, and whether it has any. Comments, raw blocks and strings keep their text.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let (mut text, mut has_tag) = (String::with_capacity(source.len() + 64), false);
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = if rest.starts_with("{#") {
            rest.find("#}").map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("{{") {
            end_of(rest, "}}")
        } else if rest.starts_with("{%") {
            let length = end_of(rest, "%}");
            let tag = Tag::parse(&rest[..length]);
            let filter = match tag.words {
                "generation" => Some(format!("filter {FILTER}")),
                "endgeneration" => Some("endfilter".to_owned()),
                _ => None,
            };
            if let Some(filter) = filter {
                has_tag = true;
                // Line breaks stay, so that errors name the template's own lines.
                let lines = "\n".repeat(rest[..length].matches('\n').count());
                text.push_str(&format!("{{%{} {filter}{lines} {}%}}", tag.before, tag.after));
                rest = &rest[length..];
                continue;
            }
            if tag.words == "raw" { end_of_raw(rest, length) } else { length }
        } else {
            1
        };
        text.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    text.push_str(rest);
    (text, has_tag)
}

/// A block tag.
struct Tag<'a> {
    /// `-`, `+` or nothing.
    before: &'a str,
    words: &'a str,
    after: &'a str,
}

impl<'a> Tag<'a> {
    fn parse(tag: &'a str) -> Self {
        let inner = tag.strip_prefix("{%").unwrap_or(tag);
        let inner = inner.strip_suffix("%}").unwrap_or(inner);
        let mark = |c: char| c == '-' || c == '+';
        let (before, inner) = inner.split_at(usize::from(inner.starts_with(mark)));
        let (inner, after) = inner.split_at(inner.len() - usize::from(inner.ends_with(mark)));
        Self { before, words: inner.trim(), after }
    }
}

/// Returns the length of an expression or tag, up to `close` outside of strings.
fn end_of(text: &str, close: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut at, mut quote) = (2, None);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

/// Returns the length of a raw block whose first tag has `length` bytes.
fn end_of_raw(text: &str, length: usize) -> usize {
    let mut at = length;
    while let Some(offset) = text[at..].find("{%") {
        at += offset;
        let end = text[at..].find("%}").map_or(text.len(), |end| at + end + 2);
        if Tag::parse(&text[at..end]).words == "endraw" {
            return end;
        }
        at += 2;
    }
    text.len()
}

/// Removes the marks from a rendered text, and returns the spans between them in bytes. Spans that touch become one.
///
/// # Errors
/// Marks that are not in pairs: the template changes the text of a block after it.
pub(super) fn take_spans(rendered: &str) -> Result<(String, Vec<Range<usize>>), String> {
    let mut text = String::with_capacity(rendered.len());
    let mut spans: Vec<Range<usize>> = Vec::new();
    let mut open = None;
    for c in rendered.chars() {
        match (c, open) {
            (OPEN, None) => open = Some(text.len()),
            (CLOSE, Some(start)) => {
                open = None;
                match spans.last_mut() {
                    Some(last) if last.end == start => last.end = text.len(),
                    _ => spans.push(start..text.len()),
                }
            }
            (OPEN | CLOSE, _) => {
                return Err("its `{% generation %}` blocks are nested, or it takes them apart".to_owned());
            }
            (c, _) => text.push(c),
        }
    }
    match open {
        None => Ok((text, spans.into_iter().filter(|span| !span.is_empty()).collect())),
        Some(_) => Err("it takes a `{% generation %}` block apart".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_are_rewritten() {
        for (source, expected) in [
            ("a {%- generation -%} b {% endgeneration +%}", "a {%- filter F -%} b {% endfilter +%}"),
            ("{%generation%}x{%endgeneration%}", "{% filter F %}x{% endfilter %}"),
            ("{%\n generation\n%}", "{% filter F\n\n %}"),
            ("{# {% generation %} #}{% if x %}", "{# {% generation %} #}{% if x %}"),
            ("{{ '{% generation %}' }}", "{{ '{% generation %}' }}"),
            ("{% set x = \"%} \\\" {% generation %}\" %}", "{% set x = \"%} \\\" {% generation %}\" %}"),
            ("{% raw %}{% generation %}{%- endraw %}{", "{% raw %}{% generation %}{%- endraw %}{"),
            ("{% generation x %}{ %}", "{% generation x %}{ %}"),
            ("{%", "{%"),
            ("{{ 'ä", "{{ 'ä"),
            ("{# ", "{# "),
            ("{% raw %}{%", "{% raw %}{%"),
        ] {
            let (text, has_tag) = rewrite(source);
            assert_eq!(text, expected.replace('F', FILTER), "{source}");
            assert_eq!(has_tag, source != expected, "{source}");
        }
    }

    #[test]
    fn spans_are_in_bytes_of_the_text_without_marks() {
        let marked = format!("ä{OPEN}bc{CLOSE}{OPEN}d{CLOSE}e{OPEN}{CLOSE}{OPEN}f{CLOSE}");
        assert_eq!(take_spans(&marked), Ok(("äbcdef".to_owned(), vec![2..5, 6..7])));
        for wrong in [format!("{OPEN}{OPEN}"), format!("{CLOSE}"), format!("{OPEN}a")] {
            assert!(take_spans(&wrong).is_err());
        }
    }
}
