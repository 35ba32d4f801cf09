//! The passes of a model whose layers are offloaded: inference, and a LoRA step.

use std::path::Path;
use std::time::Instant;

use frugal::planning::{PeakMeter, PeakUsage};
use lora::LoraConfig;
use offload::{Offload, Span};
use report::Metric;
use runtime::profile::{Trace, TraceConfig, range};
use tch::Device;
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

use crate::offload::measured_model::MeasuredModel;

/// Rank of the adapters.
pub(super) const RANK: i64 = 8;

/// Everything that is measured of a model.
pub(super) struct Measured {
    pub(super) inference: Passes,
    /// The peaks of installing the adapters.
    pub(super) installed: PeakUsage,
    pub(super) lora: Passes,
}

impl Measured {
    /// Reads, installs adapters, and trains them; each pass once to warm up and `repeats` times. `step` is called after each. One more LoRA
    /// step is written to the file `trace`.
    ///
    /// # Errors
    /// Errors of the model; a file that cannot be written.
    pub(super) fn run(
        mut subject: MeasuredModel,
        (repeats, seed): (u32, u64),
        trace: Option<&Path>,
        step: &mut dyn FnMut(&str),
    ) -> anyhow::Result<Self> {
        let inference = Passes::run(&subject, repeats, &mut || step("reading"), |subject| subject.infer())?;
        let adapters = LoraConfig {
            r: RANK,
            lora_alpha: 16.0,
            target_modules: Some(["q_proj", "k_proj", "v_proj", "o_proj"].into()),
            ..LoraConfig::default()
        };
        let watch = PeakMeter::start(subject.device)?;
        LoraConfig { seed, ..adapters.clone() }.install(&mut subject.model)?;
        let installed = watch.finish()?;
        let group = Group::new(subject.parameters(), 1e-4);
        let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![group])?;
        let mut lora_step = |subject: &MeasuredModel| {
            let passes = subject.gradients()?;
            let began = Instant::now();
            optimizer.step()?;
            optimizer.zero_grad(ZeroGrad::ToNone)?;
            Ok(passes.total() + began.elapsed().as_secs_f64())
        };
        let lora = Passes::run(&subject, repeats, &mut || step("a LoRA step"), &mut lora_step)?;
        if let Some(path) = trace {
            // Neither shapes nor allocations: both lengthen a step.
            let trace = Trace::start(TraceConfig { cuda: true, shapes: false, memory: false })?;
            {
                let _step = range("LoRA step");
                lora_step(&subject)?;
            }
            trace.save(path)?;
        }
        Ok(Self { inference, installed, lora })
    }
}

/// Passes that were measured.
pub(super) struct Passes {
    pub(super) seconds: Vec<f64>,
    pub(super) seen: PeakUsage,
    /// The streams of each.
    pub(super) traces: Vec<Vec<Span>>,
    loaded: f64,
}

impl Passes {
    /// Runs a pass to warm up, and then some that are measured.
    fn run(
        subject: &MeasuredModel,
        repeats: u32,
        step: &mut dyn FnMut(),
        mut pass: impl FnMut(&MeasuredModel) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Self> {
        let watch = PeakMeter::start(subject.device)?;
        pass(subject)?;
        let (mut seconds, mut traces) = (Vec::new(), Vec::new());
        let mut loaded = 0;
        for _ in 0..repeats {
            let before = subject.offload.as_ref().map_or(0, |offload| offload.counters().loaded);
            subject.offload.as_ref().map(Offload::start_trace).transpose()?;
            seconds.push(pass(subject)?);
            if let Some(offload) = &subject.offload {
                traces.push(offload.take_trace()?);
                loaded = offload.counters().loaded - before;
            }
            step();
        }
        Ok(Self { seconds, seen: watch.finish()?, traces, loaded: loaded as f64 })
    }

    pub(super) fn metrics(&self, predicted: u64, tokens: i64, device: Device) -> Vec<Metric> {
        let peak = self.seen.tensors.peak as f64;
        let rates: Vec<f64> = self.seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
        let trace = self.traces.last().map_or(&[][..], Vec::as_slice);
        let mut metrics = vec![
            Metric::of_samples("step_seconds", "s", &self.seconds),
            Metric::of_samples("tokens_per_second", "tokens/s", &rates),
            Metric::exact("peak_bytes", "B", peak),
            Metric::exact("prediction_error", "ratio", (predicted as f64 / peak - 1.0).abs()),
            Metric::exact("process_bytes", "B", self.seen.process as f64),
            Metric::exact("counted_bytes", "B", self.seen.counted(device) as f64),
            Metric::exact("loaded_bytes", "B", self.loaded),
            Metric::exact("overlap", "ratio", offload::overlap(trace)),
        ];
        metrics.extend(offload::load_rate(trace).map(|rate| Metric::exact("link_rate", "B/s", rate)));
        metrics
    }
}
