//! GRPO, crossed with every technique: each keeps its promise, or is refused by name.
//!
//! A technique that promises bits has the same answers, too. One that rounds in another way may sample another token at a near tie, which
//! no answer of these does.

use std::collections::BTreeMap;

use expect_test::expect;
use frugal::Error;
use frugal::Recipe;
use frugal::config::ObjectiveKind;
use frugal::training::Batches;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::policy::{Answer, Policy, PromptBatches, Ratio, Rewards};
use frugal::training::preference::Switch;
use tch::Device;

use crate::objectives::DPO;
use crate::pairs::{Outcome, ROWS, Rounding, base, broken, outcome, prepare, rows};
use crate::techniques::{Family, Promise, TECHNIQUES, Technique};

const SAMPLES: usize = 4;

const fn rewarded(
    name: &'static str,
    group: &'static str,
    set: fn(&mut frugal::Config, Family),
) -> Technique {
    Technique { name, group, promise: Promise::Nothing, set }
}

/// The answers of the model that is trained.
const FULL: Technique =
    rewarded("GRPO", "objective", |config, _| config.objective.kind = ObjectiveKind::Grpo);

/// With adapters, which the reference is without, and two updates from each set of answers.
const ADAPTED: Technique = rewarded("GRPO with β and two updates", "adapter", |config, family| {
    (DPO.set)(config, family);
    config.objective.kind = ObjectiveKind::Grpo;
    config.objective.beta = Some(0.05);
    (config.rollout.updates, config.rollout.ratio) = (2, Ratio::Sequence);
});

/// The share of an answer's tokens that are even.
struct Even;

impl Rewards for Even {
    fn rewards(&mut self, answers: &[Answer<'_>], _: bool) -> frugal::training::Result<Vec<f64>> {
        let even = |tokens: &[i64]| tokens.iter().filter(|token| *token % 2 == 0).count();
        Ok(answers.iter().map(|one| even(one.tokens) as f64 / one.tokens.len().max(1) as f64).collect())
    }
}

#[allow(clippy::result_large_err, reason = "a test's errors are few")]
fn run(family: Family, techniques: &[&Technique]) -> Result<Outcome, Error> {
    let mut config = base();
    techniques.iter().for_each(|technique| (technique.set)(&mut config, family));
    (config.rollout.samples, config.rollout.max_new_tokens) = (SAMPLES, 6);
    let recipe = Recipe::new(&config)?;
    frugal::runtime::random::seed(1).unwrap();
    let mut prepared = prepare(&recipe, family)?;
    let layout = Layout { batch: config.training.batch, ..Layout::default() };
    let first = MaskedBatches::new(rows(), layout, Device::Cpu)?.next()?.unwrap();
    prepared.plan_activations(&first)?;
    let answers = config.training.batch * config.training.accumulation;
    let prompts = rows().into_iter().map(|row| row.tokens).collect();
    let mut data = PromptBatches::new(prompts, answers / SAMPLES, Some(1))?;
    outcome(prepared, &mut data, |trainer, handles| {
        let at_a_time = config.training.micro_batch_size.unwrap_or(config.training.batch);
        let kl = config.objective.beta.unwrap_or(0.0);
        let policy = config.rollout.policy(kl, (at_a_time, ROWS), vec![7, 11], 5)?;
        let switch = handles.adapters.as_ref().map(lora::Adapters::switch);
        let switch = switch.map(|switch| -> Switch { Box::new(move || Ok(Box::new(switch.disable()?))) });
        trainer.policy = Some(Policy::new(policy, Box::new(Even), switch)?);
        Ok(())
    })
}

#[test]
fn every_technique_keeps_its_promise_or_is_refused_by_name() {
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for objective in [&FULL, &ADAPTED] {
        for family in [Family::Llama, Family::Gpt2] {
            let plain = run(family, &[objective]).unwrap();
            assert!(plain.norms.iter().all(|norm| *norm > 1e-3), "{:?}", plain.norms);
            for technique in TECHNIQUES.iter().filter(|technique| technique.group != objective.group) {
                let name = format!("{family:?}: {} + {}", objective.name, technique.name);
                match run(family, &[technique, objective]) {
                    Err(Error::Conflict { why, .. }) => *reasons.entry(why.to_owned()).or_default() += 1,
                    Err(error) => failures.push(format!("{name}: {error}")),
                    Ok(with) => {
                        let rounding =
                            if technique.group == "precision" { Rounding::Low } else { Rounding::Fp32 };
                        failures.extend(
                            broken(technique.promise, &with, &plain, rounding)
                                .map(|found| format!("{name}: {found}")),
                        );
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} × {reason}")).collect();
    expect![[r#"
        2 × an adapter freezes the whole base
        22 × each token of an answer would load every layer
        4 × rows are the model's own answers, which are not known before a step
        2 × the optimizer's state of trained layers in files is in files, too
        4 × the update on the host is that of offloaded layers"#]].assert_eq(&reasons.join("\n"));
}
