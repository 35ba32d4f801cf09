//! Best-fit decreasing over groups of rows.
//!
//! The groups of equal room form a stack, and a [`BitmapTree`] holds the rooms whose stacks are not empty. Documents of
//! length `s` go to the smallest room `c ≥ s`: a row there takes `⌊c/s⌋` of them, because after each its room is still the
//! smallest that fits. Among rows of equal room the one filled last comes first.

use super::bitmap_tree::BitmapTree;
use super::patterns::{Contents, Group, Packed, share};

/// No group.
const NOTHING: u32 = u32::MAX;

/// Stacks of groups, by room.
struct Stacks {
    /// Each group with the index of the one below it.
    groups: Vec<(Group, u32)>,
    tops: Vec<u32>,
    rooms: BitmapTree,
}

impl Stacks {
    fn push(&mut self, group: Group) {
        let top = &mut self.tops[group.room as usize];
        if *top == NOTHING {
            self.rooms.insert(group.room as usize);
        }
        self.groups.push((group, *top));
        *top = (self.groups.len() - 1) as u32;
    }

    /// Pops the top group of the smallest room of at least `length`.
    fn pop(&mut self, length: u32) -> Option<Group> {
        let room = self.rooms.at_least(length as usize)?;
        let (group, below) = self.groups[self.tops[room] as usize];
        self.tops[room] = below;
        if below == NOTHING {
            self.rooms.remove(room);
        }
        Some(group)
    }
}

/// Packs `counts[length]` documents of each length into rows of `capacity`.
pub(super) fn pack(counts: &[u32], capacity: u32) -> Packed {
    let mut contents = Contents::default();
    let mut stacks = Stacks {
        groups: Vec::new(),
        tops: vec![NOTHING; capacity as usize + 1],
        rooms: BitmapTree::new(capacity as usize + 1),
    };
    for length in (1..=capacity).rev() {
        let mut documents = counts[length as usize];
        while documents > 0 {
            let group = stacks.pop(length).unwrap_or_else(|| Group {
                content: contents.nothing(),
                rows: documents.div_ceil(capacity / length),
                room: capacity,
            });
            let times = group.room / length;
            let (full, rest, untouched) = share(group.rows, times, documents);
            if untouched > 0 {
                stacks.push(Group { rows: untouched, ..group });
            }
            if full > 0 {
                stacks.push(contents.fill(group, full, length, times));
            }
            if rest > 0 {
                stacks.push(contents.fill(group, 1, length, rest));
            }
            documents -= full * times + rest;
        }
    }
    // The stacks are lists in one vector, which still contains popped groups.
    let mut groups = Vec::new();
    for &top in stacks.tops.iter() {
        let mut at = top;
        while at != NOTHING {
            let (group, below) = stacks.groups[at as usize];
            groups.push(group);
            at = below;
        }
    }
    Packed { groups, contents }
}
