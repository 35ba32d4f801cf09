//! One run, cut into phases.

use tch::Device;

use crate::device::{self, Event, Stream};
use crate::error::Result;

/// The current run. [`end`](PhaseTimer::end) divides its time.
#[derive(Debug)]
pub struct PhaseTimer {
    device: Device,
    /// The stream of this thread's operations.
    stream: Stream,
    /// One for each cut, the first at the start; reused over the runs.
    events: Vec<Event>,
    /// The phase before each cut; `None` for the rest of the run.
    cuts: Vec<Option<&'static str>>,
}

/// Seconds of one run.
pub(super) struct Pieces {
    pub(super) total: f64,
    /// In the order of their first end; a phase that ended twice has the sum.
    pub(super) phases: Vec<(&'static str, f64)>,
}

impl PhaseTimer {
    pub(super) fn new(device: Device) -> Result<Self> {
        Ok(Self { device, stream: Stream::current(device)?, events: Vec::new(), cuts: Vec::new() })
    }

    /// Waits until the device is idle, and starts the clock.
    pub(super) fn start(&mut self) -> Result<()> {
        device::synchronize(self.device)?;
        self.stream = Stream::current(self.device)?;
        self.cuts.clear();
        self.record(0)
    }

    /// Ends a phase, which began at the end of the previous one, or at the start of the run. The same name again in one
    /// run adds to the phase. On CUDA this does not wait.
    ///
    /// # Errors
    /// Errors of CUDA, including those of earlier kernels.
    pub fn end(&mut self, phase: &'static str) -> Result<()> {
        self.cut(Some(phase))
    }

    /// Waits for the end of the run and reads the clock.
    pub(super) fn finish(&mut self) -> Result<Pieces> {
        self.cut(None)?;
        self.events[self.cuts.len()].synchronize()?;
        let mut pieces = Pieces { total: 0.0, phases: Vec::new() };
        for (index, phase) in self.cuts.iter().enumerate() {
            let seconds = self.events[index].elapsed(&self.events[index + 1])?;
            pieces.total += seconds;
            let Some(name) = *phase else { continue };
            match pieces.phases.iter_mut().find(|(other, _)| *other == name) {
                Some((_, sum)) => *sum += seconds,
                None => pieces.phases.push((name, seconds)),
            }
        }
        Ok(pieces)
    }

    fn cut(&mut self, phase: Option<&'static str>) -> Result<()> {
        self.cuts.push(phase);
        self.record(self.cuts.len())
    }

    fn record(&mut self, index: usize) -> Result<()> {
        if index == self.events.len() {
            self.events.push(Event::new(self.device)?);
        }
        self.stream.record(&self.events[index])
    }
}
