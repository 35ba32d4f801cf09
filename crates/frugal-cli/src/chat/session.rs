//! A conversation with a model: its messages within the context, and the next answer.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{anyhow, bail};
use frugal::dataloading::Tokenizer;
use frugal::dataloading::chat::{ChatTemplate, Conversation, Message};
use frugal::text_stream::TextStream;
use models::generation::{FinishReason, GenerationConfig, Generator};
use models::module::LanguageModel;

/// Positions that are left for an answer at least, if the context has four times as many.
const ROOM: usize = 64;

pub(super) struct Session {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    /// The message before the conversation.
    system: Option<Message>,
    messages: Vec<Message>,
    /// The most tokens that the model reads.
    context: usize,
}

/// An answer.
pub(super) struct Answer {
    /// The tokens that the model was given.
    pub(super) prompt: Vec<i64>,
    pub(super) text: String,
    pub(super) tokens: usize,
    /// Why it ended.
    pub(super) ended: &'static str,
    /// Messages that were left out because the context is full.
    pub(super) forgotten: usize,
}

impl Session {
    pub(super) fn new(
        tokenizer: Tokenizer,
        template: ChatTemplate,
        system: Option<&str>,
        context: usize,
    ) -> Self {
        let system = system.map(|text| Message::new("system", text));
        Self { tokenizer, template, system, messages: Vec::new(), context }
    }

    /// Forgets the messages.
    pub(super) fn reset(&mut self) {
        self.messages.clear();
    }

    /// Answers a message: `shown` gets the text as it comes, and ends the answer if it returns false. A message that cannot be answered is
    /// forgotten.
    ///
    /// # Errors
    /// A message that the template refuses, or that is longer than the context; those of the generation.
    pub(super) fn answer(
        &mut self,
        model: &dyn LanguageModel,
        options: &GenerationConfig,
        text: &str,
        stop: &AtomicBool,
        shown: impl FnMut(&str) -> bool,
    ) -> anyhow::Result<Answer> {
        let before = self.messages.clone();
        self.messages.push(Message::new("user", text));
        let answer = self.next(model, options, stop, shown);
        if answer.is_err() {
            self.messages = before;
        }
        answer
    }

    fn next(
        &mut self,
        model: &dyn LanguageModel,
        options: &GenerationConfig,
        stop: &AtomicBool,
        mut shown: impl FnMut(&str) -> bool,
    ) -> anyhow::Result<Answer> {
        let (prompt, forgotten) = self.prompt()?;
        let mut blank = self.blank_before_answer();
        let mut stream = TextStream::new(&self.tokenizer, &[]);
        let (mut text, mut failed) = (String::new(), None);
        let mut callback = |_: usize, tokens: &[i64]| match stream.push(tokens) {
            Ok(new) => {
                let new = without_blank(&new, &mut blank);
                text.push_str(new);
                // A closed pipe ends the answer.
                let read = new.is_empty() || shown(new);
                !read || stop.load(Ordering::Relaxed)
            }
            Err(error) => {
                failed = Some(error);
                true
            }
        };
        let generated =
            Generator::new(model, options)?.generate(std::slice::from_ref(&prompt), &mut callback)?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let generated =
            generated.into_iter().next().ok_or_else(|| anyhow!("the model has generated nothing"))?;
        let rest = stream.finish(&generated.tokens)?;
        let rest = without_blank(&rest, &mut blank);
        shown(rest);
        text.push_str(rest);
        self.messages.push(Message::new("assistant", &text));
        let ended = match generated.finish_reason {
            FinishReason::EndToken => "end token",
            FinishReason::Callback => "interrupted",
            FinishReason::MaxNewTokens => "length",
            FinishReason::MaxSequence => "context",
        };
        Ok(Answer { prompt, text, tokens: generated.tokens.len(), ended, forgotten })
    }

    /// The blanks that the template writes between the prompt and an answer, as Llama 2's does: the model writes them, and they are no part of
    /// its message, before which the template writes them again in the next prompt.
    fn blank_before_answer(&self) -> String {
        const ANSWER: &str = "answer-to-be-found";
        let messages = || self.system.iter().chain(&self.messages).cloned();
        let render = |messages: Vec<Message>, asks| {
            Some(self.template.render(&Conversation::new(messages), asks).ok()?.text)
        };
        let answered = || messages().chain([Message::new("assistant", ANSWER)]).collect();
        let blank = || {
            let (prompt, whole) = (render(messages().collect(), true)?, render(answered(), false)?);
            let (blank, _) = whole.strip_prefix(&prompt)?.split_once(ANSWER)?;
            blank.trim().is_empty().then(|| blank.to_owned())
        };
        blank().unwrap_or_default()
    }

    /// The tokens of the conversation, without its first turns if they do not fit, and how many messages are left out.
    fn prompt(&mut self) -> anyhow::Result<(Vec<i64>, usize)> {
        let most = self.context - ROOM.min(self.context / 4);
        let mut forgotten = 0;
        loop {
            let messages = self.system.iter().chain(&self.messages).cloned();
            let text = self.template.render(&Conversation::new(messages), true)?.text;
            let tokens = self.tokenizer.encode(&text)?;
            if tokens.len() <= most {
                return Ok((tokens.into_iter().map(i64::from).collect(), forgotten));
            }
            // A question goes with its answer.
            let next = self.messages.iter().skip(1).position(|message| message.role() == "user");
            let Some(next) = next else {
                bail!(
                    "the message has {} tokens with its template, and the model reads {most} besides the answer; shorten it",
                    tokens.len()
                );
            };
            self.messages.drain(..=next);
            forgotten += next + 1;
        }
    }
}

/// Returns a part of a text without the blanks that are still to come at its start.
fn without_blank<'t>(mut text: &'t str, blank: &mut String) -> &'t str {
    while let (Some(first), false) = (blank.chars().next(), text.is_empty()) {
        let Some(rest) = text.strip_prefix(first) else {
            blank.clear();
            break;
        };
        text = rest;
        blank.remove(0);
    }
    text
}
