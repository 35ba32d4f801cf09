//! Records what the streams did, and when.

pub use accounting::offload::StreamKind;
use parking_lot::Mutex;
use runtime::device::{Event, Stream};
use serde_json::{Value, json};
use tch::Device;

use crate::error::Result;
use crate::schedule::Direction;

/// A piece of work on a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The stream.
    pub stream: StreamKind,
    /// The layer's number.
    pub layer: usize,
    /// The direction. A load has the direction of its use, or forward if it was prefetched.
    pub direction: Direction,
    /// Seconds from the start of the trace.
    pub start: f64,
    /// Seconds from the start of the trace.
    pub end: f64,
    /// Bytes copied; 0 for computing.
    pub bytes: u64,
}

/// Collects spans while recording.
#[derive(Debug, Default)]
pub(crate) struct Trace(Mutex<Option<Recording>>);

#[derive(Debug)]
struct Recording {
    /// On the device and on the host: their events cannot be compared with each other.
    base: [Event; 2],
    open: Vec<(Span, Event, Event)>,
}

impl Trace {
    /// Starts a recording.
    pub(crate) fn start(&self, device: Device) -> Result<()> {
        let base = [Event::new(device)?, Event::new(Device::Cpu)?];
        Stream::current(device)?.record(&base[0])?;
        base[0].synchronize()?;
        Stream::current(Device::Cpu)?.record(&base[1])?;
        *self.0.lock() = Some(Recording { base, open: Vec::new() });
        Ok(())
    }

    /// Whether it records.
    pub(crate) fn is_recording(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Marks the start of a span on a stream; `None` while not recording.
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
        (kind, layer, direction): (StreamKind, usize, Direction),
        bytes: u64,
    ) -> runtime::Result<()> {
        let Some(begin) = begin else { return Ok(()) };
        let end = Event::new(stream.device())?;
        stream.record(&end)?;
        if let Some(recording) = &mut *self.0.lock() {
            recording.open.push((
                Span { stream: kind, layer, direction, start: 0.0, end: 0.0, bytes },
                begin,
                end,
            ));
        }
        Ok(())
    }

    /// Ends the recording and returns its spans by start time. All work must be done.
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

/// Returns the fraction of loading time during which other layers computed: 1 if all loads are hidden.
pub fn overlap(spans: &[Span]) -> f64 {
    let intervals = |stream: StreamKind| -> Vec<(f64, f64)> {
        spans.iter().filter(|span| span.stream == stream).map(|span| (span.start, span.end)).collect()
    };
    let (compute, load) = (intervals(StreamKind::Compute), intervals(StreamKind::Load));
    let total: f64 = load.iter().map(|(start, end)| end - start).sum();
    let both =
        |&(a, b): &(f64, f64)| -> f64 { compute.iter().map(|&(c, d)| (b.min(d) - a.max(c)).max(0.0)).sum() };
    if total > 0.0 { load.iter().map(both).sum::<f64>() / total } else { 1.0 }
}

/// Returns the bytes per second of the load stream while it loads; `None` if nothing was loaded.
pub fn load_rate(spans: &[Span]) -> Option<f64> {
    let loads = spans.iter().filter(|span| span.stream == StreamKind::Load);
    let (bytes, seconds) = loads
        .fold((0, 0.0), |(bytes, seconds), span| (bytes + span.bytes, seconds + (span.end - span.start)));
    (seconds > 0.0).then(|| bytes as f64 / seconds)
}

/// Converts spans to a trace for Perfetto and Chrome: one thread for each stream, times in microseconds.
pub fn to_chrome(spans: &[Span]) -> Value {
    let names = StreamKind::ALL.iter().enumerate().map(|(thread, stream)| {
        json!({ "ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": { "name": stream.name() } })
    });
    let events = spans.iter().map(|span| {
        let way = if span.direction == Direction::Forward { "forward" } else { "backward" };
        json!({
            "ph": "X", "pid": 1, "tid": StreamKind::ALL.iter().position(|stream| *stream == span.stream),
            "name": format!("layer {} {way}", span.layer), "cat": span.stream.name(),
            "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6, "args": { "bytes": span.bytes },
        })
    });
    json!({ "traceEvents": names.chain(events).collect::<Vec<_>>(), "displayTimeUnit": "ms" })
}
