//! Numbers from a seed, the same on every machine: SplitMix64 (Steele et al. 2014).

/// A stream of numbers.
#[derive(Debug, Clone)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A stream of its own for part `number`.
    pub(super) fn fork(&self, number: u64) -> Self {
        let mut fork = Self { state: self.state ^ number.wrapping_mul(0xd134_2543_de82_ef95) };
        fork.next();
        fork
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `from` to `to`, both included.
    pub(super) fn range(&mut self, from: i64, to: i64) -> i64 {
        let span = to.saturating_sub(from).max(0) as u64 + 1;
        from + ((u128::from(self.next()) * u128::from(span)) >> 64) as i64
    }

    /// An index into a list of `length`, which is not empty.
    pub(super) fn index(&mut self, length: usize) -> usize {
        self.range(0, length as i64 - 1) as usize
    }

    pub(super) fn chance(&mut self, percent: i64) -> bool {
        self.range(1, 100) <= percent
    }

    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.index(list.len())]
    }

    /// The first of a list often, the last ones seldom: ranks fall off as in Zipf's law, by integers only.
    pub(super) fn pick_ranked<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        let weight = |rank: usize| 100_000 / (rank as i64 + 3);
        let mut ticket = self.range(1, (0..list.len()).map(weight).sum());
        let rank = (0..list.len()).find(|rank| {
            ticket -= weight(*rank);
            ticket <= 0
        });
        &list[rank.unwrap_or(0)]
    }

    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.index(last + 1));
        }
    }
}
