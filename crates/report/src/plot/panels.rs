//! The figures of the page: panels side by side with one axis each, from zero, and names beside what they name.

use super::axis::Axis;
use super::place::{Area, Labels, spread_apart};
use super::svg::{self, Anchor, Svg};
use super::{NARROW, WIDE, is_narrow};

/// A figure, at both widths.
pub(crate) struct Drawing {
    pub(crate) wide: String,
    pub(crate) narrow: String,
}

/// A panel with its marks.
pub(crate) struct Panel<T> {
    pub(crate) title: String,
    pub(crate) marks: Vec<T>,
}

/// A bar, with its place in the list of all names.
pub(crate) struct Bar {
    pub(crate) row: usize,
    pub(crate) value: f64,
    pub(crate) interval: Option<(f64, f64)>,
    pub(crate) text: String,
}

/// A point; points of one colour are joined from left to right.
pub(crate) struct Dot {
    pub(crate) label: String,
    pub(crate) colour: usize,
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) interval: Option<(f64, f64)>,
}

/// A line, from left to right.
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) colour: usize,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Words of a figure.
pub(crate) struct Words<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
}

/// Draws bars: one row for each of `names` with its colour, one panel beside the other. `ratio` draws a line at 1.
pub(crate) fn bars(
    words: &Words<'_>,
    names: &[(String, usize)],
    panels: &[Panel<Bar>],
    ratio: bool,
) -> Drawing {
    let draw = |width: f64| {
        let mut svg = Svg::new();
        let narrow = is_narrow(width);
        let label = names.iter().map(|(name, _)| svg::width(name)).fold(0.0, f64::max).min(width * 0.36);
        let left = if narrow { 14.0 } else { 8.0 + label + 10.0 };
        let columns = if narrow { 1 } else { panels.len() };
        let cell = (width - left - 8.0) / columns as f64;
        let row = if narrow { 38.0 } else { 26.0 };
        let height = 24.0 + names.len() as f64 * row + 40.0;
        let most = |panel: &Panel<Bar>| {
            panel
                .marks
                .iter()
                .map(|bar| bar.interval.map_or(bar.value, |(_, high)| high.min(bar.value * 1.5)))
                .fold(0.0, f64::max)
        };
        for (index, panel) in panels.iter().enumerate() {
            let at = if narrow { (left, index as f64 * height) } else { (left + index as f64 * cell, 0.0) };
            let figures = panel.marks.iter().map(|bar| svg::width(&bar.text)).fold(0.0, f64::max) + 14.0;
            let end = at.0 + cell - figures - 8.0;
            let axis = Axis::over(&[most(panel).max(if ratio { 1.0 } else { 0.0 })], false, true, 3)
                .between(at.0, end)
                .without_crowding();
            let (top, bottom) = (at.1 + 24.0, at.1 + 24.0 + names.len() as f64 * row);
            svg.text("head", Anchor::Start, (at.0, at.1 + 14.0), &svg::clip(&panel.title, cell - 10.0));
            for (value, tick) in &axis.ticks {
                svg.line("grid", (axis.at(*value), top), (axis.at(*value), bottom));
                svg.text("soft", Anchor::Middle, (axis.at(*value), bottom + 15.0), tick);
            }
            for (i, (name, colour)) in names.iter().enumerate() {
                let y = top + i as f64 * row;
                if narrow {
                    svg.text("", Anchor::Start, (at.0, y + 14.0), &svg::clip(name, cell));
                } else if index == 0 {
                    svg.text("", Anchor::End, (left - 8.0, y + 17.0), &svg::clip(name, label));
                }
                let bar_top = y + if narrow { 18.0 } else { 5.0 };
                let Some(bar) = panel.marks.iter().find(|bar| bar.row == i) else {
                    svg.text("soft", Anchor::Start, (at.0 + 4.0, bar_top + 12.0), "not measured");
                    continue;
                };
                let tip = axis.at(bar.value);
                svg.rect(&svg::fill(*colour), (at.0, bar_top), ((tip - at.0).max(1.0), 16.0), &bar.text);
                let mut text_at = tip;
                if let Some((low, high)) = bar.interval {
                    let (low, high) = (axis.at(low).max(at.0), axis.at(high).min(end + figures - 6.0));
                    svg.line("interval", (low, bar_top + 8.0), (high, bar_top + 8.0));
                    text_at = text_at.max(high.min(end));
                }
                svg.text("", Anchor::Start, (text_at + 5.0, bar_top + 12.5), &bar.text);
            }
            svg.line("base", (at.0, top), (at.0, bottom));
            if ratio {
                svg.line("one", (axis.at(1.0), top), (axis.at(1.0), bottom));
            }
            if index == 0 || narrow {
                svg.text("soft", Anchor::Start, (at.0, bottom + 32.0), words.x);
            }
        }
        let rows = if narrow { panels.len() } else { 1 };
        svg.finish(words.title, width, rows as f64 * height)
    };
    Drawing { wide: draw(WIDE), narrow: draw(NARROW) }
}

