//! Groups of rows of one content.
//!
//! A content is a list of `(length, times)` from the longest. Rows that differ in their latest entries share the earlier
//! ones: contents are the paths of a tree, each node an entry, each group at the node where its path ends.

/// Rows with the same content and the same room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    /// Where its content ends.
    pub(super) content: u32,
    /// How many rows.
    pub(super) rows: u32,
    /// Tokens that each of them still takes.
    pub(super) room: u32,
}

/// `times` documents of `length`, behind the entry `before`.
#[derive(Debug, Clone, Copy)]
struct Entry {
    before: u32,
    length: u32,
    times: u32,
}

/// No entry.
const NOTHING: u32 = u32::MAX;

/// All contents.
#[derive(Debug, Default)]
pub(super) struct Contents(Vec<Entry>);

impl Contents {
    /// The content of an empty row.
    pub(super) fn nothing(&self) -> u32 {
        NOTHING
    }

    /// A content with `times` documents of `length` more.
    pub(super) fn extend(&mut self, before: u32, length: u32, times: u32) -> u32 {
        self.0.push(Entry { before, length, times });
        (self.0.len() - 1) as u32
    }

    /// Rows that were `group`'s, with `times` documents of `length` more in each.
    pub(super) fn fill(&mut self, group: Group, rows: u32, length: u32, times: u32) -> Group {
        let content = self.extend(group.content, length, times);
        Group { content, rows, room: group.room - length * times }
    }

    /// The entries of a content from the longest, `(length, times)`.
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

/// How many documents of a length come into each row of a group that has room for `times`, when `documents` are left:
/// rows that get `times` each, documents of one more row, rows that get none.
pub(super) fn share(rows: u32, times: u32, documents: u32) -> (u32, u32, u32) {
    let full = rows.min(documents / times);
    let rest = if full < rows { (documents - full * times).min(times) } else { 0 };
    (full, rest, rows - full - u32::from(rest > 0))
}

/// Groups of rows for `counts[length]` documents of each length.
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
