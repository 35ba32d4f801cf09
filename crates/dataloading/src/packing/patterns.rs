//! Groups of rows of equal content.
//!
//! A content is a list of `(length, times)` from the longest. Rows with a common prefix share it: contents are paths of a
//! tree, each node is an entry, and each group refers to the node where its path ends.

/// Rows of equal content and equal room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    /// The last node of the content.
    pub(super) content: u32,
    /// The number of rows.
    pub(super) rows: u32,
    /// Free tokens per row.
    pub(super) room: u32,
}

/// `times` documents of `length`, after the entry `before`.
#[derive(Debug, Clone, Copy)]
struct Entry {
    before: u32,
    length: u32,
    times: u32,
}

/// No entry.
const NOTHING: u32 = u32::MAX;

/// The tree of all contents.
#[derive(Debug, Default)]
pub(super) struct Contents(Vec<Entry>);

impl Contents {
    /// Returns the content of an empty row.
    pub(super) fn nothing(&self) -> u32 {
        NOTHING
    }

    /// Returns a content extended by `times` documents of `length`.
    pub(super) fn extend(&mut self, before: u32, length: u32, times: u32) -> u32 {
        self.0.push(Entry { before, length, times });
        (self.0.len() - 1) as u32
    }

    /// Returns rows of `group` extended by `times` documents of `length` each.
    pub(super) fn fill(&mut self, group: Group, rows: u32, length: u32, times: u32) -> Group {
        let content = self.extend(group.content, length, times);
        Group { content, rows, room: group.room - length * times }
    }

    /// Returns the entries of a content from the longest, `(length, times)`.
    pub(super) fn entries(&self, content: u32) -> Vec<(u32, u32)> {
        let mut entries = Vec::new();
        let mut at = content;
        while let Some(entry) = self.0.get(at as usize) {
            entries.push((entry.length, entry.times));
            at = entry.before;
        }
        entries.reverse();
        entries
    }
}

/// Splits a group whose rows have room for `times` documents, with `documents` left: rows that take `times` each, the
/// documents of one partial row, and rows that take none.
pub(super) fn share(rows: u32, times: u32, documents: u32) -> (u32, u32, u32) {
    let full = rows.min(documents / times);
    let rest = if full < rows { (documents - full * times).min(times) } else { 0 };
    (full, rest, rows - full - u32::from(rest > 0))
}

/// Plans groups of rows for `counts[length]` documents of each length.
pub(super) struct Packed {
    pub(super) groups: Vec<Group>,
    pub(super) contents: Contents,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_shared_among_rows() {
        for (rows, times, documents, expected) in [
            (3, 2, 6, (3, 0, 0)),
            (3, 2, 7, (3, 0, 0)),
            (3, 2, 5, (2, 1, 0)),
            (3, 2, 3, (1, 1, 1)),
            (3, 2, 1, (0, 1, 2)),
            (3, 2, 2, (1, 0, 2)),
        ] {
            assert_eq!(share(rows, times, documents), expected, "{rows} {times} {documents}");
        }
    }
}
