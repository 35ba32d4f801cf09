//! Greedy answers to questions, and their grades.

use std::path::Path;

use frugal::companion_files::CompanionFiles;
use frugal::config::DataConfig;
use frugal::tasks::gsm8k::Accuracy;
use frugal::tasks::questions::Grader;
use models::generation::{FinishReason, GenerationConfig, Generator};
use report::Progress;
use serde_json::json;

use super::{Eval, Grader as GraderArg, json_lines};
use crate::common_flags::Common;
use crate::flags::model::{Found, with_adapter};
use crate::flags::rows::encoder;
use crate::flags::tokenizer::Ends;
use crate::output::print_fields;
use crate::questions;

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
    let grader = match arguments.grader {
        GraderArg::Exact => Grader::Exact,
        GraderArg::Contains => Grader::Contains,
        GraderArg::Number => Grader::Number,
        GraderArg::Regex => Grader::Regex,
    };
    let files = [path.to_owned()];
    let questions = questions::read(&files, Some(grader), arguments.limit, &encoder, &mut end_tokens)?;
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
            let text = questions::text(encoder.tokenizer(), &answer.tokens)?;
            let right = question.reference.as_ref().is_some_and(|reference| reference.accepts(&text));
            let is_cut =
                matches!(answer.finish_reason, FinishReason::MaxNewTokens | FinishReason::MaxSequence);
            accuracy.add(right);
            cut += u64::from(is_cut);
            if out.is_some() {
                lines.push(json!({
                    "question": question.fields.get("question"), "answer": question.fields.get("answer"),
                    "output": text, "right": right,
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
