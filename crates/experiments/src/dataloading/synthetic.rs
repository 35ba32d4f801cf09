//! Generated samples: given lengths, and tokens from a pool.

use std::ops::Range;

use dataloading::Result;
use dataloading::permutation::Permutation;
use dataloading::samples::Samples;

/// Samples with given lengths, whose tokens are slices of one pool, as they are of a token store.
#[derive(Debug, Clone)]
pub(crate) struct Synthetic {
    /// The start of each sample, and the end of the last.
    offsets: Vec<u64>,
    pool: Vec<u32>,
}

impl Synthetic {
    /// Samples of these lengths. All tokens are there once, up to 2²⁶ of them; beyond that samples share them.
    pub(crate) fn new(lengths: &[u32]) -> Self {
        let mut offsets = Vec::with_capacity(lengths.len() + 1);
        offsets.push(0);
        let mut end = 0;
        for &length in lengths {
            end += u64::from(length);
            offsets.push(end);
        }
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let pool = (end as usize).min(1 << 26) + longest;
        Self { offsets, pool: (0..pool as u64).map(|place| 1 + (mix(place) % 50_000) as u32).collect() }
    }
}

impl Samples for Synthetic {
    fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    fn length(&self, index: usize) -> usize {
        (self.offsets[index + 1] - self.offsets[index]) as usize
    }

    fn read(&self, index: usize, out: &mut Vec<u32>) -> Result<()> {
        self.read_part(index, 0..self.length(index), out)
    }

    fn read_part(&self, index: usize, part: Range<usize>, out: &mut Vec<u32>) -> Result<()> {
        let start = (self.offsets[index] % (1 << 26)) as usize;
        let end = part.end.min(self.length(index));
        out.extend_from_slice(&self.pool[start + part.start.min(end)..start + end]);
        Ok(())
    }
}

/// `n` lengths uniform in `1..=longest`.
pub(crate) fn uniform_lengths(n: usize, longest: u32, seed: u64) -> Vec<u32> {
    let order = Permutation::new(1 << 44, seed, 0, 0);
    (0..n as u64).map(|place| (order.at(place) % u64::from(longest)) as u32 + 1).collect()
}

/// `n` lengths with the spread of a text's paragraphs: log-normal with median 72 and sigma 1.2, from 2 to 2048. The peer in
/// PyTorch makes the same ones, and the same tokens.
pub(crate) fn text_lengths(n: usize, seed: u64) -> Vec<u32> {
    let start = mix(seed).wrapping_mul(2);
    let uniform = |number: u64| ((mix(start.wrapping_add(number)) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    let length = |place: u64| {
        // Box and Muller.
        let (a, b) = (uniform(2 * place), uniform(2 * place + 1));
        let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        (72.0 * (1.2 * normal).exp()).clamp(2.0, 2048.0) as u32
    };
    (0..n as u64).map(length).collect()
}

/// Steele, Lea and Flood's finaliser of SplitMix64 (2014), which the peer computes too.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_tokens_are_those_of_the_peer() {
        let lengths = text_lengths(100_000, 0);
        assert_eq!(lengths[..6], [2, 117, 57, 142, 34, 176]);
        assert_eq!(lengths.iter().map(|&length| u64::from(length)).sum::<u64>(), 14_495_141);
        let mut tokens = Vec::new();
        Synthetic::new(&lengths).read_part(1, 0..3, &mut tokens).unwrap();
        assert_eq!(tokens, [24_731, 31_857, 13_253]);
        Synthetic::new(&lengths[..1]).read_part(0, 1..usize::MAX, &mut tokens).unwrap();
        assert_eq!(tokens.len(), 4);
    }
}
