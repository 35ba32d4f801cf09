//! Which rows belong together.

/// Which rows an objective takes together. They are in one batch, and in one row if rows are packed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Each row for itself: what is learned is tokens.
    #[default]
    Rows,
    /// Row 2k is the chosen, and row 2k + 1 the rejected one of pair k. [`Layout::batch`](super::Layout::batch) counts pairs, if they are not packed, and batches
    /// have [`Sequences`](dataloading::Sequences).
    Pairs {
        /// Whether the prompt of a chosen row, which has no labels, gets them: they are of no sequence.
        learn_prompts: bool,
    },
    /// Each row is a desirable or an undesirable answer, by the sign of its weight. Batches have [`Sequences`](dataloading::Sequences) with
    /// [`Ratings`](dataloading::Ratings): each row's prompt with the answer of another.
    Rated,
}

impl Grouping {
    /// Returns the number of rows that belong together.
    pub fn rows(self) -> usize {
        match self {
            Self::Rows | Self::Rated => 1,
            Self::Pairs { .. } => 2,
        }
    }

    /// Returns the log-probabilities by a reference that a row has.
    pub(super) fn references(self) -> usize {
        if self == Self::Rated { 2 } else { 1 }
    }

    /// Whether this row is the chosen one of a pair.
    pub(super) fn is_chosen(self, row: usize) -> bool {
        matches!(self, Self::Pairs { .. }) && row.is_multiple_of(2)
    }

    /// Whether the prompt of this row is learned.
    pub(super) fn learns_prompt(self, row: usize) -> bool {
        self == Self::Pairs { learn_prompts: true } && self.is_chosen(row)
    }
}
