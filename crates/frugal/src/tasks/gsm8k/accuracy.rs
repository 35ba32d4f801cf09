//! A share of right answers, and how sure it is.
//!
//! Of `n` answers `k` are right; `p = k/n`. Wilson's interval (1927) holds the shares `q` for which `k` is within the expected spread,
//! `|p − q| ≤ z·√(q(1 − q)/n)`: solved for `q`,
//!
//! ```text
//! (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n)
//! ```
//!
//! It stays between 0 and 1 and is right for few answers and for shares near 0 and 1, where `p ± z·√(p(1 − p)/n)` is not.

use std::fmt;

use serde::Serialize;

/// The normal distribution has 95 % within ± this many standard deviations.
const Z: f64 = 1.959_963_984_540_054;

/// A number of correct answers, and of all answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Accuracy {
    /// Right answers.
    pub right: usize,
    /// All answers.
    pub of: usize,
}

impl Accuracy {
    /// Counts one more answer.
    pub fn add(&mut self, right: bool) {
        self.right += usize::from(right);
        self.of += 1;
    }

    /// Returns the share of right answers, from 0 to 1; 0 of none.
    pub fn share(&self) -> f64 {
        if self.of == 0 { 0.0 } else { self.right as f64 / self.of as f64 }
    }

    /// Returns Wilson's interval of 95 %: the lowest and the highest share; 0 to 1 without answers.
    pub fn interval(&self) -> (f64, f64) {
        if self.of == 0 {
            return (0.0, 1.0);
        }
        let (p, n) = (self.share(), self.of as f64);
        let middle = p + Z * Z / (2.0 * n);
        let spread = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        let below = 1.0 + Z * Z / n;
        // Rounding must not put the share itself outside: at 0 of n the lower end is a few units in the last place above 0.
        (((middle - spread) / below).clamp(0.0, p), ((middle + spread) / below).clamp(p, 1.0))
    }
}

impl fmt::Display for Accuracy {
    /// `41.6 % (95 % interval 39.0 to 44.3 %, 549 of 1319)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = self.interval();
        let percent = 100.0 * self.share();
        write!(
            f,
            "{percent:.1} % (95 % interval {:.1} to {:.1} %, {} of {})",
            100.0 * low,
            100.0 * high,
            self.right,
            self.of
        )
    }
}
