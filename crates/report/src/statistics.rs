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

/// The interval that contains the median of the population with a probability of at least 95 %, from order statistics, whatever the
/// distribution: between the k-th smallest and the k-th largest of n samples the probability is 1 − 2·P(B(n, ½) < k), and k is the
/// largest that reaches 95 %. `None` below six samples, which never reach it.
pub fn median_interval(samples: &[f64]) -> Option<(f64, f64)> {
    let n = samples.len();
    // The probability that fewer than `k` of `n` samples lie below the median.
    let mut below = 0.0;
    let mut term = 0.5f64.powi(i32::try_from(n).ok()?);
    let mut k = 0;
    while k < n && 1.0 - 2.0 * (below + term) >= 0.95 {
        below += term;
        term *= (n - k) as f64 / (k + 1) as f64;
        k += 1;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    (k > 0).then(|| (sorted[k - 1], sorted[n - k]))
}

/// The quantile 0.975 of Student's t distribution.
pub fn t_quantile(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
        2.045, 2.042,
    ];
    match degrees {
        0 => f64::INFINITY,
        1..=30 => TABLE[degrees - 1],
        // Within 0.001 of the table's entries beyond 30.
        more => 1.96 + 2.4 / more as f64,
    }
}

/// The 95 % interval of the geometric mean of positive `values`, by Student's t over their logarithms; `None` below two.
pub fn log_interval(values: &[f64]) -> Option<(f64, f64)> {
    let n = values.len();
    if n < 2 || values.iter().any(|value| *value <= 0.0) {
        return None;
    }
    let logs: Vec<f64> = values.iter().map(|value| value.ln()).collect();
    let mean = logs.iter().sum::<f64>() / n as f64;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let wide = t_quantile(n - 1) * (squares / (n - 1) as f64 / n as f64).sqrt();
    Some(((mean - wide).exp(), (mean + wide).exp()))
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

    #[test]
    fn the_interval_of_a_mean_of_ratios() {
        assert_eq!(log_interval(&[2.0]), None);
        assert_eq!(
            log_interval(&[2.0, 2.0]).map(|(low, high)| (low.round(), high.round())),
            Some((2.0, 2.0))
        );
        // Mean 0 and standard deviation ln 2 of three logarithms: 4.303 · ln 2 / √3.
        let (low, high) = log_interval(&[0.5, 1.0, 2.0]).unwrap();
        let wide = (4.303 * 2f64.ln() / 3f64.sqrt()).exp();
        assert!((high - wide).abs() < 1e-9 && (low - 1.0 / wide).abs() < 1e-9, "{low} {high}");
        // Entries of tables of Student's t.
        for (degrees, quantile) in [(1, 12.706), (10, 2.228), (40, 2.021), (60, 2.000), (120, 1.980)] {
            assert!((t_quantile(degrees) - quantile).abs() < 2e-3, "{degrees}");
        }
    }

    #[test]
    fn the_interval_of_the_median_has_the_tabulated_ranks() {
        // The ranks of the 95 % interval in tables of the sign test.
        for (n, rank) in [(6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (20, 6), (25, 8)] {
            let samples: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            assert_eq!(median_interval(&samples), Some((f64::from(rank), f64::from(n + 1 - rank))), "{n}");
        }
        for n in 0..6 {
            assert_eq!(median_interval(&vec![1.0; n]), None, "{n}");
        }
    }
}
