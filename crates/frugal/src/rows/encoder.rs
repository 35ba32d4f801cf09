//! From what a record holds to tokens and labels.

use std::collections::BTreeSet;
use std::ops::Range;

use dataloading::chat::{ChatTemplate, Conversation, EndTokens, Mask, Segment};
use dataloading::records::{Content, Detected, PromptTemplates, Record};
use dataloading::tokenizer::Encoded;
use dataloading::{IGNORE_INDEX, Tokenizer};
use serde_json::Value;
use training::masked_rows::MaskedRow;

use super::counts::Counts;
use super::overlong::{Overlong, split, truncate};
use super::second_end::second_end;
use crate::error::{Error, Result};

/// Options of rows for a model.
#[derive(Debug, Clone)]
pub struct RowConfig {
    /// The most tokens of a row.
    pub longest: usize,
    /// Handling of longer rows.
    pub overlong: Overlong,
    /// Part of a conversation, or of a prompt with its completion, that counts in the loss.
    pub mask: Mask,
    /// The token that begins every row without a chat template, if the model has one.
    pub begin: Option<u32>,
    /// The token that ends a completion or a text.
    pub end: u32,
    /// Number of ids that the model knows.
    pub vocabulary: usize,
    /// The field that holds the text of a record.
    pub field: String,
    /// Templates that make a prompt and a completion of a record's fields; `None` for the formats of [`dataloading::records::RecordFormat`].
    pub templates: Option<PromptTemplates>,
}

/// Makes rows for one model.
#[derive(Debug, Clone)]
pub struct RowEncoder {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    ends: EndTokens,
    /// The ids of the tokens that end a generation of the model.
    end_ids: Vec<u32>,
    options: RowConfig,
}

impl RowEncoder {
    /// Creates an encoder. `model_ends` are the tokens that end a generation of the model.
    pub fn new(
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        model_ends: &[u32],
        options: RowConfig,
    ) -> Self {
        let model = model_ends.iter().chain([&options.end]).filter_map(|id| tokenizer.token(*id)).collect();
        let ends = EndTokens { added: tokenizer.added_tokens(), model };
        Self { tokenizer, template, ends, end_ids: model_ends.to_vec(), options }
    }

    /// Whether a text that ends with this token needs no other end.
    pub(super) fn is_end(&self, id: u32) -> bool {
        id == self.options.end || self.end_ids.contains(&id)
    }

