//! Predicted times, corrected by those of the first steps.

use frugal::training::observer::Collect;
use frugal::training::{Batches, Trainer};
use serde_json::json;

use crate::common_flags::Common;
use crate::output::figures::{counted, duration};
use crate::output::print_line;

/// Steps that are measured. The first is left out of the mean: it creates the optimizer's state.
const STEPS: u64 = 3;

/// The predicted time of a step.
pub(crate) struct Expected {
    /// Predicted seconds of a step of mean size; `None` if this machine's rates are not known.
    pub(super) seconds: Option<f64>,
    /// Positions of such a step.
    pub(super) positions: f64,
    /// Steps of an epoch, if an epoch ends.
    pub(super) epoch: Option<f64>,
}

impl Expected {
    /// Trains the first steps and says how long a step takes, and what is left. Does nothing in a training too short for that.
    ///
    /// # Errors
    /// Any error of the training.
    pub(crate) fn calibrate(
        &self,
        common: &Common,
        trainer: &mut Trainer,
        train: &mut dyn Batches,
        validation: Option<&mut dyn Batches>,
    ) -> anyhow::Result<()> {
        let until = trainer.step() + STEPS;
        if until + STEPS > trainer.options.steps {
            return Ok(());
        }
        let records = Collect::default();
        trainer.observers.push(Box::new(records.clone()));
        let ended = trainer.advance(until, train, validation);
        trainer.observers.pop();
        ended?;
        let records = records.take();
        let measured = records.iter().skip(1);
        let (seconds, positions) = measured.fold((0.0, 0), |(seconds, positions), record| {
            (seconds + record.timings.total, positions + record.tokens + record.padding)
        });
        if records.len() < STEPS as usize || positions == 0 {
            return Ok(());
        }
        let step = seconds / positions as f64 * self.positions;
        let left = trainer.options.steps - trainer.step();
        if common.json {
            print_line(
                &json!({ "calibration": { "predicted_step_seconds": self.seconds, "step_seconds": step } }),
            );
        }
        let epoch =
            self.epoch.map_or_else(String::new, |steps| format!(", an epoch {}", duration(steps * step)));
        Ok(trainer.note(&format!(
            "a step takes {}{}{epoch}, the {} left {}\n",
            duration(step),
            self.seconds.map_or_else(String::new, |seconds| format!(" (predicted: {})", duration(seconds))),
            counted(left, "step"),
            duration(left as f64 * step)
        ))?)
    }
}
