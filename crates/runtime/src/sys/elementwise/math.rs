//! The functions of a pass, written without branches so that a loop over them becomes vector instructions.
//!
//! fp32: each polynomial but that of `exp` was fitted for this module (weighted least squares, iterated towards the smallest
//! largest error), its own error is below 6·10⁻⁸ relative to the result; with rounding, `exp`, `ln` and `tanh` are within four units in the last
//! place, `erf` within six. f64: libm's functions, one element at a time.

use tch::Kind;

use super::program::{Binary, Ternary, Unary};

unsafe extern "C" {
    /// libm's error function.
    safe fn erf(x: f64) -> f64;
}

/// A type that passes compute in.
pub(in crate::sys) trait Real: Copy + Default + Send + Sync + PartialOrd + 'static {
    const KIND: Kind;
    const ZERO: Self;
    const ONE: Self;
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn from_f32(value: f32) -> Self;
    fn to_f32(self) -> f32;
    fn add(self, other: Self) -> Self;
    fn subtract(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn divide(self, other: Self) -> Self;
    fn negate(self) -> Self;
    fn abs(self) -> Self;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;

    /// eˣ for x ≤ 0, 0 where it is below the normal numbers.
    #[inline(always)]
    fn exp_of_negative(self) -> Self {
        self.exp()
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE.divide(Self::ONE.add(self.negate().exp()))
    }

    /// The normal distribution.
    #[inline(always)]
    fn normal(self) -> Self {
        let half = Self::from_f64(0.5);
        self.multiply(Self::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf().add(Self::ONE).multiply(half)
    }

    /// Φ(x) + x·φ(x) with the normal density φ(x) = e^(−x²/2)/√(2π).
    #[inline(always)]
    fn gelu_slope(self) -> Self {
        let height = Self::from_f64(std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 * 0.5);
        let bell = self.multiply(self).multiply(Self::from_f64(-0.5)).exp_of_negative();
        self.normal().add(self.multiply(bell.multiply(height)))
    }

    #[inline(always)]
    fn flag(flag: bool) -> Self {
        if flag { Self::ONE } else { Self::ZERO }
    }

    /// NaN where one of the two is, as libtorch's `maximum`.
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        let larger = if self > other { self } else { other };
        if self.is_nan() { self } else { larger }
    }

    /// NaN where one of the two is, as libtorch's `minimum`.
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        let smaller = if self < other { self } else { other };
        if self.is_nan() { self } else { smaller }
    }

    #[inline(always)]
    #[allow(clippy::eq_op, reason = "that is what NaN is")]
    fn is_nan(self) -> bool {
        self != self
    }

    #[inline(always)]
    fn unary(self, function: Unary) -> Self {
        match function {
            Unary::Negate => self.negate(),
            Unary::Reciprocal => Self::ONE.divide(self),
            Unary::Sqrt => self.sqrt(),
            Unary::Rsqrt => Self::ONE.divide(self.sqrt()),
            Unary::Exp => self.exp(),
            Unary::Ln => self.ln(),
            Unary::Tanh => self.tanh(),
            Unary::Sigmoid => self.sigmoid(),
            Unary::Erf => self.erf(),
            // The comparison is false for NaN, which goes through.
            Unary::Relu => {
                if self <= Self::ZERO {
                    Self::ZERO
                } else {
                    self
                }
            }
            Unary::Abs => self.abs(),
            Unary::Sign => Self::flag(self > Self::ZERO).subtract(Self::flag(self < Self::ZERO)),
            Unary::Gelu => self.multiply(self.normal()),
            Unary::GeluSlope => self.gelu_slope(),
            Unary::LogisticSlope => self.multiply(Self::ONE.subtract(self)),
        }
    }

    #[inline(always)]
    fn binary(self, function: Binary, other: Self) -> Self {
        match function {
            Binary::Add => self.add(other),
            Binary::Subtract => self.subtract(other),
            Binary::Multiply => self.multiply(other),
            Binary::Divide => self.divide(other),
            Binary::Maximum => self.maximum(other),
            Binary::Minimum => self.minimum(other),
            Binary::Less => Self::flag(self < other),
            Binary::LessEqual => Self::flag(self <= other),
            Binary::Equal => Self::flag(self == other),
            Binary::NotEqual => Self::flag(self != other),
        }
    }

    #[inline(always)]
    fn ternary(self, function: Ternary, b: Self, c: Self) -> Self {
        match function {
            Ternary::MultiplyAdd => self.multiply(b).add(c),
            Ternary::MultiplySubtract => self.multiply(b).subtract(c),
            Ternary::SubtractProduct => c.subtract(self.multiply(b)),
            Ternary::Product => self.multiply(b).multiply(c),
            Ternary::Select => {
                if self == Self::ZERO {
                    c
                } else {
                    b
                }
            }
        }
    }
}

