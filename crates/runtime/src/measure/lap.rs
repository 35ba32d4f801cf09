//! One run, cut into phases.

use tch::Device;

use crate::device::{self, Event, Stream};
use crate::error::Result;

/// The run at hand. Its time is cut where [`end`](Lap::end) and [`exclude`](Lap::exclude) are called.
#[derive(Debug)]
pub struct Lap {
    device: Device,
    /// Where this thread's operations go.
    stream: Stream,
    /// One for each cut, the first at the start; kept over the runs.
    events: Vec<Event>,
    /// What the piece before each cut is.
    cuts: Vec<Piece>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Phase(&'static str),
    /// Part of the run and of no phase.
    Rest,
    Excluded,
}

/// Seconds of one run.
pub(super) struct Pieces {
    pub(super) total: f64,
    /// In the order of their first end; a phase that ended twice has the sum.
    pub(super) phases: Vec<(&'static str, f64)>,
}

impl Lap {
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

    /// Ends a phase, which began where the one before ended, or at the start of the run. The same name again in one run
    /// adds to the phase. On CUDA nothing is waited for.
    ///
    /// # Errors
    /// CUDA's, among them those of kernels that ran before.
    pub fn end(&mut self, phase: &'static str) -> Result<()> {
        self.cut(Piece::Phase(phase))
    }

    /// Leaves the time since the last phase, or since the start, out of the run: preparation that must be repeated but
    /// is not what is measured.
    ///
    /// # Errors
    /// As [`Lap::end`].
    pub fn exclude(&mut self) -> Result<()> {
        self.cut(Piece::Excluded)
    }

    /// Waits for the end of the run and reads the clock.
    pub(super) fn finish(&mut self) -> Result<Pieces> {
        self.cut(Piece::Rest)?;
        self.events[self.cuts.len()].synchronize()?;
        let mut pieces = Pieces { total: 0.0, phases: Vec::new() };
        for (index, piece) in self.cuts.iter().enumerate() {
            let seconds = self.events[index].elapsed(&self.events[index + 1])?;
            if *piece != Piece::Excluded {
                pieces.total += seconds;
            }
            let Piece::Phase(name) = *piece else { continue };
            match pieces.phases.iter_mut().find(|(phase, _)| *phase == name) {
                Some((_, sum)) => *sum += seconds,
                None => pieces.phases.push((name, seconds)),
            }
        }
        Ok(pieces)
    }

    fn cut(&mut self, piece: Piece) -> Result<()> {
        self.cuts.push(piece);
        self.record(self.cuts.len())
    }

    fn record(&mut self, index: usize) -> Result<()> {
        if index == self.events.len() {
            self.events.push(Event::new(self.device)?);
        }
        self.stream.record(&self.events[index])
    }
}
