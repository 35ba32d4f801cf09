//! GSM8K, graded as lm-evaluation-harness and OpenAI grade it.

use frugal::companion_files::CompanionFiles;
use frugal::config::DataConfig;
use frugal::tasks::gsm8k::evaluate::Graded;
use frugal::tasks::gsm8k::{
    Accuracy, EvaluateConfig, Evaluation, FewShot, Grader, Problem, Solver, evaluate_generation,
};
use models::generation::Sampling;
use report::Progress;
use serde_json::{Value, json};

use super::{Eval, Part, json_lines};
use crate::common_flags::Common;
use crate::flags::model::{Found, with_adapter};
use crate::flags::tokenizer::Ends;
use crate::output::problems::Problems;
use crate::output::{print_line, print_text};

pub(super) fn run(
    common: &Common,
    arguments: &Eval,
    found: &Found,
    (source, data): (&Problems, &DataConfig),
) -> anyhow::Result<()> {
    let device = common.device()?;
    let folder = &found.folder;
    let companions = CompanionFiles::of(folder, found.adapter.as_deref(), data)?;
    let encoder = Ends::find(folder, &companions, data)?.encoder(folder, data)?;
    let parts = source.parts()?;
    let few_shot = source.few_shot(&parts.train, arguments.shots.unwrap_or(FewShot::SHOTS))?;
    let mut problems: Vec<Problem> = match arguments.split.unwrap_or(Part::Test) {
        Part::Test => parts.test,
        Part::Validation => parts.validation,
        Part::Official => source.official()?,
    };
    problems.truncate(arguments.limit.unwrap_or(usize::MAX));
    // Hours of answers must not end with a file that cannot be written.
    let out = arguments.answers_file()?;
    let model = with_adapter(arguments.model.load(folder, device)?, found.adapter.as_deref())?;

    let options = EvaluateConfig {
        batch_size: arguments.batch_size as usize,
        max_new_tokens: arguments.max_new_tokens,
        ..EvaluateConfig::default()
    };
    let mut solver = Solver::new(model.as_ref(), Sampling::Greedy, &problems, &encoder, &few_shot)?;
    let mut progress = (!common.quiet).then(|| Progress::new(problems.len() as u64));
    let (mut so_far, began) = (Accuracy::default(), std::time::Instant::now());
    let mut tokens = 0;
    let mut observe = |graded: &[Graded]| {
        for one in graded {
            so_far.add(one.right[&Grader::Flexible]);
            tokens += one.new_tokens;
            if let Some(progress) = &mut progress {
                progress.step();
            }
        }
        let rate = tokens as f64 / began.elapsed().as_secs_f64().max(1e-9);
        if let Some(progress) = &progress {
            progress.message(&format!("accuracy {:.1} % {rate:.1} tokens/s", 100.0 * so_far.share()));
        }
    };
    let evaluation =
        evaluate_generation(&mut solver, &problems, &encoder, &few_shot, &options, &mut observe)?;
    drop(progress);
    if let Some(out) = out {
        out.write(|file| json_lines(file, &evaluation.graded))?;
    }
    print_evaluation(common, &evaluation, solver.tokens, solver.time.as_secs_f64());
    Ok(())
}

fn print_evaluation(common: &Common, evaluation: &Evaluation, tokens: usize, seconds: f64) {
    let rate = tokens as f64 / seconds.max(1e-9);
    if common.json {
        let of = |grader: Grader| -> (String, Value) {
            let accuracy = evaluation.accuracy(grader);
            let (low, high) = accuracy.interval();
            let figures = json!({
                "accuracy": accuracy.share(), "low": low, "high": high, "right": accuracy.right, "of": accuracy.of,
            });
            (grader.name().to_owned(), figures)
        };
        let graders: serde_json::Map<String, Value> = Grader::ALL.into_iter().map(of).collect();
        print_line(&json!({
            "graders": graders, "skipped": evaluation.skipped.len(), "tokens": tokens, "tokens_per_second": rate,
        }));
        return;
    }
    for grader in Grader::ALL {
        print_text(&format!("{:9} {}\n", grader.name(), evaluation.accuracy(grader)));
    }
    if !evaluation.skipped.is_empty() {
        print_text(&format!("{} problems were too long and left out\n", evaluation.skipped.len()));
    }
    print_text(&format!("{tokens} tokens, {rate:.1} tokens/s\n"));
}
