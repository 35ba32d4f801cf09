//! The content of a record, in each format.

use serde_json::{Map, Value};

use super::messages;
use super::parquet_file::NOT_TEXT;
use super::preference;
use super::rated;
use super::record_format::RecordFormat;
use crate::batch::IGNORE_INDEX;
use crate::chat::{Conversation, Message};
use crate::text::json_lines::kind;

/// The content of a record.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Messages.
    Conversation(Conversation),
    /// A question and its answer, as messages and as texts, for models with and without a chat template.
    Exchange {
        /// The record as messages.
        conversation: Conversation,
        /// The text before the answer.
        prompt: String,
        /// The answer.
        completion: String,
    },
    /// A text to continue, and its continuation.
    Completion {
        /// Read.
        prompt: String,
        /// Learned.
        completion: String,
    },
    /// Two answers to one prompt. Of each what follows the prompt is learned.
    Pair {
        /// The better one: a conversation or a completion.
        chosen: Box<Content>,
        /// The other one.
        rejected: Box<Content>,
    },
    /// An answer to a prompt, and whether it is desirable.
    Rated {
        /// A conversation or a completion. What follows the prompt is learned.
        answer: Box<Content>,
        /// The label.
        is_desirable: bool,
    },
    /// A text that is learned as a whole.
    Text(String),
    /// Tokens.
    Tokens {
        /// Ids.
        ids: Vec<u32>,
        /// For each id, whether it is learned.
        is_trained: Vec<bool>,
    },
}

impl RecordFormat {
    pub(super) fn content(self, fields: &Map<String, Value>, text_field: &str) -> Result<Content, String> {
        let text = |field: &str| string(fields, field);
        match self {
            Self::Preference => preference::content(fields),
            Self::Rated => rated::content(fields),
            Self::Messages => Ok(Content::Conversation(messages::conversation(fields, "messages")?)),
            Self::Conversations => {
                Ok(Content::Conversation(messages::conversation(fields, "conversations")?))
            }
            Self::PromptCompletion => prompt_completion(fields),
            Self::Instruction => instruction(fields),
            Self::QuestionAnswer => {
                let (question, answer) = (text("question")?, text("answer")?);
                Ok(Content::Exchange {
                    conversation: exchange(fields, &question, &answer)?,
                    prompt: format!("Question: {question}\nAnswer:"),
                    completion: format!(" {answer}"),
                })
            }
            Self::Text => Ok(Content::Text(text(text_field)?)),
            Self::Tokens => tokens(fields),
        }
    }
}

pub(super) fn string(fields: &Map<String, Value>, field: &str) -> Result<String, String> {
    match fields.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Object(bytes)) if bytes.contains_key(NOT_TEXT) => {
            Err(format!("`{field}` has {NOT_TEXT}; write the column as text in UTF-8, or remove the record"))
        }
        Some(other) => Err(format!("`{field}` is {}, expected a text", kind(other))),
        None => Err(format!("no `{field}`; the fields here are: {}", names(fields))),
    }
}

pub(super) fn names(fields: &Map<String, Value>) -> String {
    let names: Vec<&str> = fields.keys().map(String::as_str).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

pub(super) fn exchange(
    fields: &Map<String, Value>,
    user: &str,
    assistant: &str,
) -> Result<Conversation, String> {
    let mut conversation = messages::beside(fields)?;
    if let Some(system) = fields.get("system").and_then(Value::as_str).filter(|text| !text.is_empty()) {
        conversation.messages.push(Message::new("system", system));
    }
    conversation.messages.extend([Message::new("user", user), Message::new("assistant", assistant)]);
    Ok(conversation)
}

pub(super) fn prompt_completion(fields: &Map<String, Value>) -> Result<Content, String> {
    let is_list = |field: &str| fields.get(field).is_some_and(Value::is_array);
    if !is_list("prompt") && !is_list("completion") {
        return Ok(Content::Completion {
            prompt: string(fields, "prompt")?,
            completion: string(fields, "completion")?,
        });
    }
    let part = |field: &str, role: &str| match is_list(field) {
        true => messages::messages(fields, field),
        false => Ok(vec![Message::new(role, &string(fields, field)?)]),
    };
    let mut prompt = part("prompt", "user")?;
    // The prompt is not learned, whatever its messages are.
    prompt.iter_mut().for_each(|message| message.is_trained = false);
    prompt.extend(part("completion", "assistant")?);
    Ok(Content::Conversation(Conversation { messages: prompt, ..messages::beside(fields)? }))
}

fn instruction(fields: &Map<String, Value>) -> Result<Content, String> {
    let (instruction, output) = (string(fields, "instruction")?, string(fields, "output")?);
    let input = match fields.get("input") {
        None | Some(Value::Null) => String::new(),
        Some(_) => string(fields, "input")?,
    };
    if fields.get("history").and_then(Value::as_array).is_some_and(|turns| !turns.is_empty()) {
        return Err("`history` is not read; write the turns as `messages`".to_owned());
    }
    let (user, plain) = match input.trim().is_empty() {
        true => (instruction.clone(), String::new()),
        false => (format!("{instruction}\n\n{input}"), format!("### Input:\n{input}\n\n")),
    };
    Ok(Content::Exchange {
        conversation: exchange(fields, &user, &output)?,
        prompt: format!("### Instruction:\n{instruction}\n\n{plain}### Response:\n"),
        completion: output,
    })
}

fn tokens(fields: &Map<String, Value>) -> Result<Content, String> {
    let list = |field: &str| match fields.get(field) {
        Some(Value::Array(numbers)) => numbers
            .iter()
            .map(|number| {
                number.as_i64().ok_or_else(|| format!("`{field}` has {number}, expected whole numbers"))
            })
            .collect::<Result<Vec<i64>, String>>(),
        Some(other) => Err(format!("`{field}` is {}, expected a list of numbers", kind(other))),
        None => Err(format!("no `{field}`; the fields here are: {}", names(fields))),
    };
    let of_row = list("input_ids")?;
    let ids = of_row
        .iter()
        .map(|id| u32::try_from(*id).map_err(|_| format!("`input_ids` has {id}, which is no token")));
    let ids: Vec<u32> = ids.collect::<Result<_, _>>()?;
    if fields.get("attention_mask").is_some_and(|mask| !mask.is_null())
        && list("attention_mask")?.iter().any(|seen| *seen != 1)
    {
        return Err(
            "`attention_mask` is not 1 everywhere; remove the padding, which is added when batches are made"
                .to_owned(),
        );
    }
    let is_trained = match fields.get("labels") {
        None | Some(Value::Null) => vec![true; ids.len()],
        Some(_) => {
            let labels = list("labels")?;
            if labels.len() != ids.len() {
                return Err(format!(
                    "{} `input_ids` and {} `labels`; expected as many",
                    ids.len(),
                    labels.len()
                ));
            }
            if let Some((at, (id, label))) = of_row
                .iter()
                .zip(&labels)
                .enumerate()
                .find(|(_, (id, label))| **label != IGNORE_INDEX && label != id)
            {
                return Err(format!(
                    "label {at} is {label}, and the token there {id}; expected the token itself (labels are not shifted) or \
                     {IGNORE_INDEX}"
                ));
            }
            labels.iter().map(|label| *label != IGNORE_INDEX).collect()
        }
    };
    Ok(Content::Tokens { ids, is_trained })
}
