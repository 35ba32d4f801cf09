//! An observer that keeps the steps, evaluations and peak of a training.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Device;
use training::Trainer;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};

use crate::step_peak::StepPeak;

/// The records of a training.
#[derive(Debug)]
pub(crate) struct RecordedTraining {
    /// Every step.
    pub(crate) steps: Vec<StepRecord>,
    /// Every evaluation, the first of each step: one at the end may follow one at the last step.
    pub(crate) evaluations: Vec<Evaluation>,
    peak: StepPeak,
}

impl RecordedTraining {
    /// The most bytes that were live during a training step.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak.bytes()
    }
}

/// Records one training.
#[derive(Clone, Debug)]
pub(crate) struct TrainingRecorder(Arc<Mutex<RecordedTraining>>);

impl TrainingRecorder {
    /// Starts to record `trainer`, and the first region of its peak.
    pub(crate) fn attach(trainer: &mut Trainer, device: Device) -> training::Result<Self> {
        let recorded =
            RecordedTraining { steps: Vec::new(), evaluations: Vec::new(), peak: StepPeak::start(device)? };
        let recorder = Self(Arc::new(Mutex::new(recorded)));
        trainer.observers.push(Box::new(recorder.clone()));
        Ok(recorder)
    }

    /// Returns what was recorded so far.
    pub(crate) fn seen(&self) -> MutexGuard<'_, RecordedTraining> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for TrainingRecorder {
    fn on_step(&mut self, record: &StepRecord) -> training::Result<()> {
        let mut seen = self.seen();
        seen.peak.after_step()?;
        seen.steps.push(record.clone());
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> training::Result<()> {
        let mut seen = self.seen();
        seen.peak.after_evaluation()?;
        if seen.evaluations.last().is_none_or(|last| last.step != evaluation.step) {
            seen.evaluations.push(*evaluation);
        }
        Ok(())
    }
}
