//! Messages of a record, in OpenAI's format (`role`, `content`) or in ShareGPT's (`from`, `value`).

use serde_json::{Map, Value};

use crate::chat::{Conversation, Message};
use crate::text::json_lines::kind;

/// ShareGPT's names of the roles.
const ROLES: [(&str, &str); 16] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("bot", "assistant"),
    ("model", "assistant"),
    ("assistant", "assistant"),
    ("function_call", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function", "tool"),
    ("function_response", "tool"),
    ("developer", "developer"),
];

/// Roles whose typing mistakes are errors.
const MEANT: [&str; 4] = ["assistant", "user", "system", "developer"];

/// Axolotl's fields for whether a message is learned.
const TRAINED: [&str; 2] = ["train", "training"];

/// Returns the conversation of a record: its messages under `field`, and `tools`, `documents` and `chat_template_kwargs`.
pub(super) fn conversation(record: &Map<String, Value>, field: &str) -> Result<Conversation, String> {
    with_messages(record, messages(record, field)?)
}

/// Returns a conversation of messages, with what a record has beside them.
pub(super) fn with_messages(
    record: &Map<String, Value>,
    messages: Vec<Message>,
) -> Result<Conversation, String> {
    let mut conversation = Conversation { messages, ..beside(record)? };
    if let Some(system) = record.get("system").and_then(Value::as_str).filter(|text| !text.is_empty()) {
        let has_own = conversation.messages.first().is_some_and(|first| first.role() == "system");
        if !has_own {
            conversation.messages.insert(0, Message::new("system", system));
        }
    }
    Ok(conversation)
}

/// Returns a conversation without messages, with what a record has beside them.
pub(super) fn beside(record: &Map<String, Value>) -> Result<Conversation, String> {
    let list = |field: &str| match parsed(record.get(field)) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(items)) if items.is_empty() => Ok(None),
        Some(list @ Value::Array(_)) => Ok(Some(list)),
        Some(other) => Err(format!("`{field}` is {}, expected a list", kind(&other))),
    };
    let arguments = match parsed(record.get("chat_template_kwargs")) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(other) => return Err(format!("`chat_template_kwargs` is {}, expected an object", kind(&other))),
    };
    Ok(Conversation {
        tools: list("tools")?,
        documents: list("documents")?,
        arguments,
        ..Conversation::default()
    })
}

/// Returns the messages under a field.
pub(super) fn messages(record: &Map<String, Value>, field: &str) -> Result<Vec<Message>, String> {
    let list = match parsed(record.get(field)) {
        Some(Value::Array(list)) => list,
        Some(other) => return Err(format!("`{field}` is {}, expected a list of messages", kind(&other))),
        None => return Err(format!("no `{field}`")),
    };
    if list.is_empty() {
        return Err(format!("`{field}` is empty, expected at least one message; remove the record"));
    }
    let numbered = list.into_iter().enumerate();
    let messages: Vec<Message> = numbered
        .map(|(at, value)| {
            message(value).map_err(|reason| format!("`{field}`, message {}: {reason}", at + 1))
        })
        .collect::<Result<_, String>>()?;
    // Under another name a turn would not be learned. Templates may have calls as a role of their own.
    let has_answers = messages.iter().any(Message::is_answer);
    for (at, message) in messages.iter().enumerate() {
        let known = ROLES.iter().find(|(name, role)| name != role && *name == message.role());
        let is_wrong = |(name, role): &&(&str, &str)| {
            matches!(*role, "user" | "assistant") && !(has_answers && *name == "function_call")
        };
        if let Some((name, role)) = known.filter(is_wrong) {
            return Err(format!("`{field}`, message {}: `role` is \"{name}\"; expected \"{role}\"", at + 1));
        }
    }
    Ok(messages)
}

/// A column of CSV has JSON as text.
fn parsed(value: Option<&Value>) -> Option<Value> {
    match value? {
        Value::String(text) if text.trim().is_empty() => None,
        Value::String(text) => {
            Some(serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.as_str())))
        }
        other => Some(other.clone()),
    }
}

/// Whether a typing mistake or two, one for each four letters, turn `name` into `meant`.
pub(super) fn is_near(name: &str, meant: &str) -> bool {
    (1..=meant.len() / 4).contains(&strsim::damerau_levenshtein(name, meant))
}

