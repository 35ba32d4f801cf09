//! A row as text, in which the learned tokens are marked.

use dataloading::{IGNORE_INDEX, Tokenizer};
use training::masked_rows::MaskedRow;

use crate::error::Result;

/// Marks of a part: the text before and after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// Marks of tokens that are read only.
    pub read: [&'static str; 2],
    /// Marks of tokens that count in the loss.
    pub learned: [&'static str; 2],
    /// Special tokens that are learned, such as the one that ends a turn.
    pub learned_token: [&'static str; 2],
}

impl Marks {
    /// Colours of a terminal: what is read is dim, what is learned green, and its special tokens are inverted.
    pub const COLOURS: Self = Self {
        read: ["\u{1b}[2m", "\u{1b}[0m"],
        learned: ["\u{1b}[32m", "\u{1b}[0m"],
        learned_token: ["\u{1b}[7;32m", "\u{1b}[0m"],
    };
    /// Brackets around what is learned.
    pub const BRACKETS: Self =
        Self { read: ["", ""], learned: ["⟦", "⟧"], learned_token: ["⟦", "⟧"] };
}

/// Returns the text of a row with marks. The first token is never learned, because nothing predicts it. Control characters but line
/// breaks and tabs are replaced by their pictures, so that data cannot control the terminal.
///
/// # Errors
/// The tokenizer fails on the tokens.
pub fn marked(row: &MaskedRow, tokenizer: &Tokenizer, marks: Marks) -> Result<String> {
    let added = tokenizer.added_tokens();
    let is_added = |id: u32| tokenizer.token(id).is_some_and(|token| added.contains(&token));
    let ids: Vec<u32> = row.tokens.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX)).collect();
    let kind = |at: usize| {
        let is_learned = at > 0 && row.labels[at] != IGNORE_INDEX;
        match (is_learned, marks.learned == marks.learned_token) {
            (false, _) => marks.read,
            (true, false) if is_added(ids[at]) => marks.learned_token,
            (true, _) => marks.learned,
        }
    };
    let mut text = String::new();
    let mut at = 0;
    while at < ids.len() {
        let [before, after] = kind(at);
        let length = (at..ids.len()).take_while(|next| kind(*next) == [before, after]).count();
        text.push_str(before);
        text.extend(tokenizer.decode_known(&ids[at..at + length])?.chars().map(visible));
        text.push_str(after);
        at += length;
    }
    Ok(text)
}

fn visible(c: char) -> char {
    match c {
        '\n' | '\t' => c,
        '\u{7f}' => '\u{2421}',
        c if c < ' ' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
        c if c.is_control() => '\u{fffd}',
        c => c,
    }
}