    /// Returns the options.
    pub fn options(&self) -> &RowConfig {
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

    /// Returns the rows of a record that are short enough and have something to learn, with its weight, and counts them and the others. Of
    /// a record with the weight 0 nothing is learned.
    ///
    /// # Errors
    /// A weight that is not 0 or more; a record that has another format, or fields that hold something else; one that the template refuses; a row that is too long,
    /// if that is an error. Each names the record.
    pub fn record(&self, record: &Record, detected: &Detected) -> Result<(Vec<MaskedRow>, Counts)> {
        let weight = record.weight(&self.options.field)?;
        let (mut rows, mut counts) = self.unweighted(record, detected)?;
        if weight == 0.0 {
            counts.without_label += rows.len();
            return Ok((Vec::new(), Counts { rows: 0, tokens: 0, trained: 0, ..counts }));
        }
        rows.iter_mut().for_each(|row| row.weight *= weight);
        counts.weighted = if weight == 1.0 { 0 } else { rows.len() };
        Ok((rows, counts))
    }

    /// [`RowEncoder::record`] with the weight 1.
    fn unweighted(&self, record: &Record, detected: &Detected) -> Result<(Vec<MaskedRow>, Counts)> {
        let field = &self.options.field;
        let content = match &self.options.templates {
            Some(templates) => templates.content(record)?,
            None => record.content(detected.format(record, field)?, field)?,
        };
        let mut counts = Counts { records: 1, ..Counts::default() };
        let mut found = Findings { has_empty_answer: has_empty_answer(&content), ..Findings::default() };
        let rows = self.rows(&content, &mut found).map_err(|error| record.location.error(error))?;
        counts.empty_answers = usize::from(found.has_empty_answer);
        found.notes.into_iter().for_each(|note| counts.notes.note(note, &record.location));
        let mut kept = Vec::new();
        if rows.is_empty() {
            counts.without_label += 1;
        }
        match content {
            Content::Pair { .. } => return self.answers::<2>(record, rows, counts),
            Content::Rated { .. } => return self.answers::<1>(record, rows, counts),
            _ => {}
        }
        for row in rows {
            self.check(&row).map_err(|error| record.location.error(error))?;
            let longest = self.options.longest;
            let parts = match self.options.overlong {
                _ if row.tokens.len() <= longest => vec![row],
                Overlong::Error => {
                    let reason = too_long(row.tokens.len(), longest, "skip, truncate or split");
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
                    split(&row, longest, self.options.begin)
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

    /// Returns the rows of a pair, the chosen one first, or that of a rated answer: all or none.
    fn answers<const N: usize>(
        &self,
        record: &Record,
        rows: Vec<MaskedRow>,
        counts: Counts,
    ) -> Result<(Vec<MaskedRow>, Counts)> {
        let refuse = |reason: String| Err(record.location.error(reason).into());
        let (mut counts, count) = (counts, rows.len());
        let Ok(rows) = <[MaskedRow; N]>::try_from(rows) else {
            let of = if N == 2 { "`chosen` and `rejected` make" } else { "the answer makes" };
            return refuse(format!(
                "{of} {count} rows, and not one each: an answer is empty, or the chat template changes earlier answers when later ones \
                 follow; leave a single answer to learn in each"
            ));
        };
        if let [chosen, rejected] = &rows[..]
            && chosen.tokens == rejected.tokens
        {
            counts.without_label += 2;
            counts.notes.note(
                "`chosen` and `rejected` are equal: nothing is learned from them, and they are left out"
                    .to_owned(),
                &record.location,
            );
            return Ok((Vec::new(), counts));
        }
        let (mut kept, longest) = (Vec::new(), self.options.longest);
        let most = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        match self.options.overlong {
            Overlong::Error | Overlong::Split if most > longest => {
                return refuse(too_long(most, longest, "skip or truncate"));
            }
            Overlong::Skip if most > longest => {
                counts.skipped += N;
                return Ok((kept, counts));
            }
            _ => {}
        }
        for row in rows {
            self.check(&row).map_err(|error| record.location.error(error))?;
            counts.truncated += usize::from(row.tokens.len() > longest);
            kept.push(truncate(row, longest));
        }
        let labels =
            |row: &MaskedRow| row.labels.iter().skip(1).filter(|label| **label != IGNORE_INDEX).count();
        if kept.iter().any(|row| labels(row) == 0) {
            counts.without_label += N;
            return Ok((Vec::new(), counts));
        }
        counts.rows += N;
        counts.tokens += kept.iter().map(|row| row.tokens.len()).sum::<usize>();
        counts.trained += kept.iter().map(labels).sum::<usize>();
        Ok((kept, counts))
    }

    /// Checks that the model knows the ids of a row. A tokenizer may have tokens beyond them that no row uses.
    fn check(&self, row: &MaskedRow) -> Result<(), String> {
        let vocabulary = self.options.vocabulary;
        let is_beyond = |id: &&i64| !usize::try_from(**id).is_ok_and(|id| id < vocabulary);
        let Some(id) = row.tokens.iter().find(is_beyond) else { return Ok(()) };
        let token = u32::try_from(*id).ok().and_then(|id| self.tokenizer.token(id));
        let token = token.map_or_else(String::new, |token| format!(" (`{token}`)"));
        Err(format!(
            "token {id}{token} is beyond the model's vocabulary of {vocabulary}; take the tokenizer that came with the model, or leave \
             the token out"
        ))
    }

    /// Returns the rows of a record, of any length.
    fn rows(&self, content: &Content, found: &mut Findings) -> Result<Vec<MaskedRow>> {
        Ok(match content {
            Content::Conversation(conversation) => {
                let Some(template) = &self.template else {
                    return Err(Error::Toml(
                        "the record is a conversation, and the model has no chat template; give one with --chat-template"
                            .to_owned(),
                    ));
                };
                self.conversation(template, conversation, found)?
            }
            Content::Exchange { conversation, prompt, completion } => match &self.template {
                Some(template) => self.conversation(template, conversation, found)?,
                None => vec![self.completion(prompt, completion, found)?],
            },
            Content::Completion { prompt, completion } => vec![self.completion(prompt, completion, found)?],
            Content::Pair { chosen, rejected } => {
                let mut rows = self.rated(chosen, true, found)?;
                rows.extend(self.rated(rejected, false, found)?);
                rows
            }
            Content::Rated { answer, is_desirable } => self.rated(answer, *is_desirable, found)?,
            Content::Text(text) if text.is_empty() => Vec::new(),
            Content::Text(text) => vec![self.delimited(text, None, found)?],
            Content::Tokens { ids, is_trained } => {
                let tokens: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
                let labels = tokens.iter().zip(is_trained);
                let labels = labels.map(|(id, is_trained)| if *is_trained { *id } else { IGNORE_INDEX });
                let labels = labels.collect();
                vec![MaskedRow::new(tokens, labels)]
            }
        })
    }

    /// Returns the rows of an answer. Their tokens after the prompt are learned, whatever the options say.
    fn rated(&self, answer: &Content, is_desirable: bool, found: &mut Findings) -> Result<Vec<MaskedRow>> {
        let options = RowConfig { mask: Mask::Answers, ..self.options.clone() };
        let mut rows = Self { options, ..self.clone() }.rows(answer, found)?;
        rows.iter_mut().for_each(|row| row.weight = if is_desirable { 1.0 } else { -1.0 });
        Ok(rows)
    }

    fn conversation(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        found: &mut Findings,
    ) -> Result<Vec<MaskedRow>> {
        let mask = self.options.mask;
        let rows = template.rows(conversation, mask, &self.ends)?;
        for part in template.unused(conversation, &rows, mask, &self.ends) {
            found
                .notes
                .insert(format!("{part}: the chat template leaves it out, so the model does not see it"));
        }
        if let Some(end) = second_end(conversation, &rows, &self.ends) {
            found.notes.insert(format!(
                "an answer ends with `{end}`, and the chat template writes an end after it, so two are learned; remove it from the data"
            ));
        }
        let mut learned = rows.iter().flatten().filter(|segment| segment.is_trained && mask != Mask::All);
        found.has_empty_answer |= learned.any(|segment| self.ends.is_empty_answer(&segment.text));
        rows.iter().map(|segments| self.segments(segments, found)).collect()
    }

    /// Tokenizes the text of all segments at once, as inference tokenizes it. The template has written the special tokens.
    fn segments(&self, segments: &[Segment], found: &mut Findings) -> Result<MaskedRow> {
        let (mut text, mut learned) = (String::new(), Vec::new());
        for segment in segments {
            let start = text.len();
            text.push_str(&segment.text);
            if segment.is_trained {
                learned.push(start..text.len());
            }
        }
        let encoded = self.tokenizer.encode_with_spans(&text)?;
        found.note_joined(&encoded, &learned);
        Ok(row(&encoded, &learned))
    }

    fn completion(&self, prompt: &str, completion: &str, found: &mut Findings) -> Result<MaskedRow> {
        let text = format!("{prompt}{completion}");
        let learned = if self.options.mask == Mask::All { 0 } else { prompt.len() };
        self.delimited(&text, Some(learned), found)
    }

    /// Returns the row of a text that is learned from a byte on, after a prompt, or as a whole, with its
    /// begin and end tokens. A text that has them already gets no second ones.
    fn delimited(&self, text: &str, learned: Option<usize>, found: &mut Findings) -> Result<MaskedRow> {
        let (is_text, learned) = (learned.is_none(), learned.unwrap_or(0));
        let (ids, mut row) = if is_text {
            // All of it is learned, and it may be long.
            let ids = self.tokenizer.encode_long(text)?;
            let tokens: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
            (ids, MaskedRow::new(tokens.clone(), tokens))
        } else {
            let encoded = self.tokenizer.encode_with_spans(text)?;
            let answer = learned..text.len();
            let answer = std::slice::from_ref(&answer);
            found.note_joined(&encoded, answer);
            let row = row(&encoded, answer);
            (encoded.ids, row)
        };
        if let Some(begin) = self.options.begin.filter(|begin| ids.first() != Some(begin)) {
            row.tokens.insert(0, i64::from(begin));
            let is_learned = self.options.mask == Mask::All || is_text;
            row.labels.insert(0, if is_learned { i64::from(begin) } else { IGNORE_INDEX });
        }
        if !ids.last().is_some_and(|id| self.is_end(*id)) {
            row.tokens.push(i64::from(self.options.end));
            row.labels.push(i64::from(self.options.end));
        }
        Ok(row)
    }
}

/// Notes on a record while its rows are made.
#[derive(Default)]
struct Findings {
    has_empty_answer: bool,
    notes: BTreeSet<String>,
}

impl Findings {
    /// Notes a token that is of the prompt's end and of the answer's start: inference reads the prompt alone, and has other tokens.
    fn note_joined(&mut self, encoded: &Encoded, learned: &[Range<usize>]) {
        if encoded.joins_a_start_of(learned) {
            self.notes.insert(
                "a token joins the end of the prompt with the start of the answer, and counts as the answer's; the prompt alone, which \
                 the model reads to answer, has other tokens there: let it end without a blank, and begin the answer with it"
                    .to_owned(),
            );
        }
    }
}

/// Why a row is refused that has more tokens than the longest one may.
fn too_long(tokens: usize, longest: usize, choices: &str) -> String {
    format!(
        "{tokens} tokens are more than the longest row of {longest}; shorten it, or choose what happens to long rows: --overlong {choices}"
    )
}

/// Returns the row of tokens; those within these parts of the text count in the loss.
fn row(encoded: &Encoded, learned: &[Range<usize>]) -> MaskedRow {
    let tokens: Vec<i64> = encoded.ids.iter().map(|id| i64::from(*id)).collect();
    let within = encoded.is_within(learned);
    let labels = tokens.iter().zip(within).map(|(id, within)| if within { *id } else { IGNORE_INDEX });
    let labels = labels.collect();
    MaskedRow::new(tokens, labels)
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
        Content::Pair { chosen, rejected } => has_empty_answer(chosen) || has_empty_answer(rejected),
        Content::Rated { answer, .. } => has_empty_answer(answer),
        Content::Text(_) | Content::Tokens { .. } => false,
    }
}
