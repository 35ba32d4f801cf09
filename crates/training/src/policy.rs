//! Reinforcement learning from rewards: group relative policy optimization (GRPO; Shao et al., arXiv:2402.03300) and its variants.
//!
//! In each step the model, the *policy*, answers each of some prompts G times. Each answer i gets a reward r, its advantage A is that against
//! the other answers of its prompt, and with ρ = exp(ℓ − ℓ_old), the ratio of a token's probability to that when it was sampled, the loss
//! of a token is
//!
//! ```text
//! −min(ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A) + β·ρ·(e^d − d − 1),   d = ℓ̂ − ℓ
//! ```
//!
//! where ℓ̂ is the log-probability by the reference, the model without its adapters, and β = 0 leaves that term and its forward out. With
//! one update for each set of samples ρ is 1 and only its gradient counts.
//!
//! | choice | values |
//! |---|---|
//! | [`Ratio`] | of each token; or of the sequence, exp of the mean (GSPO, arXiv:2507.18071) |
//! | [`Aggregate`] | grpo: the mean over answers of the mean over their tokens; dapo: the mean over all tokens of the step (arXiv:2503.14476); dr-grpo: the sum over tokens, divided by answers times the longest possible answer (arXiv:2503.20783) |
//! | [`Scale`] | A = r − mean, divided by the standard deviation of the group or of the batch, or not (Dr. GRPO) |
//!
//! The denominators are those of the whole step, over all micro-batches. The formulas are those of TRL 1.16.
//!
//! A sample is a function of the seed, the step, the prompt's place in the step and its number in the group, whatever is sampled beside
//! it, up to the rounding of products with another number of rows. So a training that goes on from a checkpoint has the samples it would
//! have had. Answers are scored by the temperature they were sampled with. Dropout is off.
//!
//! Answers whose advantage is 0, such as those of a prompt that all answers solve, have no gradient without the β term: they are not computed
//! again, and only count in the denominators.

mod advantages;
mod exchange;
mod loss;
mod prompts;
mod rollouts;

use std::fmt;

use serde::{Deserialize, Serialize};
use tch::Tensor;

pub use advantages::Scale;
pub use prompts::{Prompt, PromptBatches};
pub use rollouts::{Answer, Rewards, Rollout};

use crate::accumulation::MicroBatches;
use crate::error::{Error, Result};
use crate::preference::Switch;
use crate::trainer::TrainerConfig;

/// Of what the ratio of probabilities is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ratio {
    /// Of each token.
    #[default]
    Token,
    /// Of a whole answer: exp of the mean over its tokens.
    Sequence,
}

/// How the losses of tokens become that of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregate {
    /// Each answer has the same weight.
    Grpo,
    /// Each token has the same weight.
    #[default]
    Dapo,
    /// Each token has the same weight in all steps.
    DrGrpo,
}

/// How a policy is optimized. See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyConfig {
    /// G: answers to each prompt, at least 2.
    pub samples: usize,
    /// Answers of a micro-batch, whose gradients are computed together.
    pub rows: usize,
    /// Answers that are generated at a time; they have a cache of keys and values.
    pub at_once: usize,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// The temperature of sampling, above 0.
    pub temperature: f64,
    /// Tokens that end an answer. They are learned, too.
    pub end_tokens: Vec<i64>,
    /// ε_low and ε_high.
    pub clip: [f64; 2],
    /// β, at least 0.
    pub kl: f64,
    /// Of what the ratio is taken.
    pub ratio: Ratio,
    /// How token losses are added.
    pub aggregate: Aggregate,
    /// How advantages are scaled.
    pub scale: Scale,
    /// Updates from each set of answers, at least 1. From the second on the ratio of probabilities is not 1.
    pub updates: u64,
    /// Whether answers without an end are left out of the loss. They count in the advantages.
    pub mask_truncated: bool,
    /// The seed of the samples.
    pub seed: u64,
}

