//! Element types, and blocks of them in registers.

use half::{bf16, f16};

use super::real::Real;

/// An element type of a matrix.
pub(crate) trait Element: Copy + Default + Send + Sync + 'static {
    type Compute: Real;
    fn widen(self) -> Self::Compute;
    fn round(value: Self::Compute) -> Self;
    /// Returns the elements as they are if they already have the compute type.
    #[inline(always)]
    fn as_compute(_: &[Self]) -> Option<&[Self::Compute]> {
        None
    }
    #[inline(always)]
    fn as_compute_mut(_: &mut [Self]) -> Option<&mut [Self::Compute]> {
        None
    }
}

macro_rules! computed_in {
    ($real:ty) => {
        impl Element for $real {
            type Compute = $real;
            #[inline(always)]
            fn widen(self) -> $real {
                self
            }
            #[inline(always)]
            fn round(value: $real) -> $real {
                value
            }
            #[inline(always)]
            fn as_compute(values: &[$real]) -> Option<&[$real]> {
                Some(values)
            }
            #[inline(always)]
            fn as_compute_mut(values: &mut [$real]) -> Option<&mut [$real]> {
                Some(values)
            }
        }
    };
}

computed_in!(f32);
computed_in!(f64);

impl Element for bf16 {
    type Compute = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn round(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x40;
        bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded } as u16)
    }
}

/// Without the branches and calls of `half`, so that a block becomes a few vector instructions.
impl Element for f16 {
    type Compute = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = bits & 0x7fff;
        // The exponent's bias grows from 15 to 127; all ones stay all ones.
        let normal = (magnitude << 13) + (112 << 23);
        let special = normal + (112 << 23);
        let subnormal = (magnitude as i32 as f32 * 2.0f32.powi(-24)).to_bits();
        let wide = if magnitude >= 0x7c00 {
            special
        } else if magnitude < 0x400 {
            subnormal
        } else {
            normal
        };
        f32::from_bits(wide | (bits & 0x8000) << 16)
    }
    #[inline(always)]
    fn round(value: f32) -> f16 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // To nearest, ties to even; a carry out of the largest number gives infinity.
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Near 1/2, fp32 has the spacing of fp16's subnormals, so the sum is rounded to it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let rounded = if magnitude > 0x7f80_0000 {
            0x7e00
        } else if magnitude >= 0x4780_0000 {
            0x7c00
        } else if magnitude < 0x3880_0000 {
            subnormal
        } else {
            normal
        };
        f16::from_bits((rounded | (bits >> 16) & 0x8000) as u16)
    }
}

/// # Safety
/// `N` elements lie at `pointer`.
#[inline(always)]
pub(crate) unsafe fn load<T: Element, const N: usize>(pointer: *const T) -> [T::Compute; N] {
    // SAFETY: by this function's contract the elements exist; an array has the layout of its elements.
    let raw = unsafe { pointer.cast::<[T; N]>().read_unaligned() };
    let mut wide = [T::Compute::default(); N];
    for i in 0..N {
        wide[i] = raw[i].widen();
    }
    wide
}

/// # Safety
/// As [`load`]; no other code reads or writes these elements meanwhile.
#[inline(always)]
pub(crate) unsafe fn store<T: Element, const N: usize>(pointer: *mut T, values: &[T::Compute; N]) {
    let mut raw = [T::default(); N];
    for i in 0..N {
        raw[i] = T::round(values[i]);
    }
    // SAFETY: by this function's contract.
    unsafe { pointer.cast::<[T; N]>().write_unaligned(raw) };
}

/// Runs the body over `from..to`: in blocks of `$block` elements, then of eight, then one by one. `$n` is a constant in each.
macro_rules! blocks {
    ($block:expr, $from:expr, $to:expr, |$at:ident, $n:ident| $body:block) => {{
        let (mut $at, end): (usize, usize) = ($from, $to);
        while $at + $block <= end {
            const $n: usize = $block;
            $body
            $at += $n;
        }
        while $at + 8 <= end {
            const $n: usize = 8;
            $body
            $at += $n;
        }
        while $at < end {
            const $n: usize = 1;
            $body
            $at += $n;
        }
    }};
}
pub(crate) use blocks;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp16_and_bf16_conversions_match_half() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32_const());
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{bits:x}: {ours} {theirs}");
            let (ours, theirs) = (bf16::from_bits(bits).widen(), bf16::from_bits(bits).to_f32_const());
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{bits:x}: {ours} {theirs}");
        }
        // Every exponent and sign, with mantissas around each tie.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let (ours, theirs) = (<f16 as Element>::round(value), f16::from_f32_const(value));
                assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{value:e}: {ours} {theirs}");
                let (ours, theirs) = (<bf16 as Element>::round(value), bf16::from_f32_const(value));
                assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{value:e}: {ours} {theirs}");
            }
        }
    }
}
