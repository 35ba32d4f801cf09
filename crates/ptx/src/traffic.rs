//! The traffic of a warp's access: sectors of global memory, passes over the banks of shared memory.

/// Bytes of a sector, the unit in which global memory is moved.
pub(crate) const SECTOR: u64 = 32;
const BANKS: u64 = 32;
const BANK_BYTES: u64 = 4;

/// Sectors that a warp's access touches, and as few as could hold its bytes. Each address is one that `width` divides.
pub(crate) fn sectors(addresses: &[u64], width: u64) -> (u64, u64) {
    let mut sorted = [0; 32];
    let sorted = &mut sorted[..addresses.len()];
    sorted.copy_from_slice(addresses);
    if !sorted.is_sorted() {
        sorted.sort_unstable();
    }
    let changes = |unit: u64| {
        sorted.windows(2).filter(|pair| pair[0] / unit != pair[1] / unit).count() as u64
            + u64::from(!sorted.is_empty())
    };
    (changes(SECTOR), (changes(width) * width).div_ceil(SECTOR))
}

/// Passes over the banks beyond those that the access' width needs: as many words of one bank, as many passes.
pub(crate) fn bank_conflicts(addresses: &[u64], width: u64) -> u64 {
    // Lanes whose bytes fill the banks once are served together.
    let group = (BANKS * BANK_BYTES / width.max(BANK_BYTES)) as usize;
    addresses.chunks(group).map(|lanes| passes(lanes, width).saturating_sub(1)).sum()
}

fn passes(addresses: &[u64], width: u64) -> u64 {
    let mut words: Vec<u64> = addresses
        .iter()
        .flat_map(|address| address / BANK_BYTES..=(address + width - 1) / BANK_BYTES)
        .collect();
    words.sort_unstable();
    words.dedup();
    let mut of_bank = [0; BANKS as usize];
    for word in words {
        of_bank[(word % BANKS) as usize] += 1;
    }
    of_bank.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(f: impl Fn(u64) -> u64) -> Vec<u64> {
        (0..32).map(f).collect()
    }

    #[test]
    fn sectors_of_patterns() {
        assert_eq!(sectors(&addresses(|lane| 4 * lane), 4), (4, 4));
        assert_eq!(sectors(&addresses(|lane| 16 * lane), 16), (16, 16));
        assert_eq!(sectors(&addresses(|lane| 128 * lane), 4), (32, 4));
        assert_eq!(sectors(&addresses(|lane| 4 * lane + 4), 4), (5, 4));
        assert_eq!(sectors(&addresses(|_| 64), 8), (1, 1));
        assert_eq!(sectors(&addresses(|lane| 4 * (31 - lane)), 4), (4, 4));
        assert_eq!(sectors(&[], 4), (0, 0));
    }

    #[test]
    fn bank_conflicts_of_patterns() {
        assert_eq!(bank_conflicts(&addresses(|lane| 4 * lane), 4), 0);
        assert_eq!(bank_conflicts(&addresses(|_| 8), 4), 0, "one word is sent to all lanes");
        assert_eq!(bank_conflicts(&addresses(|lane| 128 * lane), 4), 31);
        assert_eq!(bank_conflicts(&addresses(|lane| 132 * lane), 4), 0);
        assert_eq!(bank_conflicts(&addresses(|lane| 8 * lane), 4), 1);
        assert_eq!(bank_conflicts(&addresses(|lane| 16 * lane), 16), 0);
    }
}
