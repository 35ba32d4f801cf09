//! The levels of 8-bit codes: the dynamic map of bitsandbytes (`create_dynamic_map`), for numbers that are divided by the largest magnitude of
//! their block.
//!
//! Decade i = 0..7 is 10^(i−6)·[0.1, 1], divided evenly into 2ⁱ intervals for each sign ([`signed`]), or into 2ⁱ⁺¹ ([`unsigned`]); the
//! levels are the intervals' middles, and 0 and 1. They are 256 either way: in ascending order a level's position is its code. The middles and
//! their products with the decade are rounded to fp32 as bitsandbytes rounds them, so that codes of either are read by the other.

use std::sync::LazyLock;

/// Decades of the map.
const DECADES: usize = 7;

/// The levels of numbers of both signs, by their codes.
pub fn signed() -> &'static [f32; 256] {
    &SIGNED.levels
}

/// The levels of numbers from 0 on, by their codes.
pub fn unsigned() -> &'static [f32; 256] {
    &UNSIGNED.levels
}

pub(super) static SIGNED: LazyLock<Levels> = LazyLock::new(|| Levels::new(true));
pub(super) static UNSIGNED: LazyLock<Levels> = LazyLock::new(|| Levels::new(false));

/// The exponent of the least number whose level is looked up: below it the level is 0, in either map.
const LEAST_EXPONENT: u32 = 127 - 23;
/// The cells of the table: 128 for each power of two, so that at most one boundary between levels is in a cell.
const CELLS: usize = (23 << 7) + 1;

/// Levels, and a table that finds the nearest.
pub(super) struct Levels {
    pub(super) levels: [f32; 256],
    /// By magnitude, ascending from 0: the middle between a magnitude and the next, and infinity after the last.
    boundaries: [f32; 256],
    /// The number of boundaries at or below the least magnitude of a cell.
    cells: [u8; CELLS],
    /// Added to the position of a magnitude for its code: that of 0.
    zero: u8,
}

impl Levels {
    fn new(is_signed: bool) -> Self {
        let mut magnitudes = vec![0.0f32];
        for decade in 0..DECADES {
            let intervals = 1usize << (decade + usize::from(!is_signed));
            magnitudes.extend(middles(intervals).into_iter().map(|middle| power(decade) * middle));
        }
        let negative = if is_signed { magnitudes[1..].to_vec() } else { Vec::new() };
        magnitudes.push(1.0);
        let mut levels: Vec<f32> =
            negative.iter().map(|magnitude| -magnitude).chain(magnitudes.clone()).collect();
        levels.sort_by(f32::total_cmp);
        let mut boundaries = [f32::INFINITY; 256];
        for (boundary, pair) in boundaries.iter_mut().zip(magnitudes.windows(2)) {
            *boundary = (pair[0] + pair[1]) / 2.0;
        }
        let mut cells = [0; CELLS];
        for (cell, bits) in cells.iter_mut().zip(LEAST_EXPONENT << 7..) {
            let least = f32::from_bits(bits << 16);
            *cell = boundaries.iter().filter(|boundary| **boundary < least).count() as u8;
        }
        let mut of = [0.0; 256];
        of.copy_from_slice(&levels);
        Self { levels: of, boundaries, cells, zero: negative.len() as u8 }
    }

    /// Returns the position of the nearest magnitude.
    #[inline(always)]
    fn position(&self, magnitude: f32) -> u8 {
        let cell = ((magnitude.to_bits() >> 16) as usize).saturating_sub((LEAST_EXPONENT << 7) as usize);
        let position = self.cells[cell.min(CELLS - 1)];
        position + u8::from(magnitude > self.boundaries[usize::from(position)])
    }

    /// Returns the code of the level that is nearest to a number from −1 to 1.
    #[inline(always)]
    pub(super) fn signed_code(&self, number: f32) -> u8 {
        let position = self.position(number.abs());
        // 1 has no negative.
        if number < 0.0 { self.zero - position.min(self.zero) } else { self.zero + position }
    }

    /// Returns the code of the level that is nearest to a number from 0 to 1; of one above 0 never that of 0.
    #[inline(always)]
    pub(super) fn unsigned_code(&self, number: f32) -> u8 {
        self.position(number).max(u8::from(number > 0.0))
    }
}

/// Returns the middles of equal intervals of [0.1, 1].
fn middles(intervals: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / intervals as f32;
    // As `torch.linspace` has it: the second half from the end, and each product and sum rounded once.
    let half = intervals.div_ceil(2);
    let end = |index: usize| {
        if index < half {
            step.mul_add(index as f32, 0.1)
        } else {
            (-step).mul_add((intervals - index) as f32, 1.0)
        }
    };
    (0..intervals).map(|index| (end(index) + end(index + 1)) / 2.0).collect()
}

/// Returns the upper end of a decade.
fn power(decade: usize) -> f32 {
    10f64.powi(decade as i32 + 1 - DECADES as i32) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The position of the nearest of all magnitudes, one by one.
    fn nearest(levels: &Levels, magnitude: f32) -> u8 {
        levels.boundaries.iter().filter(|boundary| magnitude > **boundary).count() as u8
    }

    #[test]
    fn there_are_256_levels_in_order_and_the_table_finds_the_nearest() {
        for (levels, least) in [(&*SIGNED, 5.5e-7), (&*UNSIGNED, 3.25e-7)] {
            assert!(levels.levels.windows(2).all(|pair| pair[0] < pair[1]));
            let zero = usize::from(levels.zero);
            assert_eq!((levels.levels[zero], levels.levels[255]), (0.0, 1.0));
            assert!((levels.levels[zero + 1] / least - 1.0).abs() < 1e-6);
            let near = |bits: u32| (bits.saturating_sub(2)..bits + 3).map(f32::from_bits);
            let boundaries = levels.boundaries.iter().filter(|boundary| boundary.is_finite());
            let cells = (100u32 << 7..=127 << 7).map(|cell| cell << 16);
            for magnitude in boundaries.map(|boundary| boundary.to_bits()).chain(cells).flat_map(near) {
                let magnitude = magnitude.min(1.0);
                assert_eq!(levels.position(magnitude), nearest(levels, magnitude), "{magnitude:e}");
            }
        }
    }

    #[test]
    fn codes_are_those_of_their_levels() {
        for code in 0..=255u8 {
            assert_eq!(SIGNED.signed_code(signed()[usize::from(code)]), code);
            assert_eq!(UNSIGNED.unsigned_code(unsigned()[usize::from(code)]), code);
        }
        // −1 has no level, and the least number above 0 is not 0.
        assert_eq!((SIGNED.signed_code(-1.0), SIGNED.signed_code(-0.0)), (0, 127));
        assert_eq!((UNSIGNED.unsigned_code(0.0), UNSIGNED.unsigned_code(1e-30)), (0, 1));
    }
}
