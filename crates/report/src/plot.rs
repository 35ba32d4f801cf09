//! Plots as SVG text: lines, points with their Pareto front, bars, timelines.
//!
//! The same records give the same bytes. A plot has no background and takes its colours by `prefers-color-scheme`, so
//! it is readable on a light and on a dark page, inlined or as a file. Colours are Okabe and Ito's, which people with
//! colour-blindness tell apart, and series also differ in the shape of their marks.

mod axis;
mod bars;
mod figure;
mod place;
mod svg;
mod timeline;
mod xy;

pub(crate) use svg::escape;

use crate::measurements::Measurements;
use crate::spec::{Plot, PlotKind};

/// Draws the plot that `spec` describes. `None` where no record belongs in it.
pub fn draw(spec: &Plot, measured: &Measurements) -> Option<String> {
    match spec.kind {
        PlotKind::Line | PlotKind::Scatter => {
            figure::points(spec, measured).map(|figure| xy::draw(spec, &figure))
        }
        PlotKind::Bar | PlotKind::StackedBar => {
            figure::bars(spec, measured).map(|figure| bars::draw(spec, &figure))
        }
        PlotKind::Timeline => timeline::spans(spec, measured).map(|figure| timeline::draw(spec, &figure)),
    }
}
