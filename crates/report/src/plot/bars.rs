//! Horizontal bars, side by side or stacked. They lie, so that long names of cases stand in full beside them.

use super::axis::Axis;
use super::figure::{Bar, Bars, Group, Panel};
use super::is_narrow;
use super::place::{Sample, legend};
use super::svg::{self, Anchor, Svg};
use crate::spec::{Plot, PlotKind};
use crate::unit::{self, Multiple};

/// Draws a figure of bars.
pub(super) fn draw(spec: &Plot, figure: &Bars, width: f64) -> String {
    let mut svg = Svg::new();
    let stacked = spec.kind == PlotKind::StackedBar;
    let entries: Vec<_> = match figure.series.len() {
        0 | 1 => Vec::new(),
        _ => figure.series.iter().enumerate().map(|(i, name)| (Sample::Block(i), name.clone())).collect(),
    };
    let mut top = 4.0 + legend(&mut svg, 8.0, 4.0, width - 8.0, &entries);
    let narrow = is_narrow(width);
    let names = figure.panels.iter().flat_map(|panel| &panel.items).map(|group| svg::width(&group.name));
    // Beyond this a name leaves its bar no room.
    let most = width * 0.4;
    let left = if narrow { 14.0 } else { 8.0 + names.fold(0.0, f64::max).min(most) + 10.0 };
    for panel in &figure.panels {
        if figure.panels.len() > 1 {
            svg.text("head", Anchor::Start, (8.0, top + 12.0), &svg::clip(&panel.title, width - 16.0));
            top += 22.0;
        }
        top = draw_panel(&mut svg, figure, panel, stacked, Span { left, width }, top);
    }
    svg.finish(&spec.title, width, top)
}

/// Where the bars begin, and the drawing's width.
#[derive(Clone, Copy)]
struct Span {
    left: f64,
    width: f64,
}

/// Draws one panel and returns where the next may start.
fn draw_panel(
    svg: &mut Svg,
    figure: &Bars,
    panel: &Panel<Group>,
    stacked: bool,
    span: Span,
    top: f64,
) -> f64 {
    let Span { left, width } = span;
    // Names beside the bars, or above them where there is no room beside.
    let above = if is_narrow(width) { 17.0 } else { 0.0 };
    let ticks = if is_narrow(width) { 4 } else { 6 };
    let sum = |group: &Group| group.bars.iter().flatten().filter_map(|bar| bar.value).sum::<f64>();
    let values: Vec<f64> = match stacked {
        true => panel.items.iter().map(sum).collect(),
        false => {
            panel.items.iter().flat_map(|g| g.bars.iter().flatten()).filter_map(|bar| bar.value).collect()
        }
    };
    let multiple = unit::multiple(values.iter().fold(0.0, |m: f64, v| m.max(v.abs())), &figure.value.unit);
    let drawn: Vec<f64> = values.iter().map(|value| value / multiple.divisor).collect();
    let decimals = unit::decimals(&drawn, &multiple, &figure.value.unit);
    // Room for the figure at the end of the longest bar, and for the whiskers.
    let figures = drawn.iter().map(|value| svg::width(&unit::fixed(*value, decimals))).fold(0.0, f64::max);
    let right = width - (figures + 16.0).max(if is_narrow(width) { 64.0 } else { 84.0 });
    let whisker = |bar: &Bar| bar.value.map(|value| (value + bar.spread) / multiple.divisor);
    let mut shown = drawn.clone();
    if !stacked {
        shown.extend(panel.items.iter().flat_map(|g| g.bars.iter().flatten()).filter_map(whisker));
    }
    let axis = Axis::over(&shown, false, true, ticks).between(left, right).without_crowding();
    let (thick, gap) = if stacked || figure.series.len() == 1 { (18.0, 8.0) } else { (14.0, 12.0) };
    let per_group = if stacked { 1 } else { figure.series.len() };
    let group_height = per_group as f64 * thick + gap + above;
    let bottom = top + panel.items.len() as f64 * group_height;
    for (value, label) in &axis.ticks {
        let at = axis.at(*value);
        svg.line("grid", (at, top), (at, bottom));
        svg.text("soft", Anchor::Middle, (at, bottom + 16.0), label);
    }
    let title = unit::with_symbol(&figure.value.heading, &in_brackets(&multiple.symbol));
    svg.text("", Anchor::End, (right, bottom + 33.0), &svg::clip(&title, right - 16.0));
    for (row, group) in panel.items.iter().enumerate() {
        let group_top = top + row as f64 * group_height + gap / 2.0 + above;
        let middle = group_top + (group_height - gap) / 2.0;
        if above > 0.0 {
            svg.text("", Anchor::Start, (left, group_top - 4.0), &svg::clip(&group.name, width - 16.0));
        } else {
            svg.text("", Anchor::End, (left - 8.0, middle + 4.0), &svg::clip(&group.name, left - 16.0));
        }
        let pen = Pen { axis: &axis, multiple: &multiple, decimals, thick };
        if stacked {
            pen.stack(svg, group, group_top, sum(group));
        } else {
            for (series, bar) in group.bars.iter().enumerate() {
                let Some(bar) = bar else { continue };
                pen.bar(svg, series, bar, group_top + series as f64 * thick);
            }
        }
    }
    svg.line("base", (axis.at(0.0), top), (axis.at(0.0), bottom));
    bottom + 50.0
}

