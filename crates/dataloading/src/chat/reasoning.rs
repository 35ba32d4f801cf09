//! Templates of models that reason before they answer.
//!
//! **The prompt opens the reasoning** (DeepSeek-R1, QwQ): it ends with `<think>\n`, and the template leaves reasoning out of every answer
//! that it writes. So no rendering has what the model writes after its prompt. The built-in variant for training writes it: after the
//! prompt the rest of the reasoning, `</think>`, the answer, and what the template writes after an answer. An answer without reasoning
//! begins with `</think>`.
//!
//! **The history has no reasoning** (Qwen3): only the last answer has its own. Each answer is a row, after the prompt that inference
//! reads.

use std::fmt;

use serde_json::Value;

use super::conversation::{Conversation, Message};
use super::template::ChatTemplate;

/// Takes the place of an answer, to see what a template writes around it. Unicode reserves it for use inside a program.
const PLACEHOLDER: char = '\u{fdd2}';
/// Fields of a message with its reasoning, by the names in use.
const FIELDS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// How the rows of a conversation differ from the template's text of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrainingVariant {
    /// The prompt opens the reasoning, and the template's answers have none: the rows have it.
    OpenedReasoning {
        /// The prompt's end, without blanks: `<think>`.
        tag: String,
    },
    /// Earlier answers have no reasoning, so each answer is a row of its own.
    ReasoningOfLastAnswer,
}

impl fmt::Display for TrainingVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OpenedReasoning { tag } => write!(
                f,
                "opened-reasoning: the template's prompt ends with `{tag}`, and its answers leave reasoning out; each answer is a row \
                 after that prompt, with its reasoning or an empty one"
            ),
            Self::ReasoningOfLastAnswer => f.write_str(
                "reasoning-of-last-answer: the template leaves reasoning out of earlier answers; each answer with another history is a \
                 row of its own, after the prompt that the model reads to answer",
            ),
        }
    }
}

/// The texts that open the reasoning, at the end of a prompt, and end it.
struct Opening<'a> {
    text: &'a str,
    tag: &'a str,
    close: String,
}

impl<'a> Opening<'a> {
    /// Reads what follows the start of an answer in a prompt: `<think>` or `[THINK]`, and blanks.
    fn find(text: &'a str) -> Option<Self> {
        let tag = text.trim();
        let close = match (tag.strip_prefix('<'), tag.strip_prefix('[')) {
            (Some(name), _) if name.ends_with('>') => format!("</{name}"),
            (_, Some(name)) if name.ends_with(']') => format!("[/{name}"),
            _ => return None,
        };
        Some(Self { text, tag, close })
    }

    /// Returns what a model writes after the opening, up to the end of its answer's text.
    fn answer(&self, message: &Message, content: &str) -> String {
        if content.contains(&self.close) {
            return match content.trim_start().strip_prefix(self.tag) {
                Some(reasoning) => reasoning.trim_start_matches('\n').to_owned(),
                None => content.to_owned(),
            };
        }
        let mut fields = FIELDS.iter().filter_map(|name| message.fields.get(*name).and_then(Value::as_str));
        let reasoning = fields.find(|text| !text.trim().is_empty()).unwrap_or_default().trim_matches('\n');
        let begin = if self.text.ends_with('\n') { "" } else { "\n" };
        // A blank line would be one token with the line break that the prompt ends with, which inference does not read.
        let end = if reasoning.is_empty() { "" } else { "\n" };
        format!("{begin}{reasoning}{end}{}\n\n{}", self.close, content.trim_start_matches('\n'))
    }
}

impl ChatTemplate {
    /// Returns the built-in variant with which conversations are made rows, for the templates of models that reason.
    pub fn training_variant(&self) -> Option<TrainingVariant> {
        if self.marks_generation() {
            return None;
        }
        const REASONING: &str = "reasoning-to-be-found";
        let question = Message::new("user", "question");
        let answer = Message::new("assistant", &format!("<think>\n{REASONING}\n</think>\n\nanswer"));
        let render = |messages: &[Message], prompt| {
            let rendered = self.render(&Conversation::new(messages.iter().cloned()), prompt);
            rendered.ok().map(|rendered| rendered.text)
        };
        let prompt = render(std::slice::from_ref(&question), true)?;
        let rendered = render(&[question.clone(), answer.clone()], false)?;
        let conversation = Conversation::new([question.clone(), answer.clone()]);
        if !rendered.starts_with(&prompt) {
            let around = self.around_answer(&conversation, 1)?;
            let opening = Opening::find(prompt.strip_prefix(&around[0])?)?;
            return Some(TrainingVariant::OpenedReasoning { tag: opening.tag.to_owned() });
        }
        let history = render(&[question.clone(), answer, question], false)?;
        let is_left_out = rendered.contains(REASONING) && !history.contains(REASONING);
        is_left_out.then_some(TrainingVariant::ReasoningOfLastAnswer)
    }

    /// Returns what a model writes after a prompt that opens its reasoning, where the answer at a message is rendered as `whole`;
    /// `None` if the prompt opens none.
    pub(super) fn after_opening(
        &self,
        conversation: &Conversation,
        at: usize,
        prompt: &str,
        rendered: &str,
    ) -> Option<String> {
        let message = &conversation.messages[at];
        let [before, after] = self.around_answer(conversation, at)?;
        let opening = Opening::find(prompt.strip_prefix(&before)?)?;
        Some(match message.fields.get("content").and_then(Value::as_str) {
            Some(content) => opening.answer(message, content) + &after,
            // Calls of tools alone.
            None => opening.answer(message, "") + rendered.strip_prefix(&before)?,
        })
    }

    /// Returns what a model writes after a prompt, where the answer at a message is rendered as `whole`, with another text before the
    /// question: Mistral's templates write a system message into the last turn of a user, which a whole conversation does not end with.
    /// `None` if what follows the question is another text, too.
    pub(super) fn after_question(
        &self,
        conversation: &Conversation,
        at: usize,
        prompt: &str,
        rendered: &str,
    ) -> Option<String> {
        let [before, _] = self.around_answer(conversation, at)?;
        let question = conversation.messages.get(at.checked_sub(1)?)?.fields.get("content")?.as_str()?.trim();
        let end =
            |text: &str| (!question.is_empty()).then(|| Some(text.rfind(question)? + question.len()))?;
        let answer = rendered.strip_prefix(before.get(..end(&before)?)?)?;
        Some(answer.strip_prefix(prompt.get(end(prompt)?..)?)?.to_owned())
    }

    /// Returns what the template writes before and after the text of the answer at a message, which ends the conversation.
    fn around_answer(&self, conversation: &Conversation, at: usize) -> Option<[String; 2]> {
        let mut messages = conversation.messages[..=at].to_vec();
        let fields = &mut messages[at].fields;
        if !fields.get("content").is_some_and(Value::is_string) {
            // A template may write calls of tools in another way beside a text.
            fields.retain(|name, _| name == "role");
        }
        fields.insert("content".to_owned(), PLACEHOLDER.to_string().into());
        let text = self.render_messages(conversation, &messages, false).ok()?.text;
        let (before, after) = text.split_once(PLACEHOLDER)?;
        (!after.contains(PLACEHOLDER)).then(|| [before.to_owned(), after.to_owned()])
    }
}
