//! Lines and points over two axes, in one panel or in small multiples.

use super::axis::Axis;
use super::figure::{Dimension, Panel, Point, Points};
use super::is_narrow;
use super::place::{Area, Labels, Sample, legend, spread_apart};
use super::svg::{self, Anchor, Svg};
use crate::spec::{Plot, PlotKind};
use crate::unit::{self, Multiple};

const HEAD: f64 = 18.0;
/// The most room that names at the ends of lines take.
const END_NAMES: f64 = 260.0;

/// Draws a figure of points.
pub(super) fn draw(spec: &Plot, figure: &Points, width: f64) -> String {
    let mut svg = Svg::new();
    let panels = figure.panels.len();
    let columns = match panels {
        1 => 1,
        _ if is_narrow(width) => 1,
        2 | 4 => 2,
        _ => 3,
    };
    let many = figure.series.len() > 1;
    // The names stand at the lines' ends where there is one panel with room for them.
    let at_ends =
        many && spec.kind == PlotKind::Line && panels == 1 && figure.series.len() <= 8 && !is_narrow(width);
    let mut entries = Vec::new();
    if many && !at_ends {
        entries.extend(figure.series.iter().enumerate().map(|(i, name)| (Sample::Mark(i), name.clone())));
    }
    if spec.pareto {
        entries.push((Sample::Front, "Pareto front (its points are filled)".into()));
    }
    let top = 4.0 + legend(&mut svg, 8.0, 4.0, width - 8.0, &entries);
    let (cell_width, plot_height) =
        (width / columns as f64, if columns == 1 && !is_narrow(width) { 300.0 } else { 190.0 });
    let heading = if panels > 1 { HEAD } else { 0.0 };
    let cell_height = heading + HEAD + plot_height + 56.0;
    for (index, panel) in figure.panels.iter().enumerate() {
        let (column, row) = (index % columns, index / columns);
        let (left, cell_top) = (column as f64 * cell_width, top + row as f64 * cell_height);
        if panels > 1 {
            svg.text(
                "head",
                Anchor::Start,
                (left + 8.0, cell_top + 12.0),
                &svg::clip(&panel.title, cell_width - 24.0),
            );
        }
        let cell = Area {
            left: left + 8.0,
            top: cell_top + heading,
            right: left + cell_width - 22.0,
            bottom: cell_top + cell_height - 56.0,
        };
        draw_panel(&mut svg, spec, figure, panel, cell, at_ends);
    }
    let rows = panels.div_ceil(columns);
    svg.finish(&spec.title, width, top + rows as f64 * cell_height)
}

/// Values of a dimension as they are drawn: in one multiple of their unit.
struct Drawn {
    values: Vec<f64>,
    multiple: Multiple,
    title: String,
}

impl Drawn {
    fn new(dimension: &Dimension, values: Vec<f64>) -> Self {
        let largest = values.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        let multiple = if dimension.key {
            unit::multiple(1.0, "count")
        } else {
            unit::multiple(largest, &dimension.unit)
        };
        let title = match multiple.symbol.as_str() {
            "" => dimension.heading.clone(),
            symbol => format!("{} ({symbol})", dimension.heading),
        };
        Self { values: values.iter().map(|v| v / multiple.divisor).collect(), multiple, title }
    }
}

