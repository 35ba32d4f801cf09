//! Tokens that are added to a tokenizer.

use tokenizers::AddedToken;

use super::{Tokenizer, guarded};
use crate::error::{Error, Result};

/// A token to add.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenToAdd<'a> {
    /// Its text, which is found as a whole in every text.
    pub text: &'a str,
    /// Whether it is special: a text for people leaves it out.
    pub special: bool,
}

/// A tokenizer with further tokens.
#[derive(Debug, Clone)]
pub struct AddedTokens {
    /// The `tokenizer.json`.
    pub json: String,
    /// The id of each token, in the order in which they were given.
    pub ids: Vec<u32>,
    /// Whether each token is new; others were in the vocabulary.
    pub is_new: Vec<bool>,
}

impl Tokenizer {
    /// Adds tokens to a `tokenizer.json`, as transformers' `add_tokens` does: each gets the next free id, and one that the vocabulary has
    /// keeps its id and stays what it is.
    ///
    /// ```
    /// use dataloading::tokenizer::{Tokenizer, TokenToAdd, TrainConfig};
    ///
    /// let options = TrainConfig { vocabulary: 270, ..TrainConfig::default() };
    /// let json = Tokenizer::train_json(["the cat and the hat"].map(|text| Ok(text.to_owned())), &options)?;
    /// let tokens = ["<|call|>", "the"].map(|text| TokenToAdd { text, special: text == "<|call|>" });
    /// let added = Tokenizer::add_tokens(json.as_bytes(), &tokens)?;
    /// assert_eq!(added.is_new, [true, false]);
    /// let tokenizer = Tokenizer::from_bytes(added.json.as_bytes())?;
    /// assert_eq!(tokenizer.encode("<|call|>")?, added.ids[..1]);
    /// # Ok::<(), dataloading::Error>(())
    /// ```
    ///
    /// # Errors
    /// The content is not a tokenizer; a text that is empty, has blanks alone, or is there twice.
    pub fn add_tokens(json: &[u8], tokens: &[TokenToAdd<'_>]) -> Result<AddedTokens> {
        for (index, token) in tokens.iter().enumerate() {
            let refuse =
                |reason: &str| Err(Error::Tokenizer(format!("the new token `{}` {reason}", token.text)));
            if token.text.trim().is_empty() {
                return refuse("has no text; give letters or signs");
            }
            if tokens[..index].iter().any(|other| other.text == token.text) {
                return refuse("is there twice; give it once");
            }
        }
        guarded(|| {
            let mut inner = std::str::from_utf8(json)?.parse::<tokenizers::Tokenizer>()?;
            let is_new: Vec<bool> =
                tokens.iter().map(|token| inner.token_to_id(token.text).is_none()).collect();
            for (token, _) in tokens.iter().zip(&is_new).filter(|(_, is_new)| **is_new) {
                let added = AddedToken::from(token.text, token.special).normalized(false);
                match token.special {
                    true => inner.add_special_tokens(&[added]),
                    false => inner.add_tokens(&[added]),
                };
            }
            let id = |token: &TokenToAdd<'_>| {
                let missing = || format!("the tokenizer does not take `{}`", token.text);
                inner.token_to_id(token.text).ok_or_else(missing)
            };
            let ids = tokens.iter().map(id).collect::<std::result::Result<_, _>>()?;
            Ok(AddedTokens { json: inner.to_string(false)?, ids, is_new })
        })
    }
}
