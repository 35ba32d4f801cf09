//! A timer that divides a measured run into phases, such as forward and backward.

use tch::Device;

use crate::device::{self, Event, Stream};
use crate::error::Result;

/// Times the phases of a run. Each ends with [`end`](PhaseTimer::end). The times are between events on the device's stream, so
/// that the host does not wait between phases.
#[derive(Debug)]
pub struct PhaseTimer {
    device: Device,
    /// The stream of this thread's operations.
    stream: Stream,
    /// The event at the start and the event of each cut, reused over the runs.
    events: Vec<Event>,
    /// The phase that each cut ends; `None` for the part of the run after the last phase.
    cuts: Vec<Option<&'static str>>,
}

/// Seconds of one run.
pub(super) struct RunTimes {
    pub(super) total: f64,
    /// Seconds by phase, in the order in which phases first ended; a phase that ended twice has the sum.
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
    pub(super) fn finish(&mut self) -> Result<RunTimes> {
        self.cut(None)?;
        self.events[self.cuts.len()].synchronize()?;
        let mut times = RunTimes { total: 0.0, phases: Vec::new() };
        for (index, phase) in self.cuts.iter().enumerate() {
            let seconds = self.events[index].elapsed(&self.events[index + 1])?;
            times.total += seconds;
            let Some(name) = *phase else { continue };
            match times.phases.iter_mut().find(|(other, _)| *other == name) {
                Some((_, sum)) => *sum += seconds,
                None => times.phases.push((name, seconds)),
            }
        }
        Ok(times)
    }

    /// Ends a phase, or the rest of the run.
    fn cut(&mut self, phase: Option<&'static str>) -> Result<()> {
        self.cuts.push(phase);
        self.record(self.cuts.len())
    }

    /// Records the event `index` on the stream, and creates it in the first run.
    fn record(&mut self, index: usize) -> Result<()> {
        if index == self.events.len() {
            self.events.push(Event::new(self.device)?);
        }
        self.stream.record(&self.events[index])
    }
}
