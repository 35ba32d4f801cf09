//! Packing documents into rows of one capacity with almost no padding.
//!
//! Given lengths `l₁ … lₙ` and a capacity `C`, assign each document to a row so that no row exceeds `C` tokens and there
//! are as few rows as possible: bin packing. Both classic heuristics process the documents from the longest to the shortest
//! and need at most `11/9` of the minimum number of rows, plus a constant (Johnson 1974):
//!
//! - **first-fit decreasing** puts each into the first row with enough room;
//! - **best-fit decreasing** puts each into the row with the least remaining room (for language models: Ding et al.,
//!   arXiv:2404.10830; on histograms of lengths: Krell et al., arXiv:2107.02027).
//!
//! Documents of equal length are interchangeable, and so are rows of equal content. So the planner never handles single
//! documents: it splits *groups* of equal rows, `(content, number of rows, room)`, for each length from `C` down to 1, and
//! finds the next group in a [bitmap tree](bitmap_tree) over the amounts of room (a segment tree of fan-out 64). A group is
//! split at most once per length, so there are `O(min(n, C))` groups, and planning ten million documents costs the same as
//! ten thousand; only counting the lengths and listing the rows grow with `n`. The result equals that of the algorithm over
//! single documents, against which it is tested.
//!
//! A [`PackingPlan`] is global over the data set and deterministic. For streams of unknown lengths use [`StreamingBestFit`].

mod best_fit;
pub mod bitmap_tree;
pub mod bound;
mod first_fit;
mod patterns;
mod plan;
mod streaming;

pub use bound::{lower_bound, next_fit};
pub use plan::{Assignment, PackingConfig, PackingPlan, Piece};
pub use streaming::{StreamingBestFit, StreamingConfig};

use crate::error::{Error, Result};

/// The packing algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Best-fit decreasing: the row with the least remaining room.
    #[default]
    BestFitDecreasing,
    /// First-fit decreasing: the row that was opened first.
    FirstFitDecreasing,
}

impl Algorithm {
    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::BestFitDecreasing => "best-fit decreasing",
            Self::FirstFitDecreasing => "first-fit decreasing",
        }
    }
}

/// How a document longer than a row is handled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LongDocuments {
    /// Split it into full rows and a rest, each packed like a document.
    #[default]
    Split,
    /// Drop it.
    Drop,
}

const WHAT: &str = "packing";

/// Checks the capacity of rows.
fn check_capacity(capacity: usize) -> Result<u32> {
    const LARGEST: usize = 1 << 28;
    if (1..=LARGEST).contains(&capacity) {
        return Ok(capacity as u32);
    }
    Err(Error::Config {
        what: WHAT,
        reason: format!("rows of {capacity} tokens; expected a capacity from 1 to {LARGEST}"),
    })
}
