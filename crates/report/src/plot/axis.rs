//! An axis: from values to positions, and where its ticks are.

use crate::plot::svg::{clip, width};

/// A range of values laid over a range of positions.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    log: bool,
    low: f64,
    high: f64,
    start: f64,
    end: f64,
    /// Values with their labels.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis that shows all of `values` with about `wanted` ticks; one that is to start at zero does unless it is
    /// logarithmic.
    ///
    /// A logarithmic axis over values that are not all positive is a linear one.
    pub(super) fn over(values: &[f64], log: bool, zero: bool, wanted: usize) -> Self {
        let log = log && values.iter().all(|v| *v > 0.0);
        let mut low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let mut high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if zero && !log {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        if !(low.is_finite() && high.is_finite()) {
            (low, high) = (0.0, 1.0);
        }
        if log { Self::logarithmic(low, high, wanted) } else { Self::linear(low, high, wanted) }
    }

    fn linear(low: f64, high: f64, wanted: usize) -> Self {
        let (mut low, mut high) = (low, high);
        // Values that differ by less than f64 resolves on an axis are one value.
        if high - low <= 1e-9 * high.abs().max(low.abs()) {
            let room = if high == 0.0 { 1.0 } else { high.abs() * 0.5 };
            (low, high) = (low - room, high + room);
        }
        // Room for the marks at the ends; an end at zero is an end.
        let room = (high - low) * 0.06;
        low = if low == 0.0 { 0.0 } else { low - room };
        high = if high == 0.0 { 0.0 } else { high + room };
        let step = nice_step((high - low) / wanted.max(1) as f64);
        let decimals = (-step.log10().floor()).max(0.0) as usize;
        let (first, last) = ((low / step).ceil(), (high / step).floor());
        let count = (last - first).clamp(0.0, 50.0) as usize;
        let tick = |i: usize| {
            let value = (first + i as f64) * step;
            (value, label(value, decimals))
        };
        Self { log: false, low, high, start: 0.0, end: 1.0, ticks: (0..=count).map(tick).collect() }
    }

    fn logarithmic(low: f64, high: f64, wanted: usize) -> Self {
        let decades = (high / low).log10();
        if decades < 0.7 {
            // Too narrow for round powers: nice linear steps at logarithmic positions.
            let mut axis = Self::linear(low, high, wanted);
            axis.low = axis.low.max(low / 1.08);
            let above = axis.low;
            axis.ticks.retain(|(value, _)| *value >= above);
            return Self { log: true, ..axis };
        }
        let multiples: &[f64] = if decades * 3.0 > wanted as f64 * 2.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let every = if multiples.len() == 1 { (decades / wanted as f64).ceil().max(1.0) as i32 } else { 1 };
        let (low, high) = (low / 1.15, high * 1.15);
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let ticks = (first..=last)
            .filter(|power| power.rem_euclid(every) == 0)
            .flat_map(|power| multiples.iter().map(move |m| (m * 10f64.powi(power), power)))
            .filter(|(value, _)| (low..=high).contains(value))
            .map(|(value, power)| (value, label(value, (-power).max(0) as usize)))
            .collect();
        Self { log: true, low, high, start: 0.0, end: 1.0, ticks }
    }

    /// An axis with a place for each of `names`, at the values 0, 1, 2, …
    pub(super) fn of_names(names: &[String]) -> Self {
        let ticks = names.iter().enumerate().map(|(i, name)| (i as f64, clip(name, 150.0))).collect();
        Self { log: false, low: -0.5, high: names.len() as f64 - 0.5, start: 0.0, end: 1.0, ticks }
    }

    /// Puts the ticks at the values themselves, where these are few: batch 1, 2, 4 and 8 are read off better than
    /// at 0, 2.5 and 5.
    pub(super) fn with_ticks_at(mut self, values: &[f64]) -> Self {
        let mut at = values.to_vec();
        at.sort_by(f64::total_cmp);
        at.dedup();
        if (2..=8).contains(&at.len()) && at.iter().all(|v| *v == v.trunc() && v.abs() < 1e9) {
            self.ticks = at.into_iter().map(|value| (value, label(value, 0))).collect();
        }
        self
    }

    /// Lays the axis from position `start` to `end`.
    pub(super) fn between(mut self, start: f64, end: f64) -> Self {
        (self.start, self.end) = (start, end);
        self
    }

    /// The position of a value.
    pub(super) fn at(&self, value: f64) -> f64 {
        let lay = |v: f64| if self.log { v.ln() } else { v };
        let part = (lay(value) - lay(self.low)) / (lay(self.high) - lay(self.low));
        self.start + part * (self.end - self.start)
    }

    /// How wide the widest label is.
    pub(super) fn label_width(&self) -> f64 {
        self.ticks.iter().map(|(_, label)| width(label)).fold(0.0, f64::max)
    }

    /// Removes the ticks whose labels would touch the one before, along a horizontal axis.
    pub(super) fn without_crowding(mut self) -> Self {
        let mut free = f64::NEG_INFINITY;
        let ticks = std::mem::take(&mut self.ticks);
        for (value, label) in ticks {
            let (middle, half) = (self.at(value), width(&label) / 2.0);
            if middle - half >= free {
                free = middle + half + 8.0;
                self.ticks.push((value, label));
            }
        }
        self
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is not much below `rough`.
fn nice_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|m| m * power >= rough * 0.8).unwrap_or(10.0);
    times * power
}

fn label(value: f64, decimals: usize) -> String {
    if value != 0.0 && (value.abs() >= 1e9 || decimals > 6) {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    crate::unit::grouped(&format!("{:.decimals$}", value + 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(values: &[f64], log: bool, zero: bool) -> String {
        let axis = Axis::over(values, log, zero, 5).between(0.0, 100.0);
        for value in values {
            assert!((-1e-6..=100.0 + 1e-6).contains(&axis.at(*value)), "{value} is off the axis");
        }
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ticks_are_round_and_the_values_are_on_the_axis() {
        assert_eq!(labels(&[0.0, 9.3], false, true), "0 2 4 6 8");
        assert_eq!(labels(&[103.0, 145.0], false, false), "110 120 130 140");
        assert_eq!(labels(&[-0.02, 0.03], false, true), "-0.02 -0.01 0.00 0.01 0.02 0.03");
        assert_eq!(labels(&[7.0], false, false), "4 6 8 10");
        assert_eq!(labels(&[1.0, 600.0], true, false), "1 2 5 10 20 50 100 200 500");
        assert_eq!(labels(&[1e-3, 1e6], true, false), "0.01 1 100 10,000 1,000,000");
        assert_eq!(labels(&[3.0, 4.0], true, false), "3.0 3.2 3.4 3.6 3.8 4.0");
        assert_eq!(labels(&[0.0, 10.0], true, true), "0 2 4 6 8 10", "no logarithm of zero");
    }

    #[test]
    fn few_whole_values_are_the_ticks() {
        let axis = Axis::over(&[1.0, 64.0], true, false, 5).with_ticks_at(&[1.0, 8.0, 64.0, 8.0]);
        assert_eq!(axis.ticks.iter().map(|tick| tick.0).collect::<Vec<_>>(), [1.0, 8.0, 64.0]);
    }
}
