//! The lanes of a rank in a traced step.

use std::path::Path;

use report::{Case, Metric};
use serde::{Deserialize, Serialize};
use trace::{Profile, RangeEvent};

/// Something that a lane did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) lane: String,
    pub(crate) what: String,
    /// Seconds from the beginning of the step.
    pub(crate) start: f64,
    pub(crate) end: f64,
}

/// The ranges of the training's thread that are shown, by their names in the trace.
const PHASES: [(&str, &str); 3] =
    [("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")];
/// The operations of a group that are shown, and their lanes.
const TRANSFERS: [(&str, &str); 2] = [("reduce_scatter", "reduce"), ("all_gather", "gather")];

/// Reads the lanes of the last step of a trace: what the training's thread computes, and the transfers.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Span>> {
    let profile = Profile::read(path)?;
    let named = |range: &&RangeEvent| profile.range_name(range) == "step";
    let Some(step) = profile.ranges.iter().filter(named).max_by_key(|range| range.start) else {
        return Ok(Vec::new());
    };
    let seconds = |at: i64| (at - step.start) as f64 / 1e9;
    let mut spans = Vec::new();
    for range in profile.ranges.iter().filter(|range| range.start >= step.start && range.end <= step.end) {
        let name = profile.range_name(range);
        let phase = PHASES.iter().find(|(known, _)| *known == name && range.thread == step.thread);
        let transfer = TRANSFERS
            .iter()
            .find(|(known, _)| name.split_once(' ').is_some_and(|(operation, _)| operation == *known));
        let (lane, what) = match (phase, transfer) {
            (Some((_, what)), _) => ("compute", (*what).to_owned()),
            (None, Some((_, lane))) => (*lane, (*lane).to_owned()),
            (None, None) => continue,
        };
        spans.push(Span {
            lane: lane.to_owned(),
            what,
            start: seconds(range.start),
            end: seconds(range.end),
        });
    }
    Ok(spans)
}

/// A timeline's measurements, as a plot of the kind `timeline` reads them.
pub(crate) fn figures(of: &Case, rank: usize, spans: &[Span]) -> Vec<(Case, Metric)> {
    let figure = |(number, span): (usize, &Span)| {
        let case = of
            .clone()
            .with("lane", format!("rank {rank}, {}", span.lane))
            .with("what", span.what.as_str())
            .with("span", number);
        [("start", span.start), ("end", span.end)]
            .map(|(name, time)| (case.clone(), Metric::exact(name, "s", time)))
    };
    spans.iter().enumerate().flat_map(figure).collect()
}

/// The share of a lane's time during which the rank computes: forward or backward.
pub(crate) fn hidden(spans: &[Span], lane: &str) -> Option<f64> {
    let computes = || spans.iter().filter(|span| matches!(span.what.as_str(), "forward" | "backward"));
    let (mut all, mut together) = (0.0, 0.0);
    for span in spans.iter().filter(|span| span.lane == lane) {
        all += span.end - span.start;
        let shared = |other: &Span| (other.end.min(span.end) - other.start.max(span.start)).max(0.0);
        together += computes().map(shared).sum::<f64>();
    }
    (all > 0.0).then_some(together / all)
}
