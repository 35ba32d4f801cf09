//! A fine-tuning on rewards: the model answers questions, and learns from the grades of its answers.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::bail;
use frugal::companion_files::CompanionFiles;
use frugal::config::{Config, RewardSource};
use frugal::dataloading::Tokenizer;
use frugal::dataloading::records::{FileKind, Splits};
use frugal::models::hugging_face::Folder;
use frugal::planning::{DataShape, WeightFormat};
use frugal::rows::RowEncoder;
use frugal::run_folder::SplitRecord;
use frugal::tasks::program_grader::{Limits, ProgramGrader};
use frugal::training::Batches;
use frugal::training::policy::{Answer, PromptBatches, Rewards};
use serde_json::{Value, json};

use super::data::with_date;
use super::weights::Weights;
use super::{IN_PLACE, kind, open_base, steps, write_companions};
use crate::flags::rows::encoder;
use crate::flags::tokenizer::Ends;
use crate::folder::run_record::About;
use crate::questions::{self, Question};
use crate::run::job::{Feed, Job, Ready};
use crate::run::plan::PlannedTraining;

/// The questions of a training, and how their answers are graded.
struct Questions {
    train: Vec<Question>,
    validation: Vec<Question>,
    train_files: Vec<PathBuf>,
    validation_files: Vec<PathBuf>,
    end_tokens: Vec<i64>,
}

pub(super) fn tune(mut job: Job<'_>) -> anyhow::Result<()> {
    let (common, out, device) = (job.common, job.out(), job.device);
    let folder = open_base(&mut job)?;
    let companions = super::origin::companions(job.config(), &folder, out, job.resumes())?;
    let (config, template) = with_date(job.config(), &companions, out, job.resumes())?;
    job.complete(config)?;

    // The questions, and the steps over them.
    let ends = Ends::find(&folder, &companions, &job.config().data)?;
    ends.note_context(common, &folder, &job.config().data);
    let encoder = encoder(&folder, template, &job.config().data, &ends)?;
    let data = Questions::read(job.config(), &encoder, &companions, &ends)?;
    let of_step = questions_of_step(job.config())?;
    let seed = job.config().training.seed;
    let prompts =
        |questions: &[Question]| questions.iter().map(|question| question.prompt.clone()).collect::<Vec<_>>();
    let train = PromptBatches::new(prompts(&data.train), of_step, Some(seed))?;
    let steps =
        steps(job.config(), train.len().div_ceil(of_step) as u64 * job.config().training.accumulation as u64);
    let longest = longest(job.config(), &folder, &train)?;

    // The plan, before a weight is read.
    let (kind, resumes) = (kind(job.config(), &folder)?, job.resumes());
    let shape = DataShape::uniform(job.config().training.batch as u64, longest as u64, false);
    let planned = job.plan(PlannedTraining {
        shape: Some(folder.config()),
        format: WeightFormat::of(&folder, kind)?,
        device,
        data: shape,
        steps,
        resumes,
    })?;
    let Some(planned) = planned else { return Ok(()) };

    // The output folder and the model.
    let has_adapter = planned.run.config.adapter.is_some();
    let record = |about: &mut About| {
        about.train = SplitRecord::of(&data.train_files, data.train.len())?;
        about.validation = SplitRecord::of(&data.validation_files, data.validation.len())?;
        write_companions(about, &companions, out, has_adapter)
    };
    let opened = planned.open(record, |recipe| Ok(recipe.open(&folder, device)?))?;
    let mut ready = opened.ready(|| Ok(None))?;
    let validation = match data.validation.is_empty() {
        true => None,
        false => Some(PromptBatches::new(prompts(&data.validation), data.validation.len(), None)?),
    };
    learn(&mut ready, &encoder, data, longest)?;
    let (common, adapters) = (ready.run.common.clone(), ready.handles.adapters.take());
    let writer = Weights { common, adapters, base: folder.clone(), companions };
    let has_baseline = ready.run.config.training.baseline;
    let feed = Feed {
        train: Box::new(train),
        validation: validation.map(|validation| Box::new(validation) as Box<dyn Batches>),
        loading: IN_PLACE,
        writer: Some(Rc::new(writer)),
    };
    let finished = ready.train(feed, |_, trainer, _, validation| {
        if let Some(validation) = validation.filter(|_| trainer.step() == 0 && has_baseline) {
            trainer.evaluate(validation)?;
        }
        Ok(())
    })?;
    finished.write()?;
    finished.print(&[], false);
    Ok(())
}

impl Questions {
    /// Reads the questions that the configuration names.
    fn read(
        config: &Config,
        encoder: &RowEncoder,
        companions: &CompanionFiles,
        ends: &Ends,
    ) -> anyhow::Result<Self> {
        let own = &config.data;
        let path = Path::new(&own.source);
        if own.source.is_empty() {
            bail!("`data.source` is missing; give the questions as --questions");
        }
        if !Splits::may_exist(path) {
            bail!(
                "{} does not exist; give a file of records (.jsonl, .json, .csv, .parquet) with `question` and `answer`",
                path.display()
            );
        }
        let mut splits = Splits::find(path)?;
        if let Some(file) = &own.validation {
            splits.validation = vec![file.clone()];
        }
        if let Some(text) = splits.train.iter().find(|file| FileKind::from_path(file) == FileKind::Text) {
            bail!(
                "{}: plain text has no questions; give records with `question` and `answer`",
                text.display()
            );
        }
        let grader = match config.rollout.source()? {
            RewardSource::Comparison(grader) => Some(grader),
            RewardSource::Program(_) => None,
        };
        let mut end_tokens = companions.end_tokens().to_vec();
        if !end_tokens.contains(&i64::from(ends.end)) {
            end_tokens.push(i64::from(ends.end));
        }
        let train = questions::read(&splits.train, grader, own.limit, encoder, &mut end_tokens)?;
        let validation = match splits.validation.is_empty() {
            true => Vec::new(),
            false => questions::read(&splits.validation, grader, None, encoder, &mut end_tokens)?,
        };
        if config.training.evaluate_every.is_some() && validation.is_empty() {
            bail!(crate::run::training::NO_VALIDATION);
        }
        Ok(Self {
            train,
            validation,
            train_files: splits.train,
            validation_files: splits.validation,
            end_tokens,
        })
    }
}