impl PolicyConfig {
    /// Checks the options.
    ///
    /// # Errors
    /// One outside its range.
    pub fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::config("objective", reason));
        if self.samples < 2 {
            return refuse(format!(
                "{} answers to each prompt; expected at least 2, since an answer is compared with the others",
                self.samples
            ));
        }
        if self.updates == 0 {
            return refuse("0 updates from each set of answers; expected at least 1".to_owned());
        }
        if self.rows == 0 || self.at_once == 0 || self.max_new_tokens == 0 {
            return refuse("0 rows, answers at a time or new tokens; expected at least 1 of each".to_owned());
        }
        let [low, high] = self.clip;
        if !(0.0..1.0).contains(&low) || !high.is_finite() || high < 0.0 {
            return refuse(format!(
                "the clip is [{low}, {high}]; expected the first in [0, 1), and the second at least 0"
            ));
        }
        if !self.kl.is_finite() || self.kl < 0.0 {
            return refuse(format!("kl is {}; expected 0 or more", self.kl));
        }
        if !self.temperature.is_finite() || self.temperature <= 0.0 {
            return refuse(format!("temperature is {}; expected above 0", self.temperature));
        }
        Ok(())
    }
}

/// A training on rewards.
pub struct Policy {
    /// How it is optimized.
    pub config: PolicyConfig,
    /// What says how good answers are.
    pub rewards: Box<dyn Rewards>,
    /// Makes the model the reference, for β above 0.
    pub switch: Option<Switch>,
    /// The answers of the last step, if another one learns from them.
    held: Option<MicroBatches>,
}

impl Policy {
    /// Creates a training on rewards.
    ///
    /// # Errors
    /// As [`PolicyConfig::check`].
    pub fn new(config: PolicyConfig, rewards: Box<dyn Rewards>, switch: Option<Switch>) -> Result<Self> {
        config.check()?;
        Ok(Self { config, rewards, switch, held: None })
    }

    /// Whether answers of earlier steps are learned from in the step after `step`.
    pub(crate) fn is_between(&self, step: u64) -> bool {
        !step.is_multiple_of(self.config.updates)
    }

    /// Checks that a training ends, and saves, between sets of answers.
    ///
    /// # Errors
    /// A number of steps, or of steps between checkpoints, that is no multiple of the updates from each set.
    pub(crate) fn check_steps(&self, steps: u64, options: &TrainerConfig) -> Result<()> {
        let updates = self.config.updates;
        for (what, number) in
            [("steps", Some(steps)), ("steps between checkpoints", options.checkpoint_every)]
        {
            if let Some(number) = number.filter(|number| !number.is_multiple_of(updates)) {
                let reason = format!(
                    "{number} {what} with {updates} updates from each set of answers, which a checkpoint does not have; expected a multiple \
                     of them"
                );
                return Err(Error::config("objective", reason));
            }
        }
        Ok(())
    }

    /// Keeps the answers of a step, if another one may learn from them.
    pub(crate) fn hold(&mut self, micro: MicroBatches) {
        self.held = (self.config.updates > 1).then_some(micro);
    }

    pub(crate) fn held(&mut self) -> Option<MicroBatches> {
        self.held.take()
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Sums over the tokens of a batch.
#[derive(Debug)]
pub struct PolicySums {
    /// Of the weighted losses: a scalar.
    pub loss: Tensor,
    /// Of the terms e^d − d − 1, and the number of tokens whose ratio is clipped, `[2]`, without a graph.
    pub figures: Tensor,
}

/// What is known of a step's answers before they are learned from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RolloutFigures {
    /// The mean reward.
    pub reward: f64,
    /// The standard deviation of the rewards of a prompt, the mean over prompts.
    pub reward_deviation: f64,
    /// The share of prompts whose answers all have the same reward.
    pub equal_groups: f64,
    /// Mean tokens of an answer.
    pub length: f64,
    /// The share of answers that were cut.
    pub cut: f64,
}