/// What a type has under the same names already.
macro_rules! inherent {
    ($real:ident) => {
        const ZERO: $real = 0.0;
        const ONE: $real = 1.0;
        #[inline(always)]
        fn from_f64(value: f64) -> $real {
            value as $real
        }
        #[inline(always)]
        fn to_f64(self) -> f64 {
            self as f64
        }
        #[inline(always)]
        fn from_f32(value: f32) -> $real {
            value as $real
        }
        #[inline(always)]
        fn to_f32(self) -> f32 {
            self as f32
        }
        #[inline(always)]
        fn add(self, other: $real) -> $real {
            self + other
        }
        #[inline(always)]
        fn subtract(self, other: $real) -> $real {
            self - other
        }
        #[inline(always)]
        fn multiply(self, other: $real) -> $real {
            self * other
        }
        #[inline(always)]
        fn divide(self, other: $real) -> $real {
            self / other
        }
        #[inline(always)]
        fn negate(self) -> $real {
            -self
        }
        #[inline(always)]
        fn abs(self) -> $real {
            $real::abs(self)
        }
        #[inline(always)]
        fn sqrt(self) -> $real {
            $real::sqrt(self)
        }
    };
}

impl Real for f64 {
    const KIND: Kind = Kind::Double;
    inherent!(f64);
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }
    #[inline(always)]
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
    #[inline(always)]
    fn erf(self) -> f64 {
        erf(self)
    }
}

/// The polynomial with these coefficients, that of the highest power first. Multiplications and additions are one instruction
/// each on every processor with vectors of eight; without, they are calls.
macro_rules! polynomial {
    ($x:expr, $first:literal $(, $next:literal)*) => {{
        let sum: f32 = $first;
        $(let sum = sum.mul_add($x, $next);)*
        sum
    }};
}

impl Real for f32 {
    const KIND: Kind = Kind::Float;
    inherent!(f32);

    /// 2ⁿ in two halves, so that the results fall through the subnormal numbers to 0 and rise to infinity as they should.
    #[inline(always)]
    fn exp(self) -> f32 {
        // Comparisons with NaN are false, so it goes through.
        let x = if self < -104.0 { -104.0 } else { self };
        let x = if x > 89.0 { 89.0 } else { x };
        let (p, n) = reduced_exp(x);
        let half = n >> 1;
        p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
    }

    #[inline(always)]
    fn exp_of_negative(self) -> f32 {
        // 2⁻¹²⁷ is 0 here, its bits being those of 0.
        let x = if self < -88.0 { -88.0 } else { self };
        let (p, n) = reduced_exp(x);
        p * power_of_two(n)
    }

    /// 2ⁿ in one piece: e⁻ˣ below 2⁻¹²⁶ adds nothing to 1, and from 2¹²⁸ on it is infinity.
    #[inline(always)]
    fn sigmoid(self) -> f32 {
        let x = -self;
        let x = if x < -87.0 { -87.0 } else { x };
        let x = if x > 89.0 { 89.0 } else { x };
        let (p, n) = reduced_exp(x);
        1.0 / (p * power_of_two(n) + 1.0)
    }

