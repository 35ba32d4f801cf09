//! Records steps of a training with the profiler, and adds what a trace cannot show.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use models::module::trainable;
use runtime::profile::{Trace, TraceConfig};

use crate::batches::Batches;
use crate::error::Result;
use crate::observer::{Observer, StepRecord};
use crate::probe::StepProbe;
use crate::trainer::{StopReason, Trainer};
use trace::{Profile, TrainingFacts};

/// How batches are loaded, for a diagnosis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loading {
    /// Worker threads; 0 if the training thread loads.
    pub workers: usize,
    /// Whether batches are in pinned memory before they are copied to a CUDA device.
    pub pinned: bool,
}

/// A recording.
#[derive(Debug)]
pub struct TracedSteps {
    /// The trace.
    pub profile: Profile,
    /// Further facts for the diagnosis.
    pub facts: TrainingFacts,
}

/// Runs `steps` more steps with the profiler, writes the trace to `path` for Perfetto, and parses it; `None` if the training
/// ended before. The training continues as if nothing had been recorded.
///
/// # Errors
/// Errors of the loop and of the profiler; a file that cannot be written.
pub fn trace(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    validation: Option<&mut dyn Batches>,
    steps: u64,
    loading: Loading,
    path: &Path,
) -> Result<Option<TracedSteps>> {
    let until = trainer.step().saturating_add(steps);
    let records = Arc::<Mutex<Vec<StepRecord>>>::default();
    trainer.observers.push(Box::new(Collect(records.clone())));
    let recorded = record(trainer, train, validation, until, path);
    trainer.observers.pop();
    recorded?;
    if trainer.step() < until {
        return Ok(None);
    }
    let records = std::mem::take(&mut *records.lock().unwrap_or_else(PoisonError::into_inner));
    let facts = facts(trainer, train, &records, loading)?;
    Ok(Some(TracedSteps { profile: Profile::read(path)?, facts }))
}

fn record(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    validation: Option<&mut dyn Batches>,
    until: u64,
    path: &Path,
) -> Result<StopReason> {
    let cuda = trainable(trainer.model.as_ref()).iter().any(|(_, tensor)| tensor.device().is_cuda());
    let trace = Trace::start(TraceConfig { cuda, shapes: true, memory: true })?;
    let ended = trainer.advance(until, train, validation)?;
    trace.save(path)?;
    Ok(ended)
}

/// Collects what a trace of the steps `records` cannot show. Runs a [`StepProbe`].
///
/// # Errors
/// Errors of the probe.
pub fn facts(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    records: &[StepRecord],
    loading: Loading,
) -> Result<TrainingFacts> {
    let sum = |of: fn(&StepRecord) -> usize| records.iter().map(of).sum::<usize>() as f64;
    let (tokens, padding) = (sum(|record| record.tokens), sum(|record| record.padding));
    let probe = StepProbe::run(trainer, train)?;
    Ok(TrainingFacts {
        padding_share: Some(padding / (tokens + padding).max(1.0)),
        workers: Some(loading.workers),
        pinned: Some(loading.pinned),
        elements_without_gradient: probe.as_ref().map(|probe| probe.elements_without_gradient),
        parameters_without_gradient: probe.map(|probe| probe.without_gradient),
    })
}

struct Collect(Arc<Mutex<Vec<StepRecord>>>);

impl Observer for Collect {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.clone());
        Ok(())
    }
}
