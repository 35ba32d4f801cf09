//! First-fit decreasing over groups of rows.
//!
//! The groups are kept in the order in which their rows were opened, in blocks of a few dozen, each with its largest room.
//! Documents of length `s` go from left to right into the groups with room of at least `s`; a row takes `⌊room/s⌋` of them,
//! because it stays the first that fits. Within one length the search never goes back: groups passed over had no room.

use super::patterns::{Contents, Group, Packed, share};

const BLOCK: usize = 64;

#[derive(Default)]
struct Block {
    groups: Vec<Group>,
    most_room: u32,
}

impl Block {
    fn measure(&mut self) {
        self.most_room = self.groups.iter().map(|group| group.room).max().unwrap_or(0);
    }
}

/// Packs `counts[length]` documents of each length into rows of `capacity`.
pub(super) fn pack(counts: &[u32], capacity: u32) -> Packed {
    let mut contents = Contents::default();
    let mut blocks: Vec<Block> = vec![Block::default()];
    for length in (1..=capacity).rev() {
        let mut documents = counts[length as usize];
        let mut at = 0;
        while documents > 0 && at < blocks.len() {
            if blocks[at].most_room >= length {
                documents -= fill_block(&mut blocks[at], &mut contents, length, documents);
                if blocks[at].groups.len() > BLOCK {
                    let half = blocks[at].groups.len() / 2;
                    let mut behind = Block { groups: blocks[at].groups.split_off(half), most_room: 0 };
                    blocks[at].measure();
                    behind.measure();
                    at += 1;
                    blocks.insert(at, behind);
                }
            }
            at += 1;
        }
        if documents > 0 {
            let times = capacity / length;
            let rows = documents.div_ceil(times);
            let opened = Group { content: contents.nothing(), rows, room: capacity };
            let mut last = Block { groups: vec![opened], most_room: capacity };
            fill_block(&mut last, &mut contents, length, documents);
            let tail = blocks.last_mut().expect("there is one from the start");
            tail.most_room = tail.most_room.max(last.most_room);
            tail.groups.extend(last.groups);
            if tail.groups.len() > BLOCK {
                blocks.push(Block::default());
            }
        }
    }
    let groups = blocks.into_iter().flat_map(|block| block.groups).collect();
    Packed { groups, contents }
}

/// Assigns documents to the groups of a block and returns their number.
fn fill_block(block: &mut Block, contents: &mut Contents, length: u32, documents: u32) -> u32 {
    let mut left = documents;
    let mut at = 0;
    while left > 0 && at < block.groups.len() {
        let group = block.groups[at];
        if group.room >= length {
            let times = group.room / length;
            let (full, rest, untouched) = share(group.rows, times, left);
            let mut parts = Vec::with_capacity(3);
            if full > 0 {
                parts.push(contents.fill(group, full, length, times));
            }
            if rest > 0 {
                parts.push(contents.fill(group, 1, length, rest));
            }
            if untouched > 0 {
                parts.push(Group { rows: untouched, ..group });
            }
            left -= full * times + rest;
            let number = parts.len();
            if let [one] = parts[..] {
                block.groups[at] = one;
            } else {
                block.groups.splice(at..=at, parts);
            }
            at += number;
        } else {
            at += 1;
        }
    }
    block.measure();
    documents - left
}
