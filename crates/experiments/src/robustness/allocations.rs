//! `robustness allocations`: a training step in which one allocation after the other is refused.
//!
//! After each refusal weights and optimizer state have to be those before the step, bit for bit, or the error has to name that they are
//! not; and the step, computed again, has to give the bits of an undisturbed one.

use anyhow::{Context, ensure};
use frugal::config::{
    ActivationPlan, Compute, LossHeadKind, OffloadConfig, OffloadTier, OptimizerPlace, Recomputed,
    ScalerConfig,
};
use frugal::lora::LoraConfig;
use frugal::models::module;
use frugal::models::{DecoderConfig, Llama};
use frugal::recipe::Handles;
use frugal::training::masked_rows::{Layout, MaskedBatches, MaskedRow};
use frugal::training::{Batches, Error, Trainer};
use frugal::{Config, Recipe};
use report::{Case, Metric};
use runtime::memory::fail_allocations;
use tch::{Device, Kind, Tensor};

use crate::driver::Bench;

/// Allocations of a step that are refused, at most.
const MOST: u64 = 500;
const ROWS: usize = 8;
const VOCABULARY: i64 = 61;

/// A way to train.
struct Setup {
    name: &'static str,
    set: fn(&mut Config),
}

const SETUPS: [Setup; 9] = [
    Setup { name: "all weights, AdamW", set: |_| {} },
    Setup { name: "LoRA", set: |config| config.adapter = Some(adapter(false)) },
    Setup {
        name: "DoRA, layers recomputed",
        set: |config| {
            config.adapter = Some(adapter(true));
            config.activations.plan = ActivationPlan::Recompute;
            config.activations.recompute = Recomputed::Layer;
        },
    },
    Setup {
        name: "fused loss, packed, accumulation of 2",
        set: |config| {
            (config.loss.head, config.loss.chunk_tokens) = (LossHeadKind::Fused, Some(32));
            (config.training.batch, config.training.accumulation) = (ROWS / 2, 2);
            config.data.packing = Some(24);
        },
    },
    Setup { name: "bf16", set: |config| config.precision.compute = Compute::Bf16 },
    Setup {
        name: "fp16 with a loss scaler",
        set: |config| {
            config.precision.compute = Compute::Fp16;
            config.precision.scaler = Some(ScalerConfig::Static { scale: 1024.0 });
        },
    },
    Setup { name: "offloaded layers", set: |config| config.offload = Some(OffloadConfig::default()) },
    Setup {
        name: "offloaded layers, AdamW on the host",
        set: |config| {
            config.offload = Some(OffloadConfig::default());
            config.optimizer.place = OptimizerPlace::Host;
        },
    },
    Setup {
        name: "layers and AdamW in files, no clipping",
        set: |config| {
            config.offload = Some(OffloadConfig { tier: OffloadTier::File, ..OffloadConfig::default() });
            config.optimizer.place = OptimizerPlace::Host;
            config.optimizer.clip = 0.0;
        },
    },
];

fn adapter(use_dora: bool) -> LoraConfig {
    LoraConfig { r: 2, use_dora, init_lora_weights: false.into(), ..LoraConfig::default() }
}

pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    // Each of them, or every n-th.
    let every = bench.sized([50, 50, 1, 1]);
    let cases = SETUPS.iter().flat_map(|setup| [1, 2].map(|step| (setup, step)));
    let label = |(setup, step): &(&Setup, u64)| format!("{}, step {step}", setup.name);
    bench.each(cases, label, |bench, (setup, step)| {
        let outcome = refuse_each(setup, step, every, bench.seed)?;
        bench.put(&Case::new().with("training", setup.name).with("step", step), outcome.metrics())
    })
}

/// The outcomes of the refusals in one step.
#[derive(Debug, Default)]
struct Outcome {
    tried: u64,
    /// Clear errors after which everything was as before.
    as_before: u64,
    /// Clear errors that weights are updated in part.
    interrupted: u64,
    /// Steps that ended well nevertheless.
    tolerated: u64,
    unclear_errors: u64,
    different_bits: u64,
}

impl Outcome {
    fn metrics(&self) -> Vec<Metric> {
        let Self { tried, as_before, interrupted, tolerated, unclear_errors, different_bits } = *self;
        let all = [
            ("tries", tried),
            ("as_before", as_before),
            ("interrupted", interrupted),
            ("tolerated", tolerated),
            ("unclear_errors", unclear_errors),
            ("different_bits", different_bits),
            ("lost", unclear_errors + different_bits),
        ];
        all.into_iter().map(|(name, count)| Metric::exact(name, "", count as f64)).collect()
    }
}

