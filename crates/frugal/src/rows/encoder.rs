//! From what a record holds to tokens and labels.

use dataloading::chat::{ChatTemplate, Conversation, EndTokens, Mask, Segment};
use dataloading::records::{Content, Detected, PromptTemplates, Record};
use dataloading::{IGNORE_INDEX, Tokenizer};
use serde_json::Value;
use training::masked_rows::MaskedRow;

use super::overlong::{Overlong, split, truncate};
use super::prepare::Counts;
use crate::error::{Error, Result};

/// How rows are made for a model.
#[derive(Debug, Clone)]
pub struct RowOptions {
    /// The most tokens of a row.
    pub longest: usize,
    /// What happens to longer ones.
    pub overlong: Overlong,
    /// What of a conversation, or of a prompt with its completion, is learned.
    pub mask: Mask,
    /// The token that begins every row without a chat template, if the model has one.
    pub begin: Option<u32>,
    /// The token that ends a completion or a text.
    pub end: u32,
    /// Number of ids that the model knows.
    pub vocabulary: usize,
    /// The field that holds the text of a record.
    pub field: String,
    /// How a prompt and a completion are made of a record's fields; `None` for the formats of [`dataloading::records::RecordFormat`].
    pub templates: Option<PromptTemplates>,
}

/// Makes rows for one model.
#[derive(Debug, Clone)]
pub struct RowEncoder {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    ends: EndTokens,
    options: RowOptions,
}

impl RowEncoder {
    /// Creates an encoder. `model_ends` are the tokens that end a generation of the model.
    pub fn new(
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        model_ends: &[u32],
        options: RowOptions,
    ) -> Self {
        let model = model_ends.iter().chain([&options.end]).filter_map(|id| tokenizer.token(*id)).collect();
        let ends = EndTokens { added: tokenizer.added_tokens(), model };
        Self { tokenizer, template, ends, options }
    }

