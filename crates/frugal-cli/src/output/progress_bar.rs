//! A training's progress bar (loss, tokens per second, time left, memory), with notes and warnings above it.

use std::time::{Duration, Instant};

use report::Progress;
use tch::Device;
use training::Result;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

/// A bar on standard error, if that is a terminal or `cargo xtask run-all` reads it; otherwise a line each minute. Notes and warnings go there
/// in any case.
#[derive(Debug)]
pub(crate) struct Display {
    progress: Progress,
    done: u64,
    device: Device,
    /// Tokens per second.
    rate: f64,
    validation: Option<f64>,
    /// Bytes that may be held.
    budget: Option<u64>,
    /// Steps in all.
    steps: u64,
    /// Seconds of a step.
    seconds: f64,
    /// The text of the bar.
    line: String,
    /// When a line was last printed in place of the bar.
    printed: Instant,
}

/// Time between lines where there is no bar.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// Weight of the latest step in the rate that is shown.
const SMOOTHING: f64 = 0.1;

impl Display {
    /// Makes a display of a training of `steps` steps on `device`.
    pub(crate) fn new(steps: u64, device: Device) -> Self {
        let progress = Progress::new(steps);
        Self {
            progress,
            done: 0,
            device,
            rate: 0.0,
            validation: None,
            budget: None,
            steps,
            seconds: 0.0,
            line: String::new(),
            printed: Instant::now(),
        }
    }

    /// Shows memory against a budget.
    pub(crate) fn with_budget(mut self, budget: Option<u64>) -> Self {
        self.budget = budget;
        self
    }

    /// Returns whether the bar is visible.
    pub(crate) fn is_seen(&self) -> bool {
        self.progress.is_seen()
    }

    fn advance(&mut self, step: u64) {
        while self.done < step {
            self.progress.step();
            self.done += 1;
        }
    }

    fn line(&self, record: &StepRecord) -> String {
        let gibibytes = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 30));
        let of = self.budget.map_or_else(String::new, |budget| format!(" of {}", gibibytes(budget)));
        let memory = match (held(self.device), &*of) {
            (Some(bytes), of) => format!(" {}{of} GiB", gibibytes(bytes)),
            (None, _) => String::new(),
        };
        let validation = self.validation.map_or_else(String::new, |loss| format!(" (valid {loss:.3})"));
        let left = match self.steps.saturating_sub(record.step) {
            0 => String::new(),
            left => format!(" {} left", duration(left as f64 * self.seconds)),
        };
        // As long as there is room for beside a bar on 80 columns.
        let aux = record.router_aux_loss.map_or_else(String::new, |aux| format!(", routers {aux:.3}"));
        let reward =
            record.policy.map_or_else(String::new, |policy| format!(", reward {:.3}", policy.rollout.reward));
        let of_teacher =
            record.distilled.map_or_else(String::new, |own| format!(", divergence {:.3}", own.divergence));
        let right = record.rewards.and(record.accuracy);
        let right = right.map_or_else(String::new, |right| format!(", {:.0} % right", 100.0 * right));
        format!(
            "loss {:.3}{aux}{right}{reward}{of_teacher}{validation}{left} {:.0} tokens/s{memory}",
            record.loss, self.rate
        )
    }
}

/// Bytes that a budget is compared with: on the CPU those of the process without pages of mapped files, of tensors otherwise.
fn held(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => runtime::device::resident_memory().ok().map(|memory| memory.anonymous),
        _ => runtime::memory::live_bytes(device).ok(),
    }
}

/// Returns a duration in its two largest units: `3 h 07 min`, `4 min 10 s`, `12 s`.
pub(crate) fn duration(seconds: f64) -> String {
    let all = if seconds.is_finite() { seconds.max(0.0).round() as u64 } else { 0 };
    let (days, hours, minutes) = (all / 86_400, all / 3600, all / 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{all} s"),
        (0, 0, _) => format!("{minutes} min {:02} s", all % 60),
        (0, ..) => format!("{hours} h {:02} min", minutes % 60),
        _ => format!("{days} d {:02} h", hours % 24),
    }
}

impl Observer for Display {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        let seconds = record.timings.total.max(1e-9);
        let latest = record.tokens as f64 / seconds;
        self.rate += if self.rate == 0.0 { latest } else { SMOOTHING * (latest - self.rate) };
        self.seconds += if self.seconds == 0.0 { seconds } else { SMOOTHING * (seconds - self.seconds) };
        self.advance(record.step);
        self.line = self.line(record);
        self.progress.message(&self.line);
        if !self.is_seen() && self.printed.elapsed() >= BETWEEN_LINES {
            self.progress.print(&format!("step {} of {}: {}\n", record.step, self.steps, self.line));
            self.printed = Instant::now();
        }
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.validation = Some(evaluation.reward.unwrap_or(evaluation.loss));
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

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_two_units() {
        let seconds = [0.4, 59.6, 250.0, 11_220.0, 200_000.0, f64::NAN];
        let texts = ["0 s", "1 min 00 s", "4 min 10 s", "3 h 07 min", "2 d 07 h", "0 s"];
        assert_eq!(seconds.map(duration), texts);
    }
}