/// Refuses every `every`-th allocation in turn in step `step`, from 1.
fn refuse_each(setup: &Setup, step: u64, every: u64, seed: u64) -> anyhow::Result<Outcome> {
    let mut training = Training::at(setup, step - 1, seed)?;
    let before = training.bits()?;
    let mut undisturbed = Training::at(setup, step, seed)?;
    let after = undisturbed.bits()?;
    undisturbed.advance(step + 1)?;
    let next = undisturbed.bits()?;
    let mut outcome = Outcome::default();
    for number in (0..MOST).step_by(every as usize) {
        let failures = fail_allocations(number..number + 1)?;
        let result = training.advance(step);
        let refused = failures.failed()? > 0;
        drop(failures);
        outcome.tried += u64::from(refused);
        match result {
            Ok(()) if !refused => break,
            Ok(()) => outcome.tolerated += 1,
            Err(error) if !error.is_out_of_memory() => {
                eprintln!("{}, step {step}, allocation {number}: {error}", setup.name);
                outcome.unclear_errors += 1;
            }
            Err(Error::Interrupted { .. }) => {
                // It resumes from a checkpoint.
                ensure!(
                    training.advance(step).is_err(),
                    "a training went on from weights that were updated in part"
                );
                outcome.interrupted += 1;
                training = Training::at(setup, step - 1, seed)?;
                continue;
            }
            Err(_) => outcome.as_before += 1,
        }
        let expected = if training.trainer.step() < step { &before } else { &after };
        let mut same = training.bits()? == *expected;
        if training.trainer.step() == step {
            training.advance(step + 1)?;
            same &= training.bits()? == next;
        }
        outcome.different_bits += u64::from(!same);
        if !same || training.trainer.step() >= step {
            training = Training::at(setup, step - 1, seed)?;
        }
    }
    // After all the refusals.
    if training.trainer.step() < step {
        training.advance(step)?;
    }
    outcome.different_bits += u64::from(training.bits()? != after);
    Ok(outcome)
}

/// A training that is run step by step.
struct Training {
    trainer: Trainer,
    data: MaskedBatches,
    _handles: Handles,
}

impl Training {
    /// A training after `steps` steps.
    fn at(setup: &Setup, steps: u64, seed: u64) -> anyhow::Result<Self> {
        let mut config = Config::default();
        config.loss.head = LossHeadKind::Plain;
        (config.training.batch, config.training.accumulation) = (ROWS, 1);
        (config.optimizer.lr, config.optimizer.warmup) = (1e-2, 0.0);
        (setup.set)(&mut config);
        runtime::random::seed(seed)?;
        let model = Llama::new(&DecoderConfig::llama(VOCABULARY, 16, 24, 3, 2), (Kind::Float, Device::Cpu))?;
        let mut prepared = Recipe::new(&config)?.apply(Box::new(model))?;
        let layout = Layout {
            batch: config.training.batch,
            arrangement: config.data.arrangement(usize::MAX),
            ..Layout::default()
        };
        let mut data = MaskedBatches::new(rows(), layout, Device::Cpu)?;
        let start = data.state();
        prepared.plan_activations(&data.next()?.context("no rows")?)?;
        data.resume(&start)?;
        let (trainer, handles) = prepared.trainer(9)?;
        let mut training = Self { trainer, data, _handles: handles };
        training.advance(steps)?;
        Ok(training)
    }

    fn advance(&mut self, until: u64) -> Result<(), Error> {
        self.trainer.advance(until, &mut self.data, None).map(drop)
    }

    /// Copies of the weights and of the optimizer's state.
    fn bits(&self) -> anyhow::Result<Vec<(String, Tensor)>> {
        let optimizer = &self.trainer.optimizer;
        optimizer.synchronize()?;
        let mut bits = Vec::new();
        for named in module::tensors(self.trainer.model.as_ref()) {
            bits.push((named.name, optimizer.whole_weight(named.tensor)?.copy()));
        }
        for (name, tensor) in optimizer.state()? {
            bits.push((format!("optimizer.{name}"), tensor.copy()));
        }
        Ok(bits)
    }
}

fn rows() -> Vec<MaskedRow> {
    let row = |number: i64| {
        let length = 5 + number % 5;
        let tokens: Vec<i64> = (0..length).map(|at| (7 * number + 5 * at * at + 3) % VOCABULARY).collect();
        let labels = (0..).zip(&tokens).map(|(at, id)| if at < 2 { -100 } else { *id }).collect();
        MaskedRow::new(tokens, labels)
    };
    (0..ROWS as i64).map(row).collect()
}
