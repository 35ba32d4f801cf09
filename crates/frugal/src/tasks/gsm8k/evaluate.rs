//! Measures the share of problems that a model solves: the assignment's `evaluate_generation`.
//!
//! Prompts are sorted by their number of tokens and generated in batches, so that the rows of a batch have little padding; the
//! results come in the order of the problems. Each generated text is cut at the first stop text and graded three ways
//! ([`Grader`]). All texts are returned: a share without its transcript cannot be checked.

use std::collections::BTreeMap;

use serde::Serialize;

use super::accuracy::Accuracy;
use super::error::{Error, Result};
use super::graders::Grader;
use super::prompt::FewShot;
use super::records::Problem;
use super::stop_texts::StopTexts;
use super::tokenize::Encoder;

/// A generator of continuations of prompts.
pub trait Generator {
    /// The new tokens of each prompt, in the prompts' order: at most `max_new` of them, which may end early with a token of
    /// `ends` or where `stop` says so.
    ///
    /// # Errors
    /// The model's own.
    fn generate(
        &mut self,
        prompts: &[Vec<i64>],
        max_new: usize,
        ends: &[i64],
        stop: &StopTexts<'_>,
    ) -> Result<Vec<Vec<i64>>, Box<dyn std::error::Error + Send + Sync>>;
}

/// Options of an evaluation.
#[derive(Debug, Clone)]
pub struct EvaluateConfig {
    /// Prompts at a time.
    pub batch_size: usize,
    /// Tokens of an answer, at most.
    pub max_new_tokens: usize,
    /// Texts that end an answer.
    pub stop: Vec<String>,
}

impl Default for EvaluateConfig {
    /// Batches of 4 (the assignment's), 256 new tokens (the harness's), the harness's stop texts.
    fn default() -> Self {
        let stop = StopTexts::DEFAULT.map(str::to_owned).to_vec();
        Self { batch_size: 4, max_new_tokens: 256, stop }
    }
}

/// A problem's answer and what the graders say: a line of the transcript.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Graded {
    /// The problem's index in the data set, from 0.
    pub number: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were generated.
    pub new_tokens: usize,
    /// The generated text, up to the first stop text.
    pub text: String,
    /// The gold number.
    pub gold: String,
    /// Answer that each grader extracted from the text.
    pub extracted: BTreeMap<Grader, Option<String>>,
    /// The verdict of each grader.
    pub right: BTreeMap<Grader, bool>,
}

impl Graded {
    fn new(number: usize, problem: &Problem, text: String, prompt_tokens: usize, new_tokens: usize) -> Self {
        let each = Grader::ALL.into_iter();
        let extracted = each.clone().map(|grader| (grader, grader.extract(&text))).collect();
        let right = each.map(|grader| (grader, grader.right(&text, &problem.answer))).collect();
        Self { number, prompt_tokens, new_tokens, gold: problem.result(), text, extracted, right }
    }
}

/// All answers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evaluation {
    /// In the order of the data set.
    pub graded: Vec<Graded>,
    /// Problems whose prompts were too long and left out: they are in no accuracy.
    pub skipped: Vec<usize>,
}

impl Evaluation {
    /// Returns how many answers a grader calls right.
    pub fn accuracy(&self, grader: Grader) -> Accuracy {
        let mut accuracy = Accuracy::default();
        for graded in &self.graded {
            accuracy.add(graded.right[&grader]);
        }
        accuracy
    }
}

/// Generates and grades an answer to each problem. `few_shot` has the examples before each question, `encoder` the tokenizer
/// and the model's context; `observe` is called after each batch is graded, for a progress bar.
///
/// # Errors
/// A batch size or a number of new tokens of 0; a prompt that leaves no room for its answer, if such are refused; what the
/// model says, with the numbers of the problems; a model that returns another number of rows than it got prompts.
pub fn evaluate_generation(
    model: &mut dyn Generator,
    dataset: &[Problem],
    encoder: &Encoder,
    few_shot: &FewShot,
    options: &EvaluateConfig,
    observe: &mut dyn FnMut(&[Graded]),
) -> Result<Evaluation> {
    if options.batch_size == 0 || options.max_new_tokens == 0 {
        return Err(Error::Config {
            what: "evaluation",
            reason: format!(
                "batches of {} prompts and {} new tokens; both must be 1 or more",
                options.batch_size, options.max_new_tokens
            ),
        });
    }
    let stop = StopTexts::new(encoder.tokenizer(), options.stop.iter().cloned())?;
    let ends = [i64::from(encoder.options().end)];
    let mut evaluation = Evaluation::default();
    let mut prompts = Vec::with_capacity(dataset.len());
    for (number, problem) in dataset.iter().enumerate() {
        let tokens = encoder.prompt(&few_shot.prompt(&problem.question)?)?;
        match encoder.fits(number, tokens.len(), options.max_new_tokens)? {
            true => prompts.push((number, tokens)),
            false => evaluation.skipped.push(number),
        }
    }
    // Longest first: a batch that does not fit into memory fails at once.
    prompts.sort_by_key(|(number, tokens)| (std::cmp::Reverse(tokens.len()), *number));
    for batch in prompts.chunks(options.batch_size) {
        let tokens: Vec<Vec<i64>> = batch.iter().map(|(_, tokens)| tokens.clone()).collect();
        let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
            let numbers: Vec<String> = batch.iter().map(|(number, _)| number.to_string()).collect();
            Error::Generate { problems: numbers.join(", "), cause }
        };
        let rows = model.generate(&tokens, options.max_new_tokens, &ends, &stop).map_err(failed)?;
        if rows.len() != batch.len() {
            return Err(failed(format!("{} rows came back, of {} prompts", rows.len(), batch.len()).into()));
        }
        let start = evaluation.graded.len();
        for ((number, prompt), new) in batch.iter().zip(rows) {
            let text = stop.text(&new, &ends)?;
            let graded = Graded::new(*number, &dataset[*number], text, prompt.len(), new.len());
            evaluation.graded.push(graded);
        }
        observe(&evaluation.graded[start..]);
    }
    evaluation.graded.sort_by_key(|graded| graded.number);
    Ok(evaluation)
}
