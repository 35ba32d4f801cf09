//! `frugal eval`: the loss on data, answers to questions, or answers to GSM8K.

mod gsm8k;
mod loss;
mod questions;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{ArgGroup, Args, ValueEnum};
use frugal::config::{DataConfig, DataFormat};
use frugal::dataloading::chat::Mask;
use frugal::dataloading::records::{RecordFormat, Splits};
use frugal::rows;
use serde::Serialize;

use crate::common_flags::Common;
use crate::flags::Flags;
use crate::flags::model::ModelArgs;
use crate::flags::rows::{found, found_text};
use crate::flags::table::ROWS;
use crate::folder::output_file::{OutputFile, OutputFlag};
use crate::output::problems::Problems;
use frugal::tasks::gsm8k::split;

/// Part of a folder's data that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The test split; of GSM8K the assignment's, 5 % of the training file
    Test,
    /// The validation split; of GSM8K another 5 %
    Validation,
    /// GSM8K's official test set
    Official,
}

/// How answers to questions are graded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Grader {
    /// The answer equals the reference, apart from surrounding blanks
    Exact,
    /// The answer contains the reference, ignoring case
    Contains,
    /// The last numbers of both are equal
    Number,
    /// The reference is a regular expression that matches within the answer
    Regex,
}

#[derive(Args)]
#[command(
    group(ArgGroup::new("what").required(true).args(["data", "questions"])),
    after_help = "\
Examples:
  frugal eval --model run --data test.jsonl                        # mean loss and perplexity, on rows as in the training
  frugal eval --model qwen.gguf --data wikitext-2/test.txt --max-length 512    # perplexity of a text, in rows of 512 tokens
  frugal eval --model run --questions qa.jsonl --grader number --out answers.jsonl
  frugal eval --model Qwen/Qwen2.5-0.5B --data gsm8k --split official --shots 8"
)]
pub(crate) struct Eval {
    #[command(flatten)]
    model: ModelArgs,
    /// An adapter's folder [default: that of the run in --model]
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Data to measure the mean loss on, in any format that finetune reads. GSM8K's problems (its folder, or --format gsm8k) are answered
    /// and graded instead; --format question-answer measures their loss
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Grade greedy answers to the questions of this file: JSON lines with `question` and `answer`
    #[arg(long, value_name = "FILE")]
    questions: Option<PathBuf>,
    /// How answers to --questions are graded
    #[arg(long, value_enum, requires = "questions", default_value = "exact")]
    grader: Grader,
    /// Split of a folder [default: test; for the loss, validation if there is one]
    #[arg(long, value_enum)]
    split: Option<Part>,
    #[command(flatten)]
    rows: Flags<ROWS>,
    /// Rows or prompts per batch. A model with longrope (Phi-3) computes all rows of a batch as its longest one demands; 1 measures
    /// each by itself
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Maximum number of tokens of an answer
    #[arg(long, default_value_t = 256)]
    max_new_tokens: usize,
    /// Take the first N rows, questions or problems
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Write each answer and its grades to FILE, as JSON lines
    #[arg(long, value_name = "FILE", alias = "transcript")]
    out: Option<PathBuf>,
    /// Overwrite --out
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// GSM8K: solved examples before each question [default: 3]
    #[arg(long)]
    shots: Option<usize>,
    /// GSM8K: remove calculator annotations (<<6*7=42>>) from answers
    #[arg(long)]
    strip_annotations: bool,
    /// GSM8K: seed of the split into 90, 5 and 5 % and of the choice of solved examples [default: 42]
    #[arg(long)]
    split_seed: Option<u64>,
}

impl Eval {
    /// The file of answers, checked, if one is asked for.
    fn answers_file(&self) -> anyhow::Result<Option<OutputFile>> {
        let Some(out) = self.out.as_deref() else { return Ok(None) };
        let data = self.data.as_deref().or(self.questions.as_deref()).unwrap_or(Path::new(""));
        let folders = [Some(data), Some(Path::new(&self.model.model)), self.adapter.as_deref()];
        let files = folders.into_iter().flatten().flat_map(Path::read_dir).flatten().flatten();
        let inputs: Vec<PathBuf> = files.map(|entry| entry.path()).chain([data.to_owned()]).collect();
        let inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
        OutputFile::new(out, &OutputFlag { name: "--out", overwrite: Some(self.overwrite) }, &inputs)
            .map(Some)
    }

