//! Methods measured in turns.
//!
//! A machine's speed drifts by a quarter within minutes. So all methods run once in each round, and a ratio is taken within the
//! round, in which they ran one after the other.

use std::time::Instant;

use accounting::offload::Method as Paper;
use frugal::planning::MachineRates;
use models::LlamaConfig;
use offload::{Options, StreamKind};
use report::{Case, Metric};
use runtime::device::pinned_bytes;
use runtime::measure::Samples;
use runtime::memory::{Region, live_bytes};
use tch::{Device, Kind};
use training::optimizer::{AdamW, DeviceOptimizer, Group};

use super::predicted::{Step, job, peak};
use super::spans;
use super::subject::{Passes, Subject};

/// Where a model's layers are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// On the device, and nothing is computed again.
    Resident,
    /// As the options say.
    Offloaded(Options),
    /// On the host, which computes.
    Host,
}

/// A method under measurement.
#[derive(Clone, Debug)]
pub(crate) struct Entrant {
    /// What the table calls it.
    pub(crate) method: &'static str,
    pub(crate) tier: &'static str,
    pub(crate) place: Place,
    /// The same on paper.
    pub(crate) paper: Paper,
    /// Whether it can train.
    pub(crate) trains: bool,
    /// Whether it only serves as a measure for others, having been reported.
    pub(crate) reported: bool,
}

