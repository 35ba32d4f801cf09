//! Questions with their answers, as the model reads them.

use std::path::{Path, PathBuf};

use anyhow::bail;
use frugal::dataloading::IGNORE_INDEX;
use frugal::dataloading::Tokenizer;
use frugal::dataloading::records::{self, Detected, RecordFormat};
use frugal::rows::RowEncoder;
use frugal::tasks::questions::{Grader, Reference};
use frugal::training::masked_rows::MaskedRow;
use serde_json::{Map, Value};

/// A question as the model reads it, and its answer.
pub(crate) struct Question {
    /// The record.
    pub(crate) fields: Map<String, Value>,
    /// The answer to compare with; `None` where a program grades.
    pub(crate) reference: Option<Reference>,
    pub(crate) prompt: Vec<i64>,
}

/// Reads the questions of files, and prepares their answers for a grader, unless a program grades them. A prompt is what a training on the
/// same records reads before it learns; the tokens that end its answers are added to `end_tokens`.
///
/// # Errors
/// A record without a question, or without an answer that the grader can compare with; no question at all.
pub(crate) fn read(
    files: &[PathBuf],
    grader: Option<Grader>,
    limit: Option<usize>,
    encoder: &RowEncoder,
    end_tokens: &mut Vec<i64>,
) -> anyhow::Result<Vec<Question>> {
    let detected = Detected { formats: vec![(RecordFormat::QuestionAnswer, 0)], ignored: Vec::new() };
    let added: Vec<i64> = {
        let tokenizer = encoder.tokenizer();
        tokenizer.added_tokens().iter().filter_map(|token| tokenizer.id(token)).map(i64::from).collect()
    };
    let mut questions = Vec::new();
    for record in records::read_all(files)?.take(limit.unwrap_or(usize::MAX)) {
        let mut record = record?;
        let fields = record.fields.clone();
        if grader.is_none() {
            // The prompt ends where any answer begins.
            record.fields.insert("answer".to_owned(), Value::from("0"));
        }
        let (rows, _) = encoder.record(&record, &detected)?;
        let (Some(row), Some(answer)) = (rows.first(), record.fields.get("answer").and_then(Value::as_str))
        else {
            bail!("{}: nothing is to be answered; give `question` and `answer` as texts", record.location);
        };
        let reference = grader.map(|grader| Reference::new(grader, answer)).transpose();
        let reference = reference.map_err(|reason| record.location.error(reason))?;
        let prompt = row.prompt().to_vec();
        if prompt.is_empty() {
            bail!("{}: the question is empty", record.location);
        }
        end_tokens.extend(end_of(row, &added).filter(|end| !end_tokens.contains(end)));
        questions.push(Question { fields, reference, prompt });
    }
    if questions.is_empty() {
        let file = files.first().map_or(Path::new(""), PathBuf::as_path);
        bail!(
            "{}: there is no question in it; write {{\"question\": …, \"answer\": …}} on each line",
            file.display()
        );
    }
    Ok(questions)
}

/// The special token that ends the answer of a row, after which a template may write a line break.
fn end_of(row: &MaskedRow, added: &[i64]) -> Option<i64> {
    let learned = row.labels.iter().rev().copied().filter(|label| *label != IGNORE_INDEX);
    learned.take(3).find(|label| added.contains(label))
}

/// Returns the text of generated tokens.
///
/// # Errors
/// The tokenizer fails on them.
pub(crate) fn text(tokenizer: &Tokenizer, tokens: &[i64]) -> anyhow::Result<String> {
    let ids: Vec<u32> = tokens.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX)).collect();
    Ok(tokenizer.decode_known(&ids)?)
}
