//! A comparison of methods, which are measured in turns.
//!
//! A machine's speed drifts by a quarter within minutes. So all methods run once in each round, and a ratio is taken within the
//! round, in which they ran one after the other.

mod rounds;

use std::time::Instant;

use accounting::offload::Method as Paper;
use anyhow::Context;
use frugal::planning::MachineRates;
use models::DecoderConfig;
use offload::{HostAdamW, HostAdamWConfig, OffloadConfig, StreamKind};
use report::{Case, Metric};
use runtime::device::pinned_bytes;
use runtime::measure::Samples;
use runtime::memory::{Region, live_bytes};
use tch::{Device, Kind};
use training::optimizer::{AdamW, DeviceOptimizer, Group};

use super::measured_model::{MeasuredModel, Passes};
use super::predicted::{Step, costs, peak};
use super::spans;
use crate::driver::Bench;
use rounds::{Moved, Sample, moved, ratios, samples, unexplained};

/// The place of a model's layers.
#[derive(Clone, Debug)]
pub(crate) enum Placement {
    /// On the device, and nothing is computed again.
    Resident,
    /// Offloaded with these options.
    Offloaded(OffloadConfig),
    /// On the host, which computes.
    Host,
}

/// A method under measurement.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    /// The method's name in the table.
    pub(crate) method: &'static str,
    pub(crate) tier: &'static str,
    pub(crate) placement: Placement,
    /// The same on paper.
    pub(crate) paper: Paper,
    /// Whether its inference is a row.
    pub(crate) infers: bool,
    /// Whether it can train.
    pub(crate) trains: bool,
    /// Whether AdamW runs on the host, during backward.
    pub(crate) host_optimizer: bool,
    /// Whether it only serves as a measure for others, having been reported.
    pub(crate) reported: bool,
}

impl Variant {
    fn case(&self, pass: &str) -> Case {
        let (ring, memory) = match &self.placement {
            Placement::Offloaded(options) => (
                if options.method == offload::Method::Overlap && options.resident.is_empty() {
                    options.ring.to_string()
                } else {
                    "–".to_owned()
                },
                match (self.tier, options.device, options.pinned) {
                    ("device", ..) => "–",
                    (_, Device::Cpu, _) => "pages",
                    (.., true) => "pinned",
                    (.., false) => "pageable",
                },
            ),
            Placement::Resident | Placement::Host => ("–".to_owned(), "–"),
        };
        case(pass, self.method, self.tier).with("ring", ring).with("memory", memory)
    }
}

/// The case of a pass of a method, without a ring.
pub(crate) fn case(pass: &str, method: &str, tier: &str) -> Case {
    Case::new()
        .with("pass", pass)
        .with("method", method)
        .with("tier", tier)
        .with("ring", "–")
        .with("memory", "–")
}

/// Conditions that all variants of a comparison share.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    pub(crate) config: DecoderConfig,
    pub(crate) device: Device,
    pub(crate) tokens: i64,
    pub(crate) seed: u64,
    pub(crate) rounds: usize,
}

/// Measured once, after the model was made.
#[derive(Default)]
struct Once {
    /// Device bytes at the peak of a pass over those that others hold.
    inference_peak: u64,
    /// Device bytes that the model holds between passes.
    model_bytes: u64,
    /// Bytes at the peak of a training step. The host's memory has been used before: first uses fault every page in, which
    /// slows the stores, and gradients pile up on the device.
    training_peak: u64,
    host_bytes: u64,
    /// Seconds of steps of an ordinary AdamW, where the parameters are.
    optimizer: Vec<f64>,
}

struct Runner {
    /// Dropped before the model, whose layers it steps.
    host_optimizer: Option<HostAdamW>,
    model: MeasuredModel,
    once: Once,
    inference: Vec<Sample>,
    training: Vec<Sample>,
}

