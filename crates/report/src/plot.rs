//! Plots as SVG text: lines, points with their Pareto front, bars, timelines.
//!
//! The same records give the same bytes. A plot has no background and takes its colours by `prefers-color-scheme`, so
//! it is readable on a light and on a dark page, inlined or as a file. Colours are Okabe and Ito's, which people with
//! colour-blindness distinguish, and series also differ in the shape of their marks.

mod axis;
mod bars;
pub mod curves;
mod figure;
pub(crate) mod panels;
mod place;
mod svg;
mod timeline;
mod xy;

pub use svg::escape;

use crate::measurements::Measurements;
use crate::spec::{Plot, PlotKind};

/// Widths of a drawing: of a file and a wide page, and of a phone, so that the text keeps its size on both.
const WIDE: f64 = 960.0;
const NARROW: f64 = 380.0;

/// Draws the plot that `spec` describes. `None` where no record belongs in it.
pub fn draw(spec: &Plot, measured: &Measurements) -> Option<String> {
    draw_in(spec, measured, WIDE)
}

/// Returns the same plot for a narrow page: panels below each other, names above their bars.
pub fn draw_narrow(spec: &Plot, measured: &Measurements) -> Option<String> {
    draw_in(spec, measured, NARROW)
}

fn draw_in(spec: &Plot, measured: &Measurements, width: f64) -> Option<String> {
    match spec.kind {
        PlotKind::Line | PlotKind::Scatter => {
            figure::points(spec, measured).map(|figure| xy::draw(spec, &figure, width))
        }
        PlotKind::Bar | PlotKind::StackedBar => {
            figure::bars(spec, measured).map(|figure| bars::draw(spec, &figure, width))
        }
        PlotKind::Timeline => {
            timeline::spans(spec, measured).map(|figure| timeline::draw(spec, &figure, width))
        }
    }
}

/// The spans of a timeline as a trace that ui.perfetto.dev and chrome://tracing open. `None` without a record, or where
/// `spec` asks for none.
pub fn trace(spec: &Plot, measured: &Measurements) -> Option<String> {
    spec.trace.then(|| timeline::spans(spec, measured).map(|figure| timeline::trace(&figure)))?
}

/// Returns width and height of a drawing.
pub fn size(svg: &str) -> (f64, f64) {
    let number = |name: &str| {
        let rest = svg.split_once(&format!(" {name}=\""))?.1;
        rest.split('"').next()?.parse().ok()
    };
    (number("width").unwrap_or(WIDE), number("height").unwrap_or(WIDE))
}

/// Whether a drawing of this width is for a narrow page.
fn is_narrow(width: f64) -> bool {
    width < 600.0
}

/// Returns the rules that all plots share, for a page that has many of them.
pub fn style_sheet() -> String {
    svg::rules()
}

/// Returns a drawing without the rules of [`style_sheet`], to stand in a page that has them.
pub fn without_style(svg: &str) -> String {
    svg.replacen(&svg::style(), "", 1)
}
