//! Figures of a trace.

use offload::{Span, StreamKind};
use report::{Case, Metric};

/// Returns the seconds in which a stream is busy. Work on a stream never overlaps.
pub(crate) fn busy(spans: &[Span], stream: StreamKind) -> f64 {
    spans.iter().filter(|span| span.stream == stream).map(|span| span.end - span.start).sum()
}

/// Seconds between two layers of one pass in which neither a layer comes nor gradients go: the idle time of what computes that
/// transfers do not account for. Between forward and backward the head computes, which is no layer's.
pub(crate) fn unexplained(spans: &[Span]) -> f64 {
    let mut computes: Vec<&Span> = spans.iter().filter(|span| span.stream == StreamKind::Compute).collect();
    computes.sort_by(|a, b| a.start.total_cmp(&b.start));
    let gaps = computes.windows(2).filter(|pair| pair[0].direction == pair[1].direction);
    gaps.map(|pair| {
        let (mut at, end, mut rest) = (pair[0].end, pair[1].start, 0.0);
        let mut transfers: Vec<(f64, f64)> = spans
            .iter()
            .filter(|span| matches!(span.stream, StreamKind::Load | StreamKind::Store))
            .map(|span| (span.start.max(at), span.end.min(end)))
            .filter(|(start, end)| start < end)
            .collect();
        transfers.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (start, end) in transfers {
            rest += (start - at).max(0.0);
            at = at.max(end);
        }
        rest + (end - at).max(0.0)
    })
    .sum()
}

/// Seconds of loads that lie between two layers of one pass although the later layer is in its slot: not the load but something else
/// holds compute up, on a CPU the load's thread, which takes a core.
pub(crate) fn held_up(spans: &[Span]) -> f64 {
    let mut computes: Vec<&Span> = spans.iter().filter(|span| span.stream == StreamKind::Compute).collect();
    computes.sort_by(|a, b| a.start.total_cmp(&b.start));
    let loads = || spans.iter().filter(|span| span.stream == StreamKind::Load);
    let gaps = computes.windows(2).filter(|pair| pair[0].direction == pair[1].direction);
    gaps.map(|pair| {
        let before = loads().filter(|load| load.layer == pair[1].layer && load.start < pair[1].start);
        // From then on the later layer is loaded.
        let there = before.map(|load| load.end).fold(pair[0].end, f64::max);
        let others = loads().filter(|load| load.layer != pair[1].layer);
        others.map(|load| (load.end.min(pair[1].start) - load.start.max(there)).max(0.0)).sum::<f64>()
    })
    .sum()
}

/// A timeline's measurements, as a plot of the kind `timeline` reads them: each span is `of` with its stream, layer and number, and has
/// a `start` and an `end` in seconds, the first span's start being 0.
pub(crate) fn timeline(case: &Case, spans: &[Span]) -> Vec<(Case, Metric)> {
    let origin = spans.iter().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let measure = |(number, span): (usize, &Span)| {
        let what = match (span.stream, span.direction) {
            (StreamKind::Compute, offload::Direction::Forward) => "forward",
            (StreamKind::Compute, offload::Direction::Backward) => "backward",
            (StreamKind::Load, _) => "weights",
            (StreamKind::Store, _) => "gradients",
            (StreamKind::Host, _) => "step",
        };
        let case = case
            .clone()
            .with("stream", span.stream.name())
            .with("what", what)
            .with("layer", span.layer.to_string())
            .with("span", number);
        [("start", span.start), ("end", span.end)]
            .map(|(name, time)| (case.clone(), Metric::exact(name, "s", time - origin)))
    };
    spans.iter().enumerate().flat_map(measure).collect()
}

#[cfg(test)]
mod tests {
    use offload::Direction;

    use super::*;

    #[test]
    fn what_transfers_account_for_is_explained() {
        let span = |stream, direction, start, end| Span { stream, layer: 0, direction, start, end, bytes: 1 };
        let (forward, backward) = (Direction::Forward, Direction::Backward);
        let spans = [
            span(StreamKind::Compute, forward, 0.0, 1.0),
            // Between 1 and 4: a load and a store that meet, and half a second of nothing before and after.
            span(StreamKind::Load, forward, 1.5, 2.5),
            span(StreamKind::Store, backward, 2.0, 3.5),
            span(StreamKind::Compute, forward, 4.0, 5.0),
            // The head.
            span(StreamKind::Compute, backward, 9.0, 10.0),
            // A transfer while a layer computes explains nothing.
            span(StreamKind::Load, backward, 9.0, 9.5),
            span(StreamKind::Compute, backward, 10.25, 11.0),
        ];
        assert_eq!(unexplained(&spans), 1.25);
        assert_eq!(offload::load_rate(&spans), Some(2.0 / 1.5));
    }

    #[test]
    fn a_load_holds_compute_up_only_where_the_layer_is_there() {
        let span = |stream, layer, start, end| {
            let direction = Direction::Forward;
            Span { stream, layer, direction, start, end, bytes: 1 }
        };
        let spans = [
            span(StreamKind::Compute, 0, 0.0, 1.0),
            // Layer 1 comes until 1.5, and layer 2 from then on until 2.5; layer 1 begins only at 2.
            span(StreamKind::Load, 1, 0.5, 1.5),
            span(StreamKind::Load, 2, 1.5, 2.5),
            span(StreamKind::Compute, 1, 2.0, 3.0),
            span(StreamKind::Compute, 2, 3.0, 4.0),
        ];
        assert_eq!(held_up(&spans), 0.5);
    }
}
