//! The formats of records, and which of them a file has.

use std::fmt;

use serde_json::{Map, Value};

use super::content::names;
use super::messages::is_near;
use super::rated;
use super::weight::WEIGHT;
use super::{FileKind, Record};
use crate::error::{Error, Result};

/// Records that are read to find the format of a file.
pub const DETECTED_ROWS: usize = 100;

/// The meaning of a record's fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RecordFormat {
    /// `chosen` and `rejected`, with their `prompt` or without: texts, or lists of messages.
    Preference,
    /// `completion` and a `label` that is true or false, with the `prompt` or without: texts, or lists of messages.
    Rated,
    /// `messages`: a list of `{"role": …, "content": …}`; with `tools` if there are any.
    Messages,
    /// `conversations`: a list of `{"from": "human", "value": …}`, ShareGPT's format.
    Conversations,
    /// `prompt` and `completion`: texts, or lists of messages.
    PromptCompletion,
    /// `instruction`, `input` (may be empty) and `output`: Alpaca's format.
    Instruction,
    /// `question` and `answer`.
    QuestionAnswer,
    /// `input_ids`, and `labels` if there are any.
    Tokens,
    /// `text`, or another field that holds one.
    Text,
}

impl RecordFormat {
    /// All formats; of those that a record could have, the first counts.
    pub const ALL: [Self; 9] = [
        Self::Preference,
        Self::Rated,
        Self::Messages,
        Self::Conversations,
        Self::PromptCompletion,
        Self::Instruction,
        Self::QuestionAnswer,
        Self::Tokens,
        Self::Text,
    ];

    /// Returns the fields that it needs.
    pub fn fields(self, text_field: &str) -> Vec<&str> {
        match self {
            Self::Preference => vec!["chosen", "rejected"],
            Self::Rated => vec!["completion", "label"],
            Self::Messages => vec!["messages"],
            Self::Conversations => vec!["conversations"],
            Self::PromptCompletion => vec!["prompt", "completion"],
            Self::Instruction => vec!["instruction", "output"],
            Self::QuestionAnswer => vec!["question", "answer"],
            Self::Tokens => vec!["input_ids"],
            Self::Text => vec![text_field],
        }
    }

    /// Returns the fields that it reads of a record if they are there.
    fn beside(self, fields: &Map<String, Value>) -> &'static [&'static str] {
        let has_messages =
            || ["prompt", "completion"].iter().any(|field| fields.get(*field).is_some_and(Value::is_array));
        match self {
            Self::Preference => &["prompt", "system", "tools", "documents", "chat_template_kwargs"],
            Self::Messages | Self::Conversations | Self::QuestionAnswer => {
                &["tools", "documents", "chat_template_kwargs", "system"]
            }
            Self::Rated => &["prompt", "tools", "documents", "chat_template_kwargs"],
            Self::PromptCompletion if has_messages() => &["tools", "documents", "chat_template_kwargs"],
            Self::Instruction => {
                &["tools", "documents", "chat_template_kwargs", "system", "input", "history"]
            }
            Self::Tokens => &["labels", "attention_mask"],
            Self::PromptCompletion | Self::Text => &[],
        }
    }

    /// Returns the format of a record by its fields; `None` if it has none of the formats.
    pub fn from_fields(fields: &Map<String, Value>, text_field: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.is_of(fields, text_field))
    }

    /// Whether a record has the fields that it needs.
    fn is_of(self, fields: &Map<String, Value>, text_field: &str) -> bool {
        let has = |field: &&str| fields.get(*field).is_some_and(|value| !value.is_null());
        // A label may be one of classes.
        self.fields(text_field).iter().all(has) && (self != Self::Rated || rated::label(fields).is_some())
    }
}

impl fmt::Display for RecordFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Preference => "chosen and rejected answers",
            Self::Rated => "answers with a label",
            Self::Messages => "messages",
            Self::Conversations => "conversations",
            Self::PromptCompletion => "prompt and completion",
            Self::Instruction => "instruction, input and output",
            Self::QuestionAnswer => "question and answer",
            Self::Tokens => "token ids",
            Self::Text => "text",
        })
    }
}

/// The formats that the first records of a file have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detected {
    /// The formats, and how many records have each, the most frequent first.
    pub formats: Vec<(RecordFormat, usize)>,
    /// Fields that the records have and that are not read.
    pub ignored: Vec<String>,
}

