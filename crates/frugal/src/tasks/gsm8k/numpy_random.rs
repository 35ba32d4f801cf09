//! `numpy.random.default_rng(seed).permutation(n)`, to the same order.
//!
//! Three published parts. A *seed sequence* (O'Neill's `randutils`) mixes the seed into a pool of four words and draws the
//! generator's 256 bits from it. *PCG64* (O'Neill 2014) is `s ← s·M + c` modulo 2¹²⁸, whose output is the xor of the halves
//! turned by the top six bits. *Fisher and Yates* swap position `i`, from the last to the second, with a position at or below it,
//! drawn without bias: bits are drawn again while they are above `i`.

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

/// The stream of numbers.
struct Pcg64 {
    state: u128,
    increment: u128,
    /// The upper half of an output whose lower half was taken.
    half: Option<u32>,
}

impl Pcg64 {
    fn new(seed: u64) -> Self {
        let [a, b, c, d] = seed_sequence(seed).map(u128::from);
        let mut pcg = Self { state: 0, increment: (((c << 64) | d) << 1) | 1, half: None };
        pcg.step();
        pcg.state = pcg.state.wrapping_add((a << 64) | b);
        pcg.step();
        pcg
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        (((self.state >> 64) ^ self.state) as u64).rotate_right((self.state >> 122) as u32)
    }

    fn next_u32(&mut self) -> u32 {
        self.half.take().unwrap_or_else(|| {
            let both = self.next_u64();
            self.half = Some((both >> 32) as u32);
            both as u32
        })
    }

    /// From 0 to `last`, both included: as many bits as `last` has, until they are not above it.
    fn up_to(&mut self, last: u32) -> u32 {
        let mask = u32::MAX.checked_shr(last.leading_zeros()).unwrap_or(0);
        loop {
            let drawn = self.next_u32() & mask;
            if drawn <= last {
                return drawn;
            }
        }
    }
}

/// The four words that seed the generator: state (upper, lower) and stream (upper, lower).
fn seed_sequence(seed: u64) -> [u64; 4] {
    let mut constant = 0x43b0_d7e5_u32;
    let mut hash = |word: u32| {
        let word = word ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        let word = word.wrapping_mul(constant);
        word ^ (word >> 16)
    };
    let mut pool = [seed as u32, (seed >> 32) as u32, 0, 0].map(&mut hash);
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            let hashed = hash(pool[from]).wrapping_mul(0x4973_f715);
            let mixed = pool[to].wrapping_mul(0xca01_f9dd).wrapping_sub(hashed);
            pool[to] = mixed ^ (mixed >> 16);
        }
    }
    let mut constant = 0x8b51_f9dd_u32;
    let mut draw = |word: u32| {
        let word = word ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        let word = word.wrapping_mul(constant);
        u64::from(word ^ (word >> 16))
    };
    let mut drawn = [0; 8];
    for (place, word) in drawn.iter_mut().enumerate() {
        *word = draw(pool[place % 4]);
    }
    std::array::from_fn(|k| drawn[2 * k] | (drawn[2 * k + 1] << 32))
}

/// Returns the numbers below `count` in the order of numpy's generator of `seed`.
pub(super) fn permutation(count: u32, seed: u64) -> Vec<usize> {
    let mut pcg = Pcg64::new(seed);
    let mut order: Vec<usize> = (0..count as usize).collect();
    for place in (1..count).rev() {
        order.swap(place as usize, pcg.up_to(place) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_numpys() {
        // numpy 2: `default_rng(42).bit_generator.state`, then `random_raw(3)`.
        let mut pcg = Pcg64::new(42);
        assert_eq!(pcg.state, 274_674_114_334_540_486_603_088_602_300_644_985_544);
        assert_eq!(pcg.increment, 332_724_090_758_049_132_448_979_897_138_935_081_983);
        let raw = [14_276_969_152_011_380_360, 8_095_878_257_575_067_585, 15_838_336_090_824_644_132];
        assert_eq!([(); 3].map(|()| pcg.next_u64()), raw);
    }

    #[test]
    fn permutations_are_numpys() {
        let cases: [(u64, [usize; 12]); 4] = [
            (0, [9, 2, 7, 4, 5, 11, 0, 3, 6, 10, 8, 1]),
            (1, [8, 11, 4, 7, 5, 0, 1, 9, 2, 10, 6, 3]),
            (42, [0, 7, 6, 9, 11, 3, 5, 2, 4, 10, 1, 8]),
            (123_456_789_012, [4, 7, 6, 8, 1, 11, 3, 0, 10, 5, 2, 9]),
        ];
        for (seed, expected) in cases {
            assert_eq!(permutation(12, seed), expected, "seed {seed}");
        }
        assert_eq!(permutation(1000, 42)[..10], [978, 933, 859, 916, 127, 608, 856, 260, 147, 810]);
        assert_eq!(permutation(0, 1), [0; 0]);
        assert_eq!(permutation(1, 1), [0]);
    }
}
