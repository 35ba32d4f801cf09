//! Texts that end a generation.
//!
//! A model that did not learn to stop continues with the next `Question:`. That text may begin and end within tokens, and a
//! byte-level BPE may cut a character, so what is searched is text, not ids. Every token of a byte-level BPE has at least one
//! byte: a stop text of `n` bytes that a new token completes lies within the last `n` tokens, and to decode these is enough.
//! So a check costs the same at every length, and keeps nothing between tokens.

use dataloading::Tokenizer;

use super::error::{Error, Result};

/// Finds stop texts in generated tokens.
#[derive(Debug, Clone)]
pub struct StopTexts<'a> {
    tokenizer: &'a Tokenizer,
    texts: Vec<String>,
    /// Tokens that are decoded: one more than the longest text has bytes, since some decoders treat the first one apart.
    window: usize,
}

impl<'a> StopTexts<'a> {
    /// Returns the stop texts of lm-evaluation-harness's `gsm8k`.
    pub const DEFAULT: [&'static str; 3] = ["Question:", "</s>", "<|im_end|>"];

    /// Makes a finder of any of `texts`.
    ///
    /// # Errors
    /// An empty text, which is everywhere.
    pub fn new<T: Into<String>>(
        tokenizer: &'a Tokenizer,
        texts: impl IntoIterator<Item = T>,
    ) -> Result<Self> {
        let texts: Vec<String> = texts.into_iter().map(Into::into).collect();
        if texts.iter().any(String::is_empty) {
            return Err(Error::Config {
                what: "stop text",
                reason: "an empty text would end every answer before it begins; leave it out".into(),
            });
        }
        let window = texts.iter().map(String::len).max().map_or(0, |longest| longest + 1);
        Ok(Self { tokenizer, texts, window })
    }

    /// Returns whether the last of these tokens completed a stop text. Call it after every token.
    ///
    /// # Errors
    /// A token that is not an id, or that the tokenizer refuses.
    pub fn ended(&self, tokens: &[i64]) -> Result<bool> {
        let tail = &tokens[tokens.len().saturating_sub(self.window)..];
        let text = decode(self.tokenizer, tail)?;
        Ok(self.texts.iter().any(|stop| text.contains(stop.as_str())))
    }

    /// Returns the text before the first stop text.
    pub fn cut<'t>(&self, text: &'t str) -> &'t str {
        let first = self.texts.iter().filter_map(|stop| text.find(stop.as_str())).min();
        &text[..first.unwrap_or(text.len())]
    }

    /// Returns the text of a whole generation, up to the first stop text and without the tokens from the first of `ends` on.
    ///
    /// # Errors
    /// A token that is not an id, or that the tokenizer refuses.
    pub fn text(&self, tokens: &[i64], ends: &[i64]) -> Result<String> {
        let end = tokens.iter().position(|token| ends.contains(token)).unwrap_or(tokens.len());
        Ok(self.cut(&decode(self.tokenizer, &tokens[..end])?).to_owned())
    }
}

fn decode(tokenizer: &Tokenizer, tokens: &[i64]) -> Result<String> {
    let ids: Result<Vec<u32>> = tokens
        .iter()
        .map(|token| {
            u32::try_from(*token)
                .map_err(|_| Error::Tokenizer(format!("{token} is not an id; was it a label of −100?")))
        })
        .collect();
    Ok(tokenizer.decode_known(&ids?)?)
}
