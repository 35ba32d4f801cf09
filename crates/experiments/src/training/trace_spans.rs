//! The part of a trace in which an inefficiency shows, as spans of a timeline.

use trace::{Operator, Profile, RangeEvent};

use super::injected_slowdowns::Inefficiency;

/// Spans of a picture; shorter ones beyond them are left out.
const MOST: usize = 24;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TracePart {
    /// All of it.
    Step,
    /// The span from its beginning until some time after its batch is there.
    Beginning,
    /// The forward pass.
    Forward,
    /// The forward pass from the output projection on.
    Loss,
    /// The optimizer's step and the clearing of gradients.
    Optimizer,
}

impl TracePart {
    /// Returns the part in which an inefficiency shows.
    pub(crate) fn showing(inefficiency: Inefficiency) -> Self {
        match inefficiency {
            Inefficiency::PadToMax => Self::Step,
            Inefficiency::TokenizePerItem | Inefficiency::NoWorkers | Inefficiency::Unpinned => {
                Self::Beginning
            }
            Inefficiency::OddWidth
            | Inefficiency::UnusedProjection
            | Inefficiency::ExplicitAttention
            | Inefficiency::MaskPerForward => Self::Forward,
            Inefficiency::IndexedLoss | Inefficiency::AccuracyEachStep | Inefficiency::HostReads => {
                Self::Loss
            }
            Inefficiency::ZeroedGradients | Inefficiency::UnfusedOptimizer => Self::Optimizer,
        }
    }
}

/// Something that ran for a time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Span {
    /// The row that it stands in: phases, operators, loader.
    pub row: &'static str,
    /// Its name.
    pub what: String,
    /// The kind of work, for its colour.
    pub kind: &'static str,
    /// Seconds from the beginning of the part.
    pub start: f64,
    /// Seconds from the beginning of the part.
    pub end: f64,
}

/// The spans in `part` of the trace's last step: its phases, the operators that the program called, and the loader's work.
pub(crate) fn spans(profile: &Profile, part: TracePart) -> Vec<Span> {
    let ranges =
        |name: &'static str| profile.ranges.iter().filter(move |range| profile.range_name(range) == name);
    let Some(step) = ranges("step").max_by_key(|range| range.start) else { return Vec::new() };
    let within = |range: &&RangeEvent| {
        range.thread == step.thread && range.start >= step.start && range.end <= step.end
    };
    let phase = |name| ranges(name).filter(within).map(|range| (range.start, range.end));
    let step_span = (step.start, step.end);
    let called = called(profile, step);
    let (from, until) = match part {
        TracePart::Step => step_span,
        TracePart::Beginning => {
            let (start, end) = phase("data").next().unwrap_or((step.start, step.start));
            (start, (end + 2 * (end - start)).max(end + (step.end - step.start) / 200))
        }
        TracePart::Forward => phase("forward").next().unwrap_or(step_span),
        TracePart::Loss => {
            let (start, end) = phase("forward").next().unwrap_or(step_span);
            let mut inside = called.iter().filter(|operator| operator.start >= start && operator.end <= end);
            let projection = inside.rfind(|operator| kind(profile.operator_name(operator)) == "product");
            (projection.map_or(start, |operator| operator.start), end)
        }
        // The range of the step, and that of unscaling and clipping before it.
        TracePart::Optimizer => {
            let both = || phase("optimizer").chain(phase("clip"));
            let start = both().map(|(start, _)| start).min();
            (start.unwrap_or(step.start), both().map(|(_, end)| end).max().unwrap_or(step.end))
        }
    };
    let span = |row, what: &str, kind, start: i64, end: i64| {
        let seconds = |at: i64| (at.clamp(from, until) - from) as f64 / 1e9;
        let (start, end) = (seconds(start), seconds(end));
        (end > start).then(|| Span { row, what: what.to_owned(), kind, start, end })
    };
    let mut spans = Vec::new();
    for name in ["data", "forward", "backward", "clip", "optimizer"] {
        spans.extend(phase(name).filter_map(|(start, end)| span("phases", name, "phase", start, end)));
    }
    let operators = called.iter().filter_map(|operator| {
        let name = profile.operator_name(operator);
        span("operators", short(name), kind(name), operator.start, operator.end)
    });
    spans.extend(longest(joined(operators, (until - from) as f64 / 1e9)));
    for name in ["load", "tokenize"] {
        let work = ranges(name).filter_map(|range| span("loader", name, "loader", range.start, range.end));
        spans.extend(longest(joined(work, (until - from) as f64 / 1e9)));
    }
    spans
}

/// The operators and nodes on the step's thread that no other contains, in order.
fn called<'a>(profile: &'a Profile, step: &RangeEvent) -> Vec<&'a Operator> {
    let mut operators: Vec<&Operator> = profile
        .operators
        .iter()
        .filter(|operator| operator.thread == step.thread)
        .filter(|operator| operator.start >= step.start && operator.end <= step.end)
        .collect();
    operators.sort_by_key(|operator| (operator.start, std::cmp::Reverse(operator.end)));
    let mut until = i64::MIN;
    operators.retain(|operator| {
        let outermost = operator.start >= until;
        until = until.max(operator.end);
        outermost
    });
    operators
}

/// Joins neighbours of one name with less than a hundredth of the picture between them.
fn joined(spans: impl Iterator<Item = Span>, width: f64) -> Vec<Span> {
    let mut joined: Vec<Span> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if last.what == span.what && span.start - last.end < width / 100.0 => {
                last.end = span.end
            }
            _ => joined.push(span),
        }
    }
    joined
}

/// The longest spans, in order.
fn longest(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_by(|a, b| (b.end - b.start).total_cmp(&(a.end - a.start)));
    spans.truncate(MOST);
    spans.sort_by(|a, b| a.start.total_cmp(&b.start));
    spans
}

fn short(name: &str) -> &str {
    let name = name.rsplit("evaluate_function: ").next().unwrap_or(name);
    name.strip_prefix("aten::").unwrap_or(name)
}

fn kind(name: &str) -> &'static str {
    let is = |names: &[&str]| names.iter().any(|wanted| name.contains(wanted));
    if is(&["scaled_dot_product", "softmax", "ScaledDotProduct", "causal_attention", "query_attention"]) {
        "attention"
    } else if is(&["linear", "mm", "Linear", "Mm", "product"]) {
        "product"
    } else if is(&["copy", "to_copy", "contiguous", "cat", "index", "nonzero", "Index"]) {
        "copy or index"
    } else if is(&["zero", "fill", "empty"]) {
        "fill"
    } else {
        "other operator"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(what: &str, start: f64, end: f64) -> Span {
        Span { row: "operators", what: what.into(), kind: "product", start, end }
    }

    #[test]
    fn close_neighbours_of_one_name_are_one_span() {
        let spans =
            vec![span("mm", 0.0, 1.0), span("mm", 1.05, 2.0), span("add", 2.0, 2.1), span("mm", 2.1, 3.0)];
        let joined = joined(spans.into_iter(), 10.0);
        assert_eq!(joined, [span("mm", 0.0, 2.0), span("add", 2.0, 2.1), span("mm", 2.1, 3.0)]);
    }

    #[test]
    fn the_longest_spans_stay_in_their_order() {
        let spans: Vec<Span> =
            (0..40).map(|i| span("mm", f64::from(i), f64::from(i) + 0.01 * f64::from(i))).collect();
        let kept = longest(spans.clone());
        assert_eq!(kept, spans[40 - MOST..]);
    }
}