    /// Returns the options.
    pub fn options(&self) -> &RowOptions {
        &self.options
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the texts of the tokens that end a generation of the model.
    pub fn model_ends(&self) -> &[String] {
        &self.ends.model
    }

    /// Returns the chat template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Returns the rows of a record that are short enough and have something to learn, and counts them and the others.
    ///
    /// # Errors
    /// A record that has another format, or fields that hold something else; one that the template refuses; a row that is too long,
    /// if that is an error. Each names the record.
    pub fn record(&self, record: &Record, detected: &Detected) -> Result<(Vec<MaskedRow>, Counts)> {
        let field = &self.options.field;
        let content = match &self.options.templates {
            Some(templates) => templates.content(record)?,
            None => record.content(detected.format(record, field)?, field)?,
        };
        let rows = self.rows(&content).map_err(|error| record.location.error(error))?;
        let mut counts = Counts {
            records: 1,
            empty_answers: usize::from(has_empty_answer(&content)),
            ..Counts::default()
        };
        let mut kept = Vec::new();
        if rows.is_empty() {
            counts.without_label += 1;
        }
        for row in rows {
            if let Some(id) = row
                .tokens
                .iter()
                .find(|id| usize::try_from(**id).is_ok_and(|id| id >= self.options.vocabulary))
            {
                let reason = format!(
                    "token {id} is beyond the model's vocabulary of {}; take the tokenizer that came with the model",
                    self.options.vocabulary
                );
                return Err(record.location.error(reason).into());
            }
            let longest = self.options.longest;
            let parts = match self.options.overlong {
                _ if row.tokens.len() <= longest => vec![row],
                Overlong::Error => {
                    let reason = format!(
                        "{} tokens are more than the longest row of {longest}; shorten it, or choose what happens to long \
                         rows: --overlong skip, truncate or split",
                        row.tokens.len(),
                    );
                    return Err(record.location.error(reason).into());
                }
                Overlong::Skip => {
                    counts.skipped += 1;
                    continue;
                }
                Overlong::Truncate => {
                    counts.truncated += 1;
                    vec![truncate(row, longest)]
                }
                Overlong::Split => {
                    counts.split += 1;
                    split(&row, longest)
                }
            };
            for part in parts {
                let labels = part.labels.iter().skip(1).filter(|label| **label != IGNORE_INDEX).count();
                if labels == 0 {
                    counts.without_label += 1;
                } else {
                    counts.rows += 1;
                    counts.tokens += part.tokens.len();
                    counts.trained += labels;
                    kept.push(part);
                }
            }
        }
        Ok((kept, counts))
    }

    /// Returns the rows of a record, of any length.
    fn rows(&self, content: &Content) -> Result<Vec<MaskedRow>> {
        Ok(match content {
            Content::Conversation(conversation) => {
                let Some(template) = &self.template else {
                    return Err(Error::Toml(
                        "the record is a conversation, and the model has no chat template; give one with --chat-template"
                            .to_owned(),
                    ));
                };
                self.conversation(template, conversation)?
            }
            Content::Exchange { conversation, prompt, completion } => match &self.template {
                Some(template) => self.conversation(template, conversation)?,
                None => vec![self.completion(prompt, completion)?],
            },
            Content::Completion { prompt, completion } => vec![self.completion(prompt, completion)?],
            Content::Text(text) if text.is_empty() => Vec::new(),
            Content::Text(text) => vec![self.text(text)?],
            Content::Tokens { ids, is_trained } => {
                let tokens: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
                let labels = tokens.iter().zip(is_trained);
                let labels = labels.map(|(id, is_trained)| if *is_trained { *id } else { IGNORE_INDEX });
                vec![MaskedRow { labels: labels.collect(), tokens }]
            }
        })
    }

    fn conversation(&self, template: &ChatTemplate, conversation: &Conversation) -> Result<Vec<MaskedRow>> {
        let rows = template.rows(conversation, self.options.mask, &self.ends)?;
        rows.iter().map(|segments| self.segments(segments)).collect()
    }

    /// Tokenizes segments separately. The template has written the special tokens.
    fn segments(&self, segments: &[Segment]) -> Result<MaskedRow> {
        let mut row = MaskedRow::default();
        for (number, segment) in segments.iter().enumerate() {
            let ids = match number {
                0 => self.tokenizer.encode(&segment.text)?,
                _ => self.tokenizer.encode_after(&segment.text)?,
            };
            push(&mut row, &ids, segment.is_trained);
        }
        Ok(row)
    }

    fn completion(&self, prompt: &str, completion: &str) -> Result<MaskedRow> {
        let mut row = MaskedRow::default();
        let learns_prompt = self.options.mask == Mask::All;
        push(&mut row, &self.options.begin.into_iter().collect::<Vec<_>>(), learns_prompt);
        push(&mut row, &self.tokenizer.encode(prompt)?, learns_prompt);
        let answer = if prompt.is_empty() {
            self.tokenizer.encode(completion)?
        } else {
            self.tokenizer.encode_after(completion)?
        };
        push(&mut row, &answer, true);
        push(&mut row, &[self.options.end], true);
        Ok(row)
    }

    /// Returns the row of a text with its begin and end tokens, of any length.
    fn text(&self, text: &str) -> Result<MaskedRow> {
        let mut row = MaskedRow::default();
        push(&mut row, &self.options.begin.into_iter().collect::<Vec<_>>(), true);
        push(&mut row, &self.tokenizer.encode_long(text)?, true);
        push(&mut row, &[self.options.end], true);
        Ok(row)
    }
}

/// Returns whether an answer that is learned is empty.
fn has_empty_answer(content: &Content) -> bool {
    match content {
        Content::Conversation(conversation) | Content::Exchange { conversation, .. } => {
            // An answer may be its tool calls or its reasoning.
            let is_blank = |(name, value): (&String, &Value)| match value {
                Value::Null => true,
                Value::String(text) => name == "role" || text.trim().is_empty(),
                Value::Array(items) => items.is_empty(),
                _ => false,
            };
            let mut answers =
                conversation.messages.iter().filter(|message| message.is_answer() && message.is_trained);
            answers.any(|message| message.fields.iter().all(is_blank))
        }
        Content::Completion { completion, .. } => completion.trim().is_empty(),
        Content::Text(_) | Content::Tokens { .. } => false,
    }
}

fn push(row: &mut MaskedRow, ids: &[u32], is_trained: bool) {
    let ids = ids.iter().map(|id| i64::from(*id));
    row.labels.extend(ids.clone().map(|id| if is_trained { id } else { IGNORE_INDEX }));
    row.tokens.extend(ids);
}
