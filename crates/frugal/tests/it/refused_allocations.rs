//! An allocation that is refused, one of a step after the other, under every technique: a clear error, everything as before the step,
//! and the same bits when the step is computed again. `cargo xtask run-all --only allocations --scale full` refuses each of them.

use frugal::models::module;
use frugal::recipe::Handles;
use frugal::runtime::memory::fail_allocations;
use frugal::training::masked_rows::{Layout, MaskedBatches};
use frugal::training::{Batches, Error, Trainer};
use frugal::{Config, Recipe};
use tch::{Device, Tensor};

use crate::pairs::{base, prepare, rows};
use crate::techniques::{Family, TECHNIQUES};

/// Allocations of a step that are refused one by one, at most.
const ALLOCATIONS: u64 = 500;
/// Every so many of them, from another one for each technique.
const EVERY: usize = 13;

/// A training that goes on step by step.
struct Training {
    trainer: Trainer,
    data: MaskedBatches,
    _handles: Handles,
}

impl Training {
    /// A training after `steps` steps; `None` if the techniques cannot be combined.
    fn at(config: &Config, steps: u64) -> Option<Self> {
        frugal::runtime::random::seed(1).unwrap();
        let recipe = Recipe::new(config).ok()?;
        let layout = Layout {
            batch: config.training.batch,
            arrangement: config.data.arrangement(usize::MAX),
            shuffle: Some(1),
            ..Layout::default()
        };
        let mut data = MaskedBatches::new(rows(false), layout, Device::Cpu).unwrap();
        let mut prepared = prepare(&recipe, Family::Llama).ok()?;
        let first = data.next().unwrap().unwrap();
        prepared.plan_activations(&first).unwrap();
        let data = MaskedBatches::new(rows(false), layout, Device::Cpu).unwrap();
        let (trainer, handles) = prepared.trainer(9).unwrap();
        let mut training = Self { trainer, data, _handles: handles };
        training.advance(steps).unwrap();
        Some(training)
    }

    fn advance(&mut self, until: u64) -> Result<(), Error> {
        self.trainer.advance(until, &mut self.data, None).map(drop)
    }

    /// Copies of the weights and of the state of the optimizer and of the scaler.
    fn bits(&self) -> Vec<(String, Tensor)> {
        self.trainer.optimizer.synchronize().unwrap();
        let weights = module::tensors(self.trainer.model.as_ref()).into_iter();
        let weights = weights
            .map(|named| (named.name, self.trainer.optimizer.whole_weight(named.tensor).unwrap().copy()));
        let state = self.trainer.optimizer.state().unwrap().into_iter();
        let scaler = self.trainer.scaler.state().to_string();
        let scaler = ("scaler".to_owned(), Tensor::from_slice(scaler.as_bytes()));
        let state = state.map(|(name, tensor)| (format!("optimizer.{name}"), tensor.copy()));
        weights.chain(state).chain([scaler]).collect()
    }
}

/// What came of the refusals in one step.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    tried: u64,
    /// Errors after which everything was as before.
    as_before: u64,
    /// Steps that succeeded nevertheless.
    tolerated: u64,
    /// Errors that say that the weights are updated in part.
    interrupted: u64,
}

/// Refuses one allocation after the other in step `step`, from 1.
fn refuse_some(config: &Config, step: u64, first: u64, name: &str) -> Option<Outcome> {
    let mut training = Training::at(config, step - 1)?;
    let before = training.bits();
    let mut undisturbed = Training::at(config, step)?;
    let after = undisturbed.bits();
    undisturbed.advance(step + 1).unwrap();
    let next = undisturbed.bits();
    let mut outcome = Outcome::default();
    for number in (first..ALLOCATIONS).step_by(EVERY) {
        let failures = fail_allocations(number..number + 1).unwrap();
        let result = training.advance(step);
        let refused = failures.failed().unwrap();
        drop(failures);
        if refused == 0 {
            assert!(result.is_ok(), "{name}, step {step}: {result:?}");
            break;
        }
        outcome.tried += 1;
        let at = format!("{name}, step {step}, allocation {number}: {result:?}");
        match result {
            Ok(()) => outcome.tolerated += 1,
            Err(error) => {
                assert!(error.is_out_of_memory(), "{at}");
                if let Error::Interrupted { .. } = error {
                    outcome.interrupted += 1;
                    let error = training.advance(step).unwrap_err().to_string();
                    assert!(error.contains("resume from a checkpoint"), "{error}");
                    training = Training::at(config, step - 1)?;
                    continue;
                }
                outcome.as_before += 1;
            }
        }
        let expected = if training.trainer.step() < step { &before } else { &after };
        assert!(training.bits() == *expected, "{at}: other bits");
        if training.trainer.step() == step {
            training.advance(step + 1).unwrap();
            assert!(training.bits() == next, "{at}: other bits in the next step");
            training = Training::at(config, step - 1)?;
        }
    }
    training.advance(step).unwrap();
    assert!(training.bits() == after, "{name}: other bits at the end of step {step}");
    Some(outcome)
}

/// The techniques of these names.
fn config(names: &[&str]) -> Config {
    let mut config = base();
    for name in names {
        let technique = TECHNIQUES.iter().find(|technique| technique.name == *name).unwrap();
        (technique.set)(&mut config, Family::Llama);
    }
    config
}

#[test]
fn every_technique_survives_them() {
    let singles = TECHNIQUES.iter().map(|technique| vec![technique.name]);
    let sets = [
        vec!["LoRA", "offload to files"],
        vec!["LoRA", "fp16", "recompute layers"],
        vec!["DoRA", "bf16", "fused loss", "packing"],
        vec!["offload, overlap", "optimizer on the host"],
        vec!["offload, overlap", "optimizer on the host", "no clipping", "bf16"],
        vec!["offload, checkpointing", "optimizer on the host", "accumulation"],
    ];
    let mut total = Outcome::default();
    for (number, set) in singles.chain(sets).enumerate() {
        let name = set.join(" + ");
        for step in [1, 2] {
            let first = (5 * number as u64 + step) % EVERY as u64;
            let Some(outcome) = refuse_some(&config(&set), step, first, &name) else { continue };
            assert!(outcome.tried >= 10, "{name}: {outcome:?}");
            // Only updates of layers during backward cannot be undone.
            let during_backward = name.contains("no clipping") && name.contains("on the host");
            assert!(outcome.interrupted == 0 || during_backward, "{name}, step {step}: {outcome:?}");
            total.tried += outcome.tried;
            total.as_before += outcome.as_before;
            total.tolerated += outcome.tolerated;
            total.interrupted += outcome.interrupted;
        }
    }
    assert!(total.as_before > 500, "{total:?}");
    // A scale that grows at every step, and is put back.
    let mut growing = config(&["LoRA", "fp16"]);
    growing.precision.scaler = None;
    let outcome = refuse_some(&growing, 2, 0, "dynamic scale").unwrap();
    assert!(outcome.as_before == outcome.tried && outcome.tried > 10, "{outcome:?}");
}
