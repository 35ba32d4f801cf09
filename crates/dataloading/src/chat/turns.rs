//! Splits a rendered conversation into segments, and marks those that count in the loss.
//!
//! **If the template marks answers** with `{% generation %}`, the marked spans count in the loss.
//!
//! **If it does not**, prefixes are rendered. For the answer at message *i*, `p` is the rendering of the messages before it with the
//! generation prompt, and `f` is the rendering of these messages and the answer. Inference reads `p` and generates the rest of `f`, so `p`
//! must be a prefix of `f`, and `f[p.len()..]` counts in the loss. If the answer is the first message, `p` comes from `first_prompt`.
//!
//! Templates may render an answer differently once further messages follow it (Qwen3 removes its reasoning). If `f` is not a prefix of the
//! next answer's `p`, a new row begins, so that each row is a text that inference sees. A conversation whose history changes at each answer
//! becomes one row per answer; a conversation whose history stays is one row. If `p` opens the reasoning of an answer, and the template
//! leaves reasoning out, [a variant for training](super::TrainingVariant) renders `f`.
//!
//! **The token that ends a turn always counts in the loss**, or the model would not learn to stop. A span that ends before this token is
//! extended to it. In a template without end tokens (GLM-4: a turn ends where the next begins), it is the first token of the user's next
//! message. A template without either is refused.

use super::conversation::{Conversation, Message};
use super::template::ChatTemplate;
use crate::error::Result;

/// The part of a conversation that counts in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mask {
    /// The answers, except those of weight 0.
    #[default]
    Answers,
    /// The last answer.
    Last,
    /// Everything.
    All,
}

/// A part of a row's text. The text of all segments is tokenized at once, and labelled by the parts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Segment {
    /// The text.
    pub text: String,
    /// Whether its tokens count in the loss.
    pub is_trained: bool,
}

impl Segment {
    fn new(text: &str, is_trained: bool) -> Self {
        Self { text: text.to_owned(), is_trained }
    }
}

/// The texts of the tokens that can end a turn.
#[derive(Debug, Clone, Default)]
pub struct EndTokens {
    /// The tokenizer's added tokens, such as `<|im_end|>`.
    pub added: Vec<String>,
    /// The tokens that end a generation of the model.
    pub model: Vec<String>,
}

impl EndTokens {
    /// Returns the token at the start of a text.
    fn at_start<'a>(&'a self, text: &str) -> Option<&'a str> {
        let tokens = self.added.iter().chain(&self.model).filter(|token| !token.is_empty());
        tokens
            .filter(|token| text.starts_with(token.as_str()))
            .max_by_key(|token| token.len())
            .map(String::as_str)
    }

    /// Returns whether an answer consists of these tokens and white space alone: trained on it, a model would learn to end at once.
    pub fn is_empty_answer(&self, text: &str) -> bool {
        /// In bytes; a longer text is an answer.
        const LONGEST: usize = 160;
        let mut rest = text.trim_start();
        while let Some(token) = self.at_start(rest).filter(|_| text.len() <= LONGEST) {
            rest = rest[token.len()..].trim_start();
        }
        rest.is_empty()
    }

    /// Returns whether a text ends with a token, and white space after it.
    fn at_end(&self, text: &str) -> bool {
        let ends = |text: &str| {
            let mut tokens = self.added.iter().chain(&self.model).filter(|token| !token.is_empty());
            tokens.any(|token| text.ends_with(token.as_str()))
        };
        ends(text) || ends(text.trim_end())
    }
}

impl ChatTemplate {
    /// Returns the rows of a conversation, each in segments; no rows if no part of it counts in the loss.
    ///
    /// # Errors
    /// [`Error::Template`](crate::Error::Template): the errors of [`ChatTemplate::render`]; a prompt that is not a prefix of the conversation
    /// with the answer, with both texts; turns without an end token.
    pub fn rows(
        &self,
        conversation: &Conversation,
        mask: Mask,
        ends: &EndTokens,
    ) -> Result<Vec<Vec<Segment>>> {
        let template = self.chosen(conversation);
        let rows = |conversation: &Conversation| Turns { template, conversation, mask, ends }.rows();
        match conversation.with_parsed_arguments() {
            // Some templates take the arguments of calls as text.
            Some(parsed) => rows(&parsed).or_else(|error| rows(conversation).map_err(|_| error)),
            None => rows(conversation),
        }
    }
}

/// A conversation to be divided into rows.
struct Turns<'a> {
    template: &'a ChatTemplate,
    conversation: &'a Conversation,
    mask: Mask,
    ends: &'a EndTokens,
}

