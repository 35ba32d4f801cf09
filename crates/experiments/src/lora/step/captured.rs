//! The step as a training captures it: a CUDA graph repeats it, or on a CPU the recorder, which shows that it can be captured.

use dataloading::{Batch, Counts};
use report::Metric;
use runtime::device::graph::OperatorsOnly;
use runtime::memory::{Region, live_bytes};
use serde_json::Value;
use tch::{Device, Tensor};
use training::Trainer;
use training::clip::NonFinite;
use training::trainer::TrainerConfig;

use super::{Method, Prepared, Step};
use crate::training::stepped::{Stepped, WARM_UP};

/// A training whose steps are repeated, and its batch.
pub(super) struct Captured {
    stepped: Stepped,
    tokens: Tensor,
    labels: Tensor,
    labelled: i64,
    device: Device,
    /// Its bytes between steps, and at the peak of its first ones.
    live: u64,
    peak: u64,
}

impl Captured {
    /// Runs the first steps of a model that was made since `before` bytes were live.
    pub(super) fn new(prepared: Prepared, method: Method, before: u64) -> anyhow::Result<Self> {
        let Prepared { model, optimizer, switches, layers, tokens, labels, labelled, device } = prepared;
        switches.change(&vec![method.plan(); layers])?;
        // As the step that is compared, which looks for no infinity either.
        let options = TrainerConfig { steps: 1, non_finite: NonFinite::Ignore, ..TrainerConfig::default() };
        let mut trainer = Trainer::new(model, Box::new(optimizer), options)?;
        if !device.is_cuda() {
            trainer.record_steps();
        }
        let stepped = Stepped::new(trainer, device);
        let mut captured = Self { stepped, tokens, labels, labelled, device, live: 0, peak: 0 };
        let region = Region::start(device)?;
        for _ in 0..WARM_UP {
            captured.step()?;
        }
        let replays = captured.stepped.trainer.replays();
        anyhow::ensure!(replays > 0, "the step was not captured");
        captured.peak = region.finish()?.peak.saturating_sub(before);
        captured.live = live_bytes(device)?.saturating_sub(before);
        Ok(captured)
    }

    /// The bytes that are live because of it while another step is measured.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    /// Runs a step, and returns its seconds.
    pub(super) fn step(&mut self) -> anyhow::Result<f64> {
        let _operators = (!self.device.is_cuda()).then(OperatorsOnly::enter);
        let targets = usize::try_from(self.labelled)?;
        let counts = Counts { targets, tokens: self.tokens.numel(), ..Counts::default() };
        let (tokens, labels) = (self.tokens.shallow_clone(), self.labels.shallow_clone());
        self.stepped.step(
            Batch {
                tokens,
                labels,
                packing: None,
                padding: Vec::new(),
                sequences: None,
                taught: None,
                weights: None,
                counts,
            },
            Value::Null,
        )
    }

    /// Figures of one round.
    pub(super) fn measure(
        &mut self,
        arguments: &Step,
        limit: f64,
        flops: f64,
    ) -> anyhow::Result<Vec<Metric>> {
        let tokens = (arguments.batch * arguments.sequence) as f64;
        let seconds = (0..arguments.repeats).map(|_| self.step()).collect::<anyhow::Result<Vec<f64>>>()?;
        let rates: Vec<f64> = seconds.iter().map(|seconds| tokens / seconds).collect();
        let mut figures = vec![
            Metric::of_samples("step_seconds", "s", &seconds),
            Metric::of_samples("tokens_per_second", "tokens/s", &rates),
            Metric::exact("limit_tokens_per_second", "tokens/s", limit * tokens / flops),
            Metric::exact("flops", "FLOP", flops),
            Metric::exact("replayed_steps", "count", self.stepped.trainer.replays() as f64),
        ];
        if self.device.is_cuda() {
            figures.push(Metric::exact("peak_bytes", "B", self.peak as f64));
        }
        Ok(figures)
    }
}

/// The names of this step's and the other's implementation: on a GPU the captured one is what a training runs; on a CPU its time is
/// the recorder's.
pub(super) fn implementations(device: Device) -> [Option<&'static str>; 2] {
    if device.is_cuda() { [None, Some("frugal, eager")] } else { [Some("frugal, recorded"), None] }
}
