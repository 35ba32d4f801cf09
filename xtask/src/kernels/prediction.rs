//! A kernel's time from what it does, on paper: the slowest of its bytes, its instructions and its special functions.
//!
//! Nothing here was measured on these machines. It is a lower bound of what a kernel can reach, and names what would bound it.

use ptx::{Class, Counts};

/// A GPU's rates.
pub(super) struct Machine {
    pub(super) name: &'static str,
    /// Bytes a second of a copy: nine tenths of the data sheet's.
    bandwidth: f64,
    /// Instructions of warps a second: four in each cycle of each multiprocessor.
    instructions: f64,
}

const fn machine(name: &'static str, terabytes: f64, multiprocessors: f64, gigahertz: f64) -> Machine {
    Machine { name, bandwidth: 0.9e12 * terabytes, instructions: 4e9 * multiprocessors * gigahertz }
}

/// Data sheets of the SXM modules.
pub(super) const MACHINES: [Machine; 3] = [
    machine("A100", 2.039, 108.0, 1.41),
    machine("H100", 3.35, 132.0, 1.755),
    machine("H200", 4.8, 132.0, 1.755),
];

/// Warps' instructions for which a special function occupies its unit, which has 16 lanes of the 128.
const SPECIAL: f64 = 8.0;

/// The work of a kernel at some size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Work {
    pub(super) bytes: f64,
    pub(super) instructions: f64,
    pub(super) special: f64,
}

impl Work {
    pub(super) fn from_counts(counts: &Counts) -> Self {
        Self {
            bytes: (counts.bytes_read + counts.bytes_written) as f64,
            instructions: counts.instructions() as f64,
            special: counts.of(Class::Special) as f64,
        }
    }

    /// The same for `rows`, from two smaller sizes: what is read once, such as weights, is not multiplied.
    pub(super) fn extrapolated((few, less): (f64, Self), (many, more): (f64, Self), rows: f64) -> Self {
        let line = |less: f64, more: f64| less + (more - less) / (many - few) * (rows - few);
        Self {
            bytes: line(less.bytes, more.bytes),
            instructions: line(less.instructions, more.instructions),
            special: line(less.special, more.special),
        }
    }

    /// Seconds, and what takes them.
    pub(super) fn on(&self, machine: &Machine) -> (f64, &'static str) {
        let bounds = [
            (self.bytes / machine.bandwidth, "memory"),
            (self.instructions / machine.instructions, "issue"),
            (SPECIAL * self.special / machine.instructions, "special functions"),
        ];
        bounds.into_iter().fold((0.0, ""), |most, one| if one.0 > most.0 { one } else { most })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_part_is_the_time() {
        let work = Work { bytes: 4.32e12, instructions: 1.0, special: 1.0 };
        assert_eq!(work.on(&MACHINES[2]), (1.0, "memory"));
        let work = Work { special: 1e15, ..work };
        assert_eq!(work.on(&MACHINES[2]).1, "special functions");
    }

    #[test]
    fn what_is_read_once_is_counted_once() {
        let work = |rows: f64| Work { bytes: 100.0 + 7.0 * rows, instructions: rows, special: 0.0 };
        assert_eq!(Work::extrapolated((2.0, work(2.0)), (4.0, work(4.0)), 1000.0), work(1000.0));
    }
}