fn in_brackets(symbol: &str) -> String {
    if symbol.is_empty() { String::new() } else { format!("({symbol})") }
}

struct Pen<'a> {
    axis: &'a Axis,
    multiple: &'a Multiple,
    decimals: usize,
    thick: f64,
}

impl Pen<'_> {
    fn figure(&self, svg: &mut Svg, value: f64, end: f64, top: f64) {
        let text = unit::fixed(value / self.multiple.divisor, self.decimals);
        svg.text("soft", Anchor::Start, (end + 6.0, top + self.thick / 2.0 + 4.0), &text);
    }

    fn bar(&self, svg: &mut Svg, series: usize, bar: &Bar, top: f64) {
        let zero = self.axis.at(0.0);
        let Some(value) = bar.value else { return self.not_measured(svg, top) };
        let end = self.axis.at(value / self.multiple.divisor);
        let (from, to) = (zero.min(end), zero.max(end));
        svg.rect(&svg::fill(series), (from, top + 1.0), (to - from, self.thick - 2.0), &bar.hover);
        let mut tip = to;
        if bar.spread > 0.0 {
            let ends =
                [-1.0, 1.0].map(|side| self.axis.at((value + side * bar.spread) / self.multiple.divisor));
            let middle = top + self.thick / 2.0;
            svg.line("base", (ends[0], middle), (ends[1], middle));
            tip = tip.max(ends[1]);
        }
        self.figure(svg, value, tip, top);
    }

    fn not_measured(&self, svg: &mut Svg, top: f64) {
        let at = (self.axis.at(0.0) + 6.0, top + self.thick / 2.0 + 4.0);
        svg.text("soft", Anchor::Start, at, "not measured");
    }

    fn stack(&self, svg: &mut Svg, group: &Group, top: f64, sum: f64) {
        if group.bars.iter().flatten().all(|bar| bar.value.is_none()) {
            return self.not_measured(svg, top);
        }
        let mut from = 0.0;
        for (series, bar) in group.bars.iter().enumerate() {
            let Some((bar, value)) = bar.as_ref().and_then(|bar| Some((bar, bar.value?))) else { continue };
            let (left, right) = (self.axis.at(from), self.axis.at(from + value / self.multiple.divisor));
            svg.rect(&svg::fill(series), (left, top), (right - left, self.thick), &bar.hover);
            from += value / self.multiple.divisor;
        }
        self.figure(svg, sum, self.axis.at(from), top);
    }
}
