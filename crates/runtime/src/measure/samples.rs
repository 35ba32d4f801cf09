//! Order statistics of a few samples.

/// All samples of one quantity, in the order in which they were taken.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Samples {
    /// The samples; seconds if the quantity is time.
    pub samples: Vec<f64>,
}

impl Samples {
    /// Returns the median; NaN without samples.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Returns half the interquartile range: half of the samples are within about this of the median.
    pub fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / 2.0
    }

    /// Returns a quantile, interpolated linearly as by default in NumPy. `share` is clamped to 0..=1; NaN without samples.
    ///
    /// ```
    /// let samples = runtime::measure::Samples { samples: vec![4.0, 1.0, 2.0, 3.0] };
    /// assert_eq!(samples.quantile(0.25), 1.75);
    /// assert_eq!((samples.median(), samples.spread()), (2.5, 0.75));
    /// ```
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
        let position = share.clamp(0.0, 1.0) * last as f64;
        // NaN becomes 0 in the cast, and the arithmetic below propagates it.
        let below = (position.floor() as usize).min(last);
        let above = (below + 1).min(last);
        let part = position - below as f64;
        // Without this an infinite neighbour of weight 0 would make the result NaN.
        if part == 0.0 { sorted[below] } else { sorted[below] + (sorted[above] - sorted[below]) * part }
    }
}