impl Detected {
    /// Finds the formats of the first [`DETECTED_ROWS`] records. Records that cannot be read, or are in none of the formats, are passed over
    /// here: whoever reads all records gets their errors.
    ///
    /// # Errors
    /// No record can be read in one of the formats.
    pub fn new(records: impl Iterator<Item = Result<Record>>, text_field: &str) -> Result<Self> {
        let mut formats: Vec<(RecordFormat, usize)> = Vec::new();
        let (mut ignored, mut first_error, mut seen) = (Vec::new(), None, 0);
        for record in records.take(DETECTED_ROWS) {
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    first_error.get_or_insert(error);
                    continue;
                }
            };
            let Some(format) = RecordFormat::from_fields(&record.fields, text_field) else {
                first_error.get_or_insert_with(|| record.location.error(unknown(&record, text_field)));
                continue;
            };
            seen += 1;
            match formats.iter_mut().find(|(other, _)| *other == format) {
                Some((_, count)) => *count += 1,
                None => formats.push((format, 1)),
            }
            for name in record.fields.keys() {
                let name_of = name.as_str();
                let is_read = format.fields(text_field).contains(&name_of)
                    || format.beside(&record.fields).contains(&name_of)
                    || name_of == WEIGHT;
                if !is_read && !ignored.contains(name) {
                    ignored.push(name.clone());
                }
            }
        }
        match first_error {
            Some(error) if seen == 0 => return Err(error),
            None if seen == 0 => {
                return Err(Error::Empty {
                    from: "data".to_owned(),
                    reason: "there is no record in it".to_owned(),
                });
            }
            _ => {}
        }
        formats.sort_by_key(|(format, count)| (std::cmp::Reverse(*count), *format));
        Ok(Self { formats, ignored })
    }

    /// Returns the format of a record.
    ///
    /// # Errors
    /// A format that none of the first records has.
    pub fn format(&self, record: &Record, text_field: &str) -> Result<RecordFormat> {
        match RecordFormat::ALL
            .into_iter()
            .filter(|format| self.formats.iter().any(|(known, _)| known == format))
            // A record may have the fields of several formats.
            .find(|format| format.is_of(&record.fields, text_field))
        {
            Some(format) => Ok(format),
            None => Err(record.location.error(match RecordFormat::from_fields(&record.fields, text_field) {
                None => unknown(record, text_field),
                Some(other) => {
                    format!("the record has {other}, and the data's format is {self}; correct or remove it")
                }
            })),
        }
    }
}

impl fmt::Display for Detected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.formats.iter().map(|(format, _)| format.to_string()).collect();
        f.write_str(&names.join("; or "))
    }
}

fn unknown(record: &Record, text_field: &str) -> String {
    let fields = &record.fields;
    for [there, missing] in [["chosen", "rejected"], ["rejected", "chosen"]] {
        if fields.contains_key(there) && fields.get(missing).is_none_or(Value::is_null) {
            return format!("the record has `{there}` and no `{missing}`; a pair needs both");
        }
    }
    let mut known = RecordFormat::ALL.iter().map(|format| format.fields(text_field));
    if let Some(format) = known.find(|names| names.iter().all(|name| fields.contains_key(*name))) {
        let empty: Vec<String> = format
            .iter()
            .filter(|name| fields.get(**name).is_some_and(Value::is_null))
            .map(|name| format!("`{name}`"))
            .collect();
        return format!("{} is null, expected a value; correct or remove the record", empty.join(" and "));
    }
    let is_csv = matches!(FileKind::from_path(&record.location.path), FileKind::Csv { .. });
    let is_only = |name: &&String| is_csv && fields.len() == 1 && name.contains([';', '|', '\t']);
    if let Some(name) = fields.keys().find(is_only) {
        let separator = if name.contains(';') {
            ";"
        } else if name.contains('|') {
            "|"
        } else {
            "a tab"
        };
        return format!(
            "the only column is `{name}`: values seem to be separated by {separator}; expected commas, or tabs in a file named .tsv"
        );
    }
    if let Some((name, meant)) = misspelt(fields, text_field) {
        return format!("the fields are {}; did you mean `{meant}` instead of `{name}`?", names(fields));
    }
    let list = |value: &Value| value.as_array().is_some_and(|all| all.iter().any(Value::is_object));
    if let [(name, value)] = fields.iter().filter(|(_, value)| list(value)).collect::<Vec<_>>()[..]
        && value.as_array().is_some_and(|all| all.iter().all(Value::is_object))
    {
        return format!(
            "the fields are {}, and `{name}` is a list of objects; if those are the records, write them alone: \
             `jq -c '.{name}[]' FILE > rows.jsonl`",
            names(fields)
        );
    }
    let remedy = templates(fields).map_or_else(String::new, |flags| {
        format!("; or say how a prompt and an answer are made of them: {flags}")
    });
    format!(
        "the fields are {}; expected `messages`, `conversations`, `prompt` and `completion`, `instruction` and `output`, \
         `question` and `answer`, `input_ids`, or `{text_field}` (another field that holds the text is named with --field){remedy}",
        names(fields)
    )
}

/// A field, and the missing one of a format that a typing mistake or two turn it into.
fn misspelt<'a>(fields: &'a Map<String, Value>, text_field: &'a str) -> Option<(&'a str, &'a str)> {
    RecordFormat::ALL.iter().find_map(|format| {
        let wanted = format.fields(text_field);
        let missing: Vec<&str> = wanted.into_iter().filter(|name| !fields.contains_key(*name)).collect();
        let [meant] = missing[..] else { return None };
        fields.keys().find(|name| is_near(name, meant)).map(|name| (name.as_str(), meant))
    })
}

/// Flags that make a prompt and a completion of texts of a record: the first with several words, which a number or a name has not, and the
/// last one after it. `None` if it has fewer than two.
fn templates(fields: &Map<String, Value>) -> Option<String> {
    let texts: Vec<(&String, &str)> =
        fields.iter().filter_map(|(name, value)| Some((name, value.as_str()?.trim()))).collect();
    let has_words = |(_, text): &&(&String, &str)| text.contains(char::is_whitespace);
    let first = texts.iter().position(|text| has_words(&text)).filter(|first| first + 1 < texts.len());
    let (first, rest) = texts[first.unwrap_or(0)..].split_first()?;
    let last = rest.iter().rev().find(has_words).or(rest.last())?;
    Some(format!("--prompt-template '{{{}}}' --completion-template '{{{}}}'", first.0, last.0))
}
