//! Rewards: a model learns from the grades of its own answers, in every layout of a step.

use std::any::Any;

use models::module::{self, LanguageModel};
use models::{DecoderConfig, Llama};
use tch::{Kind, Tensor, kind::FLOAT_CPU};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::policy::{Aggregate, Answer, Policy, PolicyConfig, PromptBatches, Ratio, Rewards, Scale};
use training::preference::Switch;
use training::trainer::{Trainer, TrainerConfig};
use training::{Batches, observer::Collect};

const END: i64 = 0;

/// The answer is the prompt's last token, and then it ends.
struct Copies;

impl Rewards for Copies {
    fn rewards(&mut self, answers: &[Answer<'_>], _: bool) -> training::Result<Vec<f64>> {
        let reward = |answer: &Answer<'_>| {
            let is_copy = answer.tokens.first() == answer.prompt.tokens.last();
            f64::from(u8::from(is_copy))
                + 0.5 * f64::from(u8::from(is_copy && answer.tokens.len() == 1 && !answer.is_cut))
        };
        Ok(answers.iter().map(reward).collect())
    }
}

/// The same reward for all.
struct Equal;

impl Rewards for Equal {
    fn rewards(&mut self, answers: &[Answer<'_>], _: bool) -> training::Result<Vec<f64>> {
        Ok(vec![0.1; answers.len()])
    }
}

const CONFIG: PolicyConfig = PolicyConfig {
    samples: 8,
    rows: 64,
    at_once: 64,
    max_new_tokens: 3,
    temperature: 1.0,
    end_tokens: Vec::new(),
    clip: [0.2, 0.2],
    kl: 0.0,
    ratio: Ratio::Token,
    aggregate: Aggregate::Dapo,
    scale: Scale::Group,
    updates: 1,
    mask_truncated: false,
    seed: 5,
};

fn model() -> Llama {
    runtime::random::seed(3).unwrap();
    Llama::new(&DecoderConfig::llama(12, 16, 24, 2, 2), FLOAT_CPU).unwrap()
}

fn prompts() -> PromptBatches {
    let all = (1..12).map(|token| if token % 2 == 0 { vec![token] } else { vec![1, 2, token] });
    PromptBatches::new(all.collect(), 8, Some(3)).unwrap()
}

fn trainer(config: PolicyConfig, rewards: Box<dyn Rewards>, steps: u64) -> (Trainer, Collect) {
    let model = model();
    let groups = Group::by_dimension(module::trainable(&model), 1e-2, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let options = TrainerConfig { steps, clip: Some(1.0), ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    let config = PolicyConfig { end_tokens: vec![END], ..config };
    trainer.policy = Some(Policy::new(config, rewards, None).unwrap());
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    (trainer, records)
}

/// The records and the weights of a training of a few steps.
fn run(config: PolicyConfig, steps: u64) -> (Vec<StepRecord>, Vec<Tensor>) {
    let (mut trainer, records) = trainer(config, Box::new(Copies), steps);
    trainer.run(&mut prompts(), None).unwrap();
    (records.take(), weights(trainer.model.as_ref()))
}

fn weights(model: &dyn LanguageModel) -> Vec<Tensor> {
    module::tensors(model).into_iter().map(|named| named.tensor.detach().copy()).collect()
}

fn reward(records: &[StepRecord]) -> f64 {
    let all: Vec<f64> = records.iter().map(|record| record.policy.unwrap().rollout.reward).collect();
    all.iter().sum::<f64>() / all.len() as f64
}

#[derive(Default, Clone)]
struct Evaluations(std::sync::Arc<std::sync::Mutex<Vec<Evaluation>>>);

impl Observer for Evaluations {
    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        self.0.lock().unwrap().push(*evaluation);
        Ok(())
    }
}

#[test]
fn a_model_learns_what_is_rewarded() {
    for (aggregate, scale, ratio) in [
        (Aggregate::Dapo, Scale::Group, Ratio::Token),
        (Aggregate::Grpo, Scale::Batch, Ratio::Sequence),
        (Aggregate::DrGrpo, Scale::None, Ratio::Token),
    ] {
        let config = PolicyConfig { aggregate, scale, ratio, ..CONFIG };
        let (mut trainer, records) = trainer(config, Box::new(Copies), 120);
        let evaluations = Evaluations::default();
        trainer.observers.push(Box::new(evaluations.clone()));
        trainer.evaluate(&mut prompts()).unwrap();
        trainer.run(&mut prompts(), None).unwrap();
        trainer.evaluate(&mut prompts()).unwrap();
        let records = records.take();
        let (first, last) = (reward(&records[..10]), reward(&records[110..]));
        assert!(first < 0.3 && last > 0.9, "{aggregate:?} {scale:?}: {first} to {last}");
        let last = records.last().unwrap().policy.unwrap();
        assert_eq!(
            (last.divergence, last.clipped),
            (0.0, 0.0),
            "the policy that samples is the one that learns"
        );
        let of = |number: usize| evaluations.0.lock().unwrap()[number];
        assert!(of(0).reward.unwrap() < 0.5 && of(1).reward.unwrap() > 0.9, "{:?} {:?}", of(0), of(1));
        assert_eq!((of(1).targets, of(1).loss), (8, -of(1).reward.unwrap()));
    }
}

#[test]
fn a_step_does_not_depend_on_its_micro_batches_or_on_how_many_answers_are_generated_at_a_time() {
    for aggregate in [Aggregate::Dapo, Aggregate::Grpo, Aggregate::DrGrpo] {
        let config = PolicyConfig { aggregate, ..CONFIG };
        let (records, weights) = run(config.clone(), 3);
        for (rows, at_once) in [(7, 64), (64, 5), (1, 1)] {
            let (other, of_other) = run(PolicyConfig { rows, at_once, ..config.clone() }, 3);
            for (own, other) in records.iter().zip(&other) {
                assert_eq!(own.policy.unwrap().rollout, other.policy.unwrap().rollout, "{rows} {at_once}");
                assert!((own.loss - other.loss).abs() < 1e-6, "{own:?} {other:?}");
            }
            for (own, other) in weights.iter().zip(&of_other) {
                let error = (own - other).abs().max().double_value(&[]);
                // A step of AdamW is its rate, whatever the gradient: the sign of a tiny one is of rounding.
                assert!(error < 2e-3, "{aggregate:?} {rows} {at_once}: {error:e}");
            }
        }
    }
}

/// The first update of a set is that of a training with one, and the second one's ratios differ from 1.
#[test]
fn answers_can_be_learned_from_several_times() {
    let (once, _) = run(CONFIG, 2);
    let twice = PolicyConfig { updates: 2, clip: [0.01, 0.01], ..CONFIG };
    let (records, _) = run(twice.clone(), 4);
    assert!((records[0].loss - once[0].loss).abs() < 1e-6, "{records:?}");
    let of = |step: usize| records[step].policy.unwrap();
    assert_eq!((of(0).rollout, of(2).rollout), (of(1).rollout, of(3).rollout));
    assert!(of(0).clipped == 0.0 && of(1).clipped > 0.1, "{records:?}");
    let (mut odd, _) = trainer(twice, Box::new(Copies), 3);
    let refused = odd.run(&mut prompts(), None).unwrap_err().to_string();
    assert!(refused.contains("3 steps with 2 updates from each set of answers"), "{refused}");
}

#[test]
fn answers_that_are_all_alike_change_nothing() {
    let (mut trainer, records) = trainer(CONFIG, Box::new(Equal), 2);
    let before = weights(trainer.model.as_ref());
    trainer.run(&mut prompts(), None).unwrap();
    for record in records.take() {
        assert_eq!((record.loss, record.gradient_norm), (0.0, Some(0.0)));
        let rollout = record.policy.unwrap().rollout;
        assert_eq!((rollout.reward_deviation, rollout.equal_groups), (0.0, 1.0));
        assert!((rollout.reward - 0.1).abs() < 1e-12);
    }
    assert!(before.iter().zip(weights(trainer.model.as_ref())).all(|(before, after)| *before == after));
    // Answers that are cut and left out.
    let masked = PolicyConfig { mask_truncated: true, max_new_tokens: 1, ..CONFIG };
    let (records, _) = run(masked, 1);
    let rollout = records[0].policy.unwrap().rollout;
    assert_eq!(rollout.cut, rollout.length, "an answer of one token is cut");
    assert_eq!(
        records[0].targets as f64,
        64.0 * (1.0 - rollout.cut),
        "the end is learned where there is one"
    );
}

#[test]
fn the_reference_holds_a_policy_back() {
    let with = |kl: f64| {
        let (mut trainer, records) = trainer(PolicyConfig { kl, ..CONFIG }, Box::new(Copies), 40);
        // The model at the start, whose weights are put back for as long as the switch is held.
        let (now, start) = (weights_of(trainer.model.as_ref()), weights(trainer.model.as_ref()));
        let switch: Switch = Box::new(move || {
            let held: Vec<Tensor> = now.iter().map(|tensor| tensor.detach().copy()).collect();
            set(&now, &start);
            Ok(Box::new(Held(now.iter().map(Tensor::shallow_clone).collect(), held)) as Box<dyn Any>)
        });
        trainer.policy.as_mut().unwrap().switch = Some(switch);
        trainer.run(&mut prompts(), None).unwrap();
        records.take()
    };
    let (free, held) = (with(0.001), with(1.0));
    assert_eq!(held[0].policy.unwrap().divergence, 0.0, "before the first update");
    let of_last = |records: &[StepRecord]| records.last().unwrap().policy.unwrap().divergence;
    assert!(
        of_last(&held) > 0.0 && of_last(&free) > 5.0 * of_last(&held),
        "{} {}",
        of_last(&free),
        of_last(&held)
    );
}

/// Puts weights back when it is dropped.
struct Held(Vec<Tensor>, Vec<Tensor>);

impl Drop for Held {
    fn drop(&mut self) {
        set(&self.0, &self.1);
    }
}

fn set(weights: &[Tensor], values: &[Tensor]) {
    tch::no_grad(|| {
        weights.iter().zip(values).for_each(|(weight, value)| weight.shallow_clone().copy_(value))
    });
}

fn weights_of(model: &dyn LanguageModel) -> Vec<Tensor> {
    module::tensors(model).into_iter().map(|named| named.tensor.shallow_clone()).collect()
}

#[test]
fn what_cannot_be_rewarded_is_refused() {
    for (config, expected) in [
        (PolicyConfig { samples: 1, ..CONFIG }, "1 answers to each prompt; expected at least 2"),
        (PolicyConfig { clip: [1.0, 0.2], ..CONFIG }, "the clip is [1, 0.2]"),
        (PolicyConfig { kl: -1.0, ..CONFIG }, "kl is -1"),
        (PolicyConfig { temperature: 0.0, ..CONFIG }, "temperature is 0"),
        (PolicyConfig { rows: 0, ..CONFIG }, "0 rows"),
        (PolicyConfig { updates: 0, ..CONFIG }, "0 updates"),
    ] {
        let refused = config.check().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let (mut without, _) = trainer(PolicyConfig { kl: 0.1, ..CONFIG }, Box::new(Copies), 1);
    let refused = without.run(&mut prompts(), None).unwrap_err().to_string();
    assert!(refused.contains("there are no adapters that can be turned off"), "{refused}");
    struct Wrong;
    impl Rewards for Wrong {
        fn rewards(&mut self, answers: &[Answer<'_>], _: bool) -> training::Result<Vec<f64>> {
            Ok(vec![f64::NAN; answers.len()])
        }
    }
    let (mut wrong, _) = trainer(CONFIG, Box::new(Wrong), 1);
    let refused = wrong.run(&mut prompts(), None).unwrap_err().to_string();
    assert!(refused.contains("expected a finite one for each, so correct the grader"), "{refused}");
    assert!(PromptBatches::new(vec![vec![1], vec![]], 1, None).is_err());
    let mut source = prompts();
    assert!(source.next().is_err());
    let other = PromptBatches::new(vec![vec![1]], 8, Some(3)).unwrap();
    let refused = source.resume(&other.state()).unwrap_err().to_string();
    assert!(refused.contains("written over other prompts"), "{refused}");
    assert_eq!(weights(&model()).first().unwrap().kind(), Kind::Float);
}