/// Runs variants in turns. The first is resident; the second, if it trains, is resident with recomputation.
///
/// # Errors
/// Errors of the models.
pub(crate) fn run(
    conditions: &Conditions,
    variants: &[Variant],
    bench: &mut Bench,
) -> anyhow::Result<Vec<(Case, Vec<Metric>)>> {
    // Their bytes belong to no method.
    runtime::device::product_workspaces(conditions.device)?;
    let mut runners = Vec::new();
    for variant in variants {
        bench.message(&format!("{}, {}: setting up", variant.method, variant.tier));
        runners.push(Runner::new(conditions, variant)?);
        bench.step();
    }
    for round in 0..conditions.rounds {
        for (variant, runner) in variants.iter().zip(&mut runners) {
            bench.message(&format!("round {}: {}, {}", round + 1, variant.method, variant.tier));
            runner.measure(variant)?;
            bench.step();
        }
    }
    let mut results = Vec::new();
    for (variant, runner) in variants.iter().zip(&runners).filter(|(variant, _)| variant.reported) {
        let references = [&runners[0], runners.get(1).unwrap_or(&runners[0])];
        if variant.infers {
            let metrics = runner.inference(conditions, variant, references[0])?;
            results.push((variant.case("inference"), metrics));
        }
        if variant.trains {
            results.push((variant.case("training"), runner.training(conditions, variant, references)?));
        }
    }
    Ok(results)
}

impl Runner {
    fn new(conditions: &Conditions, variant: &Variant) -> anyhow::Result<Self> {
        let &Conditions { ref config, device, tokens, seed, .. } = conditions;
        let (device, options) = match &variant.placement {
            Placement::Resident => (device, None),
            Placement::Host => (Device::Cpu, None),
            Placement::Offloaded(options) => (device, Some(options)),
        };
        let pinned = options.map_or(Device::Cpu, |options| if options.pinned { device } else { Device::Cpu });
        let host_before = pinned_bytes(pinned)?.live;
        let before = live_bytes(device)?;
        let model = MeasuredModel::new(config, (Kind::Float, device), options, (tokens, seed))?;
        let mut once = Once::default();

        let region = Region::start(device)?;
        model.infer()?;
        once.inference_peak = region.finish()?.peak - before;
        let mut host_optimizer = None;
        if variant.host_optimizer {
            let offload = model.offload.as_ref().context("the model is not offloaded")?;
            let groups = vec![Group::new(model.parameters(), 1e-6)];
            let host = HostAdamW::new(offload, groups, AdamW::default(), HostAdamWConfig::default())?;
            let optimizer = host_optimizer.insert(host);
            // The first step makes the state.
            step_on_host(&model, optimizer)?;
        } else if variant.trains {
            model.gradients()?;
            let groups = vec![Group::new(model.parameters(), 1e-6)];
            let mut optimizer = DeviceOptimizer::new(AdamW::default(), groups)?;
            for step in 0..3 {
                let began = Instant::now();
                optimizer.step()?;
                runtime::device::synchronize(device)?;
                if step > 0 {
                    once.optimizer.push(began.elapsed().as_secs_f64());
                }
            }
            drop(optimizer);
        }
        once.host_bytes = pinned_bytes(pinned)?.live - host_before;
        model.drop_gradients()?;
        if let Some(offload) = &model.offload {
            offload.synchronize()?;
        }
        once.model_bytes = live_bytes(device)? - before;
        Ok(Self { host_optimizer, model, once, inference: Vec::new(), training: Vec::new() })
    }

    fn measure(&mut self, variant: &Variant) -> anyhow::Result<()> {
        let Self { host_optimizer, model, once, inference, training } = self;
        if variant.infers {
            inference.push(traced(model, || Ok(Passes { forward: model.infer()?, backward: 0.0 }))?);
        }
        let region = Region::start(model.device)?;
        if let Some(optimizer) = host_optimizer {
            training.push(traced(model, || {
                let (passes, rest) = step_on_host(model, optimizer)?;
                once.optimizer.push(rest);
                Ok(passes)
            })?);
        } else if variant.trains {
            training.push(traced(model, || model.gradients())?);
            model.drop_gradients()?;
        }
        let peak = once.model_bytes + region.finish()?.peak_above_start();
        once.training_peak = once.training_peak.max(peak);
        Ok(())
    }

    fn inference(
        &self,
        conditions: &Conditions,
        variant: &Variant,
        resident: &Self,
    ) -> anyhow::Result<Vec<Metric>> {
        let rounds = &self.inference;
        let paper = match variant.paper {
            Paper::Resident { .. } => Paper::Resident { recompute: false },
            other => other,
        };
        let predicted = costs(
            &conditions.config,
            (Kind::Float, conditions.device),
            conditions.tokens,
            Step::Inference,
            &MachineRates::NOMINAL,
        )?;
        let mut metrics = vec![
            samples("forward_seconds", "s", rounds.iter().map(|round| round.passes.forward)),
            samples(
                "tokens_per_second",
                "tokens/s",
                rounds.iter().map(|round| conditions.tokens as f64 / round.passes.total()),
            ),
            samples("share_of_resident", "ratio", ratios([&resident.inference, rounds], [0.0; 2])),
        ];
        metrics.extend(self.peak(variant, self.once.inference_peak, peak(&predicted, paper, false)?));
        metrics.extend(moved(rounds));
        if one_at_a_time(variant) {
            metrics.push(unexplained(rounds));
        }
        Ok(metrics)
    }