impl Entrant {
    fn case(&self, pass: &str) -> Case {
        let (ring, memory) = match &self.place {
            Place::Offloaded(options) => (
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
            Place::Resident | Place::Host => ("–".to_owned(), "–"),
        };
        Case::new()
            .with("pass", pass)
            .with("method", self.method)
            .with("tier", self.tier)
            .with("ring", ring)
            .with("memory", memory)
    }
}

/// What a heat is about.
#[derive(Clone, Debug)]
pub(crate) struct Conditions {
    pub(crate) config: LlamaConfig,
    pub(crate) device: Device,
    pub(crate) tokens: i64,
    pub(crate) seed: u64,
    pub(crate) rounds: usize,
}

/// What is measured once, after the model was made.
#[derive(Default)]
struct Once {
    /// Device bytes at the peak of a pass over those that others hold.
    inference_peak: u64,
    training_peak: u64,
    host_bytes: u64,
    /// Seconds of steps of an ordinary AdamW, where the parameters are.
    optimizer: Vec<f64>,
}

/// What a round says of one pass of one entrant.
#[derive(Clone, Copy)]
struct Lap {
    passes: Passes,
    moved: Option<Moved>,
}

/// What a trace says of it.
#[derive(Clone, Copy)]
struct Moved {
    link_rate: Option<f64>,
    overlap: f64,
    transfer_seconds: f64,
    compute_seconds: f64,
    unexplained_seconds: f64,
    late: f64,
}

struct Runner {
    subject: Subject,
    once: Once,
    inference: Vec<Lap>,
    training: Vec<Lap>,
}

/// Runs a heat, whose first entrant is resident, and whose second, where it has one that trains, is resident with recomputation.
///
/// # Errors
/// Those of the models.
pub(crate) fn run(
    conditions: &Conditions,
    entrants: &[Entrant],
    progress: &mut report::Progress,
) -> anyhow::Result<Vec<(Case, Vec<Metric>)>> {
    // What they take is of no method's.
    runtime::device::product_workspaces(conditions.device)?;
    let mut runners = Vec::new();
    for entrant in entrants {
        progress.message(&format!("{}, {}: making it", entrant.method, entrant.tier));
        runners.push(Runner::new(conditions, entrant)?);
        progress.step();
    }
    for round in 0..conditions.rounds {
        for (entrant, runner) in entrants.iter().zip(&mut runners) {
            progress.message(&format!("round {}: {}, {}", round + 1, entrant.method, entrant.tier));
            runner.lap(entrant)?;
            progress.step();
        }
    }
    let mut results = Vec::new();
    for (entrant, runner) in entrants.iter().zip(&runners).filter(|(entrant, _)| entrant.reported) {
        let references = [&runners[0], runners.get(1).unwrap_or(&runners[0])];
        results.push((
            entrant.case("inference"),
            runner.inference(conditions, entrant, &references[0].inference)?,
        ));
        if entrant.trains {
            let references = references.map(|reference| reference.training.as_slice());
            results.push((entrant.case("training"), runner.training(conditions, entrant, references)?));
        }
    }
    Ok(results)
}

impl Runner {
    fn new(conditions: &Conditions, entrant: &Entrant) -> anyhow::Result<Self> {
        let &Conditions { ref config, device, tokens, seed, .. } = conditions;
        let (device, options) = match &entrant.place {
            Place::Resident => (device, None),
            Place::Host => (Device::Cpu, None),
            Place::Offloaded(options) => (device, Some(options)),
        };
        let pinned = options.map_or(Device::Cpu, |options| if options.pinned { device } else { Device::Cpu });
        let host_before = pinned_bytes(pinned)?.live;
        let before = live_bytes(device)?;
        let subject = Subject::new(config, (Kind::Float, device), options, (tokens, seed))?;
        let mut once = Once::default();

        let region = Region::start(device)?;
        subject.infer()?;
        once.inference_peak = region.finish()?.peak - before;
        if entrant.trains {
            let region = Region::start(device)?;
            subject.gradients()?;
            once.training_peak = region.finish()?.peak - before;
            let mut optimizer =
                DeviceOptimizer::new(AdamW::default(), vec![Group::new(subject.parameters(), 1e-6)])?;
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
        subject.drop_gradients()?;
        Ok(Self { subject, once, inference: Vec::new(), training: Vec::new() })
    }

    fn lap(&mut self, entrant: &Entrant) -> anyhow::Result<()> {
        let Self { subject, inference, training, .. } = self;
        inference.push(traced(subject, || Ok(Passes { forward: subject.infer()?, backward: 0.0 }))?);
        if entrant.trains {
            training.push(traced(subject, || subject.gradients())?);
            subject.drop_gradients()?;
        }
        Ok(())
    }

    fn inference(
        &self,
        conditions: &Conditions,
        entrant: &Entrant,
        resident: &[Lap],
    ) -> anyhow::Result<Vec<Metric>> {
        let laps = &self.inference;
        let paper = match entrant.paper {
            Paper::Resident { .. } => Paper::Resident { recompute: false },
            other => other,
        };
        let predicted = job(
            &conditions.config,
            (Kind::Float, conditions.device),
            conditions.tokens,
            Step::Inference,
            &MachineRates::NOMINAL,
        )?;
        let mut metrics = vec![
            samples("forward_seconds", "s", laps.iter().map(|lap| lap.passes.forward)),
            samples(
                "tokens_per_second",
                "tokens/s",
                laps.iter().map(|lap| conditions.tokens as f64 / lap.passes.total()),
            ),
            samples("share_of_resident", "ratio", ratios(resident, laps)),
        ];
        metrics.extend(self.peak(entrant, self.once.inference_peak, peak(&predicted, paper)?));
        metrics.extend(moved(laps));
        if one_at_a_time(entrant) {
            metrics.push(unexplained(laps));
        }
        Ok(metrics)
    }

    fn training(
        &self,
        conditions: &Conditions,
        entrant: &Entrant,
        [resident, recomputed]: [&[Lap]; 2],
    ) -> anyhow::Result<Vec<Metric>> {
        let laps = &self.training;
        let optimizer = Samples { samples: self.once.optimizer.clone() }.median();
        let step = job(
            &conditions.config,
            (Kind::Float, conditions.device),
            conditions.tokens,
            Step::Training,
            &MachineRates::NOMINAL,
        )?;
        let predicted = peak(&step, entrant.paper)?;
        let mut metrics = vec![
            samples("forward_seconds", "s", laps.iter().map(|lap| lap.passes.forward)),
            samples("backward_seconds", "s", laps.iter().map(|lap| lap.passes.backward)),
            Metric::of_samples("optimizer_seconds", "s", &self.once.optimizer),
            samples(
                "tokens_per_second",
                "tokens/s",
                laps.iter().map(|lap| conditions.tokens as f64 / (lap.passes.total() + optimizer)),
            ),
            samples("share_of_resident", "ratio", ratios(resident, laps)),
            samples("share_of_recomputed", "ratio", ratios(recomputed, laps)),
        ];
        metrics.extend(self.peak(entrant, self.once.training_peak, predicted));
        metrics.extend(moved(laps));
        if one_at_a_time(entrant) {
            metrics.push(unexplained(laps));
        }
        Ok(metrics)
    }

    fn peak(&self, entrant: &Entrant, measured: u64, predicted: u64) -> Vec<Metric> {
        let host = if entrant.tier == "device" { 0 } else { self.once.host_bytes };
        vec![
            Metric::exact("peak_bytes", "B", measured as f64),
            Metric::exact("predicted_peak_bytes", "B", predicted as f64),
            Metric::exact("prediction_error", "ratio", (predicted as f64 / measured as f64 - 1.0).abs()),
            Metric::exact("host_bytes", "B", host as f64),
        ]
    }
}

/// Runs passes with a trace, where the layers move.
fn traced(subject: &Subject, passes: impl FnOnce() -> anyhow::Result<Passes>) -> anyhow::Result<Lap> {
    let Some(offload) = &subject.offload else { return Ok(Lap { passes: passes()?, moved: None }) };
    let late = offload.counters().late;
    offload.start_trace()?;
    let passes = passes()?;
    let trace = offload.take_trace()?;
    let moved = Moved {
        link_rate: offload::load_rate(&trace),
        overlap: offload::overlap(&trace),
        transfer_seconds: spans::busy(&trace, StreamKind::Load) + spans::busy(&trace, StreamKind::Store),
        compute_seconds: spans::busy(&trace, StreamKind::Compute),
        unexplained_seconds: spans::unexplained(&trace),
        late: (offload.counters().late - late) as f64,
    };
    Ok(Lap { passes, moved: Some(moved) })
}

fn one_at_a_time(entrant: &Entrant) -> bool {
    entrant.paper == Paper::OneAtATime
}

/// Speed by the reference's, round by round.
fn ratios(reference: &[Lap], laps: &[Lap]) -> impl Iterator<Item = f64> {
    reference.iter().zip(laps).map(|(reference, lap)| reference.passes.total() / lap.passes.total())
}

/// The share of a step in which what computes waits between two layers, and no transfer is why.
fn unexplained(laps: &[Lap]) -> Metric {
    samples(
        "unexplained_share",
        "ratio",
        laps.iter().filter_map(|lap| Some(lap.moved?.unexplained_seconds / lap.passes.total())),
    )
}

fn moved(laps: &[Lap]) -> Vec<Metric> {
    let all: Vec<Moved> = laps.iter().filter_map(|lap| lap.moved).collect();
    let rates: Vec<f64> = all.iter().filter_map(|moved| moved.link_rate).collect();
    if rates.is_empty() {
        return Vec::new();
    }
    let idle = laps.iter().filter_map(|lap| Some(1.0 - lap.moved?.compute_seconds / lap.passes.total()));
    vec![
        Metric::of_samples("link_rate", "B/s", &rates),
        samples("overlap", "ratio", all.iter().map(|moved| moved.overlap)),
        samples("transfer_seconds", "s", all.iter().map(|moved| moved.transfer_seconds)),
        samples("beside_layers", "ratio", idle),
        samples("late_loads", "count", all.iter().map(|moved| moved.late)),
    ]
}

fn samples(name: &str, unit: &str, values: impl Iterator<Item = f64>) -> Metric {
    Metric::of_samples(name, unit, &values.collect::<Vec<_>>())
}
