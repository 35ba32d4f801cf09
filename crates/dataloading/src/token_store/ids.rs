//! Token ids in their stored form.

use std::ops::Range;

/// A slice of ids of 2 or 4 bytes each.
#[derive(Debug, Clone, Copy)]
pub struct Ids<'a> {
    bytes: &'a [u8],
    wide: bool,
}

impl<'a> Ids<'a> {
    /// `bytes` must be a whole number of ids.
    pub(super) fn new(bytes: &'a [u8], wide: bool) -> Self {
        Self { bytes, wide }
    }

    fn width(self) -> usize {
        if self.wide { 4 } else { 2 }
    }

    /// Returns the number of ids.
    pub fn len(self) -> usize {
        self.bytes.len() / self.width()
    }

    /// Returns whether there are no ids.
    pub fn is_empty(self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns id `index`, or `None` beyond the end.
    pub fn get(self, index: usize) -> Option<u32> {
        self.slice(index..index.checked_add(1)?)?.iter().next()
    }

    /// Returns a part, or `None` if it exceeds the end.
    pub fn slice(self, range: Range<usize>) -> Option<Self> {
        let width = self.width();
        let range = range.start.checked_mul(width)?..range.end.checked_mul(width)?;
        Some(Self { bytes: self.bytes.get(range)?, wide: self.wide })
    }

    /// Appends all ids to `out`. The loops over fixed-size chunks compile to vector loads, so this runs at memory
    /// bandwidth.
    pub fn copy_to(self, out: &mut Vec<u32>) {
        if self.wide {
            out.extend(self.bytes.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)));
        } else {
            out.extend(self.bytes.as_chunks::<2>().0.iter().map(|id| u32::from(u16::from_le_bytes(*id))));
        }
    }

    /// Returns an iterator over the ids.
    pub fn iter(self) -> impl Iterator<Item = u32> + 'a {
        self.bytes.chunks_exact(self.width()).map(|id| match *id {
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            [a, b] => u32::from_le_bytes([a, b, 0, 0]),
            _ => 0,
        })
    }

    /// Returns the largest id.
    pub(super) fn max(self) -> Option<u32> {
        if self.wide {
            self.bytes.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)).max()
        } else {
            self.bytes.as_chunks::<2>().0.iter().map(|id| u16::from_le_bytes(*id)).max().map(u32::from)
        }
    }
}
