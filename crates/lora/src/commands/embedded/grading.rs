//! What a model answers to held-out problems.

use std::error::Error;

use lora::gsm8k::{EvaluateOptions, Evaluation, Generator, StopTexts, evaluate_generation};
use models::generation::{GenerateOptions, generate};
use models::module::LanguageModel;

use super::world::World;

/// Tokens of an answer; a gold one has about 20.
const NEW_TOKENS: usize = 40;

const AT_A_TIME: usize = 50;

/// Answers to the world's held-out problems, taking the likeliest token each time, and their grades.
pub(crate) fn grade(model: &dyn LanguageModel, world: &World) -> anyhow::Result<Evaluation> {
    let options =
        EvaluateOptions { batch_size: AT_A_TIME, max_new_tokens: NEW_TOKENS, ..EvaluateOptions::default() };
    let World { encoder, prompts, test, .. } = world;
    Ok(evaluate_generation(&mut Greedy(model), test, encoder, prompts, &options, &mut |_| ())?)
}

struct Greedy<'m>(&'m dyn LanguageModel);

impl Generator for Greedy<'_> {
    fn generate(
        &mut self,
        prompts: &[Vec<i64>],
        max_new: usize,
        ends: &[i64],
        stop: &StopTexts<'_>,
    ) -> Result<Vec<Vec<i64>>, Box<dyn Error + Send + Sync>> {
        let options = GenerateOptions {
            max_new_tokens: max_new,
            end_tokens: ends.to_vec(),
            ..GenerateOptions::default()
        };
        let mut refused = None;
        let mut watch = |_: usize, tokens: &[i64]| match stop.ended(tokens) {
            Ok(ended) => ended,
            Err(error) => {
                refused.get_or_insert(error);
                true
            }
        };
        let generated = generate(self.0, prompts, &options, &mut watch)?;
        match refused {
            Some(error) => Err(error.into()),
            None => Ok(generated.into_iter().map(|row| row.tokens).collect()),
        }
    }
}