    /// x = 2ᵉ·(1 + f) with 1 + f between √½ and √2; ln(1 + f) = f − f²/2 + f³·P(f).
    #[inline(always)]
    #[allow(clippy::excessive_precision, reason = "as the fit gave them")]
    fn ln(self) -> f32 {
        const ROOT_OF_HALF: u32 = 0x3f35_04f3;
        let subnormal = self < f32::MIN_POSITIVE;
        let x = if subnormal { self * 8_388_608.0 } else { self };
        let exponent = x.to_bits().wrapping_sub(ROOT_OF_HALF) as i32 >> 23;
        let f = f32::from_bits(x.to_bits().wrapping_sub((exponent as u32) << 23)) - 1.0;
        let exponent = exponent as f32 - if subnormal { 23.0 } else { 0.0 };
        let p = polynomial!(
            f,
            6.917_983_175e-2,
            -1.177_966_695e-1,
            1.186_603_552e-1,
            -1.238_579_856e-1,
            1.421_991_855e-1,
            -1.666_919_744e-1,
            2.000_215_141e-1,
            -2.499_998_688e-1,
            3.333_331_183e-1
        );
        // Exact high part of ln 2, then what is left of it.
        let result = f + (f * f * (f * p - 0.5) + exponent * -2.121_944_4e-4) + exponent * 0.693_359_375;
        let result = if self == 0.0 { f32::NEG_INFINITY } else { result };
        let result = if self == f32::INFINITY { f32::INFINITY } else { result };
        if self >= 0.0 { result } else { f32::NAN }
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

    /// x·P(x²)/Q(x²) for |x| up to 4, from where on the result is 1.
    #[inline(always)]
    #[allow(clippy::excessive_precision, reason = "as the fit gave them")]
    fn erf(self) -> f32 {
        // Comparisons with NaN are false, so it goes through.
        let x = if self > 4.0 { 4.0 } else { self };
        let x = if x < -4.0 { -4.0 } else { x };
        let z = x * x;
        let p = polynomial!(
            z,
            1.986_750_676e-6,
            2.845_651_364e-4,
            3.883_392_090e-3,
            5.310_190_571e-2,
            1.935_464_325e-1,
            1.128_379_139
        );
        let q = polynomial!(
            z,
            3.741_979_996e-5,
            1.185_578_970e-3,
            1.520_735_551e-2,
            1.153_505_451e-1,
            5.048_586_159e-1,
            1.0
        );
        let result = x * p / q;
        let result = if result > 1.0 { 1.0 } else { result };
        if result < -1.0 { -1.0 } else { result }
    }
}

/// eˣ as p·2ⁿ for |x| ≤ 104; a NaN p for NaN. x = n·ln 2 + r with |r| ≤ ln 2 / 2; eʳ is a polynomial (Cephes' `expf`).
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the constants are those of the source")]
fn reduced_exp(x: f32) -> (f32, i32) {
    /// Adding 1.5·2²³ rounds to an integer, which then stands in the low bits.
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

/// 2ⁿ for n between −126 and 127, 0 for −127, infinity for 128; anything for another.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over the whole range of fp32, in steps of about a thousandth of each binade: the error in units in the last place.
    #[test]
    fn fp32_functions_are_within_a_few_units_in_the_last_place() {
        type Function<T> = fn(T) -> T;
        let table: [(&str, Function<f32>, Function<f64>, f64); 4] = [
            ("exp", Real::exp, f64::exp, 4.0),
            ("ln", Real::ln, f64::ln, 4.0),
            ("tanh", Real::tanh, f64::tanh, 4.0),
            ("erf", Real::erf, |x| erf(x), 6.0),
        ];
        for (name, ours, exact, limit) in table {
            let (mut worst, mut at) = (0.0, 0.0);
            for bits in (0..f32::INFINITY.to_bits()).step_by(7919) {
                for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    let (found, expected) = (ours(x), exact(f64::from(x)));
                    let rounded = expected as f32;
                    if rounded.is_infinite() || rounded.is_nan() {
                        let same = found == rounded || found.is_nan() && rounded.is_nan();
                        assert!(same, "{name}({x:e}) is {found}, expected {rounded}");
                        continue;
                    }
                    let unit =
                        f64::from(rounded.abs().max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON) * 0.5;
                    let error = (f64::from(found) - expected).abs() / unit;
                    if error > worst {
                        (worst, at) = (error, x);
                    }
                }
            }
            assert!(worst <= limit, "{name}({at:e}) is {worst} units off");
        }
    }

    /// Functions whose results may be 0 where the exact ones are below the normal numbers.
    #[test]
    fn short_exponentials_err_by_a_few_units_of_the_result_or_less_than_the_smallest_normal_number() {
        type Function<T> = fn(T) -> T;
        let table: [(&str, Function<f32>, Function<f64>, f64); 2] = [
            ("sigmoid", Real::sigmoid, Real::sigmoid, 4.0),
            ("e^-|x|", |x| Real::exp_of_negative(-x.abs()), |x| (-x.abs()).exp(), 4.0),
        ];
        for (name, ours, exact, units) in table {
            for i in -120_000..=120_000 {
                let x = i as f32 * 1e-3;
                let (found, expected) = (f64::from(ours(x)), exact(f64::from(x)));
                let limit = units * expected * f64::from(f32::EPSILON) * 0.5 + f64::from(f32::MIN_POSITIVE);
                let error = (found - expected).abs();
                assert!(error <= limit, "{name}({x}) is {found:e}, expected {expected:e}");
            }
        }
        assert_eq!((Real::sigmoid(f32::NEG_INFINITY), Real::exp_of_negative(f32::NEG_INFINITY)), (0.0, 0.0));
        for x in (-12_000..=12_000).map(|i| i as f32 * 1e-3) {
            let (found, expected) = (f64::from(x.gelu_slope()), f64::from(x).gelu_slope());
            assert!((found - expected).abs() < 5e-7, "slope of GELU at {x}: {found}, expected {expected}");
        }
    }

    #[test]
    fn ends_and_nan_are_those_of_libm() {
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, -1.0, 1e-45] {
            let wide = f64::from(x);
            let pairs = [
                (Real::exp(x), f64::exp(wide)),
                (Real::ln(x), f64::ln(wide)),
                (Real::tanh(x), f64::tanh(wide)),
                (Real::erf(x), erf(wide)),
                (Real::sigmoid(x), Real::sigmoid(wide)),
            ];
            for (index, (found, expected)) in pairs.into_iter().enumerate() {
                let expected = expected as f32;
                assert!(
                    found.is_nan() == expected.is_nan()
                        && (found.is_nan() || (found - expected).abs() < 1e-5 || found == expected),
                    "function {index} of {x}: {found}, expected {expected}"
                );
            }
        }
    }
}
