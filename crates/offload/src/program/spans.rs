//! What a trace says.

use offload::{Lane, Span};
use report::{Case, Metric};

/// Seconds in which a lane is busy. Work on a lane never overlaps.
pub(crate) fn busy(spans: &[Span], lane: Lane) -> f64 {
    spans.iter().filter(|span| span.lane == lane).map(|span| span.end - span.start).sum()
}

/// Bytes per second of the load lane while it loads; `None` where nothing was loaded.
pub(crate) fn link_rate(spans: &[Span]) -> Option<f64> {
    let bytes: u64 = spans.iter().filter(|span| span.lane == Lane::Load).map(|span| span.bytes).sum();
    let seconds = busy(spans, Lane::Load);
    (seconds > 0.0).then(|| bytes as f64 / seconds)
}

/// A timeline's measurements, as a plot of the kind `timeline` reads them: each span is `of` with its lane, layer and number, and has
/// a `start` and an `end` in seconds, the first span's start being 0.
pub(crate) fn timeline(of: &Case, spans: &[Span]) -> Vec<(Case, Metric)> {
    let origin = spans.iter().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let measure = |(number, span): (usize, &Span)| {
        let what = match (span.lane, span.direction) {
            (Lane::Compute, offload::Direction::Forward) => "forward",
            (Lane::Compute, offload::Direction::Backward) => "backward",
            (Lane::Load, _) => "weights",
            (Lane::Store, _) => "gradients",
            (Lane::Host, _) => "step",
        };
        let case = of
            .clone()
            .with("lane", span.lane.name())
            .with("what", what)
            .with("layer", span.layer.to_string())
            .with("span", number);
        [("start", span.start), ("end", span.end)]
            .map(|(name, time)| (case.clone(), Metric::exact(name, "s", time - origin)))
    };
    spans.iter().enumerate().flat_map(measure).collect()
}
