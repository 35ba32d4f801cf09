//! Packing documents into rows of one capacity, so that next to nothing is padding.
//!
//! Given lengths `l₁ … lₙ` and a capacity `C`, put each document into a row so that no row holds more than `C` tokens and
//! there are as few rows as possible: bin packing. Both classic heuristics take the documents from the longest to the
//! shortest and need at most `11/9` of the least number of rows, plus a constant (Johnson 1974):
//!
//! - **first-fit decreasing** puts each into the first row that has room;
//! - **best-fit decreasing** puts each into the row that it leaves the least room in (for language models: Ding et al.,
//!   arXiv:2404.10830; on histograms of lengths: Krell et al., arXiv:2107.02027).
//!
//! Documents of one length are interchangeable, and so are rows of one content. So the planner never touches a document:
//! it moves *groups* of equal rows, `(content, number of rows, room)`, through the lengths from `C` down to 1, and finds a
//! group's successor in a [bitmap tree](bitmap_tree) over the amounts of room (a segment tree of fan-out 64). A group is
//! split at most once per length, so there are `O(min(n, C))` groups and planning costs the same for ten thousand documents
//! as for ten million; what grows with `n` is counting the lengths and writing down the rows. The result is that of the
//! algorithm that goes document by document, which the tests run beside it.
//!
//! A [`Plan`] is global over the data set and deterministic. For streams whose lengths are not known beforehand there is
//! [`StreamingBestFit`].

mod best_fit;
pub mod bitmap_tree;
pub mod bound;
mod first_fit;
mod patterns;
mod plan;
mod streaming;

pub use bound::{lower_bound, next_fit};
pub use plan::{Assignment, Piece, Plan, PlanOptions};
pub use streaming::{StreamingBestFit, StreamingOptions};

use crate::error::{Error, Result};

/// How rows are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// The row that is left with the least room.
    #[default]
    BestFitDecreasing,
    /// The row that was opened first.
    FirstFitDecreasing,
}

impl Algorithm {
    /// As records call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::BestFitDecreasing => "best-fit decreasing",
            Self::FirstFitDecreasing => "first-fit decreasing",
        }
    }
}

/// What becomes of a document that is longer than a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LongDocuments {
    /// It is cut into pieces, full rows and a rest, each treated as a document of its own.
    #[default]
    Cut,
    /// It is left out.
    Drop,
}

const WHAT: &str = "packing";

/// A capacity that rows can have.
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