/// A row that later turns may join.
#[derive(Default)]
struct Row {
    segments: Vec<Segment>,
    /// The text of all segments.
    text: String,
}

impl Row {
    fn push(&mut self, text: &str, is_trained: bool) {
        self.text.push_str(text);
        match self.segments.last_mut() {
            Some(last) if !last.is_trained && !is_trained => last.text.push_str(text),
            _ if text.is_empty() => {}
            _ => self.segments.push(Segment::new(text, is_trained)),
        }
    }

    /// Appends the row, cut after its last trained segment; a row without one is dropped.
    fn finish(mut self, rows: &mut Vec<Vec<Segment>>) {
        if let Some(last) = self.segments.iter().rposition(|segment| segment.is_trained) {
            self.segments.truncate(last + 1);
            rows.push(self.segments);
        }
    }
}

impl Turns<'_> {
    fn rows(&self) -> Result<Vec<Vec<Segment>>> {
        if self.mask == Mask::All {
            let text = self.template.render_messages(self.conversation, self.messages(), false)?.text;
            return Ok(if text.is_empty() { Vec::new() } else { vec![vec![Segment::new(&text, true)]] });
        }
        let answers = self.messages().iter().enumerate().filter(|(_, message)| message.is_answer());
        let answers: Vec<usize> = answers.map(|(at, _)| at).collect();
        let last = answers.last().copied();
        let is_trained =
            |at: usize| self.messages()[at].is_trained && (self.mask == Mask::Answers || Some(at) == last);
        let trained: Vec<bool> = answers.iter().map(|at| is_trained(*at)).collect();
        if !trained.contains(&true) {
            return Ok(Vec::new());
        }
        if self.template.marks_generation() {
            self.by_spans(&trained)
        } else {
            self.by_prefixes(&answers, &trained)
        }
    }

    fn messages(&self) -> &[Message] {
        &self.conversation.messages
    }

    /// Returns one row, whose trained segments are the spans that the template marks.
    fn by_spans(&self, trained: &[bool]) -> Result<Vec<Vec<Segment>>> {
        let rendered = self.template.render_messages(self.conversation, self.messages(), false)?;
        let (text, spans) = (&rendered.text, &rendered.spans);
        let all = trained.iter().all(|is_trained| *is_trained);
        if !all && spans.len() != trained.len() {
            return Err(self.template.refuse(format!(
                "it marks {} spans with `{{% generation %}}` in a conversation of {} answers, so it is unclear which \
                 spans are the answers that do not count in the loss; leave out `weight`, or train on all answers",
                spans.len(),
                trained.len()
            )));
        }
        let (mut row, mut at) = (Row::default(), 0);
        for (number, span) in spans.iter().enumerate() {
            let is_trained = all || trained[number];
            // Extend a trained span to its end token.
            let mut end = span.end;
            if is_trained && !self.ends.at_end(&text[span.clone()]) {
                end += match self.ends.at_start(&text[end..]) {
                    Some(token) => token.len(),
                    None => return Err(self.without_end(&text[span.clone()])),
                };
            }
            // An extended span may end after the start of the next.
            row.push(&text[at..span.start.max(at)], false);
            row.push(&text[span.start.max(at)..end], is_trained);
            at = end;
        }
        let mut rows = Vec::new();
        row.finish(&mut rows);
        // Append the line break after the last turn: without it, the tokens before it may differ from those of the whole text.
        let is_last_trained = all || trained.last() == Some(&true);
        let has_blanks = at < text.len() && text[at..].trim().is_empty();
        if let Some(row) = rows.last_mut().filter(|_| is_last_trained && has_blanks) {
            row.push(Segment::new(&text[at..], false));
        }
        Ok(rows)
    }

    /// Returns the rows by rendering prefixes: see the module.
    fn by_prefixes(&self, answers: &[usize], trained: &[bool]) -> Result<Vec<Vec<Segment>>> {
        let (mut rows, mut row) = (Vec::new(), Row::default());
        for (&at, _) in answers.iter().zip(trained).filter(|(_, is_trained)| **is_trained) {
            let render = |count: usize, prompt| -> Result<String> {
                let messages = &self.messages()[..count];
                Ok(self.template.render_messages(self.conversation, messages, prompt)?.text)
            };
            // The prompt `p`, and the answer: the rest of `f`.
            let rendered = render(at + 1, false)?;
            let prompt = if at == 0 { self.first_prompt(&rendered)? } else { render(at, true)? };
            let answer = match rendered.strip_prefix(&prompt) {
                Some(answer) => answer.to_owned(),
                None => self
                    .template
                    .after_opening(self.conversation, at, &prompt, &rendered)
                    .or_else(|| self.template.after_question(self.conversation, at, &prompt, &rendered))
                    .ok_or_else(|| self.no_prefix(at, &prompt, &rendered))?,
            };
            // The end token, if the answer's own text has none.
            let mut end = "";
            if !self.ends.at_end(&answer) {
                end = match self.end_by_next_turn(at, &rendered)? {
                    Some(token) => token,
                    None => return Err(self.without_end(&answer)),
                };
            }
            // A new row, if the template changed the history.
            if !prompt.starts_with(&row.text) {
                std::mem::take(&mut row).finish(&mut rows);
            }
            let seen = row.text.len();
            row.push(&prompt[seen..], false);
            row.push(&format!("{answer}{end}"), true);
        }
        row.finish(&mut rows);
        Ok(rows)
    }

    /// Returns the prompt `p` of an answer that is the conversation's first message: the generation prompt after no messages. A template
    /// that reads the first message cannot render an empty conversation; then `p` ends with the generation prompt that the template
    /// writes after a question.
    fn first_prompt(&self, rendered: &str) -> Result<String> {
        let render = |messages: &[Message], prompt| {
            self.template
                .render_messages(self.conversation, messages, prompt)
                .ok()
                .map(|rendered| rendered.text)
        };
        if let Some(prompt) = render(&[], true).filter(|prompt| rendered.starts_with(prompt.as_str())) {
            return Ok(prompt);
        }
        let question = [Message::new("user", "?")];
        let (before, with_opening) = (render(&question, false), render(&question, true));
        let opening = before
            .zip(with_opening)
            .and_then(|(before, after)| Some(after.strip_prefix(&before)?.to_owned()));
        let end = opening
            .filter(|opening| !opening.is_empty())
            .and_then(|opening| Some(rendered.find(&opening)? + opening.len()));
        match end {
            Some(end) => Ok(rendered[..end].to_owned()),
            None => Err(self.template.refuse(
                "the conversation begins with an assistant's message, before which the template writes no prompt; begin it with \
                 a user's message"
                    .to_owned(),
            )),
        }
    }

    /// Returns the token with which a user's next message begins, if it ends a generation.
    fn end_by_next_turn(&self, at: usize, rendered: &str) -> Result<Option<&str>> {
        let mut messages = self.messages()[..=at].to_vec();
        messages.push(Message::new("user", "?"));
        let next = match self.template.render_messages(self.conversation, &messages, false) {
            Ok(next) => next.text,
            // A template may not allow a user's message here.
            Err(_) => return Ok(None),
        };
        let token = next.strip_prefix(rendered).and_then(|next| self.ends.at_start(next));
        Ok(token.filter(|token| self.ends.model.iter().any(|end| end == token)))
    }

    /// Refuses a template whose turns have no end token.
    fn without_end(&self, answer: &str) -> crate::Error {
        // Shows the template's text alone, so that all records have the same error.
        let end = tail(answer, 40);
        let end = end.rfind('<').map_or(&*end, |at| &end[at..]).trim_end();
        self.template.refuse(format!(
            "it ends an answer with `{end}`, which is not a special token of the tokenizer, so the model would never learn \
             to stop; copy the template, write a special token there instead (`{}`, for example), and give it as --chat-template",
            self.ends.model.first().or(self.ends.added.first()).map_or("<|im_end|>", String::as_str)
        ))
    }

    /// Refuses a template whose prompt is not a prefix of the rendering with the answer; shows both from shortly before they differ.
    fn no_prefix(&self, at: usize, prompt: &str, rendered: &str) -> crate::Error {
        let same = prompt.chars().zip(rendered.chars()).take_while(|(one, other)| one == other);
        let same: usize = same.map(|(c, _)| c.len_utf8()).sum();
        let from = same - tail(&prompt[..same], 30).len();
        let part = |text: &str| text[from..].chars().take(80).collect::<String>();
        self.template.refuse(format!(
            "before the answer in message {} it writes `…{}`, and with the answer `…{}`: inference would give the model \
             another prompt than training; give a template for training, which marks answers with `{{% generation %}}`",
            at + 1,
            part(prompt),
            part(rendered)
        ))
    }
}

/// Returns the last `count` characters.
fn tail(text: &str, count: usize) -> String {
    let skipped = text.chars().count().saturating_sub(count);
    text.chars().skip(skipped).collect()
}
