//! From the rewards of a group of answers to their advantages.

use serde::{Deserialize, Serialize};

/// How advantages are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// By the standard deviation of the prompt's rewards.
    #[default]
    Group,
    /// By that of all rewards of the step.
    Batch,
    /// Not at all.
    None,
}

/// Added to a standard deviation that divides, as TRL does.
const EPSILON: f64 = 1e-4;
/// Deviations below this part of the largest reward are rounding.
const ROUNDING: f64 = 1e-6;

/// Returns the advantages of `rewards`, whose groups of `samples` follow each other.
pub(super) fn advantages(rewards: &[f64], samples: usize, scale: Scale) -> Vec<f64> {
    let of_batch = deviation(rewards);
    let of_group = |group: &[f64]| {
        let (mean, own) = (mean(group), deviation(group));
        let divisor = match scale {
            Scale::Group => own + EPSILON,
            Scale::Batch => of_batch + EPSILON,
            Scale::None => 1.0,
        };
        let is_equal = own == 0.0;
        group.iter().map(|reward| if is_equal { 0.0 } else { (reward - mean) / divisor }).collect::<Vec<_>>()
    };
    rewards.chunks(samples).flat_map(of_group).collect()
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The standard deviation of a sample (the divisor is n − 1); 0 where it is no more than rounding.
pub(super) fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let largest = values.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let deviation = (squares / values.len().saturating_sub(1).max(1) as f64).sqrt();
    if deviation <= ROUNDING * largest { 0.0 } else { deviation }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt with a share q of right answers among G: A₊ = √((1 − q)/q)·√((G − 1)/G).
    #[test]
    fn advantages_of_right_and_wrong_answers_are_the_known_ones() {
        for right in 1..8 {
            let rewards: Vec<f64> = (0..8).map(|sample| f64::from(u8::from(sample < right))).collect();
            let found = advantages(&rewards, 8, Scale::Group);
            let share = right as f64 / 8.0;
            let expected = ((1.0 - share) / share).sqrt() * (7.0f64 / 8.0).sqrt();
            assert!((found[0] - expected).abs() < 1e-3 * expected, "{right}: {found:?} {expected}");
            assert!(found.iter().sum::<f64>().abs() < 1e-9, "{found:?}");
        }
    }

    #[test]
    fn equal_rewards_have_no_advantage() {
        // A third has no exact sum.
        let third = 1.0 / 3.0;
        for scale in [Scale::Group, Scale::Batch, Scale::None] {
            let found = advantages(&[third, third, third, 1.0, 0.0, 0.0], 3, scale);
            assert_eq!(found[..3], [0.0; 3], "{scale:?}");
            assert!(found[3] > 0.0 && found[4] < 0.0, "{found:?}");
        }
        let plain = advantages(&[1.0, 0.0, 0.5, 0.5], 2, Scale::None);
        assert_eq!(plain, [0.5, -0.5, 0.0, 0.0]);
    }
}