    /// Refuses flags that only GSM8K's problems have.
    fn refuse_of_gsm8k(&self) -> anyhow::Result<()> {
        let given = [
            ("--shots", self.shots.is_some()),
            ("--strip-annotations", self.strip_annotations),
            ("--split-seed", self.split_seed.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => bail!(
                "{flag} applies to GSM8K only: a folder with its train.jsonl and test.jsonl, or --format gsm8k; leave it out"
            ),
            None => Ok(()),
        }
    }
}

/// Writes values as JSON lines.
fn json_lines<T: Serialize>(out: &mut dyn Write, values: &[T]) -> io::Result<()> {
    for value in values {
        serde_json::to_writer(&mut *out, value)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

pub(crate) fn run(common: &Common, arguments: &Eval) -> anyhow::Result<()> {
    if arguments.limit == Some(0) {
        bail!("--limit 0 leaves nothing to measure; give 1 or more");
    }
    if let Some(path) =
        arguments.data.as_deref().or(arguments.questions.as_deref()).filter(|path| !Splits::may_exist(path))
    {
        bail!(
            "{} does not exist; give a file of records (.jsonl, .json, .csv, .parquet), a text file, or a folder with train.*",
            path.display()
        );
    }
    common.device()?;
    let model = arguments.model.find(common, arguments.adapter.as_deref())?;
    // Rows are made as in the training, unless a flag says otherwise.
    let mut data = DataConfig { limit: None, validation: None, ..model.data.clone().unwrap_or_default() };
    if let Some(path) = &arguments.questions {
        arguments.refuse_of_gsm8k()?;
        data = arguments.rows.data(&data)?;
        // The prompt is what comes before the answer.
        (data.format, data.mask) = (DataFormat::QuestionAnswer, Mask::Answers);
        return questions::run(common, arguments, &model, (path, &data));
    }
    // That of the training is of its own file.
    data.format = DataFormat::Auto;
    data = arguments.rows.data(&data)?;
    data.source = arguments.data.as_deref().unwrap_or(Path::new("")).display().to_string();
    data.strip_annotations = arguments.strip_annotations;
    data.split_seed = arguments.split_seed.unwrap_or(split::SEED);
    let splits = Splits::find(Path::new(&data.source));
    // A folder may have GSM8K's official test set alone.
    let detected = match arguments.split {
        Some(Part::Official) => rows::Found::Gsm8k,
        _ => found(splits.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?, &data)?,
    };
    if detected == rows::Found::Gsm8k {
        return gsm8k::run(common, arguments, &model, (&Problems::of(&data), &data));
    }
    arguments.refuse_of_gsm8k()?;
    if arguments.out.is_some() {
        bail!("--out has the answers to --questions or to GSM8K; the loss on data has none");
    }
    let splits = splits?;
    if let rows::Found::Records(records) = &detected
        && records
            .formats
            .iter()
            .any(|(format, _)| matches!(format, RecordFormat::Preference | RecordFormat::Rated))
    {
        bail!(
            "the data are {records}, and a mean loss over good and bad ones says nothing; a training with --objective measures them with \
             --validation, or write the good ones as `messages` or `completion`"
        );
    }
    common.note(&found_text(&detected, &splits, &data));
    let is_folder = Path::new(&data.source).is_dir();
    let files = match arguments.split {
        _ if !is_folder => splits.train,
        Some(Part::Validation) => splits.validation,
        Some(Part::Test) => splits.test,
        _ if !splits.validation.is_empty() => splits.validation,
        _ if !splits.test.is_empty() => splits.test,
        _ => bail!(
            "{} has neither a validation nor a test split; name the file that is measured, as --data {}",
            data.source,
            splits.train.first().map_or_else(|| "FILE".to_owned(), |file| file.display().to_string())
        ),
    };
    if files.is_empty() {
        bail!("{} has no such split; leave out --split, or name a file as --data", data.source);
    }
    loss::run(common, arguments, &model, (&files, &detected, &data))
}