/// The frame of a panel, and where the panels of a figure are.
struct Cells {
    width: f64,
    columns: usize,
    cell: f64,
    plot: f64,
}

impl Cells {
    fn new(width: f64, panels: usize) -> Self {
        let columns = if is_narrow(width) { 1 } else { panels.clamp(1, 3) };
        let plot = if columns == 1 { 170.0 } else { 200.0 };
        Self { width, columns, cell: width / columns as f64, plot }
    }

    /// Left end and top of a panel.
    fn at(&self, index: usize) -> (f64, f64) {
        let (column, row) = (index % self.columns, index / self.columns);
        (column as f64 * self.cell, row as f64 * self.height())
    }

    fn height(&self) -> f64 {
        self.plot + 92.0
    }

    fn finish(&self, svg: Svg, title: &str, panels: usize) -> String {
        svg.finish(title, self.width, panels.div_ceil(self.columns) as f64 * self.height())
    }
}

/// Draws two axes with their words, and returns them over their frame.
fn axes(
    svg: &mut Svg,
    words: &Words<'_>,
    cells: &Cells,
    index: usize,
    title: &str,
    (x, y): (Axis, Axis),
    names_room: f64,
) -> (Axis, Axis, Area) {
    let (left, top) = cells.at(index);
    svg.text("head", Anchor::Start, (left + 8.0, top + 14.0), &svg::clip(title, cells.cell - 16.0));
    svg.text("soft", Anchor::Start, (left + 8.0, top + 32.0), words.y);
    let frame = Area {
        left: left + 16.0 + y.label_width(),
        top: top + 42.0,
        right: left + cells.cell - 14.0 - names_room,
        bottom: top + 42.0 + cells.plot,
    };
    let y = y.between(frame.bottom, frame.top);
    let x = x.between(frame.left, frame.right).without_crowding();
    for (value, tick) in &y.ticks {
        svg.line("grid", (frame.left, y.at(*value)), (frame.right, y.at(*value)));
        svg.text("soft", Anchor::End, (frame.left - 6.0, y.at(*value) + 4.0), tick);
    }
    for (value, tick) in &x.ticks {
        svg.line("grid", (x.at(*value), frame.top), (x.at(*value), frame.bottom));
        svg.text("soft", Anchor::Middle, (x.at(*value), frame.bottom + 16.0), tick);
    }
    svg.line("base", (frame.left, frame.bottom), (frame.right, frame.bottom));
    svg.line("base", (frame.left, frame.top), (frame.left, frame.bottom));
    svg.text("soft", Anchor::End, (frame.right, frame.bottom + 33.0), words.x);
    (x, y, frame)
}

