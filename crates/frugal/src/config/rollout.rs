//! Answers that are sampled, graded and learned from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use training::policy::{Aggregate, PolicyConfig, Ratio, Scale};

use crate::error::{Error, Result};
use crate::tasks::questions::Grader;

/// How answers to questions are sampled, graded and learned from, for `objective.kind = "grpo"`: see [`training::policy`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// What grades answers: `number`, `exact`, `contains` or `regex` ([`tasks::questions`](crate::tasks::questions)), each a reward of 1 or 0,
    /// or the path of a program ([`tasks::program_grader`](crate::tasks::program_grader)).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grader: Option<String>,
    /// Seconds that a program may take to grade the answers of a step.
    pub grader_seconds: f64,
    /// Answers to each question.
    pub samples: usize,
    /// The most tokens of an answer.
    pub max_new_tokens: usize,
    /// The temperature of sampling.
    pub temperature: f64,
    /// Answers that are generated at a time; absent for as many as memory allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_once: Option<usize>,
    /// ε_low, and ε_high unless that is given.
    pub clip: f64,
    /// ε_high; absent for ε_low.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_high: Option<f64>,
    /// Of what the ratio of probabilities is taken.
    pub ratio: Ratio,
    /// How the losses of tokens become that of a step.
    pub aggregate: Aggregate,
    /// How advantages are scaled.
    pub scale: Scale,
    /// Updates from each set of answers.
    pub updates: u64,
    /// Whether answers without an end are left out of the loss.
    pub mask_truncated: bool,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            grader: None,
            grader_seconds: 60.0,
            samples: 8,
            max_new_tokens: 256,
            temperature: 1.0,
            at_once: None,
            clip: 0.2,
            clip_high: None,
            ratio: Ratio::default(),
            aggregate: Aggregate::default(),
            scale: Scale::default(),
            updates: 1,
            mask_truncated: false,
        }
    }
}

/// What grades answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RewardSource {
    /// A comparison with the question's answer: a reward of 1 or 0.
    Comparison(Grader),
    /// A program.
    Program(PathBuf),
}

impl RolloutConfig {
    /// Returns what grades answers.
    ///
    /// # Errors
    /// There is none, or a name that is no grader's and no path's.
    pub fn source(&self) -> Result<RewardSource> {
        let names = "number, exact, contains, regex, or the path of a program, such as ./grade.py";
        let key = "rollout.grader";
        let refuse = |found: &str| Error::Value { key, found: found.to_owned(), expected: names };
        let Some(name) = &self.grader else { return Err(refuse("missing")) };
        Ok(match name.as_str() {
            "number" => RewardSource::Comparison(Grader::Number),
            "exact" => RewardSource::Comparison(Grader::Exact),
            "contains" => RewardSource::Comparison(Grader::Contains),
            "regex" => RewardSource::Comparison(Grader::Regex),
            name if name.contains('/') || Path::new(name).is_file() => RewardSource::Program(name.into()),
            name => return Err(refuse(name)),
        })
    }

    /// Returns how a policy is optimized: gradients of `rows` answers are computed at a time, and `at_once` answers are generated together.
    ///
    /// # Errors
    /// A value outside its range.
    pub fn policy(
        &self,
        kl: f64,
        (rows, at_once): (usize, usize),
        end_tokens: Vec<i64>,
        seed: u64,
    ) -> Result<PolicyConfig> {
        let config = PolicyConfig {
            samples: self.samples,
            rows,
            at_once,
            max_new_tokens: self.max_new_tokens,
            temperature: self.temperature,
            end_tokens,
            clip: [self.clip, self.clip_high.unwrap_or(self.clip)],
            kl,
            ratio: self.ratio,
            aggregate: self.aggregate,
            scale: self.scale,
            updates: self.updates,
            mask_truncated: self.mask_truncated,
            seed,
        };
        config.check()?;
        Ok(config)
    }
}
