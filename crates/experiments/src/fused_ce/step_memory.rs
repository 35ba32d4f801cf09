//! The memory of a training step, part by part and over time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accounting::activation_plan::LayerPlan;
use accounting::candidates::{Batch, Job, Placement};
use accounting::decoder_flops::Workload;
use accounting::memory::recipe::Recipe;
use accounting::offload::{Footprint, Moment, sizes::Choices};
use accounting::recompute::NormKernel;
use anyhow::Result;
use frugal::planning::MachineRates;
use models::DecoderConfig;
use models::module::{Context, Input, LanguageModel, trainable};
use runtime::autograd::Keep;
use runtime::memory::{Region, live_bytes};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use super::training::{Variant, model};

/// Bytes of a step's parts, as the allocator counted them or as they are predicted.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepMemory {
    /// Bytes of the parameters.
    pub parameters: u64,
    /// Bytes of the optimizer's state.
    pub optimizer: u64,
    /// Bytes of the parameters' gradients, when all are there.
    pub gradients: u64,
    /// Bytes that the blocks' forward keeps.
    pub activations: u64,
    /// Bytes that the projection and the loss add to that at most, without the gradients that they make.
    pub logits: u64,
    /// The most of the whole step.
    pub peak: u64,
    /// Live bytes by seconds since the step began.
    pub timeline: Vec<(f64, u64)>,
}

/// Takes two steps of AdamW on drawn tokens `[rows, sequence]`, and watches the second.
///
/// # Errors
/// Errors of the model and of the optimizer.
pub(crate) fn measure(
    config: &DecoderConfig,
    variant: Variant,
    [rows, sequence]: [i64; 2],
    kind: Kind,
    seed: u64,
    device: Device,
) -> Result<StepMemory> {
    let before = live_bytes(device)?;
    runtime::random::seed(seed)?;
    let model = model(config, variant, rows * sequence, (kind, device))?;
    let parameters = live_bytes(device)? - before;
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&*model), 1e-4)])?;
    let drawn = Generator::new(seed)?.uniform(&[rows, sequence + 1], (0.0, 1.0), (Kind::Double, device))?;
    let drawn = drawn.f_mul_scalar(config.vocab_size as f64)?.f_to_kind(Kind::Int64)?;
    let (tokens, labels) = (drawn.f_narrow(1, 0, sequence)?, drawn.f_narrow(1, 1, sequence)?);
    step(&*model, &mut optimizer, &tokens, &labels, device)?;
    let optimizer_bytes = live_bytes(device)? - before - parameters - bytes_of(&drawn);
    let sampler = Sampler::start(device);
    let mut measured = step(&*model, &mut optimizer, &tokens, &labels, device)?;
    measured.timeline =
        sampler.finish().into_iter().map(|(at, bytes)| (at, bytes.saturating_sub(before))).collect();
    measured.parameters = parameters;
    measured.optimizer = optimizer_bytes;
    measured.peak -= before;
    Ok(measured)
}

fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

fn step(
    model: &dyn LanguageModel,
    optimizer: &mut DeviceOptimizer,
    tokens: &Tensor,
    labels: &Tensor,
    device: Device,
) -> Result<StepMemory> {
    let step = Region::start(device)?;
    let at_start = live_bytes(device)?;
    let context = Context { training: true, ..Context::default() };
    let hidden = model.hidden(&Input { context, ..Input::new(tokens) })?;
    runtime::device::synchronize(device)?;
    let activations = live_bytes(device)? - at_start;
    // The head on a leaf of its own, so that its backward ends before the blocks' begins.
    let loss_region = Region::start(device)?;
    let leaf = hidden.f_detach()?.f_set_requires_grad(true)?;
    let loss = model.head().loss(&leaf, labels, &context)?.sum.f_div_scalar(labels.numel() as f64)?;
    runtime::autograd::backward(&[&loss])?;
    drop(loss);
    let of_hidden = leaf.f_grad()?;
    drop(leaf);
    runtime::device::synchronize(device)?;
    let top_of_loss = loss_region.finish()?.peak;
    runtime::autograd::backward_with(&[&hidden], &[Some(&of_hidden)], Keep::default())?;
    drop((hidden, of_hidden));
    runtime::device::synchronize(device)?;
    let gradients: u64 = optimizer.gradients()?.iter().map(bytes_of).sum();
    optimizer.step()?;
    optimizer.zero_grad(ZeroGrad::ToNone)?;
    runtime::device::synchronize(device)?;
    let peak = step.finish()?.peak;
    let weights = models::module::parameters(model.head());
    let of_weights: u64 = weights.iter().map(|(_, weight)| bytes_of(weight)).sum();
    Ok(StepMemory {
        gradients,
        activations,
        logits: top_of_loss.saturating_sub(at_start + activations + of_weights),
        peak,
        ..StepMemory::default()
    })
}