    fn training(
        &self,
        conditions: &Conditions,
        variant: &Variant,
        [resident, recomputed]: [&Self; 2],
    ) -> anyhow::Result<Vec<Metric>> {
        let rounds = &self.training;
        let optimizer = self.optimizer_seconds();
        // An optimizer that runs during backward belongs to what is compared.
        let share_of = |reference: &Self| {
            let own = |of: &Self| if variant.host_optimizer { of.optimizer_seconds() } else { 0.0 };
            ratios([&reference.training, rounds], [own(reference), own(self)]).collect::<Vec<f64>>()
        };
        let step = costs(
            &conditions.config,
            (Kind::Float, conditions.device),
            conditions.tokens,
            Step::Training,
            &MachineRates::NOMINAL,
        )?;
        let predicted = peak(&step, variant.paper, variant.host_optimizer)?;
        let mut metrics = vec![
            samples("forward_seconds", "s", rounds.iter().map(|round| round.passes.forward)),
            samples("backward_seconds", "s", rounds.iter().map(|round| round.passes.backward)),
            Metric::of_samples("optimizer_seconds", "s", &self.once.optimizer),
            samples(
                "tokens_per_second",
                "tokens/s",
                rounds.iter().map(|round| conditions.tokens as f64 / (round.passes.total() + optimizer)),
            ),
            Metric::of_samples("share_of_resident", "ratio", &share_of(resident)),
            Metric::of_samples("share_of_recomputed", "ratio", &share_of(recomputed)),
        ];
        metrics.extend(self.peak(variant, self.once.training_peak, predicted));
        metrics.extend(moved(rounds));
        if one_at_a_time(variant) {
            metrics.push(unexplained(rounds));
        }
        Ok(metrics)
    }

    /// Seconds of a step of AdamW; of what remains of it after backward, if it runs on the host.
    fn optimizer_seconds(&self) -> f64 {
        Samples { samples: self.once.optimizer.clone() }.median()
    }

    fn peak(&self, variant: &Variant, measured: u64, predicted: u64) -> Vec<Metric> {
        let host = if variant.tier == "device" { 0 } else { self.once.host_bytes };
        vec![
            Metric::exact("peak_bytes", "B", measured as f64),
            Metric::exact("predicted_peak_bytes", "B", predicted as f64),
            Metric::exact("prediction_error", "ratio", (predicted as f64 / measured as f64 - 1.0).abs()),
            Metric::exact("host_bytes", "B", host as f64),
        ]
    }
}

/// Runs passes with a trace, where the layers move.
fn traced(model: &MeasuredModel, passes: impl FnOnce() -> anyhow::Result<Passes>) -> anyhow::Result<Sample> {
    let Some(offload) = &model.offload else { return Ok(Sample { passes: passes()?, moved: None }) };
    let before = offload.counters();
    offload.start_trace()?;
    let passes = passes()?;
    let trace = offload.take_trace()?;
    let after = offload.counters();
    let moved = Moved {
        link_rate: offload::load_rate(&trace),
        overlap: offload::overlap(&trace),
        transfer_seconds: spans::busy(&trace, StreamKind::Load) + spans::busy(&trace, StreamKind::Store),
        compute_seconds: spans::busy(&trace, StreamKind::Compute),
        unexplained_seconds: spans::unexplained(&trace),
        late: (after.late - before.late) as f64,
        loaded: (after.loaded - before.loaded) as f64,
        stored: (after.stored - before.stored) as f64,
    };
    Ok(Sample { passes, moved: Some(moved) })
}

/// Takes a step of an optimizer on the host; returns the seconds of its two passes, and of the updates that remain then.
fn step_on_host(model: &MeasuredModel, optimizer: &mut HostAdamW) -> anyhow::Result<(Passes, f64)> {
    let passes = model.gradients()?;
    let began = Instant::now();
    optimizer.step()?;
    runtime::device::synchronize(model.device)?;
    Ok((passes, began.elapsed().as_secs_f64()))
}

fn one_at_a_time(variant: &Variant) -> bool {
    variant.paper == Paper::OneAtATime
}
