//! Order statistics of repeated measurements.

/// Median and spread of a set of samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The middle sample, or the mean of the two middle ones.
    pub median: f64,
    /// Half of the interquartile range.
    pub spread: f64,
}

/// Summarizes `samples` (any order, finite); `None` without samples.
pub fn summarize(samples: &[f64]) -> Option<Summary> {
    if samples.is_empty() {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let spread = (quantile(&sorted, 0.75) - quantile(&sorted, 0.25)) / 2.0;
    Some(Summary { median: quantile(&sorted, 0.5), spread })
}

/// The quantile `q` in `0.0..=1.0` of sorted samples, linear between neighbours.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let position = q * (sorted.len() - 1) as f64;
    let (low, high) = (position.floor() as usize, position.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (position - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_spread_of_known_samples() {
        assert_eq!(summarize(&[]), None);
        assert_eq!(summarize(&[3.0]), Some(Summary { median: 3.0, spread: 0.0 }));
        assert_eq!(summarize(&[4.0, 1.0, 3.0, 2.0, 5.0]), Some(Summary { median: 3.0, spread: 1.0 }));
    }
}
