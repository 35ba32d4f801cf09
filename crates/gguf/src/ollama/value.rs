//! Values of a Modelfile's directives.
//!
//! Ollama's parser has no escapes. A value ends with its line, unless it begins with `"` or `"""`: then it ends with the first line that
//! ends with the same. So a text of a model may end its value early and go on as directives of its own. A value is therefore written only
//! if it is read as the same text again.
//!
//! Source: Ollama's `parser/parser.go`.

/// Returns a text as a value of one line, quoted where that is needed.
pub(super) fn in_one_line(text: &str) -> Option<String> {
    let is_read = |value: &String| !value.contains(['\n', '\r']) && is_read_as(value, text);
    [text.to_owned(), format!("\"{text}\"")].into_iter().find(is_read)
}

/// Returns a text in double quotes.
pub(super) fn quoted_value(text: &str) -> Option<String> {
    Some(format!("\"{text}\"")).filter(|value| is_read_as(value, text))
}

/// Returns a text in triple quotes. One that has such quotes itself is none: earlier versions end it there.
pub(super) fn in_several_lines(text: &str) -> Option<String> {
    const QUOTES: &str = "\"\"\"";
    let value = format!("{QUOTES}{text}{QUOTES}");
    (!text.contains(QUOTES) && is_read_as(&value, text)).then_some(value)
}

/// Returns a text as a comment of one line.
pub(super) fn comment(text: &str) -> String {
    text.split(['\n', '\r']).collect::<Vec<_>>().join(" ")
}

/// Whether a value with the line break behind it is read as this text, and as nothing more.
fn is_read_as(value: &str, text: &str) -> bool {
    let is_kept = |c: char| !c.is_control() || ['\n', '\r', '\t'].contains(&c);
    let breaks = value.match_indices(['\n', '\r']).map(|(at, _)| at);
    let ends = breaks.chain([value.len()]).find_map(|at| Some((at, unquoted(value[..at].trim())?)));
    ends == Some((value.len(), text)) && text.chars().all(is_kept)
}

/// The text of a value; `None` for one that goes on.
fn unquoted(value: &str) -> Option<&str> {
    for quotes in ["\"\"\"", "\""] {
        if let Some(rest) = value.strip_prefix(quotes) {
            return rest.strip_suffix(quotes);
        }
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_end_their_value_early_are_not_written() {
        for (text, one_line, quoted, several) in [
            (
                "./model.gguf",
                Some("./model.gguf"),
                Some("\"./model.gguf\""),
                Some("\"\"\"./model.gguf\"\"\""),
            ),
            ("two words ", Some("\"two words \""), Some("\"two words \""), Some("\"\"\"two words \"\"\"")),
            ("a\nFROM b", None, Some("\"a\nFROM b\""), Some("\"\"\"a\nFROM b\"\"\"")),
            ("a\"\nFROM b", None, None, Some("\"\"\"a\"\nFROM b\"\"\"")),
            ("a\" \t\r\nFROM b", None, None, Some("\"\"\"a\" \t\r\nFROM b\"\"\"")),
            ("a\"\"\"\nFROM b\nSYSTEM \"\"\"x", None, None, None),
            ("\"\"\"", None, None, None),
            ("\"", None, None, Some("\"\"\"\"\"\"\"")),
            ("say \"x\"", Some("say \"x\""), Some("\"say \"x\"\""), Some("\"\"\"say \"x\"\"\"\"")),
            ("a\u{1b}b", None, None, None),
            ("\n", None, Some("\"\n\""), Some("\"\"\"\n\"\"\"")),
        ] {
            assert_eq!(in_one_line(text).as_deref(), one_line, "{text:?}");
            assert_eq!(quoted_value(text).as_deref(), quoted, "{text:?}");
            assert_eq!(in_several_lines(text).as_deref(), several, "{text:?}");
        }
        assert_eq!(comment("one\r\nFROM two"), "one  FROM two");
    }
}
