//! Conversations, as records hold them.

use serde_json::{Map, Value};

/// A message: the fields that a template reads (`role`, `content`, `tool_calls`, …).
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Message {
    /// The fields, in the record's order.
    pub fields: Map<String, Value>,
    /// Whether an answer is learned: false for a `weight` of 0, or `train` of false. Messages of other roles are never learned.
    pub is_trained: bool,
}

impl Message {
    /// Creates a message with a role and a text.
    pub fn new(role: &str, content: &str) -> Self {
        let fields = [("role", role), ("content", content)];
        let fields = fields.map(|(name, text)| (name.to_owned(), Value::from(text)));
        Self { fields: fields.into_iter().collect(), is_trained: true }
    }

    /// Returns the role; empty for a message without one.
    pub fn role(&self) -> &str {
        self.fields.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns whether the model writes this message.
    pub fn is_answer(&self) -> bool {
        matches!(self.role(), "assistant" | "model")
    }
}

/// Messages, and what a template needs beside them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// The messages, in order.
    pub messages: Vec<Message>,
    /// Descriptions of the functions that the model may call.
    pub tools: Option<Value>,
    /// Documents to answer from.
    pub documents: Option<Value>,
    /// Further variables of the template, such as `enable_thinking`; they override those of the template's options.
    pub arguments: Map<String, Value>,
}

impl Conversation {
    /// Creates a conversation of messages.
    pub fn new(messages: impl IntoIterator<Item = Message>) -> Self {
        Self { messages: messages.into_iter().collect(), ..Self::default() }
    }

    /// Returns the conversation with the arguments of tool calls as objects, where they are texts of JSON (as OpenAI's are): most
    /// templates write them with `tojson`. `None` if nothing changes.
    pub(super) fn with_parsed_arguments(&self) -> Option<Self> {
        let mut parsed = self.clone();
        let mut changed = false;
        for message in &mut parsed.messages {
            let calls = message.fields.get_mut("tool_calls").and_then(Value::as_array_mut);
            for call in calls.into_iter().flatten() {
                let of_function = call.get("function").is_some_and(Value::is_object);
                let call = if of_function { &mut call["function"] } else { call };
                let Some(arguments) = call.get_mut("arguments") else { continue };
                let object = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
                if let Some(object) = object.filter(Value::is_object) {
                    *arguments = object;
                    changed = true;
                }
            }
        }
        changed.then_some(parsed)
    }
}