/// The questions of a step: its answers are `training.batch` for each of `training.accumulation` micro-batches.
fn questions_of_step(config: &Config) -> anyhow::Result<usize> {
    let (answers, samples) =
        (config.training.batch * config.training.accumulation.max(1), config.rollout.samples);
    if samples == 0 || !answers.is_multiple_of(samples) {
        bail!(
            "a step has {answers} answers (--batch-size {} times --accumulation {}), which is no multiple of the {samples} answers to each \
             question; change one of them, or --set rollout.samples",
            config.training.batch,
            config.training.accumulation
        );
    }
    Ok(answers / samples)
}

/// The positions of the longest row: of the longest question with the longest answer.
///
/// # Errors
/// More than the model has; a temperature at which its answers cannot be scored.
fn longest(config: &Config, folder: &Folder, train: &PromptBatches) -> anyhow::Result<usize> {
    if config.rollout.temperature != 1.0 && folder.config().final_logit_softcapping.is_some() {
        bail!(
            "`rollout.temperature` is {}: answers of a model that caps its logits are scored at 1 alone; leave it out",
            config.rollout.temperature
        );
    }
    let longest = train.longest() + config.rollout.max_new_tokens;
    let context = usize::try_from(folder.config().max_position_embeddings).unwrap_or(usize::MAX);
    if longest > context {
        bail!(
            "the longest question has {} tokens, and an answer up to {}: more than the model's {context} positions; lower \
             --max-new-tokens, or leave long questions out",
            train.longest(),
            config.rollout.max_new_tokens
        );
    }
    Ok(longest)
}

/// Gives the training its rewards.
fn learn(ready: &mut Ready<'_>, encoder: &RowEncoder, data: Questions, longest: usize) -> anyhow::Result<()> {
    let config = &ready.run.config;
    let rollout = &config.rollout;
    let all = config.training.batch * config.training.accumulation.max(1);
    let at_once = match rollout.at_once {
        Some(given) => given,
        None => ready.rows_generated(longest, rollout.samples)?,
    };
    let rows = config.training.micro_batch_size.unwrap_or(config.training.batch);
    let kl = config.objective.beta.unwrap_or(0.0);
    let policy =
        rollout.policy(kl, (rows, at_once.min(all).max(1)), data.end_tokens.clone(), config.training.seed)?;
    let program = match rollout.source()? {
        RewardSource::Comparison(_) => None,
        RewardSource::Program(path) => {
            let limits = Limits { seconds: rollout.grader_seconds, ..Limits::default() };
            Some(ProgramGrader::new(&path, limits).map_err(anyhow::Error::msg)?)
        }
    };
    ready.run.common.note(&format!(
        "{} questions, {} of a step with {} answers each; {} answers are generated at a time (the plan's time is that of the update alone)",
        data.train.len(),
        all / rollout.samples,
        rollout.samples,
        policy.at_once
    ));
    let train = data.train.len();
    let questions = data.train.into_iter().chain(data.validation).collect();
    let rewards = Graded { questions, train, tokenizer: encoder.tokenizer().clone(), program };
    ready.learn_from(policy, Box::new(rewards))
}

/// Grades answers by the questions that they answer.
struct Graded {
    /// Those of the training, and then those of the validation.
    questions: Vec<Question>,
    train: usize,
    tokenizer: Tokenizer,
    program: Option<ProgramGrader>,
}

impl Rewards for Graded {
    fn rewards(&mut self, answers: &[Answer<'_>], is_evaluation: bool) -> frugal::training::Result<Vec<f64>> {
        let failed = |reason: String| frugal::training::Error::config("rewards", reason);
        let first = if is_evaluation { self.train } else { 0 };
        let mut texts = Vec::new();
        for answer in answers {
            let question = &self.questions[first + answer.prompt.number];
            let text =
                questions::text(&self.tokenizer, answer.tokens).map_err(|error| failed(error.to_string()))?;
            texts.push((question, text, answer.is_cut));
        }
        match &self.program {
            None => Ok(texts
                .iter()
                .map(|(question, text, _)| {
                    f64::from(u8::from(
                        question.reference.as_ref().is_some_and(|reference| reference.accepts(text)),
                    ))
                })
                .collect()),
            Some(program) => {
                let line = |(question, text, is_cut): &(&Question, String, bool)| {
                    let mut fields = question.fields.clone();
                    fields.insert("completion".to_owned(), json!(text));
                    fields.insert("is_cut".to_owned(), json!(is_cut));
                    Value::Object(fields)
                };
                program.grade(&texts.iter().map(line).collect::<Vec<_>>()).map_err(failed)
            }
        }
    }
}
