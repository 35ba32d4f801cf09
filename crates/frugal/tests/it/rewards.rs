//! GRPO, crossed with every technique: each keeps its promise, or is refused by name.
//!
//! A technique that promises bits has the same answers, too. One that rounds in another way may sample another token at a near tie, which
//! no answer of these does.

use std::time::Duration;

use expect_test::expect;
use frugal::config::{ObjectiveKind, ZeroStage};
use frugal::runtime::collectives::{Group, GroupConfig, Store};
use frugal::sharding::Mesh;
use frugal::training::Batches;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::policy::{Answer, Policy, PromptBatches, Ratio, Rewards};
use frugal::training::preference::Switch;
use frugal::{Error, Recipe};
use tch::Device;
use testing::ranks::Ranks;

use crate::objectives::{DPO, refusals};
use crate::pairs::{Outcome, ROWS, Rounding, base, broken, outcome, prepare, rows};
use crate::techniques::{Family, Promise, Technique};

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
    run_over(family, techniques, None)
}

#[allow(clippy::result_large_err, reason = "a test's errors are few")]
fn run_over(family: Family, techniques: &[&Technique], ranks: Option<Mesh>) -> Result<Outcome, Error> {
    let mut config = base();
    techniques.iter().for_each(|technique| (technique.set)(&mut config, family));
    (config.rollout.samples, config.rollout.max_new_tokens) = (SAMPLES, 6);
    let mut recipe = Recipe::new(&config)?;
    if let Some(ranks) = ranks {
        // Two, so that what is refused does not depend on the ranks of the run.
        recipe.check_ranks(ranks.world().size().max(2))?;
        recipe = recipe.over(ranks)?;
    }
    frugal::runtime::random::seed(1).unwrap();
    let mut prepared = prepare(&recipe, family)?;
    let layout = Layout { batch: config.training.batch, ..Layout::default() };
    let first = MaskedBatches::new(rows(false), layout, Device::Cpu)?.next()?.unwrap();
    prepared.plan_activations(&first)?;
    let answers = config.training.batch * config.training.accumulation;
    let prompts = rows(false).into_iter().map(|row| row.tokens).collect();
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
    let check = |_: &Technique, plain: &Outcome| {
        assert!(plain.norms.iter().all(|norm| *norm > 1e-3), "{:?}", plain.norms);
    };
    let reasons = refusals(&[&FULL, &ADAPTED], run, check);
    expect![[r#"
        4 × a reward is for the answer that the model gives without noise
        2 × an adapter freezes the whole base
        22 × each token of an answer would load every layer
        4 × rows are the model's own answers, which are not known before a step
        2 × the optimizer's state of trained layers in files is in files, too
        4 × the update on the host is that of offloaded layers"#]]
    .assert_eq(&reasons);
}

/// Questions of a step and micro-batches that two ranks cannot divide equally; stages; and techniques beside them.
const OVER_RANKS: [(&Technique, usize); 4] = [(&FULL, 0), (&FULL, 1), (&ADAPTED, 1), (&ADAPTED, 2)];

const UNEVEN: [Technique; 3] = [
    rewarded("ZeRO-1", "ranks", |config, _| over_ranks(config, ZeroStage::One)),
    rewarded("ZeRO-2", "ranks", |config, _| over_ranks(config, ZeroStage::Two)),
    rewarded("ZeRO-3", "ranks", |config, _| over_ranks(config, ZeroStage::Three)),
];

fn over_ranks(config: &mut frugal::Config, stage: ZeroStage) {
    (config.training.batch, config.training.accumulation) = (SAMPLES, 5);
    config.optimizer.zero_stage = stage;
}

/// A rank's process runs this test alone.
#[test]
#[allow(clippy::print_stdout, reason = "what a rank prints is its result")]
fn a_rank() {
    testing::ranks::rank(|(): (), launch| {
        let store = Store::connect(launch, Duration::from_secs(30)).unwrap();
        for (number, (objective, stage)) in OVER_RANKS.into_iter().enumerate() {
            let run = |ranks: Mesh| run_over(Family::Llama, &[&UNEVEN[stage], objective], Some(ranks));
            let ranks = Group::new(&store, &format!("rewards {number}"), GroupConfig::default()).unwrap();
            match run((&ranks).into()) {
                Err(Error::Conflict { first, why, .. }) => println!("{first}: {why}"),
                Err(error) => panic!("{error}"),
                Ok(over) => {
                    let alone = run((&Group::alone()).into()).unwrap();
                    let different = broken(Promise::Bits, &over, &alone, Rounding::Fp32);
                    assert!(different.is_none(), "{}, {}: {different:?}", UNEVEN[stage].name, objective.name);
                    println!("{}, {}: the bits of one process", UNEVEN[stage].name, objective.name);
                }
            }
            ranks.barrier("the next one").unwrap();
        }
    });
}

#[test]
fn ranks_sample_and_learn_what_one_process_does() {
    let [two, four] = [2, 4].map(|ranks| Ranks::new("rewards::a_rank", ranks).run(&()));
    assert!(two.iter().chain(&four).all(|lines| *lines == two[0]), "{two:?} {four:?}");
    expect![[r#"
        ZeRO-1, GRPO: the bits of one process
        ZeRO-2, GRPO: the bits of one process
        ZeRO-2, GRPO with β and two updates: the bits of one process
        `objective.kind = "grpo"` with `optimizer.zero_stage = 3`: answers take different numbers of passes, and all ranks gather a layer in the same pass"#]].assert_eq(&two[0].join("\n"));
}
