//! What the lanes did, and when.

use parking_lot::Mutex;
use runtime::device::{Event, Stream};
use serde_json::{Value, json};
use tch::Device;

use crate::error::Result;
use crate::schedule::Direction;

/// A lane of the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Layers run.
    Compute,
    /// Layers come to the device.
    Load,
    /// Gradients go to the host.
    Store,
    /// The host computes: gradients are summed, and the optimizer steps.
    Host,
}

impl Lane {
    /// All, from the top of a picture.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Load, Self::Store, Self::Host];

    /// A name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Load => "load",
            Self::Store => "store",
            Self::Host => "host",
        }
    }
}

/// A piece of work on a lane.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Where.
    pub lane: Lane,
    /// Of which layer, by its number.
    pub layer: usize,
    /// On which way; a load has that of the use it was made for, or forward where it was made ahead.
    pub direction: Direction,
    /// Seconds from the beginning of the trace.
    pub start: f64,
    /// Seconds from the beginning of the trace.
    pub end: f64,
    /// Bytes that were moved; 0 for computing.
    pub bytes: u64,
}

/// Collects spans while it is on.
#[derive(Debug, Default)]
pub(crate) struct Trace(Mutex<Option<Recording>>);

#[derive(Debug)]
struct Recording {
    /// On the device, and on the host: events of one cannot be compared with those of the other.
    base: [Event; 2],
    open: Vec<(Span, Event, Event)>,
}

impl Trace {
    /// Begins anew.
    pub(crate) fn start(&self, device: Device) -> Result<()> {
        let base = [Event::new(device)?, Event::new(Device::Cpu)?];
        Stream::current(device)?.record(&base[0])?;
        base[0].synchronize()?;
        Stream::current(Device::Cpu)?.record(&base[1])?;
        *self.0.lock() = Some(Recording { base, open: Vec::new() });
        Ok(())
    }

    /// Marks the beginning of a span on a stream; `None` while it is off.
    pub(crate) fn begin(&self, stream: &Stream) -> runtime::Result<Option<Event>> {
        if self.0.lock().is_none() {
            return Ok(None);
        }
        let begin = Event::new(stream.device())?;
        stream.record(&begin)?;
        Ok(Some(begin))
    }

    /// Marks its end.
    pub(crate) fn end(
        &self,
        stream: &Stream,
        begin: Option<Event>,
        (lane, layer, direction): (Lane, usize, Direction),
        bytes: u64,
    ) -> runtime::Result<()> {
        let Some(begin) = begin else { return Ok(()) };
        let end = Event::new(stream.device())?;
        stream.record(&end)?;
        if let Some(recording) = &mut *self.0.lock() {
            recording.open.push((Span { lane, layer, direction, start: 0.0, end: 0.0, bytes }, begin, end));
        }
        Ok(())
    }

    /// Ends the trace: its spans, by their beginning. All work is done when this is called.
    pub(crate) fn take(&self) -> Result<Vec<Span>> {
        let Some(Recording { base, open }) = self.0.lock().take() else { return Ok(Vec::new()) };
        let mut spans = Vec::new();
        for (span, begin, end) in open {
            let base = if begin.device() == base[0].device() { &base[0] } else { &base[1] };
            end.synchronize()?;
            spans.push(Span { start: base.elapsed(&begin)?, end: base.elapsed(&end)?, ..span });
        }
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        Ok(spans)
    }
}

/// The share of the time in which layers were loaded that other layers computed meanwhile: 1 when all transfers hide.
pub fn overlap(spans: &[Span]) -> f64 {
    let of = |lane: Lane| -> Vec<(f64, f64)> {
        spans.iter().filter(|span| span.lane == lane).map(|span| (span.start, span.end)).collect()
    };
    let (compute, load) = (of(Lane::Compute), of(Lane::Load));
    let total: f64 = load.iter().map(|(start, end)| end - start).sum();
    let both =
        |&(a, b): &(f64, f64)| -> f64 { compute.iter().map(|&(c, d)| (b.min(d) - a.max(c)).max(0.0)).sum() };
    if total > 0.0 { load.iter().map(both).sum::<f64>() / total } else { 1.0 }
}

/// Spans as a trace that Perfetto and Chrome show: one thread for each lane, times in microseconds.
pub fn to_chrome(spans: &[Span]) -> Value {
    let names = Lane::ALL.iter().enumerate().map(|(thread, lane)| {
        json!({ "ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": { "name": lane.name() } })
    });
    let events = spans.iter().map(|span| {
        let way = if span.direction == Direction::Forward { "forward" } else { "backward" };
        json!({
            "ph": "X", "pid": 1, "tid": Lane::ALL.iter().position(|lane| *lane == span.lane),
            "name": format!("layer {} {way}", span.layer), "cat": span.lane.name(),
            "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6, "args": { "bytes": span.bytes },
        })
    });
    json!({ "traceEvents": names.chain(events).collect::<Vec<_>>(), "displayTimeUnit": "ms" })
}