/// Predicts the same step by `accounting`, from the configuration and the chunks of the implementation.
///
/// # Errors
/// Sizes that it cannot count.
pub(crate) fn predict(
    config: &DecoderConfig,
    variant: Variant,
    [rows, sequence]: [i64; 2],
    device: Device,
) -> Result<StepMemory> {
    let model = accounting::Decoder::from_config(config)?;
    let work = Workload { batch: rows.unsigned_abs(), sequence: sequence.unsigned_abs() };
    let choices = Choices {
        recipe: Recipe::FP32,
        // On a CPU a norm keeps its output, which the next product keeps too.
        norm: if device.is_cuda() { NormKernel::Fused } else { NormKernel::Output },
        loss: variant.predicted_loss(rows * sequence, [config.hidden_size, config.vocab_size], device)?,
        ..Choices::default()
    };
    let batch = Batch::new(work, None);
    let rates = MachineRates::NOMINAL.transfers;
    let job = Job { on_cpu: device == Device::Cpu, ..Job::new(model, None, choices, batch, rates) };
    let plan = vec![LayerPlan::KeepAll; usize::try_from(config.num_hidden_layers)?];
    let candidate = job.evaluate(Placement::Resident(plan), None)?;
    let moments = job.moments(&candidate)?;
    let at = |moment| moments.iter().find(|one| one.moment == moment).cloned().unwrap_or_default();
    let (head, embedding) = (at(Moment::Head), at(Moment::Embedding));
    let matrix = Recipe::FP32.gradients.bytes((config.vocab_size * config.hidden_size).unsigned_abs())?;
    let sum = |one: &Footprint, parts: [&str; 2]| parts.map(|part| one.bytes(part)).iter().sum();
    Ok(StepMemory {
        parameters: sum(&head, ["fixed weights", "resident layers"]),
        optimizer: head.bytes("optimizer state"),
        gradients: sum(&embedding, ["fixed gradients", "layer gradients"]),
        activations: head.bytes("kept activations"),
        // The gradient of the head's weight is among the gradients.
        logits: head.bytes("working memory").saturating_sub(matrix),
        peak: candidate.peak.total,
        ..StepMemory::default()
    })
}

/// Looks at the allocator's count again and again from a thread of its own.
struct Sampler {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<(f64, u64)>>,
}

impl Sampler {
    fn start(device: Device) -> Self {
        const EVERY: Duration = Duration::from_micros(200);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let started = Instant::now();
        let thread = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(bytes) = live_bytes(device) {
                    seen.push((started.elapsed().as_secs_f64(), bytes));
                }
                std::thread::sleep(EVERY);
            }
            seen
        });
        Self { stop, thread }
    }

    fn finish(self) -> Vec<(f64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// At most `count` points of a timeline: the largest of each stretch of time, so that no peak is lost.
pub(crate) fn thinned(timeline: &[(f64, u64)], count: usize) -> Vec<(f64, u64)> {
    let Some(&(end, _)) = timeline.last() else { return Vec::new() };
    let width = (end / count.max(1) as f64).max(f64::MIN_POSITIVE);
    let mut points: Vec<(f64, u64)> = Vec::new();
    let mut stretch = 0;
    for &(at, bytes) in timeline {
        let segment = (at / width) as usize;
        match points.last_mut() {
            Some(last) if segment == stretch => {
                if bytes > last.1 {
                    *last = (at, bytes);
                }
            }
            _ => {
                points.push((at, bytes));
                stretch = segment;
            }
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_every_peak() {
        let timeline: Vec<(f64, u64)> =
            (0..1000).map(|i| (f64::from(i) * 1e-3, u64::from(i == 777) * 5 + 1)).collect();
        let thin = thinned(&timeline, 50);
        assert!(thin.len() <= 51 && thin.iter().any(|(_, bytes)| *bytes == 6), "{thin:?}");
        assert!(thin.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(thinned(&[], 10).is_empty());
    }
}
