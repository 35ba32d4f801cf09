//! Greedy answers to questions, and their grades.

use std::path::Path;

use anyhow::bail;
use frugal::companion_files::CompanionFiles;
use frugal::config::DataConfig;
use frugal::dataloading::IGNORE_INDEX;
use frugal::dataloading::Tokenizer;
use frugal::dataloading::records::{self, Detected, RecordFormat};
use frugal::rows::RowEncoder;
use frugal::tasks::gsm8k::Accuracy;
use frugal::tasks::questions::{Grader, Reference};
use frugal::training::masked_rows::MaskedRow;
use models::generation::{FinishReason, GenerationConfig, Generator};
use report::Progress;
use serde_json::{Value, json};

use super::{Eval, Grader as GraderArg, json_lines};
use crate::common_flags::Common;
use crate::flags::model::{Found, with_adapter};
use crate::flags::rows::encoder;
use crate::flags::tokenizer::Ends;
use crate::output::print_fields;

/// A question as the model reads it, and its answer.
struct Question {
    question: Value,
    answer: String,
    reference: Reference,
    prompt: Vec<i64>,
}

pub(super) fn run(
    common: &Common,
    arguments: &Eval,
    found: &Found,
    (path, data): (&Path, &DataConfig),
) -> anyhow::Result<()> {
    let device = common.device()?;
    let folder = &found.folder;
    let companions = CompanionFiles::of(folder, found.adapter.as_deref(), data)?;
    let ends = Ends::find(folder, &companions, data)?;
    let encoder = encoder(folder, companions.chat_template(data)?, data, &ends)?;
    let mut end_tokens = companions.end_tokens().to_vec();
    end_tokens.push(i64::from(ends.end));
    let questions = read(path, arguments, &encoder, &mut end_tokens)?;
    // Hours of answers must not end with a file that cannot be written.
    let out = arguments.answers_file()?;
    let model = with_adapter(arguments.model.load(folder, device)?, found.adapter.as_deref())?;
    let options = GenerationConfig {
        max_new_tokens: arguments.max_new_tokens,
        end_tokens,
        ..GenerationConfig::default()
    };
    let generator = Generator::new(model.as_ref(), &options)?;
    let mut progress = (!common.quiet).then(|| Progress::new(questions.len() as u64));
    let (mut accuracy, mut cut) = (Accuracy::default(), 0u64);
    let mut lines = Vec::new();
    for batch in questions.chunks(arguments.batch_size as usize) {
        let prompts: Vec<Vec<i64>> = batch.iter().map(|question| question.prompt.clone()).collect();
        let answers = generator.generate(&prompts, &mut ())?;
        for (question, answer) in batch.iter().zip(answers) {
            let text = text(encoder.tokenizer(), &answer.tokens)?;
            let right = question.reference.accepts(&text);
            let is_cut =
                matches!(answer.finish_reason, FinishReason::MaxNewTokens | FinishReason::MaxSequence);
            accuracy.add(right);
            cut += u64::from(is_cut);
            if out.is_some() {
                lines.push(json!({
                    "question": question.question, "answer": question.answer, "output": text, "right": right,
                    "tokens": answer.tokens.len(), "ended": !is_cut,
                }));
            }
            if let Some(progress) = &mut progress {
                progress.step();
            }
        }
        if let Some(progress) = &progress {
            progress.message(&format!("accuracy {:.1} %", 100.0 * accuracy.share()));
        }
    }
    drop(progress);
    if let Some(out) = out {
        out.write(|file| json_lines(file, &lines))?;
    }
    let (low, high) = accuracy.interval();
    let figures = json!({ "share": accuracy.share(), "low": low, "high": high });
    let mut fields = vec![
        ("accuracy", accuracy.to_string(), figures),
        ("right", accuracy.right.to_string(), json!(accuracy.right)),
        ("questions", accuracy.of.to_string(), json!(accuracy.of)),
    ];
    if cut > 0 {
        fields.push((
            "cut answers",
            format!("{cut} (--max-new-tokens {})", arguments.max_new_tokens),
            json!(cut),
        ));
    }
    print_fields(common.json, fields);
    Ok(())
}

/// Reads the questions. A prompt is what a training on the same records reads before it learns; the tokens that end its answers are added
/// to `end_tokens`.
fn read(
    path: &Path,
    arguments: &Eval,
    encoder: &RowEncoder,
    end_tokens: &mut Vec<i64>,
) -> anyhow::Result<Vec<Question>> {
    let grader = match arguments.grader {
        GraderArg::Exact => Grader::Exact,
        GraderArg::Contains => Grader::Contains,
        GraderArg::Number => Grader::Number,
        GraderArg::Regex => Grader::Regex,
    };
    let detected = Detected { formats: vec![(RecordFormat::QuestionAnswer, 0)], ignored: Vec::new() };
    let limit = arguments.limit.unwrap_or(usize::MAX);
    let added: Vec<i64> = {
        let tokenizer = encoder.tokenizer();
        tokenizer.added_tokens().iter().filter_map(|token| tokenizer.id(token)).map(i64::from).collect()
    };
    let mut questions = Vec::new();
    for record in records::read_all(&[path.to_owned()])?.take(limit) {
        let record = record?;
        let field = |name: &str| record.fields.get(name).cloned();
        let (rows, _) = encoder.record(&record, &detected)?;
        let (Some(row), Some(answer)) =
            (rows.first(), field("answer").and_then(|text| Some(text.as_str()?.to_owned())))
        else {
            bail!("{}: nothing is to be answered; give `question` and `answer` as texts", record.location);
        };
        let reference = Reference::new(grader, &answer).map_err(|reason| record.location.error(reason))?;
        let learned = row.labels.iter().position(|label| *label != IGNORE_INDEX).unwrap_or(0);
        if learned == 0 {
            bail!("{}: the question is empty", record.location);
        }
        end_tokens.extend(end_of(row, &added).filter(|end| !end_tokens.contains(end)));
        let question = field("question").unwrap_or_default();
        questions.push(Question { question, answer, reference, prompt: row.tokens[..learned].to_vec() });
    }
    if questions.is_empty() {
        bail!(
            "{}: there is no question in it; write {{\"question\": …, \"answer\": …}} on each line",
            path.display()
        );
    }
    Ok(questions)
}

/// The special token that ends the answer of a row, after which a template may write a line break.
fn end_of(row: &MaskedRow, added: &[i64]) -> Option<i64> {
    let learned = row.labels.iter().rev().copied().filter(|label| *label != IGNORE_INDEX);
    learned.take(3).find(|label| added.contains(label))
}

fn text(tokenizer: &Tokenizer, tokens: &[i64]) -> anyhow::Result<String> {
    let ids: Vec<u32> = tokens.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX)).collect();
    Ok(tokenizer.decode_known(&ids)?)
}
