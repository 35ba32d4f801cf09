//! The prompts of a training on rewards, in an order that a seed gives.

use std::sync::Arc;

use dataloading::Batch;
use dataloading::fingerprint::Fingerprint;
use dataloading::permutation::Permutation;
use serde_json::{Value, json};

use crate::batches::Batches;
use crate::error::{Error, Result};

/// A prompt, and its number among all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Its number.
    pub number: usize,
    /// Its tokens.
    pub tokens: Arc<[i64]>,
}

/// A source of the prompts of steps. Each epoch has its own order, so the state is one number. A step that an epoch's end would cut
/// takes the rest from the next one.
#[derive(Debug, Clone)]
pub struct PromptBatches {
    prompts: Arc<[Arc<[i64]>]>,
    /// Prompts of a step.
    count: usize,
    seed: Option<u64>,
    fingerprint: u64,
    /// Prompts that were taken, over all epochs.
    position: u64,
}

impl PromptBatches {
    /// Creates a source of `count` prompts at a time, shuffled by a seed or in their order, at the first one.
    ///
    /// # Errors
    /// No prompt, or an empty one; 0 at a time.
    pub fn new(prompts: Vec<Vec<i64>>, count: usize, seed: Option<u64>) -> Result<Self> {
        let refuse = |reason: String| Err(Error::config("prompts", reason));
        if prompts.is_empty() || count == 0 {
            return refuse(format!(
                "{} prompts, {count} at a time; expected at least 1 of both",
                prompts.len()
            ));
        }
        if let Some(empty) = prompts.iter().position(Vec::is_empty) {
            return refuse(format!("prompt {empty} is empty; expected at least one token"));
        }
        let mut content = Fingerprint::new("prompts").number(count as u64).number(seed.unwrap_or(0));
        for prompt in &prompts {
            content = content.numbers(prompt.iter().map(|token| token.cast_unsigned()));
        }
        let prompts = prompts.into_iter().map(Arc::from).collect();
        Ok(Self { prompts, count, seed, fingerprint: content.finish(), position: 0 })
    }

    /// Returns the number of prompts.
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// Whether there are none, which [`PromptBatches::new`] refuses.
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty()
    }

    /// Returns the tokens of the longest prompt.
    pub fn longest(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.len()).max().unwrap_or(0)
    }

    fn at(&self, position: u64) -> Prompt {
        let all = self.prompts.len() as u64;
        let (epoch, number) = (position / all, position % all);
        let number = match self.seed {
            Some(seed) => Permutation::new(all, seed, epoch, 0).at(number),
            None => number,
        } as usize;
        Prompt { number, tokens: self.prompts[number].clone() }
    }
}

impl Batches for PromptBatches {
    fn next(&mut self) -> Result<Option<Batch>> {
        Err(Error::config("prompts", "prompts are for an objective over rewards, which answers them"))
    }

    fn prompts(&mut self) -> Result<Vec<Prompt>> {
        let end = self.position + self.count as u64;
        let prompts = (self.position..end).map(|position| self.at(position)).collect();
        self.position = end;
        Ok(prompts)
    }

    fn state(&self) -> Value {
        json!({ "prompts": format!("{:016x}", self.fingerprint), "position": self.position })
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        let fingerprint = format!("{:016x}", self.fingerprint);
        match state["position"].as_u64().filter(|_| state["prompts"] == *fingerprint) {
            Some(position) => self.position = position,
            None => {
                let reason = "the checkpoint was written over other prompts, or with another number of them in a step; resume with the \
                              same questions, batch size, samples and seed";
                return Err(Error::config("prompts", reason));
            }
        }
        Ok(())
    }
}
