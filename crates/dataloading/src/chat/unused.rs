//! The parts of a conversation that a template leaves out.
//!
//! A template reads the fields that its author knew. Others (calls of tools under a template without them, reasoning under another
//! name, messages of a role that it passes over) change nothing in the text, so nothing of them is learned, and nothing says so. Here
//! each is taken out of the conversation: if its rows stay the same, the template left it out.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::conversation::{Conversation, Message};
use super::template::ChatTemplate;
use super::turns::{EndTokens, Mask, Segment};

/// Fields of a message that every template reads, or that only refer to another message.
const EXPECTED: [&str; 4] = ["role", "content", "tool_call_id", "id"];
/// Ends the reasoning within the text of an answer.
const REASONING_END: &str = "</think>";

/// A part of a conversation.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Tools,
    Documents,
    Argument(String),
    Role(String),
    Field(String),
    Reasoning,
}

impl Part {
    /// Its name in a note.
    fn name(&self) -> String {
        match self {
            Self::Tools => "`tools`".to_owned(),
            Self::Documents => "`documents`".to_owned(),
            Self::Argument(name) => format!("`{name}` of `chat_template_kwargs`"),
            Self::Role(role) => format!("messages with the role `{role}`"),
            Self::Field(name) => format!("`{name}` of messages"),
            Self::Reasoning => format!("the reasoning before `{REASONING_END}` in answers"),
        }
    }

    /// The parts of a conversation that a template may leave out.
    fn all(conversation: &Conversation) -> BTreeSet<Self> {
        let is_set = |value: &Value| match value {
            Value::Null => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(items) => !items.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            _ => true,
        };
        let mut parts = BTreeSet::new();
        parts.extend(conversation.tools.is_some().then_some(Self::Tools));
        parts.extend(conversation.documents.is_some().then_some(Self::Documents));
        parts.extend(conversation.arguments.keys().cloned().map(Self::Argument));
        for message in &conversation.messages {
            if !message.is_answer() && message.role() != "user" {
                parts.insert(Self::Role(message.role().to_owned()));
            }
            let fields = message
                .fields
                .iter()
                .filter(|(name, value)| !EXPECTED.contains(&name.as_str()) && is_set(value));
            parts.extend(fields.map(|(name, _)| Self::Field(name.clone())));
            parts.extend(reasoning_end(message).map(|_| Self::Reasoning));
        }
        parts
    }

    fn remove_from(&self, conversation: &mut Conversation) {
        let messages = &mut conversation.messages;
        let fields = |messages: &mut Vec<Message>, change: &dyn Fn(&mut Map<String, Value>)| {
            messages.iter_mut().for_each(|message| change(&mut message.fields));
        };
        match self {
            Self::Tools => conversation.tools = None,
            Self::Documents => conversation.documents = None,
            Self::Argument(name) => drop(conversation.arguments.shift_remove(name)),
            Self::Role(role) => messages.retain(|message| message.role() != role),
            Self::Field(name) => fields(messages, &|fields| drop(fields.shift_remove(name))),
            Self::Reasoning => {
                for message in messages {
                    if let Some(end) = reasoning_end(message) {
                        let rest = message.fields["content"].as_str().unwrap_or_default()[end..].to_owned();
                        message.fields.insert("content".to_owned(), rest.into());
                    }
                }
            }
        }
    }
}

/// The end of the reasoning within an answer's text.
fn reasoning_end(message: &Message) -> Option<usize> {
    let text = message.fields.get("content").and_then(Value::as_str).filter(|_| message.is_answer())?;
    text.rfind(REASONING_END).map(|at| at + REASONING_END.len())
}

impl ChatTemplate {
    /// Returns the names of what a conversation has and this template leaves out of its rows, which are those of
    /// [`rows`](Self::rows) with the same mask and ends.
    pub fn unused(
        &self,
        conversation: &Conversation,
        rows: &[Vec<Segment>],
        mask: Mask,
        ends: &EndTokens,
    ) -> Vec<String> {
        if rows.is_empty() {
            return Vec::new();
        }
        let is_unused = |part: &Part| {
            let mut without = conversation.clone();
            part.remove_from(&mut without);
            // A template that refuses what is left has read it.
            self.rows(&without, mask, ends).is_ok_and(|left| left == rows)
        };
        let parts = Part::all(conversation);
        parts.iter().filter(|part| is_unused(part)).map(Part::name).collect()
    }
}