/// Draws points over two ratios; all panels share both axes, and dashed lines are at 1.
pub(crate) fn pareto(words: &Words<'_>, panels: &[Panel<Dot>]) -> Drawing {
    let all =
        |pick: fn(&Dot) -> f64| panels.iter().flat_map(|panel| &panel.marks).map(pick).fold(1.0, f64::max);
    let (x_most, y_most) = (all(|dot| dot.x), all(|dot| dot.y));
    let draw = |width: f64| {
        let mut svg = Svg::new();
        let cells = Cells::new(width, panels.len());
        for (index, panel) in panels.iter().enumerate() {
            let pair = (Axis::over(&[x_most], false, true, 5), Axis::over(&[y_most], false, true, 5));
            let (x, y, frame) = axes(&mut svg, words, &cells, index, &panel.title, pair, 0.0);
            svg.line("one", (x.at(1.0), frame.top), (x.at(1.0), frame.bottom));
            svg.line("one", (frame.left, y.at(1.0)), (frame.right, y.at(1.0)));
            let places: Vec<(f64, f64)> = panel.marks.iter().map(|dot| (x.at(dot.x), y.at(dot.y))).collect();
            let mut labels = Labels::new(frame, &places);
            let mut colours: Vec<usize> = panel.marks.iter().map(|dot| dot.colour).collect();
            colours.dedup();
            for colour in colours {
                let of = panel.marks.iter().zip(&places).filter(|(dot, _)| dot.colour == colour);
                let mut line: Vec<(f64, f64)> = of.map(|(_, place)| *place).collect();
                line.sort_by(|a, b| a.0.total_cmp(&b.0));
                svg.polyline(&format!("{} thin", svg::stroke(colour)), &line);
            }
            for (dot, place) in panel.marks.iter().zip(&places) {
                if let Some((low, high)) = dot.interval {
                    let (top, bottom) = (y.at(high).max(frame.top), y.at(low).min(frame.bottom));
                    svg.line(
                        &format!("{} whisker", svg::stroke(dot.colour)),
                        (place.0, top),
                        (place.0, bottom),
                    );
                }
                svg.mark(dot.colour, false, *place, &format!("{}: {:.2}, {:.2}", dot.label, dot.x, dot.y));
            }
            for (dot, place) in panel.marks.iter().zip(&places).filter(|(dot, _)| !dot.label.is_empty()) {
                if let Some(at) = labels.place(*place, &dot.label) {
                    svg.text("", Anchor::Start, at, &dot.label);
                }
            }
        }
        cells.finish(svg, words.title, panels.len())
    };
    Drawing { wide: draw(WIDE), narrow: draw(NARROW) }
}

/// Draws lines with their names at their right ends.
pub(crate) fn lines(words: &Words<'_>, panels: &[Panel<Line>], log_x: bool, shared: bool) -> Drawing {
    let values = |panels: &[&Panel<Line>], pick: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        panels.iter().flat_map(|panel| &panel.marks).flat_map(|line| line.points.iter().map(pick)).collect()
    };
    let every: Vec<&Panel<Line>> = panels.iter().collect();
    let draw = |width: f64| {
        let mut svg = Svg::new();
        let cells = Cells::new(width, panels.len());
        let names = panels
            .iter()
            .flat_map(|panel| &panel.marks)
            .map(|line| svg::width(&line.label))
            .fold(0.0, f64::max);
        let room = names.min(cells.cell * 0.4) + 12.0;
        for (index, panel) in panels.iter().enumerate() {
            let of = if shared { every.clone() } else { vec![panel] };
            let (xs, ys) = (values(&of, |point| point.0), values(&of, |point| point.1));
            let x = Axis::over(&xs, log_x, false, 6).with_ticks_at(&xs);
            let y = Axis::over(&ys, false, true, 5);
            let (x, y, frame) = axes(&mut svg, words, &cells, index, &panel.title, (x, y), room);
            let ends: Vec<f64> = panel
                .marks
                .iter()
                .map(|line| line.points.last().map_or(frame.bottom, |point| y.at(point.1)))
                .collect();
            let heights = spread_apart(&ends, 15.0, frame.top + 4.0, frame.bottom - 2.0);
            for (line, height) in panel.marks.iter().zip(heights) {
                let places: Vec<(f64, f64)> = line.points.iter().map(|&(a, b)| (x.at(a), y.at(b))).collect();
                svg.polyline(&svg::stroke(line.colour), &places);
                if places.len() <= 12 {
                    places.iter().for_each(|&place| svg.mark(line.colour, false, place, ""));
                }
                let end = places.last().map_or(frame.right, |place| place.0);
                svg.text(
                    &format!("t{}", line.colour % 8),
                    Anchor::Start,
                    (end + 8.0, height + 4.0),
                    &svg::clip(&line.label, room),
                );
            }
        }
        cells.finish(svg, words.title, panels.len())
    };
    Drawing { wide: draw(WIDE), narrow: draw(NARROW) }
}
