//! Decoding of blocks of 256 values.
//!
//! The quants of several groups share bytes: 32 bytes hold the low four bits of 32 values and the high four bits of the next 32 (q4_K,
//! q5_K, iq4_xs by 16), or two bits of each of four times 32 values (q2_K, q3_K, and the high bits of q6_K).

use super::{IQ4, half};

/// Returns the 6-bit scales and minima of eight groups from their 12 bytes. The first four of each are the low six bits of bytes 0 to
/// 3 and 4 to 7; the others have their low four bits in bytes 8 to 11, and the high two above the first ones'.
pub(super) fn scales_and_minima(bytes: &[u8]) -> [[u8; 8]; 2] {
    let [mut scales, mut minima] = [[0; 8]; 2];
    for j in 0..4 {
        let (scale, minimum, low) = (bytes[j], bytes[j + 4], bytes[j + 8]);
        scales[j] = scale & 63;
        minima[j] = minimum & 63;
        scales[j + 4] = low & 15 | scale >> 6 << 4;
        minima[j + 4] = low >> 4 | minimum >> 6 << 4;
    }
    [scales, minima]
}

/// Scales and minima of 16 groups (four bits each), quants, d, factor of the minima.
pub(super) fn q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (d, minimum) = (half(block, 80), half(block, 82));
    let groups = values.as_chunks_mut::<16>().0.iter_mut();
    for (group, (values, scale)) in groups.zip(&block[..16]).enumerate() {
        let (d, m) = (d * f32::from(scale & 15), minimum * f32::from(scale >> 4));
        let quants: &[u8; 16] = part(block, 16 + group / 8 * 32 + group % 2 * 16);
        let shift = group % 8 / 2 * 2;
        for (y, q) in values.iter_mut().zip(quants) {
            *y = d * f32::from(q >> shift & 3) - m;
        }
    }
}

/// Third bits, low two bits, 6-bit scales of 16 groups, d. Where the third bit is not set, 4 is subtracted.
pub(super) fn q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let d = half(block, 108);
    let scales = &block[96..108];
    for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let d = d * f32::from((low | high << 4).cast_signed() - 32);
        let mask: &[u8; 16] = part(block, group % 2 * 16);
        let quants: &[u8; 16] = part(block, 32 + group / 8 * 32 + group % 2 * 16);
        let (shift, bit) = (group % 8 / 2 * 2, group / 2);
        for ((y, q), mask) in values.iter_mut().zip(quants).zip(mask) {
            *y = d * f32::from(((q >> shift & 3) + 4 * (mask >> bit & 1)).cast_signed() - 4);
        }
    }
}

/// d, factor of the minima, scales and minima of eight groups, quants.
pub(super) fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let (d, minimum) = (half(block, 0), half(block, 2));
    let [scales, minima] = scales_and_minima(&block[4..16]);
    for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (d, m) = (d * f32::from(scales[group]), minimum * f32::from(minima[group]));
        let quants: &[u8; 32] = part(block, 16 + group / 2 * 32);
        let shift = group % 2 * 4;
        for (y, q) in values.iter_mut().zip(quants) {
            *y = d * f32::from(q >> shift & 15) - m;
        }
    }
}

/// As q4_K, with the fifth bits before the quants: bit `group` of byte l is that of the group's value l.
pub(super) fn q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let (d, minimum) = (half(block, 0), half(block, 2));
    let [scales, minima] = scales_and_minima(&block[4..16]);
    let high: &[u8; 32] = part(block, 16);
    for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (d, m) = (d * f32::from(scales[group]), minimum * f32::from(minima[group]));
        let quants: &[u8; 32] = part(block, 48 + group / 2 * 32);
        let shift = group % 2 * 4;
        for ((y, q), high) in values.iter_mut().zip(quants).zip(high) {
            *y = d * f32::from(q >> shift & 15 | (high >> group & 1) << 4) - m;
        }
    }
}

/// Low four bits, high two bits, signed scales of 16 groups, d.
pub(super) fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let d = half(block, 208);
    for (group, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let d = d * f32::from(block[192 + group].cast_signed());
        // The quarter of the half of the block that the group lies in.
        let quarter = group % 8 / 2;
        let low: &[u8; 16] = part(block, group / 8 * 64 + quarter % 2 * 32 + group % 2 * 16);
        let high: &[u8; 16] = part(block, 128 + group / 8 * 32 + group % 2 * 16);
        let (shift, high_shift) = (quarter / 2 * 4, quarter * 2);
        for ((y, low), high) in values.iter_mut().zip(low).zip(high) {
            *y = d * f32::from((low >> shift & 15 | (high >> high_shift & 3) << 4).cast_signed() - 32);
        }
    }
}

/// d, high two bits of the scales of eight groups, their low four bits, quants.
pub(super) fn iq4_xs(block: &[u8; 136], values: &mut [f32; 256]) {
    let d = half(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (group, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let d = d * f32::from((low | ((high >> (2 * group)) as u8 & 3) << 4).cast_signed() - 32);
        let products = IQ4.map(|value| d * f32::from(value));
        let quants: &[u8; 16] = part(block, 8 + 16 * group);
        let (first, second) = values.split_at_mut(16);
        for ((q, first), second) in quants.iter().zip(first).zip(second) {
            *first = products[usize::from(q & 15)];
            *second = products[usize::from(q >> 4)];
        }
    }
}

/// The `N` bytes of a block from a place on.
fn part<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    let Some(bytes) = block[at..].first_chunk() else { unreachable!("parts lie inside their block") };
    bytes
}