/// The role that a typing mistake or two turn into `role`. A template may have roles of its own, so others pass.
fn misspelt(role: &str) -> Option<&'static str> {
    let is_known = ROLES.iter().any(|(name, _)| *name == role);
    MEANT.iter().find(|name| is_near(role, name)).copied().filter(|_| !is_known)
}

fn message(value: Value) -> Result<Message, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("{}, expected an object with `role` and `content`", kind(&value)));
    };
    if !fields.contains_key("role") && fields.contains_key("from") {
        rename(&mut fields)?;
    }
    match fields.get("role") {
        Some(Value::String(role)) if !role.trim().is_empty() => {
            if let Some(meant) = misspelt(role) {
                return Err(format!("`role` is \"{role}\"; did you mean \"{meant}\"?"));
            }
        }
        Some(other) => return Err(format!("`role` is {other}, expected a text such as \"user\"")),
        None => {
            let names: Vec<&str> = fields.keys().map(String::as_str).collect();
            return Err(format!("no `role`; the fields here are: {}", names.join(", ")));
        }
    }
    let is_weighted = match fields.shift_remove("weight") {
        None | Some(Value::Null) => true,
        Some(weight) => match weight.as_f64() {
            Some(1.0) => true,
            Some(0.0) => false,
            _ => return Err(format!("`weight` is {weight}; expected 0 (not learned) or 1")),
        },
    };
    let is_trained = is_marked(&mut fields)? && is_weighted;
    let calls = fields.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    let content = fields.get("content");
    let text = match content {
        None | Some(Value::Null) if calls => None,
        None | Some(Value::Null) => return Err("no `content`, and no `tool_calls` either".to_owned()),
        Some(Value::String(_)) => None,
        Some(Value::Array(parts)) => Some(joined(parts)?),
        Some(other) => return Err(format!("`content` is {}, expected a text", kind(other))),
    };
    if let Some(text) = text {
        fields.insert("content".to_owned(), text.into());
    }
    Ok(Message { fields, is_trained })
}

/// Whether a message is learned by axolotl's marks. Where a message that is no answer is to be learned, the mark stays: it changes nothing.
fn is_marked(fields: &mut Map<String, Value>) -> Result<bool, String> {
    let is_answer = matches!(fields.get("role").and_then(Value::as_str), Some("assistant" | "model"));
    let mut is_trained = true;
    for name in TRAINED {
        match fields.get(name) {
            Some(Value::Bool(true)) if !is_answer => continue,
            None | Some(Value::Bool(true) | Value::Null) => {}
            Some(Value::Bool(false)) => is_trained = false,
            Some(other) => {
                return Err(format!(
                    "`{name}` is {other}; expected false (the message is not learned) or true"
                ));
            }
        }
        fields.shift_remove(name);
    }
    Ok(is_trained)
}

/// Changes `from` and `value` to `role` and `content`.
fn rename(fields: &mut Map<String, Value>) -> Result<(), String> {
    let from = fields.get("from").and_then(Value::as_str).unwrap_or_default().trim().to_ascii_lowercase();
    let Some((_, role)) = ROLES.iter().find(|(name, _)| *name == from) else {
        let names: Vec<&str> = ROLES.iter().map(|(name, _)| *name).collect();
        return Err(format!("`from` is \"{from}\"; expected one of {}", names.join(", ")));
    };
    let old = std::mem::take(fields);
    fields.insert("role".to_owned(), (*role).into());
    for (name, value) in old {
        match name.as_str() {
            "from" => {}
            "value" => drop(fields.insert("content".to_owned(), value)),
            _ => drop(fields.insert(name, value)),
        }
    }
    Ok(())
}

/// Returns the text of a content in parts.
fn joined(parts: &[Value]) -> Result<String, String> {
    let mut text = String::new();
    for part in parts {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text") | None, Some(part)) => text.push_str(part),
            (Some(kind), _) if kind != "text" => {
                return Err(format!("`content` has a part of type \"{kind}\"; only texts can be learned"));
            }
            _ => return Err("`content` has a part without a text".to_owned()),
        }
    }
    Ok(text)
}
