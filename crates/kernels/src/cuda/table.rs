//! Launches over many tensors: each has a table of the tensors that are alike, passed by value, and a block has some numbers of one of
//! them.

use super::Argument;

/// 8-byte words of a table: the arguments of a kernel have at most 4 KiB.
const WORDS: usize = 480;

/// A launch over tensors that are alike in `kind`.
#[derive(Debug)]
pub(crate) struct Launch<K> {
    pub(crate) kind: K,
    pub(crate) blocks: i64,
    entries: i32,
    table: Vec<u64>,
}

/// Divides tensors among launches, in their order. Each is given by what makes it alike to others, the words of its entry and its
/// numbers, `chunk` of them for each block; its entry ends with the numbers and the first block. Tensors without numbers have no entry.
pub(crate) fn launches<K: PartialEq, const MEMBERS: usize>(
    tensors: impl IntoIterator<Item = (K, [u64; MEMBERS], usize)>,
    chunk: u64,
) -> Vec<Launch<K>> {
    let mut launches: Vec<Launch<K>> = Vec::new();
    for (kind, members, numbers) in tensors.into_iter().filter(|(.., numbers)| *numbers > 0) {
        let has_room = |launch: &Launch<K>| launch.kind == kind && launch.table.len() + MEMBERS + 2 <= WORDS;
        let index = launches.iter().position(has_room).unwrap_or(launches.len());
        if index == launches.len() {
            launches.push(Launch { kind, blocks: 0, entries: 0, table: Vec::with_capacity(WORDS) });
        }
        let launch = &mut launches[index];
        launch.table.extend(members);
        launch.table.extend([numbers as u64, launch.blocks as u64]);
        launch.blocks += (numbers as u64).div_ceil(chunk) as i64;
        launch.entries += 1;
    }
    launches
}

impl<K> Launch<K> {
    /// Returns the table and the number of its entries.
    pub(crate) fn arguments(&self) -> [Argument; 2] {
        let mut table = self.table.clone();
        table.resize(WORDS, 0);
        [Argument::Words(table.into()), Argument::I32(self.entries)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(launch: &Launch<char>) -> (&[u64], i32) {
        match &launch.arguments() {
            [Argument::Words(table), Argument::I32(entries)] => {
                assert_eq!((table.len(), &table[..launch.table.len()]), (WORDS, &launch.table[..]));
                assert!(table[launch.table.len()..].iter().all(|word| *word == 0));
                (&launch.table, *entries)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn tensors_that_are_alike_share_a_table_and_each_begins_a_block() {
        let tensors =
            [('a', [1], 5), ('b', [2], 4), ('a', [3], 0), ('a', [4], 8), ('a', [5], 1), ('b', [6], 9)];
        let launches = launches(tensors, 4);
        let found: Vec<_> =
            launches.iter().map(|launch| (launch.kind, launch.blocks, words(launch))).collect();
        let a: &[u64] = &[1, 5, 0, 4, 8, 2, 5, 1, 4];
        let b: &[u64] = &[2, 4, 0, 6, 9, 1];
        assert_eq!(found, [('a', 5, (a, 3)), ('b', 4, (b, 2))]);
    }

    #[test]
    fn a_full_table_begins_another_launch_at_block_0() {
        let launches = launches((0..130).map(|address| ('a', [address; 6], 1)), 4);
        let found: Vec<_> = launches.iter().map(|launch| (launch.blocks, words(launch).1)).collect();
        assert_eq!(found, [(60, 60), (60, 60), (10, 10)]);
        assert_eq!(words(&launches[1]).0[..9], [60, 60, 60, 60, 60, 60, 1, 0, 61]);
    }
}
