//! How the rows of a batch lie.

/// How the rows of a batch lie in its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arrangement {
    /// Each in a row of its own, padded on the right to the longest.
    #[default]
    Padded,
    /// All end to end in one row, without padding (transformers' `DataCollatorWithFlattening`, TRL's `padding_free`). On a GPU the row is padded to a
    /// multiple of 64 positions, so that steps have few shapes.
    PaddingFree,
    /// Best-fit decreasing in rows of so many positions, over all of the data.
    Packed(usize),
}

impl Arrangement {
    /// Positions of a packed row.
    pub(super) fn capacity(self) -> Option<usize> {
        match self {
            Self::Packed(capacity) => Some(capacity),
            Self::Padded | Self::PaddingFree => None,
        }
    }

    /// A number that no other arrangement has.
    pub(super) fn number(self) -> u64 {
        match self {
            Self::Padded => 0,
            Self::PaddingFree => u64::MAX,
            Self::Packed(capacity) => capacity as u64,
        }
    }
}

/// Packed rows of so many positions; padded rows without a number.
impl From<Option<usize>> for Arrangement {
    fn from(packed: Option<usize>) -> Self {
        packed.map_or(Self::Padded, Self::Packed)
    }
}
