//! The types that kernels compute in, and their functions, written without branches so that a loop over them becomes vector
//! instructions.
//!
//! fp32: the polynomial of `tanh` was fitted for this module (minimax, by iterated weighted least squares); its relative error is
//! below 6·10⁻⁸, and with rounding all functions are within four units in the last place. f64: libm's functions, one element at a
//! time.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use tch::Kind;

use super::element::Element;
use super::vectors::Vectors;

/// A type that kernels compute in.
pub(crate) trait Real:
    Element<Compute = Self>
    + Vectors
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    const KIND: Kind;
    const ZERO: Self;
    const ONE: Self;
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn tanh(self) -> Self;
    /// eˣ for x ≤ 0, 0 where it is below the normal numbers.
    fn exp_of_negative(self) -> Self;
    /// 1/(1 + e⁻ˣ), and 1 minus it.
    fn sigmoid(self) -> (Self, Self);
}

impl Real for f64 {
    const KIND: Kind = Kind::Double;
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    #[inline(always)]
    fn from_f64(value: f64) -> f64 {
        value
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
    #[inline(always)]
    fn exp_of_negative(self) -> f64 {
        self.exp()
    }
    #[inline(always)]
    fn sigmoid(self) -> (f64, f64) {
        let sigmoid = 1.0 / (1.0 + (-self).exp());
        (sigmoid, 1.0 - sigmoid)
    }
}

/// Evaluates the polynomial with these coefficients, highest power first. A fused multiply-add is one instruction on every
/// processor with vectors of eight; on others it would be a call.
macro_rules! polynomial {
    ($x:expr, $first:literal $(, $next:literal)*) => {{
        let sum: f32 = $first;
        $(let sum = sum.mul_add($x, $next);)*
        sum
    }};
}

impl Real for f32 {
    const KIND: Kind = Kind::Float;
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    /// A polynomial near 0, where 1 − 2/(e²ˣ + 1) would cancel.
    #[inline(always)]
    #[allow(clippy::excessive_precision, reason = "as the fit gave them")]
    fn tanh(self) -> f32 {
        let z = self * self;
        let p = polynomial!(
            z,
            -5.942_246_005e-3,
            2.088_914_869e-2,
            -5.382_791_607e-2,
            1.333_261_902e-1,
            -3.333_332_749e-1
        );
        let size = self.abs();
        // From 10 on the result is 1.
        let twice = 2.0 * size;
        let (power, n) = reduced_exp(if twice > 20.0 { 20.0 } else { twice });
        let power = power * power_of_two(n);
        let far = (1.0 - 2.0 / (power + 1.0)).copysign(self);
        if size < 0.625 { self + self * (z * p) } else { far }
    }

    #[inline(always)]
    fn exp_of_negative(self) -> f32 {
        // Comparisons with NaN are false, so it goes through. 2⁻¹²⁷ is 0 here, its bits being those of 0.
        let x = if self < -88.0 { -88.0 } else { self };
        let (p, n) = reduced_exp(x);
        p * power_of_two(n)
    }

    /// With 2ⁿ as one factor: e⁻ˣ is 0 below 2⁻¹²⁶ and infinity from 2¹²⁸ on. 1 minus the result is e⁻ˣ times the result, without
    /// cancellation.
    #[inline(always)]
    fn sigmoid(self) -> (f32, f32) {
        let x = -self;
        let x = if x < -88.0 { -88.0 } else { x };
        let x = if x > 89.0 { 89.0 } else { x };
        let (p, n) = reduced_exp(x);
        let decay = p * power_of_two(n);
        let sigmoid = 1.0 / (decay + 1.0);
        // Outside the range, the product would be NaN.
        (sigmoid, if decay == f32::INFINITY { 1.0 } else { decay * sigmoid })
    }
}

/// eˣ as p·2ⁿ for |x| ≤ 104; a NaN p for NaN. x = n·ln 2 + r with |r| ≤ ln 2 / 2; eʳ is a polynomial (Cephes' `expf`).
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the constants are those of the source")]
fn reduced_exp(x: f32) -> (f32, i32) {
    /// Adding 1.5·2²³ rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_375, x));
    let p = polynomial!(
        r,
        1.987_569_15e-4,
        1.398_199_950_7e-3,
        8.333_451_907_3e-3,
        4.166_579_589_4e-2,
        1.666_666_545_9e-1,
        5.000_000_120_1e-1
    );
    ((p * r).mul_add(r, r) + 1.0, shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// Returns 2ⁿ for n between −126 and 127, 0 for −127, infinity for 128; unspecified for other n.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over the whole range of fp32, in steps of about a thousandth of each binade: the error in units in the last place.
    #[test]
    fn tanh_in_fp32_is_within_four_units_in_the_last_place() {
        let (mut worst, mut at) = (0.0, 0.0);
        for bits in (0..f32::INFINITY.to_bits()).step_by(7919) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (result, expected) = (Real::tanh(x), f64::from(x).tanh());
                let rounded = expected as f32;
                let unit = f64::from(rounded.abs().max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON) * 0.5;
                let error = (f64::from(result) - expected).abs() / unit;
                if error > worst {
                    (worst, at) = (error, x);
                }
            }
        }
        assert!(worst <= 4.0, "tanh({at:e}) is {worst} units off");
    }

    /// Functions whose results may be 0 where the exact ones are below the normal numbers.
    #[test]
    fn errors_of_exponentials_are_a_few_units_in_the_last_place() {
        type Function<T> = fn(T) -> T;
        let table: [(&str, Function<f32>, Function<f64>, f64); 3] = [
            ("sigmoid", |x| x.sigmoid().0, |x| x.sigmoid().0, 4.0),
            ("1 - sigmoid", |x| x.sigmoid().1, |x| (-x).sigmoid().0, 5.0),
            ("e^-|x|", |x| Real::exp_of_negative(-x.abs()), |x| (-x.abs()).exp(), 4.0),
        ];
        for (name, ours, exact, units) in table {
            for i in -120_000..=120_000 {
                let x = i as f32 * 1e-3;
                let (result, expected) = (f64::from(ours(x)), exact(f64::from(x)));
                let limit = units * expected * f64::from(f32::EPSILON) * 0.5 + f64::from(f32::MIN_POSITIVE);
                let error = (result - expected).abs();
                assert!(error <= limit, "{name}({x}) is {result:e}, expected {expected:e}");
            }
        }
        assert_eq!((f32::NEG_INFINITY.sigmoid(), f32::NEG_INFINITY.exp_of_negative()), ((0.0, 1.0), 0.0));
        assert_eq!((f64::NEG_INFINITY.sigmoid(), f64::INFINITY.sigmoid()), ((0.0, 1.0), (1.0, 0.0)));
    }

    #[test]
    fn extreme_values_and_nan_match_libm() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, -1.0, 1e-45] {
            let wide = f64::from(x);
            let pairs = [
                (Real::exp_of_negative(-x.abs()), (-wide.abs()).exp()),
                (Real::tanh(x), wide.tanh()),
                (x.sigmoid().0, wide.sigmoid().0),
                (x.sigmoid().1, wide.sigmoid().1),
            ];
            for (index, (result, expected)) in pairs.into_iter().enumerate() {
                let expected = expected as f32;
                assert!(
                    result.is_nan() == expected.is_nan()
                        && (result.is_nan() || (result - expected).abs() < 1e-5),
                    "function {index} of {x}: {result}, expected {expected}"
                );
            }
        }
    }
}
