//! A curve in bounded memory: means over as many neighbours as it takes.

/// Points that are kept, at most; twice as many as a plot is wide.
const MOST: usize = 2048;

/// The points of a curve; neighbours are averaged when there are too many.
#[derive(Debug, Default)]
pub(super) struct Points {
    /// Sums of x and y, each over `each` points.
    sums: Vec<(f64, f64)>,
    /// Sums of the points after them, and their number.
    last: (f64, f64),
    pending: u64,
    each: u64,
}

impl Points {
    /// Adds a point.
    pub(super) fn push(&mut self, x: f64, y: f64) {
        self.each = self.each.max(1);
        self.last = (self.last.0 + x, self.last.1 + y);
        self.pending += 1;
        if self.pending < self.each {
            return;
        }
        self.sums.push(std::mem::take(&mut self.last));
        self.pending = 0;
        if self.sums.len() == MOST {
            let pairs = self.sums.chunks_exact(2).map(|pair| (pair[0].0 + pair[1].0, pair[0].1 + pair[1].1));
            self.sums = pairs.collect();
            self.each *= 2;
        }
    }

    /// Returns the means, in order.
    pub(super) fn means(&self) -> Vec<(f64, f64)> {
        let mean = |(x, y): (f64, f64), count: u64| (x / count as f64, y / count as f64);
        let whole = self.sums.iter().map(|sums| mean(*sums, self.each));
        whole.chain((self.pending > 0).then(|| mean(self.last, self.pending))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_points_are_kept_and_many_are_averaged() {
        let of = |count: u32| {
            let mut points = Points::default();
            (0..count).for_each(|x| points.push(f64::from(x), 2.0 * f64::from(x)));
            points
        };
        assert_eq!(of(0).means(), []);
        let few = of(MOST as u32 - 1).means();
        assert!(few.len() == MOST - 1 && few[1000] == (1000.0, 2000.0));
        for count in [MOST as u32, 5000, 100_003] {
            let points = of(count);
            let means = points.means();
            assert!((MOST / 2..=MOST).contains(&means.len()), "{}", means.len());
            assert!(
                means.iter().all(|(x, y)| (y - 2.0 * x).abs() < 1e-9) && means.is_sorted_by(|a, b| a.0 < b.0)
            );
            let sum: f64 = points.sums.iter().map(|sums| sums.0).sum::<f64>() + points.last.0;
            assert_eq!(sum, f64::from(count) * f64::from(count - 1) / 2.0, "no point is lost");
        }
    }
}
