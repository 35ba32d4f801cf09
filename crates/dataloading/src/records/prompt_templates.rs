//! A prompt and a completion from a record's fields, by a user's own templates.

use serde_json::{Map, Value};

use super::content::{exchange, names};
use super::{Content, Record};
use crate::error::{Error, Result};
use crate::text::json_lines::kind;

/// Two texts with the names of fields in braces, such as `Question: {query}\nAnswer:` and ` {response}`. `{{` and `}}` are braces.
///
/// ```
/// use dataloading::records::PromptTemplates;
///
/// let templates = PromptTemplates::new("Translate: {english}", "{french}")?;
/// assert_eq!(templates.fields().collect::<Vec<_>>(), ["english", "french"]);
/// assert!(PromptTemplates::new("{english", "{french}").is_err());
/// # Ok::<(), dataloading::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptTemplates {
    prompt: Vec<Piece>,
    completion: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Field(String),
}

impl PromptTemplates {
    /// Reads the templates.
    ///
    /// # Errors
    /// A brace without its partner; a name that is empty; a completion without a field.
    pub fn new(prompt: &str, completion: &str) -> Result<Self> {
        let pieces = |what: &'static str, text: &str| {
            parse(text).map_err(|reason| Error::Config { what, reason: format!("{text:?}: {reason}") })
        };
        let templates = Self {
            prompt: pieces("prompt template", prompt)?,
            completion: pieces("completion template", completion)?,
        };
        if !templates.completion.iter().any(|piece| matches!(piece, Piece::Field(_))) {
            let reason = format!(
                "{completion:?} names no field; write the one to be learned in braces, such as {{answer}}"
            );
            return Err(Error::Config { what: "completion template", reason });
        }
        Ok(templates)
    }

    /// Returns the fields that the templates name.
    pub fn fields(&self) -> impl Iterator<Item = &str> {
        self.prompt.iter().chain(&self.completion).filter_map(|piece| match piece {
            Piece::Field(name) => Some(name.as_str()),
            Piece::Text(_) => None,
        })
    }

    /// Returns the prompt and the completion of a record. For models with a chat template they are a user's and the assistant's message,
    /// without blanks around them; `system`, `tools` and `documents` of the record are read then.
    ///
    /// # Errors
    /// A field that the record does not have, or that is neither a text nor a number.
    pub fn content(&self, record: &Record) -> Result<Content> {
        let make = || {
            let prompt = render(&self.prompt, &record.fields)?;
            let completion = render(&self.completion, &record.fields)?;
            let conversation = exchange(&record.fields, prompt.trim(), completion.trim())?;
            Ok(Content::Exchange { conversation, prompt, completion })
        };
        make().map_err(|reason: String| record.location.error(reason))
    }
}

fn render(pieces: &[Piece], fields: &Map<String, Value>) -> Result<String, String> {
    pieces.iter().try_fold(String::new(), |text, piece| {
        Ok(text
            + &match piece {
                Piece::Text(text) => text.clone(),
                Piece::Field(name) => match fields.get(name) {
                    Some(Value::String(text)) => text.clone(),
                    Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
                    Some(other) => {
                        return Err(format!("`{name}` is {}, expected a text or a number", kind(other)));
                    }
                    None => return Err(format!("no `{name}`; the fields here are: {}", names(fields))),
                },
            })
    })
}

fn parse(text: &str) -> Result<Vec<Piece>, String> {
    let (mut pieces, mut plain) = (Vec::new(), String::new());
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        plain += &rest[..at];
        let brace = &rest[at..=at];
        let after = &rest[at + 1..];
        if let Some(after) = after.strip_prefix(brace) {
            plain += brace;
            rest = after;
            continue;
        }
        let end = after.find(['{', '}']).filter(|end| brace == "{" && after[*end..].starts_with('}'));
        let Some(end) = end else {
            return Err(format!("`{brace}` has no partner; write `{brace}{brace}` for the character itself"));
        };
        let name = after[..end].trim();
        if name.is_empty() {
            return Err("`{}` names no field".to_owned());
        }
        if !plain.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut plain)));
        }
        pieces.push(Piece::Field(name.to_owned()));
        rest = &after[end + 1..];
    }
    plain += rest;
    if !plain.is_empty() {
        pieces.push(Piece::Text(plain));
    }
    Ok(pieces)
}
