//! Tokens that a fine-tuning adds to its model.

use std::path::Path;

use models::strict_json;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A token to add: its text, or a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum NewToken {
    /// A token that is not special, by its text.
    Text(String),
    /// A token with options.
    Described(DescribedToken),
}

/// A token to add, with options.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedToken {
    /// Its text.
    pub token: String,
    /// Whether it is special: a text for people leaves it out.
    #[serde(default)]
    pub special: bool,
    /// A text whose tokens' rows have the new row's first values as their mean; absent for
    /// [`new_token_init`](super::ModelConfig::new_token_init).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

/// First values of new rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum NewTokenInit {
    /// The mean of all rows.
    #[default]
    Mean,
    /// The mean of the rows of the tokens that the new token's text had before.
    Pieces,
}

impl NewToken {
    /// Returns its text.
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Described(token) => &token.token,
        }
    }

    /// Whether it is special.
    pub fn is_special(&self) -> bool {
        matches!(self, Self::Described(token) if token.special)
    }

    /// Returns the text whose tokens' rows have its first values as their mean, if there is one.
    pub fn from(&self) -> Option<&str> {
        match self {
            Self::Text(_) => None,
            Self::Described(token) => token.from.as_deref(),
        }
    }

    /// Reads a file: one token a line, or a JSON list of texts and objects (`token`, `special`, `from`).
    ///
    /// # Errors
    /// A file that cannot be read; JSON of another form; no token.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let refuse = |reason: String| Error::File { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|cause| refuse(cause.to_string()))?;
        let tokens: Vec<Self> = if text.trim_start().starts_with('[') && is_json(path, &text) {
            strict_json::from_str(&text).map_err(|cause| {
                refuse(format!(
                    "{cause}; expected a list of texts, or of objects such as {{\"token\": \"<|call|>\", \"special\": true, \
                     \"from\": \"call\"}}"
                ))
            })?
        } else {
            let lines = text.lines().map(|line| line.strip_suffix('\r').unwrap_or(line));
            lines.filter(|line| !line.trim().is_empty()).map(|line| Self::Text(line.to_owned())).collect()
        };
        if tokens.is_empty() {
            return Err(refuse("there is no token; give one in each line".to_owned()));
        }
        Ok(tokens)
    }
}

/// Whether a text that begins with a bracket is a JSON list: tokens such as `[CALL]` begin so, too.
fn is_json(path: &Path, text: &str) -> bool {
    let is_named_so = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    is_named_so || text.trim_start()[1..].trim_start().starts_with(['"', '{'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_by_lines_and_from_json() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            NewToken::read(&path).map_err(|error| error.to_string())
        };
        let text = |text: &str| NewToken::Text(text.to_owned());
        assert_eq!(read("a.txt", "[CALL]\r\n\n<b> c\n").unwrap(), [text("[CALL]"), text("<b> c")]);
        let described =
            DescribedToken { token: "<x>".to_owned(), special: true, from: Some("an x".to_owned()) };
        let json = r#"["<a>", {"token": "<x>", "special": true, "from": "an x"}]"#;
        assert_eq!(read("a.txt", json).unwrap(), [text("<a>"), NewToken::Described(described)]);
        assert!(read("a.txt", "\n").unwrap_err().contains("there is no token; give one in each line"));
        let error = read("a.json", r#"[{"text": "<x>"}]"#).unwrap_err();
        assert!(error.contains("expected a list of texts, or of objects"), "{error}");
        assert!(NewToken::read(&folder.path().join("none")).is_err());
    }
}