fn draw_panel(svg: &mut Svg, spec: &Plot, figure: &Points, panel: &Panel<Point>, cell: Area, at_ends: bool) {
    let points = &panel.items;
    let x = Drawn::new(&figure.x, points.iter().map(|p| p.x).collect());
    let y = Drawn::new(&figure.y, points.iter().map(|p| p.y).collect());
    let ticks = ((cell.right - cell.left) / 55.0).clamp(3.0, 10.0) as usize;
    // Zero belongs on an axis of points only where it costs less than half of the panel.
    let from_zero = |drawn: &Drawn| {
        let (low, high) =
            drawn.values.iter().fold((f64::INFINITY, 0.0), |(a, b): (f64, f64), v| (a.min(*v), b.max(*v)));
        low >= 0.0 && low <= high / 2.0
    };
    // The axes, and the frame that their labels and the names at the ends leave.
    let y_axis = match &figure.y.names {
        Some(names) => Axis::of_names(names),
        None => Axis::over(&y.values, spec.log_y, from_zero(&y) && !figure.y.key, 5),
    };
    let names_room = match at_ends {
        true => figure.series.iter().map(|name| svg::width(name)).fold(0.0, f64::max).min(END_NAMES) + 14.0,
        false => 0.0,
    };
    let frame = Area {
        left: cell.left + y_axis.label_width() + 10.0,
        top: cell.top + HEAD + 6.0,
        right: cell.right - names_room,
        bottom: cell.bottom,
    };
    let y_axis = y_axis.between(frame.bottom, frame.top);
    let x_axis = match &figure.x.names {
        Some(names) => Axis::of_names(names),
        None if figure.x.key => Axis::over(&x.values, spec.log_x, false, ticks).with_ticks_at(&x.values),
        None => Axis::over(&x.values, spec.log_x, from_zero(&x), ticks),
    }
    .between(frame.left, frame.right)
    .without_crowding();

    // The grid with its labels, and the titles.
    for (value, label) in &y_axis.ticks {
        let at = y_axis.at(*value);
        svg.line("grid", (frame.left, at), (frame.right, at));
        svg.text("soft", Anchor::End, (frame.left - 6.0, at + 4.0), label);
    }
    for (value, label) in &x_axis.ticks {
        let at = x_axis.at(*value);
        svg.line("grid", (at, frame.top), (at, frame.bottom));
        svg.text("soft", Anchor::Middle, (at, frame.bottom + 17.0), label);
    }
    svg.line("base", (frame.left, frame.bottom), (frame.right, frame.bottom));
    svg.text("", Anchor::Start, (cell.left, cell.top + 12.0), &svg::clip(&y.title, cell.right - cell.left));
    svg.text(
        "",
        Anchor::End,
        (frame.right, frame.bottom + 35.0),
        &svg::clip(&x.title, cell.right - cell.left),
    );

    // The points: their front, or the line of each series.
    let at: Vec<(f64, f64)> =
        x.values.iter().zip(&y.values).map(|(&x, &y)| (x_axis.at(x), y_axis.at(y))).collect();
    let front = if spec.pareto { pareto_front(points) } else { (0..points.len()).collect() };
    if spec.pareto {
        svg.polyline("front", &front.iter().map(|&i| at[i]).collect::<Vec<_>>());
    }
    if spec.kind == PlotKind::Line {
        draw_lines(svg, figure, points, &at, at_ends.then_some(frame));
    }
    let mut labels = Labels::new(frame, &at);
    if spec.pareto {
        labels.keep_off_line(&front.iter().map(|&i| at[i]).collect::<Vec<_>>());
    }
    for (i, point) in points.iter().enumerate() {
        let class = format!("whisker {}", svg::stroke(point.series));
        let (xs, ys) = (point.x_spread / x.multiple.divisor, point.y_spread / y.multiple.divisor);
        let reach = |axis: &Axis, value: f64, spread: f64, low: f64, high: f64| {
            let end = |v: f64| axis.at(v).max(low).min(high);
            // A whisker to zero or below has no end on a logarithmic axis.
            let down = if value - spread > 0.0 { end(value - spread) } else { end(value) };
            (down, end(value + spread))
        };
        // A whisker that its mark would cover only smudges it.
        let seen = |(a, b): (f64, f64)| ((a - b).abs() > 11.0).then_some((a, b));
        if let Some((a, b)) = seen(reach(&y_axis, y.values[i], ys, frame.top, frame.bottom)) {
            svg.line(&class, (at[i].0, a), (at[i].0, b));
        }
        if let Some((a, b)) = seen(reach(&x_axis, x.values[i], xs, frame.left, frame.right)) {
            svg.line(&class, (a, at[i].1), (b, at[i].1));
        }
        svg.mark(point.series, !front.contains(&i), at[i], &point.hover);
    }
    for (point, &at) in points.iter().zip(&at) {
        if let Some(text) = &point.label
            && let Some(place) = labels.place(at, text)
        {
            svg.text("soft", Anchor::Start, place, text);
        }
    }
}

fn draw_lines(svg: &mut Svg, figure: &Points, points: &[Point], at: &[(f64, f64)], names_in: Option<Area>) {
    let mut ends = Vec::new();
    for series in 0..figure.series.len() {
        let mut along: Vec<usize> = (0..points.len()).filter(|&i| points[i].series == series).collect();
        along.sort_by(|&a, &b| points[a].x.total_cmp(&points[b].x));
        svg.polyline(&svg::stroke(series), &along.iter().map(|&i| at[i]).collect::<Vec<_>>());
        if let Some(&last) = along.last() {
            ends.push((series, at[last]));
        }
    }
    let Some(frame) = names_in else { return };
    let heights: Vec<f64> = ends.iter().map(|(_, end)| end.1).collect();
    let placed = spread_apart(&heights, 15.0, frame.top, frame.bottom);
    for ((series, end), height) in ends.iter().zip(placed) {
        let left = frame.right + 12.0;
        // A thin line leads from a line that ends early, or whose name had to move, to the name.
        if (end.1 - height).abs() > 4.0 || left - end.0 > 44.0 {
            svg.line(
                &format!("whisker {}", svg::stroke(*series)),
                (end.0 + 5.0, end.1),
                (left - 2.0, height),
            );
        }
        svg.text(
            &svg::fill(*series),
            Anchor::Start,
            (left, height + 4.0),
            &svg::clip(&figure.series[*series], END_NAMES),
        );
    }
}

/// The points that no other point beats on one axis without losing on the other (less is better), from left to right.
fn pareto_front(points: &[Point]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|&a, &b| points[a].x.total_cmp(&points[b].x).then(points[a].y.total_cmp(&points[b].y)));
    let mut best = f64::INFINITY;
    order.retain(|&i| {
        let better = points[i].y < best;
        best = best.min(points[i].y);
        better
    });
    order
}
