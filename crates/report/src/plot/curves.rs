//! Curves of a running training: lines without marks, of any number of points.

use super::axis::Axis;
use super::place::{Sample, legend};
use super::svg::{self, Anchor, Svg};

/// The most corners that a line is drawn with.
const CORNERS: usize = 400;

/// A named line.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right; those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

/// The names of a figure of curves.
#[derive(Clone, Copy, Debug)]
pub struct CurveAxes<'a> {
    /// The subject of the figure, for screen readers.
    pub title: &'a str,
    /// The quantity from left to right.
    pub x: &'a str,
    /// The quantity upwards.
    pub y: &'a str,
}

/// Draws curves as SVG text of `width` by `height`; `None` without a point. A curve of more than [`CORNERS`] points is drawn through
/// the means of that many consecutive parts.
pub fn draw(axes: CurveAxes<'_>, curves: &[Curve], (width, height): (f64, f64)) -> Option<String> {
    let finite = |curve: &Curve| -> Vec<(f64, f64)> {
        let points = curve.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite());
        means(&points.collect::<Vec<_>>())
    };
    let drawn: Vec<(&str, Vec<(f64, f64)>)> = curves
        .iter()
        .map(|curve| (curve.name.as_str(), finite(curve)))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    if drawn.is_empty() {
        return None;
    }
    let mut svg = Svg::new();
    let entries: Vec<(Sample, String)> =
        drawn.iter().enumerate().map(|(i, (name, _))| (Sample::Mark(i), (*name).to_owned())).collect();
    let top = 4.0 + legend(&mut svg, 8.0, 4.0, width - 8.0, &entries) + 24.0;
    let values = |pick: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        drawn.iter().flat_map(|(_, points)| points.iter().map(pick)).collect()
    };
    let (xs, ys) = (values(|point| point.0), values(|point| point.1));
    let y_axis = Axis::over(&ys, false, false, 5);
    let (left, right, bottom) = (18.0 + y_axis.label_width(), width - 22.0, height - 46.0);
    let y_axis = y_axis.between(bottom, top);
    let x_axis = Axis::over(&xs, false, false, 8).between(left, right).without_crowding();
    for (value, label) in &y_axis.ticks {
        let at = y_axis.at(*value);
        svg.line("grid", (left, at), (right, at));
        svg.text("soft", Anchor::End, (left - 6.0, at + 4.0), label);
    }
    for (value, label) in &x_axis.ticks {
        let at = x_axis.at(*value);
        svg.line("grid", (at, top), (at, bottom));
        svg.text("soft", Anchor::Middle, (at, bottom + 17.0), label);
    }
    svg.line("base", (left, bottom), (right, bottom));
    svg.text("", Anchor::Start, (8.0, top - 10.0), axes.y);
    svg.text("", Anchor::End, (right, bottom + 35.0), axes.x);
    for (series, (_, points)) in drawn.iter().enumerate() {
        let at: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (x_axis.at(x), y_axis.at(y))).collect();
        svg.polyline(&svg::stroke(series), &at);
        // A line of few points has marks, so that one point alone is visible.
        if points.len() <= 40 {
            at.iter().for_each(|&place| svg.mark(series, false, place, ""));
        }
    }
    Some(svg.finish(axes.title, width, height))
}

/// Points, or the means of as many parts as a line has corners.
fn means(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let part = points.len().div_ceil(CORNERS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let (x, y) = part.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        (x / part.len() as f64, y / part.len() as f64)
    };
    points.chunks(part).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: CurveAxes<'_> = CurveAxes { title: "Loss", x: "step", y: "nats" };

    fn curve(name: &str, points: impl IntoIterator<Item = (f64, f64)>) -> Curve {
        Curve { name: name.to_owned(), points: points.into_iter().collect() }
    }

    #[test]
    fn curves_of_any_length_have_few_corners() {
        let long = curve("training <loss>", (0..100_000).map(|x| (f64::from(x), 1.0 / f64::from(x + 1))));
        let short = curve("validation", [(10.0, 0.5), (20.0, f64::NAN), (30.0, 0.25)]);
        let svg = draw(AXES, &[long, short], (960.0, 360.0)).unwrap();
        let corners: Vec<usize> = svg
            .lines()
            .filter(|line| line.starts_with("<polyline"))
            .map(|line| line.matches(',').count())
            .collect();
        assert_eq!(corners, [400, 2]);
        assert!(svg.contains("training &lt;loss&gt;") && svg.contains("aria-label=\"Loss\""), "{svg}");
        assert_eq!(means(&[(0.0, 1.0), (1.0, 3.0)]), [(0.0, 1.0), (1.0, 3.0)]);
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert_eq!(draw(AXES, &[], (960.0, 360.0)), None);
        assert_eq!(draw(AXES, &[curve("nan", [(0.0, f64::NAN)])], (960.0, 360.0)), None);
        assert!(draw(AXES, &[curve("one", [(1.0, 2.0)])], (960.0, 360.0)).unwrap().contains("class=\"mark"));
    }
}
