//! The answers of a step: generated, graded, and laid out in micro-batches.

use std::cmp::Reverse;
use std::time::Instant;

use dataloading::IGNORE_INDEX;
use models::generation::{FinishReason, Generated, GenerationConfig, Generator, Sampling};
use models::module::LanguageModel;
use runtime::profile::range;
use tch::{Device, Tensor};

use super::advantages::{advantages, deviation, mean};
use super::loss::Samples;
use super::{Aggregate, Policy, PolicyConfig, Prompt, RolloutFigures};
use crate::accumulation::MicroBatches;
use crate::error::{Error, Result};
use crate::evaluation::Evaluation;
use crate::masked_rows::{Grouping, Item, Layout, MaskedRow, assemble};
use crate::policy::exchange::{Answered, of_rank};
use crate::ranks::Ranks;
use crate::split_mix::split_mix;

/// An answer to a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    /// The prompt.
    pub prompt: &'a Prompt,
    /// Its tokens, without the one that ends it.
    pub tokens: &'a [i64],
    /// Whether it has no end.
    pub is_cut: bool,
}

/// Says how good answers are.
pub trait Rewards: Send {
    /// Returns the reward of each answer, in their order: to prompts of the training, or of an evaluation's data.
    ///
    /// # Errors
    /// A grader that fails.
    fn rewards(&mut self, answers: &[Answer<'_>], is_evaluation: bool) -> Result<Vec<f64>>;
}

/// What a step knows of its answers beside the batches.
#[derive(Debug)]
pub struct Rollout {
    /// Of each micro-batch.
    pub(crate) samples: Vec<Samples>,
    /// That of the step's loss.
    pub(crate) denominator: f64,
    /// Tokens of the answers that are learned.
    pub(crate) learned: usize,
    /// Their rewards and lengths.
    pub figures: RolloutFigures,
}

impl Policy {
    /// Answers the prompts of a step, grades the answers, and lays out those that have a gradient.
    ///
    /// # Errors
    /// Errors of the model and of the grader; a reward that is not finite.
    pub(crate) fn roll_out(
        &mut self,
        model: &dyn LanguageModel,
        prompts: &[Prompt],
        step: u64,
        ranks: Option<&Ranks>,
    ) -> Result<MicroBatches> {
        let sampling = Sampling::Random {
            temperature: self.config.temperature,
            top_k: None,
            top_p: 1.0,
            seed: split_mix(self.config.seed, step),
        };
        let (answers, rewards) = self.answered(model, prompts, (self.config.samples, sampling), ranks)?;
        let figures = figures(&rewards, &answers, self.config.samples);
        let device =
            models::module::tensors(model).first().map_or(Device::Cpu, |named| named.tensor.device());
        let mut micro = self.lay_out(&rows(prompts, &answers, &self.config), &rewards, figures, device)?;
        self.add_log_probabilities(model, &mut micro, ranks)?;
        Ok(micro)
    }

    /// Answers prompts greedily, and returns as loss the mean reward times −1, as accuracy the mean reward, and as targets their number; a
    /// perplexity there is none (NaN).
    ///
    /// # Errors
    /// No prompt; errors of the model and of the grader.
    pub(crate) fn evaluate(
        &mut self,
        model: &dyn LanguageModel,
        prompts: &[Prompt],
        step: u64,
        ranks: Option<&Ranks>,
    ) -> Result<Evaluation> {
        let start = Instant::now();
        if prompts.is_empty() {
            return Err(Error::config("evaluation", "the data has no prompt"));
        }
        let (_, rewards) = self.answered(model, prompts, (1, Sampling::Greedy), ranks)?;
        let reward = mean(&rewards);
        Ok(Evaluation {
            step,
            loss: -reward,
            perplexity: f64::NAN,
            accuracy: reward,
            targets: prompts.len() as u64,
            reward: Some(reward),
            distilled: None,
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Answers each prompt so many times, and grades the answers; greedy ones are those of an evaluation. Ranks divide the prompts among
    /// themselves, and each returns the whole: an answer is a function of its number among all.
    fn answered(
        &mut self,
        model: &dyn LanguageModel,
        prompts: &[Prompt],
        (samples, sampling): (usize, Sampling),
        ranks: Option<&Ranks>,
    ) -> Result<(Vec<Generated>, Vec<f64>)> {
        let is_evaluation = sampling == Sampling::Greedy;
        let own = ranks.map_or(0..prompts.len(), |ranks| of_rank(prompts.len(), ranks.all()));
        let first = own.start * samples;
        let prompts_of_rank = &prompts[own];
        let answers = self.generate(model, prompts_of_rank, (samples, first), sampling)?;
        let rewards = self.graded(prompts_of_rank, &answers, is_evaluation)?;
        let Some(ranks) = ranks else { return Ok((answers, rewards)) };
        let own = Answered { answers, rewards, first };
        own.exchanged(prompts.len() * samples, self.config.max_new_tokens, ranks.all())
    }

    /// Returns the rewards of answers, as many to each prompt.
    fn graded(&mut self, prompts: &[Prompt], answers: &[Generated], is_evaluation: bool) -> Result<Vec<f64>> {
        let _range = range("rewards");
        let of_each = answers.len() / prompts.len().max(1);
        let numbered = answers.iter().enumerate();
        let graded: Vec<Answer<'_>> = numbered
            .map(|(number, answer)| Answer {
                prompt: &prompts[number / of_each],
                tokens: &answer.tokens,
                is_cut: answer.end_token.is_none(),
            })
            .collect();
        let rewards = self.rewards.rewards(&graded, is_evaluation)?;
        if rewards.len() != answers.len() || rewards.iter().any(|reward| !reward.is_finite()) {
            let reason = format!(
                "{} rewards of {} answers; expected a finite one for each, so correct the grader",
                rewards.len(),
                answers.len()
            );
            return Err(Error::config("rewards", reason));
        }
        Ok(rewards)
    }

    /// Generates `samples` answers to each prompt, those of a prompt one after the other. The first one is number `first` of the step.
    fn generate(
        &self,
        model: &dyn LanguageModel,
        prompts: &[Prompt],
        (samples, first): (usize, usize),
        sampling: Sampling,
    ) -> Result<Vec<Generated>> {
        let _range = range("generate");
        let config = &self.config;
        let options = GenerationConfig {
            max_new_tokens: config.max_new_tokens,
            sampling,
            end_tokens: config.end_tokens.clone(),
            cache: true,
        };
        let generator = Generator::new(model, &options)?;
        let all: Vec<Vec<i64>> =
            prompts.iter().flat_map(|prompt| std::iter::repeat_n(prompt.tokens.to_vec(), samples)).collect();
        let mut answers = Vec::new();
        for (chunk, first) in all.chunks(config.at_once).zip((first..).step_by(config.at_once)) {
            answers.extend(generator.generate_numbered(chunk, first, &mut ())?);
        }
        Ok(answers)
    }

    /// Lays out the answers in micro-batches: the longest first, and none without a gradient.
    fn lay_out(
        &self,
        rows: &[MaskedRow],
        rewards: &[f64],
        figures: RolloutFigures,
        device: Device,
    ) -> Result<MicroBatches> {
        let config = &self.config;
        let learned = |row: &MaskedRow| row.labels.iter().filter(|label| **label != IGNORE_INDEX).count();
        let lengths: Vec<usize> = rows.iter().map(learned).collect();
        let tokens: usize = lengths.iter().sum();
        let denominator = match config.aggregate {
            Aggregate::Grpo => rows.len() as f64,
            Aggregate::Dapo => tokens.max(1) as f64,
            Aggregate::DrGrpo => (rows.len() * config.max_new_tokens) as f64,
        };
        let advantages = advantages(rewards, config.samples, config.scale);
        let has_gradient = |row: &usize| lengths[*row] > 0 && (advantages[*row] != 0.0 || config.kl > 0.0);
        let mut order: Vec<usize> = (0..rows.len()).filter(has_gradient).collect();
        if order.is_empty() {
            // A step without a gradient, of the answers that cost least.
            order = (0..rows.len()).min_by_key(|row| rows[*row].tokens.len()).into_iter().collect();
        }
        order.sort_by_key(|row| Reverse(rows[*row].tokens.len()));
        let layout = Layout { grouping: Grouping::Rated, ..Layout::default() };
        let (mut batches, mut samples, mut padding) = (Vec::new(), Vec::new(), 0);
        for part in order.chunks(config.rows) {
            let item = |row: &usize| vec![Item::of(rows[*row].clone())];
            let batch = assemble(&part.iter().map(item).collect::<Vec<_>>(), &layout, device)?;
            padding += batch.counts.padding;
            let on_device = |values: Vec<f32>| Tensor::f_from_slice(&values)?.f_to_device(device);
            let weight = |row: &usize| match config.aggregate {
                Aggregate::Grpo => 1.0 / lengths[*row].max(1) as f32,
                Aggregate::Dapo | Aggregate::DrGrpo => 1.0,
            };
            samples.push(Samples {
                advantages: on_device(part.iter().map(|row| advantages[*row] as f32).collect())?,
                weights: on_device(part.iter().map(weight).collect())?,
                old: None,
                reference: None,
            });
            batches.push(batch);
        }
        let all: usize = rows.iter().map(|row| row.tokens.len()).sum();
        let rollout = Rollout { samples, denominator, learned: tokens, figures };
        Ok(MicroBatches { batches, targets: tokens, tokens: all, padding, rollout: Some(rollout) })
    }

    /// Adds the log-probabilities by the policy that has sampled and by the reference, if the loss needs them; of ranks each to its own
    /// micro-batches.
    fn add_log_probabilities(
        &self,
        model: &dyn LanguageModel,
        micro: &mut MicroBatches,
        ranks: Option<&Ranks>,
    ) -> Result<()> {
        let Some(rollout) = &mut micro.rollout else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let takes = |number: usize| ranks.is_none_or(|ranks| ranks.takes(number));
        let numbered = rollout.samples.iter_mut().zip(&micro.batches).enumerate();
        let mut own: Vec<_> = numbered.filter(|(number, _)| takes(*number)).map(|(_, both)| both).collect();
        if self.config.updates > 1 {
            for (samples, batch) in &mut own {
                samples.old = Some(self.log_probabilities(model, batch)?);
            }
        }
        if self.config.kl == 0.0 {
            return Ok(());
        }
        let Some(switch) = &self.switch else {
            let reason =
                "the loss compares with a reference model, and there are no adapters that can be turned off";
            return Err(Error::config("objective", reason));
        };
        let off = switch().map_err(runtime::Error::Other)?;
        for (samples, batch) in &mut own {
            samples.reference = Some(self.log_probabilities(model, batch)?);
        }
        drop(off);
        Ok(())
    }
}

/// The rows of answers, in which the answer and its end are learned. One that is left out for want of an end has no label.
fn rows(prompts: &[Prompt], answers: &[Generated], config: &PolicyConfig) -> Vec<MaskedRow> {
    let row = |(number, answer): (usize, &Generated)| {
        let mut tokens = prompts[number / config.samples].tokens.to_vec();
        let mut labels = vec![IGNORE_INDEX; tokens.len()];
        let is_learned = answer.end_token.is_some() || !config.mask_truncated;
        let of_answer = answer.tokens.iter().copied().chain(answer.end_token);
        labels.extend(of_answer.clone().map(|token| if is_learned { token } else { IGNORE_INDEX }));
        tokens.extend(of_answer);
        MaskedRow::new(tokens, labels)
    };
    answers.iter().enumerate().map(row).collect()
}

fn figures(rewards: &[f64], answers: &[Generated], samples: usize) -> RolloutFigures {
    let deviations: Vec<f64> = rewards.chunks(samples).map(deviation).collect();
    let equal = deviations.iter().filter(|deviation| **deviation == 0.0).count();
    let is_cut = |answer: &&Generated| {
        matches!(answer.finish_reason, FinishReason::MaxNewTokens | FinishReason::MaxSequence)
    };
    let lengths: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let of_all = |count: usize| count as f64 / answers.len().max(1) as f64;
    RolloutFigures {
        reward: mean(rewards),
        reward_deviation: mean(&deviations),
        equal_groups: equal as f64 / deviations.len().max(1) as f64,
        length: of_all(lengths),
        cut: of_all(answers.iter().filter(is_cut).count()),
    }
}
