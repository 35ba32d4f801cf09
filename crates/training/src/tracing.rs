//! Steps of a training under the profiler, with what their trace cannot show.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use models::module::trainable;
use runtime::profile::{Trace, TraceOptions};

use crate::batches::Batches;
use crate::error::Result;
use crate::observer::{Observer, StepRecord};
use crate::probe::Probe;
use crate::profile::{Facts, Profile};
use crate::trainer::{Ended, Trainer};

/// How a training's batches are made, as far as a diagnosis wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loading {
    /// Threads that make them; 0 where the training thread does.
    pub workers: usize,
    /// Whether they lie in pinned memory before they are copied to a CUDA device.
    pub pinned: bool,
}

/// What was recorded.
#[derive(Debug)]
pub struct Traced {
    /// The trace, read back.
    pub profile: Profile,
    /// What is known besides.
    pub facts: Facts,
}

/// Runs `steps` steps more under the profiler, keeps the trace at `path` for Perfetto, and reads it back; `None` where the
/// training ended before. The training goes on as if nothing had been recorded.
///
/// # Errors
/// Those of the loop and of the profiler; a file that cannot be written.
pub fn trace(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    validation: Option<&mut dyn Batches>,
    steps: u64,
    loading: Loading,
    path: &Path,
) -> Result<Option<Traced>> {
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
    Ok(Some(Traced { profile: Profile::read(path)?, facts }))
}

fn record(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    validation: Option<&mut dyn Batches>,
    until: u64,
    path: &Path,
) -> Result<Ended> {
    let cuda = trainable(trainer.model.as_ref()).iter().any(|(_, tensor)| tensor.device().is_cuda());
    let trace = Trace::start(TraceOptions { cuda, shapes: true, memory: true })?;
    let ended = trainer.advance(until, train, validation)?;
    trace.save(path)?;
    Ok(ended)
}

/// What a trace of the steps `records` cannot show. Runs a [`Probe`].
///
/// # Errors
/// Those of the probe.
pub fn facts(
    trainer: &mut Trainer,
    train: &mut dyn Batches,
    records: &[StepRecord],
    loading: Loading,
) -> Result<Facts> {
    let sum = |of: fn(&StepRecord) -> usize| records.iter().map(of).sum::<usize>() as f64;
    let (tokens, padding) = (sum(|record| record.tokens), sum(|record| record.padding));
    let probe = Probe::run(trainer, train)?;
    Ok(Facts {
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
