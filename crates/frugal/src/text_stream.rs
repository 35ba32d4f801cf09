//! Streams generated text, token by token.
//!
//! A token of a byte-level BPE may end within a character, and may begin with what the one before left open; other decoders treat
//! the first token of a text specially. So new tokens are decoded together with the last ones before them, and the new text is the
//! difference; it is held back while it ends within a character, while its last tokens are single bytes (`<0xB7>`), whose text depends
//! on the bytes after them, or while it may be the beginning of a stop text.

use dataloading::Tokenizer;

use crate::error::{Error, Result};

/// The replacement character, which replaces an incomplete character.
const UNFINISHED: char = '\u{fffd}';

/// The text of one row. See the [module](self).
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    stop: Vec<String>,
    /// The first token that is decoded.
    start: usize,
    /// Tokens whose text was returned.
    given: usize,
    /// Text that may be the beginning of a stop text.
    held: String,
    stopped: bool,
}

impl<'t> TextStream<'t> {
    /// Makes a stream that ends before any of these texts.
    pub fn new(tokenizer: &'t Tokenizer, stop: &[String]) -> Self {
        let stop = stop.iter().filter(|text| !text.is_empty()).cloned().collect();
        Self { tokenizer, stop, start: 0, given: 0, held: String::new(), stopped: false }
    }

    /// Returns whether a stop text came.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Returns the new text of a row that has these tokens, as far as it is certain.
    ///
    /// # Errors
    /// A token that is not an id.
    pub fn push(&mut self, tokens: &[i64]) -> Result<String> {
        if self.stopped || tokens.len() <= self.given || tokens.last().is_some_and(|last| self.is_byte(*last))
        {
            return Ok(String::new());
        }
        let text = self.decode(&tokens[self.start..])?;
        if text.ends_with(UNFINISHED) {
            return Ok(String::new());
        }
        let before = self.decode(&tokens[self.start..self.given])?;
        let new = text.strip_prefix(&before).unwrap_or(&text);
        self.held.push_str(new);
        (self.start, self.given) = (self.given, tokens.len());
        Ok(self.release())
    }

    /// Returns the text that was held back, at the end of the row.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn finish(&mut self, tokens: &[i64]) -> Result<String> {
        if self.stopped {
            return Ok(String::new());
        }
        let all = self.decode(&tokens[self.start..])?;
        let before = self.decode(&tokens[self.start..self.given.min(tokens.len())])?;
        self.held.push_str(all.strip_prefix(&before).unwrap_or(&all));
        self.given = tokens.len();
        let mut text = self.release();
        text.push_str(&std::mem::take(&mut self.held));
        Ok(text)
    }

    /// Removes the held text that is not the beginning of a stop text, up to the first whole one.
    fn release(&mut self) -> String {
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            let text = self.held[..at].to_owned();
            self.held.clear();
            return text;
        }
        let begins = |at: &usize| {
            let rest = &self.held[*at..];
            !rest.is_empty() && self.stop.iter().any(|stop| stop.starts_with(rest))
        };
        let from = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(from);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether a token is a byte of a tokenizer that writes unknown characters in bytes.
    fn is_byte(&self, token: i64) -> bool {
        let token = u32::try_from(token).ok().and_then(|id| self.tokenizer.token(id));
        let digits = token.as_deref().and_then(|token| token.strip_prefix("<0x")?.strip_suffix('>'));
        digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
    }

    fn decode(&self, tokens: &[i64]) -> Result<String> {
        let ids: Result<Vec<u32>, _> = tokens.iter().map(|token| u32::try_from(*token)).collect();
        let ids = ids.map_err(|_| Error::NotAToken)?;
        Ok(self.tokenizer.decode_known(&ids)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_file(&dataloading::embedded::folder().unwrap().join("tokenizer.json")).unwrap()
    }

    fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<i64> {
        tokenizer.encode(text).unwrap().into_iter().map(i64::from).collect()
    }

    /// Returns the pieces of a text, and whether it was stopped.
    fn streamed(text: &str, stop: &[&str]) -> (Vec<String>, bool) {
        let tokenizer = tokenizer();
        let tokens = tokens(&tokenizer, text);
        let stop: Vec<String> = stop.iter().map(|text| (*text).to_owned()).collect();
        let mut stream = TextStream::new(&tokenizer, &stop);
        let mut pieces: Vec<String> =
            (1..=tokens.len()).map(|end| stream.push(&tokens[..end]).unwrap()).collect();
        pieces.push(stream.finish(&tokens).unwrap());
        (pieces, stream.stopped())
    }

    #[test]
    fn pieces_are_whole_characters_and_make_the_text() {
        for text in ["Die Straße kostet 5 €, 数学 and 🦀🦀.", "", " a  b\n\nc", "Привет, мир"]
        {
            let (pieces, stopped) = streamed(text, &["never seen"]);
            assert_eq!(pieces.concat(), text);
            assert!(!stopped && pieces.iter().all(|piece| !piece.contains(UNFINISHED)), "{pieces:?}");
        }
        let (pieces, _) = streamed("Die Straße kostet 5 €", &[]);
        assert!(
            pieces.iter().filter(|piece| !piece.is_empty()).count() > 4,
            "it comes as it is made: {pieces:?}"
        );
    }

    #[test]
    fn nothing_of_a_stop_text_is_given() {
        let (pieces, stopped) = streamed("She has 5.\n\nQuestion: How", &["Question:", "\n\nQ"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("She has 5.", true));
        let (pieces, stopped) = streamed("An open Quest", &["Question:"]);
        assert_eq!((pieces.concat().as_str(), stopped), ("An open Quest", false));
    }

    /// The text of the `tokenizers` crate: bytes that are no character together are each replaced.
    #[test]
    fn bytes_are_given_as_the_whole_text_has_them() {
        let fixtures = include_str!("../tests/it/conversation_tokens.json");
        let fixtures: serde_json::Value = serde_json::from_str(fixtures).unwrap();
        let json = fixtures["tokenizers"]["prepend"].to_string();
        let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
        let id = |token: &str| i64::from(tokenizer.id(token).unwrap());
        let (yes, v, b7, c3, a9) = (id("▁Yes"), id("<0x56>"), id("<0xB7>"), id("<0xC3>"), id("<0xA9>"));
        let line = id("<0x0A>");
        for (ids, expected) in [
            (vec![v, b7], "\u{fffd}\u{fffd}"),
            (vec![yes, v, b7, yes], "Yes\u{fffd}\u{fffd} Yes"),
            (vec![yes, c3, a9, yes], "Yesé Yes"),
            (vec![yes, v, c3, a9, line, v], "YesVé\nV"),
            (vec![yes, line, yes, line], "Yes\n Yes\n"),
        ] {
            let mut stream = TextStream::new(&tokenizer, &[]);
            let mut text: String = (1..=ids.len()).map(|end| stream.push(&ids[..end]).unwrap()).collect();
            text.push_str(&stream.finish(&ids).unwrap());
            let all: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
            assert_eq!(
                (text.as_str(), tokenizer.decode(&all).unwrap().as_str()),
                (expected, expected),
                "{ids:?}"
            );
        }
    }

    #[test]
    fn half_a_character_at_the_end_is_given_as_such() {
        let tokenizer = tokenizer();
        let all = tokens(&tokenizer, "🦀");
        assert!(all.len() > 1, "the tokenizer has a token for it; take a rarer one");
        let mut stream = TextStream::new(&tokenizer, &[]);
        assert_eq!(stream.push(&all[..1]).unwrap(), "");
        assert_eq!(stream.finish(&all[..1]).unwrap(), UNFINISHED.to_string());
    }
}
