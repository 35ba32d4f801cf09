//! Grades a model's answers to held-out problems.

use frugal::tasks::gsm8k::{EvaluateConfig, Evaluation, FewShot, Solver, evaluate_generation};
use models::generation::Sampling;
use models::module::LanguageModel;

use super::world::World;

/// Tokens of an answer; a gold one has about 20.
const NEW_TOKENS: usize = 40;

const AT_A_TIME: usize = 50;

/// Answers to the world's held-out problems, asked by `prompts`, decoded greedily, and their grades.
pub(crate) fn grade(
    model: &dyn LanguageModel,
    world: &World,
    prompts: &FewShot,
) -> anyhow::Result<Evaluation> {
    let options =
        EvaluateConfig { batch_size: AT_A_TIME, max_new_tokens: NEW_TOKENS, ..EvaluateConfig::default() };
    let World { encoder, test, .. } = world;
    let mut solver = Solver::new(model, Sampling::Greedy, test, encoder, prompts)?;
    Ok(evaluate_generation(&mut solver, test, encoder, prompts, &options, &mut |_| ())?)
}
