//! The results of a counter.

use std::cmp::Reverse;
use std::fmt::{self, Display, Formatter};
use std::ops::AddAssign;

use crate::sys::profile::{RawRow, RawWork};

/// Floating-point operations in two conventions, which differ for attention only; see [`Counter`](super::Counter).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flops {
    /// Every query with every key.
    pub dense: u64,
    /// Only the pairs that a causal mask or a window keeps.
    pub causal: u64,
}

impl From<u64> for Flops {
    fn from(flops: u64) -> Self {
        Self { dense: flops, causal: flops }
    }
}

/// An amount of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Calls of operators.
    pub calls: u64,
    /// Floating-point operations.
    pub flops: Flops,
    /// Bytes read and written.
    pub bytes: u64,
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.flops.dense += other.flops.dense;
        self.flops.causal += other.flops.causal;
        self.bytes += other.bytes;
    }
}

impl From<RawWork> for Work {
    fn from(raw: RawWork) -> Self {
        let RawWork { calls, dense, causal, bytes } = raw;
        Self { calls, flops: Flops { dense, causal }, bytes }
    }
}

/// The work of one operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpCounts {
    /// The operator, such as `aten::mm`, with all its overloads; or the name given to
    /// [`record_external`](super::record_external).
    pub name: String,
    /// All its work.
    pub total: Work,
    /// The recomputed part.
    pub recomputed: Work,
}

/// The results of a [`Counter`](super::Counter). Prints as a table, with a warning about unknown operators.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// All work.
    pub total: Work,
    /// The recomputed part, under [`recompute`](super::recompute).
    pub recomputed: Work,
    /// By operator, sorted by FLOPs, then bytes, then name. Views and other operators that move nothing are omitted.
    pub by_op: Vec<OpCounts>,
    /// Operators with unknown FLOPs, sorted by name; they are in `by_op` without FLOPs.
    pub unknown: Vec<String>,
}

impl Counts {
    pub(super) fn from_rows(rows: Vec<(String, RawRow)>) -> Self {
        let mut counts = Self::default();
        for (name, row) in rows {
            let op = OpCounts { name, total: row.total.into(), recomputed: row.recomputed.into() };
            counts.total += op.total;
            counts.recomputed += op.recomputed;
            if row.unknown != 0 {
                counts.unknown.push(op.name.clone());
            }
            counts.by_op.push(op);
        }
        let order = |op: &OpCounts| (Reverse(op.total.flops.dense), Reverse(op.total.bytes));
        counts.by_op.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.name.cmp(&b.name)));
        counts.unknown.sort();
        counts
    }

    /// Returns the work of one operator; zero if it did not run.
    #[must_use]
    pub fn op(&self, name: &str) -> Work {
        self.by_op.iter().find(|op| op.name == name).map(|op| op.total).unwrap_or_default()
    }
}

impl Display for Counts {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let width =
            self.by_op.iter().map(|op| op.name.chars().count()).max().unwrap_or(0).max("recomputed".len());
        writeln!(
            f,
            "{:width$}  {:>8}  {:>16}  {:>16}  {:>16}",
            "operator", "calls", "FLOPs", "FLOPs causal", "bytes"
        )?;
        let mut line = |name: &str, work: &Work| {
            let Work { calls, flops, bytes } = work;
            writeln!(f, "{name:width$}  {calls:>8}  {:>16}  {:>16}  {bytes:>16}", flops.dense, flops.causal)
        };
        for op in &self.by_op {
            line(&op.name, &op.total)?;
        }
        line("total", &self.total)?;
        line("recomputed", &self.recomputed)?;
        if !self.unknown.is_empty() {
            writeln!(f, "warning: the FLOPs of these operators are not known: {}", self.unknown.join(", "))?;
        }
        Ok(())
    }
}
