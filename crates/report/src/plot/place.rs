//! Where texts go so that none covers another, a mark or the frame; and the legend.

use super::svg::{self, Anchor, FONT, Svg};

/// A rectangle: left, top, right, bottom.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Area {
    fn meets(&self, other: &Area) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    fn holds(&self, other: &Area) -> bool {
        other.left >= self.left
            && other.right <= self.right
            && other.top >= self.top
            && other.bottom <= self.bottom
    }
}

/// Places texts beside points. A text that fits nowhere is left out: the point's hover still has it.
pub(super) struct Labels {
    frame: Area,
    taken: Vec<Area>,
}

impl Labels {
    /// Labels within `frame` that keep off the marks at `points`.
    pub(super) fn new(frame: Area, points: &[(f64, f64)]) -> Self {
        let r = 5.0;
        let area = |&(x, y): &(f64, f64)| Area { left: x - r, top: y - r, right: x + r, bottom: y + r };
        Self { frame, taken: points.iter().map(area).collect() }
    }

    /// Keeps labels off a line through `points`.
    pub(super) fn keep_off_line(&mut self, points: &[(f64, f64)]) {
        for pair in points.windows(2) {
            let ((x1, y1), (x2, y2)) = (pair[0], pair[1]);
            let steps = ((x2 - x1).hypot(y2 - y1) / 5.0).ceil().max(1.0);
            for i in 0..=steps as usize {
                let part = i as f64 / steps;
                let (x, y) = (x1 + (x2 - x1) * part, y1 + (y2 - y1) * part);
                self.taken.push(Area { left: x - 2.5, top: y - 2.0, right: x + 2.5, bottom: y + 2.0 });
            }
        }
    }

    /// The left end of the baseline for `text` beside the point `(x, y)`.
    pub(super) fn place(&mut self, (x, y): (f64, f64), text: &str) -> Option<(f64, f64)> {
        let (w, h, gap) = (svg::width(text), FONT, 8.0);
        let corners = [
            (x + gap, y - h / 2.0),
            (x - gap - w, y - h / 2.0),
            (x - w / 2.0, y - gap - h),
            (x - w / 2.0, y + gap),
            (x + gap, y - gap - h),
            (x + gap, y + gap / 2.0),
            (x - gap - w, y - gap - h),
            (x - gap - w, y + gap / 2.0),
        ];
        for (left, top) in corners {
            let area = Area { left, top, right: left + w, bottom: top + h };
            if self.frame.holds(&area) && !self.taken.iter().any(|taken| taken.meets(&area)) {
                self.taken.push(area);
                return Some((left, top + h * 0.82));
            }
        }
        None
    }
}

/// Moves heights apart until each is `gap` from the next, and keeps them between `top` and `bottom` where they fit.
pub(super) fn spread_apart(heights: &[f64], gap: f64, top: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..heights.len()).collect();
    order.sort_by(|&a, &b| heights[a].total_cmp(&heights[b]));
    let mut placed = heights.to_vec();
    let mut free = top;
    for &i in &order {
        placed[i] = placed[i].max(free);
        free = placed[i] + gap;
    }
    let mut limit = bottom;
    for &i in order.iter().rev() {
        placed[i] = placed[i].min(limit);
        limit = placed[i] - gap;
    }
    placed
}

/// The sign before a name in a legend.
pub(super) enum Sample {
    Mark(usize),
    Block(usize),
    Front,
}

/// Writes a legend from the top left, in as many lines as it takes, and returns its height.
pub(super) fn legend(svg: &mut Svg, left: f64, top: f64, right: f64, entries: &[(Sample, String)]) -> f64 {
    let (mut x, mut y, line) = (left, top, 20.0);
    for (sample, name) in entries {
        let name = &svg::clip(name, (right - left - 30.0).min(320.0));
        let room = if matches!(sample, Sample::Front) { 28.0 } else { 16.0 };
        let wide = room + svg::width(name) + 18.0;
        if x > left && x + wide > right {
            (x, y) = (left, y + line);
        }
        match sample {
            Sample::Mark(series) => svg.mark(*series, false, (x + 6.0, y + 8.0), ""),
            Sample::Block(series) => svg.rect(&svg::fill(*series), (x, y + 2.5), (11.0, 11.0), name),
            Sample::Front => svg.polyline("front", &[(x, y + 8.0), (x + 22.0, y + 8.0)]),
        }
        svg.text("", Anchor::Start, (x + room, y + 12.0), name);
        x += wide;
    }
    if entries.is_empty() { 0.0 } else { y - top + line + 6.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_keep_off_each_other_the_marks_and_the_frame() {
        let frame = Area { left: 0.0, top: 0.0, right: 300.0, bottom: 200.0 };
        let points: Vec<(f64, f64)> =
            (0..12).map(|i| (40.0 + f64::from(i % 4) * 6.0, 20.0 + f64::from(i) * 9.0)).collect();
        let mut labels = Labels::new(frame, &points);
        let placed = points.iter().filter(|&&point| labels.place(point, "SaveGateUp").is_some()).count();
        assert!(placed >= 6, "{placed} of {} labels found a place", points.len());
        let texts = &labels.taken[points.len()..];
        for (i, text) in texts.iter().enumerate() {
            assert!(frame.holds(text));
            let others = labels.taken.iter().enumerate().filter(|(j, _)| *j != points.len() + i);
            assert!(others.clone().all(|(_, other)| !other.meets(text)), "{text:?}");
        }
    }

    #[test]
    fn heights_are_spread_apart_in_their_order() {
        assert_eq!(spread_apart(&[50.0, 10.0, 12.0], 15.0, 0.0, 100.0), [50.0, 10.0, 25.0]);
        assert_eq!(spread_apart(&[98.0, 99.0], 15.0, 0.0, 100.0), [85.0, 100.0]);
    }
}
