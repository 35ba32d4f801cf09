//! A language model as a [`Generator`](super::Generator) of answers.

use std::error::Error;
use std::time::{Duration, Instant};

use super::{Encoder, FewShot, Problem, Result, StopTexts};
use models::generation::{self, GenerationConfig, Sampling};
use models::module::LanguageModel;

/// Generates answers with a model, which reads the common beginning of all prompts once.
#[derive(Debug)]
pub struct Solver<'m> {
    model: &'m dyn LanguageModel,
    sampling: Sampling,
    prefix: Vec<i64>,
    generator: Option<(GenerationConfig, generation::Generator<'m>)>,
    /// Tokens that were generated.
    pub tokens: usize,
    /// The time that it took.
    pub time: Duration,
}

impl<'m> Solver<'m> {
    /// Creates a solver for the prompts of these problems.
    ///
    /// # Errors
    /// A prompt that cannot be made.
    pub fn new(
        model: &'m dyn LanguageModel,
        sampling: Sampling,
        problems: &[Problem],
        encoder: &Encoder,
        few_shot: &FewShot,
    ) -> Result<Self> {
        let prompts: Result<Vec<Vec<i64>>> =
            problems.iter().map(|problem| encoder.prompt(&few_shot.prompt(&problem.question)?)).collect();
        let (time, prefix) = (Duration::ZERO, common_prefix(&prompts?));
        Ok(Self { model, sampling, prefix, generator: None, tokens: 0, time })
    }
}

/// The text that all prompts begin with, and its cache.
fn common_prefix(prompts: &[Vec<i64>]) -> Vec<i64> {
    let Some((first, others)) = prompts.split_first() else { return Vec::new() };
    let longest = prompts.iter().map(Vec::len).min().unwrap_or(0).saturating_sub(1);
    let common = |other: &Vec<i64>| first.iter().zip(other).take_while(|(a, b)| a == b).count();
    let length = others.iter().map(common).min().unwrap_or(longest).min(longest);
    first[..length].to_vec()
}

impl super::Generator for Solver<'_> {
    fn generate(
        &mut self,
        prompts: &[Vec<i64>],
        max_new: usize,
        ends: &[i64],
        stop: &StopTexts<'_>,
    ) -> Result<Vec<Vec<i64>>, Box<dyn Error + Send + Sync>> {
        let began = Instant::now();
        let options = GenerationConfig {
            max_new_tokens: max_new,
            sampling: self.sampling,
            end_tokens: ends.to_vec(),
            ..GenerationConfig::default()
        };
        if self.generator.as_ref().is_none_or(|(known, _)| *known != options) {
            let generator = generation::Generator::new(self.model, &options)?.with_prefix(&self.prefix)?;
            self.generator = Some((options, generator));
        }
        let Some((_, generator)) = &self.generator else { return Err("no generator".into()) };
        let mut refused = None;
        let mut watch = |_: usize, tokens: &[i64]| {
            stop.ended(tokens).unwrap_or_else(|error| {
                refused.get_or_insert(error);
                true
            })
        };
        let rows = generator.generate(prompts, &mut watch)?;
        if let Some(error) = refused {
            return Err(error.into());
        }
        self.tokens += rows.iter().map(|row| row.tokens.len()).sum::<usize>();
        self.time += began.elapsed();
        Ok(rows.into_iter().map(|row| row.tokens).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_leaves_every_prompt_something() {
        for (prompts, expected) in [
            (vec![], vec![]),
            (vec![vec![1, 2, 3]], vec![1, 2]),
            (vec![vec![1, 2, 3], vec![1, 2, 4]], vec![1, 2]),
            (vec![vec![1, 2, 3], vec![1, 2]], vec![1]),
            (vec![vec![1], vec![2, 1]], vec![]),
        ] {
            assert_eq!(common_prefix(&prompts), expected, "{prompts:?}");
        }
    }
}
