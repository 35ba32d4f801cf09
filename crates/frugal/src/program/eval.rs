//! `frugal eval`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::Common;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use frugal::tasks::gsm8k::evaluate::Graded;
use frugal::tasks::gsm8k::{Accuracy, EvaluateOptions, Evaluation, Grader, Problem, evaluate_generation};
use models::generation::Sampling;
use report::Progress;
use serde_json::{Value, json};

use super::encoding::EncodingArgs;
use super::model::{ModelArgs, with_adapter};
use super::output::print_line;
use super::problems::ProblemArgs;
use frugal::tasks::gsm8k::Solver;

/// Which problems are graded.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Part {
    /// The assignment's test split: 5 % of the training file
    Test,
    /// The validation split: another 5 %
    Validation,
    /// The official test set
    Official,
}

#[derive(Args)]
pub(crate) struct Eval {
    #[command(flatten)]
    model: ModelArgs,
    /// An adapter's folder
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    problems: ProblemArgs,
    /// Problems to grade
    #[arg(long, value_enum, default_value = "test")]
    split: Part,
    #[command(flatten)]
    encoding: EncodingArgs,
    /// Solved examples before each question
    #[arg(long, default_value_t = frugal::tasks::gsm8k::FewShot::SHOTS)]
    shots: usize,
    /// Prompts per batch
    #[arg(long, default_value_t = 4)]
    batch_size: usize,
    /// Maximum number of tokens of an answer
    #[arg(long, default_value_t = 256)]
    max_new_tokens: usize,
    /// Grade the first N problems
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Write each answer and its grades to FILE, as JSON lines
    #[arg(long, value_name = "FILE")]
    transcript: Option<PathBuf>,
}

pub(crate) fn run(common: &Common, arguments: &Eval) -> anyhow::Result<()> {
    let device = common.device()?;
    if arguments.limit == Some(0) {
        bail!("--limit 0 leaves no problem to grade; give 1 or more");
    }
    let folder = arguments.model.open()?;
    let encoder = arguments.encoding.encoder(&folder)?;
    let source = arguments.problems.problems();
    let parts = source.parts()?;
    let few_shot = source.few_shot(&parts.train, arguments.shots)?;
    let mut problems: Vec<Problem> = match arguments.split {
        Part::Test => parts.test,
        Part::Validation => parts.validation,
        Part::Official => source.official()?,
    };
    problems.truncate(arguments.limit.unwrap_or(usize::MAX));
    // Hours of answers must not end with a file that cannot be written.
    let transcript = arguments.transcript.as_deref().map(create).transpose()?;
    let model = with_adapter(arguments.model.load(&folder, device)?, arguments.adapter.as_deref())?;

    let options = EvaluateOptions {
        batch_size: arguments.batch_size,
        max_new_tokens: arguments.max_new_tokens,
        ..EvaluateOptions::default()
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
    if let (Some(file), Some(path)) = (transcript, arguments.transcript.as_deref()) {
        write(file, &evaluation).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    tell(common, &evaluation, solver.tokens, solver.time.as_secs_f64());
    Ok(())
}

fn create(path: &Path) -> anyhow::Result<File> {
    File::create(path).with_context(|| format!("{} cannot be written", path.display()))
}

fn write(file: File, evaluation: &Evaluation) -> anyhow::Result<()> {
    let mut out = BufWriter::new(file);
    for graded in &evaluation.graded {
        serde_json::to_writer(&mut out, graded)?;
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}

#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
fn tell(common: &Common, evaluation: &Evaluation, tokens: usize, seconds: f64) {
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
    let mut out = std::io::stdout().lock();
    for grader in Grader::ALL {
        let _ = writeln!(out, "{:9} {}", grader.name(), evaluation.accuracy(grader));
    }
    if !evaluation.skipped.is_empty() {
        let _ = writeln!(out, "{} problems were too long and left out", evaluation.skipped.len());
    }
    let _ = writeln!(out, "{tokens} tokens, {rate:.1} tokens/s");
}
