//! Tokens that a training adds to the tokenizer, in each file that lists tokens.

use std::path::Path;

use dataloading::Tokenizer;
use dataloading::tokenizer::{AddedTokens, TokenToAdd};
use serde_json::{Map, Value, json};

use super::{CompanionFiles, TOKENIZER, TOKENIZER_CONFIG, failed, object, write_text};
use crate::config::NewToken;
use crate::error::Result;

/// Older programs' file of added tokens.
const ADDED_TOKENS: &str = "added_tokens.json";

/// Added tokens.
#[derive(Debug, Clone)]
pub(super) struct Added {
    /// The `tokenizer.json` with them.
    pub(super) json: String,
    /// Id, text and whether it is special, of those that are new.
    tokens: Vec<(u32, String, bool)>,
}

impl CompanionFiles {
    /// Adds tokens to the tokenizer, and returns their ids.
    ///
    /// # Errors
    /// As [`Tokenizer::add_tokens`]; a file that cannot be read.
    pub fn add_tokens(&mut self, tokens: &[NewToken]) -> Result<AddedTokens> {
        let path = self.tokenizer_file.clone().unwrap_or_else(|| self.tokenizer.join(TOKENIZER));
        let bytes = std::fs::read(&path).map_err(|cause| failed(&path, &cause))?;
        let list: Vec<TokenToAdd<'_>> = tokens
            .iter()
            .map(|token| TokenToAdd { text: token.text(), special: token.is_special() })
            .collect();
        let added = Tokenizer::add_tokens(&bytes, &list)?;
        let all = added.ids.iter().zip(&added.is_new).zip(&list);
        let new = all.filter(|((_, is_new), _)| **is_new);
        let tokens = new.map(|((id, _), token)| (*id, token.text.to_owned(), token.special)).collect();
        self.added = Some(Added { json: added.json.clone(), tokens });
        Ok(added)
    }
}

impl Added {
    /// Writes the tokens into the tokenizer's files of a folder, which are those of the tokenizer before.
    pub(super) fn write(&self, out: &Path) -> Result<()> {
        write_text(&out.join(TOKENIZER), &self.json)?;
        let path = out.join(TOKENIZER_CONFIG);
        let mut config = object(&path)?;
        if let Some(Value::Object(listed)) = config.get_mut("added_tokens_decoder") {
            for (id, text, special) in &self.tokens {
                let token = json!({
                    "content": text, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false,
                    "special": special,
                });
                listed.insert(id.to_string(), token);
            }
            write_text(&path, &format!("{:#}\n", Value::Object(config)))?;
        }
        let path = out.join(ADDED_TOKENS);
        if path.is_file() {
            let mut listed: Map<String, Value> = object(&path)?;
            listed.extend(self.tokens.iter().map(|(id, text, _)| (text.clone(), json!(id))));
            write_text(&path, &format!("{:#}\n", Value::Object(listed)))?;
        }
        Ok(())
    }
}
