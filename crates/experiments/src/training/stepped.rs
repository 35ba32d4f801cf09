//! A trainer that runs one step at a time on batches that were drawn before, for comparisons of steps with another program.

use std::time::Instant;

use dataloading::Batch;
use serde_json::Value;
use tch::Device;
use training::Trainer;
use training::batches::Batches;

/// Steps before the first that a graph repeats: it is captured in the third of a shape.
pub(crate) const WARM_UP: u64 = 4;

/// A trainer, and the steps that it has run.
pub(crate) struct Stepped {
    pub(crate) trainer: Trainer,
    steps: u64,
    device: Device,
}

impl Stepped {
    pub(crate) fn new(trainer: Trainer, device: Device) -> Self {
        Self { trainer, steps: 0, device }
    }

    /// Runs a step on a batch, whose source is at `state`, and returns its seconds. It ends with a read of the loss, which waits for the
    /// device.
    pub(crate) fn step(&mut self, batch: Batch, state: Value) -> anyhow::Result<f64> {
        let mut batches = Drawn { state, batch: Some(batch) };
        self.steps += 1;
        self.trainer.options.steps = self.steps;
        runtime::device::synchronize(self.device)?;
        let start = Instant::now();
        self.trainer.run(&mut batches, None)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A batch that was drawn before, so that a step is measured without its data, as the other program measures its own.
struct Drawn {
    state: Value,
    batch: Option<Batch>,
}

impl Batches for Drawn {
    fn next(&mut self) -> training::Result<Option<Batch>> {
        Ok(self.batch.take())
    }

    fn state(&self) -> Value {
        self.state.clone()
    }

    /// Fails: a drawn batch is not drawn again.
    fn resume(&mut self, state: &Value) -> training::Result<()> {
        Err(training::Error::config("a drawn batch", format!("it cannot go back to {state}")))
    }
}
