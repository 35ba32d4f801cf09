//! PTX text as tokens.

use crate::error::Error;

/// A word (names, opcodes with their modifiers, numbers), a text in quotes, or one sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    Word(&'a str),
    Quoted(&'a str),
    Sign(char),
}

/// A token and where it lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Located<'a> {
    pub(crate) token: Token<'a>,
    /// The line, counted from 1.
    pub(crate) line: usize,
    pub(crate) start: usize,
}

/// All tokens, without comments.
pub(crate) fn tokens(text: &str) -> Result<Vec<Located<'_>>, Error> {
    let bytes = text.as_bytes();
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while at < bytes.len() {
        let (start, rest) = (at, &text[at..]);
        let token = match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() || byte == 0 => {
                at += 1;
                continue;
            }
            _ if rest.starts_with("//") => {
                at += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            _ if rest.starts_with("/*") => {
                let length = rest.find("*/").ok_or_else(|| unfinished(line, "comment"))? + 2;
                line += rest[..length].matches('\n').count();
                at += length;
                continue;
            }
            b'"' => {
                let length = rest[1..].find('"').ok_or_else(|| unfinished(line, "text"))? + 2;
                at += length;
                Token::Quoted(&rest[1..length - 1])
            }
            byte if is_of_word(byte) => {
                at += word(rest.as_bytes());
                Token::Word(&text[start..at])
            }
            byte if byte.is_ascii() => {
                at += 1;
                Token::Sign(char::from(byte))
            }
            _ => return Err(Error::Syntax { line, message: "a character that PTX does not have".into() }),
        };
        tokens.push(Located { token, line, start });
    }
    Ok(tokens)
}

fn unfinished(line: usize, what: &str) -> Error {
    Error::Syntax { line, message: format!("a {what} without an end") }
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// The length of the word at the beginning, which may have `::` inside: `L1::no_allocate`.
fn word(bytes: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match bytes.get(at) {
            Some(&byte) if is_of_word(byte) => at += 1,
            Some(b':') if bytes[at..].starts_with(b"::") => at += 2,
            _ => return at,
        }
    }
}
