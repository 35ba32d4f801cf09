//! Spans of time in rows: what ran when, row by row.

use serde_json::json;

use super::axis::Axis;
use super::figure::{Panel, cases, drawable, panels, series_of};
use super::place::{Sample, legend};
use super::svg::{self, Anchor, FONT, Svg};
use crate::measurements::{Measurements, distinct, plain};
use crate::record::Case;
use crate::spec::Plot;
use crate::unit::{self, Multiple};

/// A row, and the bar in it.
const ROW: f64 = 26.0;
const THICK: f64 = 20.0;
/// Minimum width, so that a very short span is visible.
const LEAST: f64 = 0.6;
/// Maximum number of series in a legend, the number of colours.
const NAMED: usize = 8;

/// Spans in panels.
pub(super) struct Spans {
    unit: String,
    series: Vec<String>,
    panels: Vec<Panel<Row>>,
    /// The end of the last span.
    last: f64,
}

/// A row of one panel.
struct Row {
    name: String,
    spans: Vec<Span>,
}

struct Span {
    series: usize,
    start: f64,
    end: f64,
    label: Option<String>,
    hover: String,
}

/// The spans of the cases that have a start, an end and a row.
pub(super) fn spans(spec: &Plot, measured: &Measurements) -> Option<Spans> {
    let unit = measured.unit(&spec.x)?.to_owned();
    let time = |case: &Case, metric: &str| measured.metric(case, metric)?.value.filter(drawable);
    let ends = |case: &Case| Some((time(case, &spec.x)?, time(case, &spec.end)?));
    let cases: Vec<_> = cases(spec, measured)
        .into_iter()
        .filter(|case| case.get(&spec.y).is_some() && ends(case).is_some())
        .collect();
    let series = distinct(cases.iter().map(|case| series_of(spec, case)));
    let lanes = distinct(cases.iter().filter_map(|case| case.get(&spec.y)).map(plain));
    let span = |case: &Case| {
        let (start, end) = ends(case)?;
        let name = series_of(spec, case);
        let shown = [start, end, end - start].map(|time| unit::human(time, &unit));
        Some(Span {
            series: series.iter().position(|have| *have == name)?,
            start,
            end,
            label: spec.label.as_ref().and_then(|key| case.get(key)).map(plain),
            hover: format!("{}: {} to {}, {}", case.describe(), shown[0], shown[1], shown[2]),
        })
    };
    let build = |(title, cases): (String, Vec<&Case>)| {
        let row = |lane: &String| {
            let mut spans: Vec<Span> = cases
                .iter()
                .filter(|case| case.get(&spec.y).map(plain).as_ref() == Some(lane))
                .filter_map(|case| span(case))
                .collect();
            spans.sort_by(|a, b| a.start.total_cmp(&b.start));
            Row { name: lane.clone(), spans }
        };
        let items = lanes.iter().map(row).filter(|row| !row.spans.is_empty()).collect();
        Panel { title, items }
    };
    let panels: Vec<_> = panels(spec, &cases).into_iter().map(build).collect();
    let last = cases.iter().filter_map(|case| ends(case)).map(|(_, end)| end).fold(0.0, f64::max);
    (!panels.is_empty()).then_some(Spans { unit, series, panels, last })
}

/// The spans in Chrome's trace format: a process for each panel, a thread for each row, times in microseconds.
pub(super) fn trace(figure: &Spans) -> String {
    let mut events = Vec::new();
    for (process, panel) in figure.panels.iter().enumerate() {
        events
            .push(json!({"ph": "M", "name": "process_name", "pid": process, "args": {"name": panel.title}}));
        for (thread, row) in panel.items.iter().enumerate() {
            let name = json!({"name": row.name});
            events
                .push(json!({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": name}));
            for span in &row.spans {
                let label = span.label.as_ref().map(|label| format!(" {label}")).unwrap_or_default();
                events.push(json!({
                    "ph": "X", "name": format!("{}{label}", figure.series[span.series]), "pid": process, "tid": thread,
                    "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start),
                }));
            }
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"}).to_string() + "\n"
}

/// Draws a figure of spans.
pub(super) fn draw(spec: &Plot, figure: &Spans, width: f64) -> String {
    let right = width - 16.0;
    let mut svg = Svg::new();
    if spec.label.is_some() {
        svg.style_texts_inside();
    }
    let entries: Vec<_> = match figure.series.len() {
        2..=NAMED => {
            figure.series.iter().enumerate().map(|(i, name)| (Sample::Block(i), name.clone())).collect()
        }
        _ => Vec::new(),
    };
    let mut top = 4.0 + legend(&mut svg, 8.0, 4.0, width - 8.0, &entries);
    let multiple = unit::multiple(figure.last, &figure.unit);
    let rows = || figure.panels.iter().flat_map(|panel| &panel.items);
    let values: Vec<f64> = rows()
        .flat_map(|row| &row.spans)
        .flat_map(|span| [span.start, span.end])
        .map(|time| time / multiple.divisor)
        .collect();
    let names = rows().map(|row| svg::width(&row.name)).fold(0.0, f64::max);
    let left = 8.0 + names.min(width * 0.3) + 10.0;
    let axis = Axis::over(&values, false, true, if super::is_narrow(width) { 4 } else { 10 })
        .between(left, right)
        .without_crowding();
    for panel in &figure.panels {
        if figure.panels.len() > 1 {
            svg.text("head", Anchor::Start, (8.0, top + 12.0), &svg::clip(&panel.title, width - 16.0));
            top += 20.0;
        }
        top = draw_panel(&mut svg, panel, &axis, &multiple, left, top);
    }
    // Under the last panel's ticks.
    let title = match multiple.symbol.as_str() {
        "" => "time".to_owned(),
        symbol => format!("time ({symbol})"),
    };
    svg.text("", Anchor::End, (right, top + 10.0), &title);
    svg.finish(&spec.title, width, top + 20.0)
}

/// Draws one panel and returns where the next may start.
fn draw_panel(
    svg: &mut Svg,
    panel: &Panel<Row>,
    axis: &Axis,
    multiple: &Multiple,
    left: f64,
    top: f64,
) -> f64 {
    let bottom = top + panel.items.len() as f64 * ROW;
    for (value, label) in &axis.ticks {
        let at = axis.at(*value);
        svg.line("grid", (at, top), (at, bottom));
        svg.text("soft", Anchor::Middle, (at, bottom + 16.0), label);
    }
    for (place, row) in panel.items.iter().enumerate() {
        let middle = top + (place as f64 + 0.5) * ROW;
        svg.text("", Anchor::End, (left - 8.0, middle + 4.0), &svg::clip(&row.name, left - 16.0));
        for span in &row.spans {
            draw_span(svg, span, axis, multiple, middle);
        }
    }
    svg.line("base", (left, top), (left, bottom));
    bottom + 28.0
}

fn draw_span(svg: &mut Svg, span: &Span, axis: &Axis, multiple: &Multiple, middle: f64) {
    let [from, to] = [span.start, span.end].map(|time| axis.at(time / multiple.divisor));
    let width = (to - from).max(LEAST);
    // A gap separates spans that follow each other at once.
    let wide = if width > 3.0 { width - 1.0 } else { width };
    let top = middle - THICK / 2.0;
    svg.rect(&svg::fill(span.series), (from, top), (wide, THICK), &span.hover);
    // Ten twelfths of the size that widths are of, with air on both sides.
    if let Some(label) = span.label.as_ref().filter(|label| svg::width(label) * 10.0 / FONT + 4.0 <= wide) {
        svg.text("inside", Anchor::Middle, (from + wide / 2.0, middle + 3.5), label);
    }
}
