//! A training's progress bar (loss, tokens per second, MFU, memory), with notes and warnings above it.

use report::Progress;
use runtime::measure::physical;
use tch::{Device, Kind};
use training::Result;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::probe::StepProbe;

/// What the model FLOPs utilization is computed from.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Efficiency {
    /// FLOPs of forward and backward for each token that goes through the model, padding included.
    pub flops_per_token: Option<f64>,
    /// The peak rate of the machine in FLOP/s: measured (`runtime::measure::physical::gemm_rate`) or from its data
    /// sheet.
    pub peak_rate: Option<f64>,
}

impl Efficiency {
    /// Takes the work of a pass, and measures the rate of a matrix product, in under a second.
    ///
    /// # Errors
    /// A device that does not exist, too little memory.
    pub fn measure(probe: &StepProbe, device: Device) -> Result<Self> {
        // Large enough to fill the device, and short.
        let size = if device.is_cuda() { 4096 } else { 1024 };
        let product = physical::gemm_rate(device, Kind::Float, size, size, size)?;
        // The best sample is the machine's limit: the others were disturbed by other work.
        let seconds = product.time.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let peak_rate = seconds.is_finite().then(|| 2.0 * (size as f64).powi(3) / seconds.max(1e-12));
        Ok(Self { flops_per_token: Some(probe.flops_per_position()), peak_rate })
    }

    /// Returns the model FLOPs utilization (Chowdhery et al., arXiv:2204.02311, appendix B) at a rate of tokens per second; `None`
    /// if a figure is not known.
    pub fn mfu(&self, tokens_per_second: f64) -> Option<f64> {
        Some(tokens_per_second * self.flops_per_token? / self.peak_rate?)
    }
}

/// A bar on standard error, if that is a terminal or `cargo xtask run-all` reads it. Notes and warnings go there in any case.
#[derive(Debug)]
pub struct Display {
    progress: Progress,
    done: u64,
    device: Device,
    efficiency: Efficiency,
    /// Tokens per second.
    rate: f64,
    /// Positions per second, padding included.
    positions_rate: f64,
    validation: Option<f64>,
    /// The text of the bar.
    line: String,
}

/// Weight of the latest step in the rate that is shown.
const SMOOTHING: f64 = 0.1;

impl Display {
    /// Makes a display of a training of `steps` steps on `device`.
    pub fn new(steps: u64, device: Device, efficiency: Efficiency) -> Self {
        let progress = Progress::new(steps);
        Self {
            progress,
            done: 0,
            device,
            efficiency,
            rate: 0.0,
            positions_rate: 0.0,
            validation: None,
            line: String::new(),
        }
    }

    /// Adds the MFU to the display.
    pub fn with_efficiency(mut self, efficiency: Efficiency) -> Self {
        self.efficiency = efficiency;
        self
    }

    /// Returns whether the bar is visible.
    pub fn is_seen(&self) -> bool {
        self.progress.is_seen()
    }

    fn advance(&mut self, step: u64) {
        while self.done < step {
            self.progress.step();
            self.done += 1;
        }
    }

    fn line(&self, record: &StepRecord) -> String {
        let memory = runtime::memory::live_bytes(self.device)
            .map_or_else(|_| "–".to_owned(), |bytes| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)));
        let mfu = self.efficiency.mfu(self.positions_rate);
        let mfu = mfu.map_or_else(|| "–".to_owned(), |share| format!("{:.0} %", share * 100.0));
        let validation = self.validation.map_or_else(String::new, |loss| format!(" (valid {loss:.3})"));
        // As long as there is room for beside a bar on 80 columns.
        format!("loss {:.3}{validation} {:.0} tokens/s MFU {mfu} {memory}", record.loss, self.rate)
    }
}

impl Observer for Display {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        let seconds = record.timings.total.max(1e-9);
        let smooth = |rate: f64, positions: usize| {
            let latest = positions as f64 / seconds;
            if rate == 0.0 { latest } else { rate + SMOOTHING * (latest - rate) }
        };
        self.rate = smooth(self.rate, record.tokens);
        self.positions_rate = smooth(self.positions_rate, record.tokens + record.padding);
        self.advance(record.step);
        self.line = self.line(record);
        self.progress.message(&self.line);
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.validation = Some(evaluation.loss);
        Ok(())
    }

    fn on_resume(&mut self, step: u64) -> Result<()> {
        self.advance(step);
        Ok(())
    }

    fn on_note(&mut self, text: &str) -> Result<()> {
        self.progress.print(text);
        Ok(())
    }

    fn on_warning(&mut self, warning: &str) -> Result<()> {
        self.progress.print(&format!("warning: {warning}\n"));
        Ok(())
    }
}

/// Removes the bar; its last text stays.
impl Drop for Display {
    fn drop(&mut self) {
        if self.is_seen() && !self.line.is_empty() {
            self.progress.print(&format!("step {}: {}\n", self.done, self.line));
        }
    }
}
