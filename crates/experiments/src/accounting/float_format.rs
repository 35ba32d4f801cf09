//! Binary floating-point formats, bit by bit.
//!
//! A code of `1 + E + M` bits (sign s, exponent field e, mantissa field m) with bias `B = 2^(E-1) - 1` represents
//!
//! ```text
//! e = 0:            (-1)^s · 2^(1-B)   · (0 + m / 2^M)      zero and the subnormal numbers
//! 0 < e < 2^E - 1:  (-1)^s · 2^(e-B)   · (1 + m / 2^M)      the normal numbers
//! e = 2^E - 1:      infinity (m = 0) or NaN (m > 0)         IEEE 754
//! ```
//!
//! fp8 e4m3fn ("finite") uses the last row for normal numbers, except `m = 2^M - 1`, which is NaN: it has no infinity,
//! and its largest value is 2^8 · 1.75 = 448 instead of 240.
//!
//! Encoding rounds to the nearest code, a tie to the even code. A value that rounds above the largest finite number
//! becomes infinity, or NaN in e4m3fn, as with `Tensor::to_kind` in PyTorch. (Hardware casts often saturate instead; a
//! scaled fp8 recipe clamps first.)
//!
//! Sources: IEEE 754-2019; Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433.

/// A binary floating-point format with at most 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FloatFormat {
    /// Bits of the exponent field, 2 to 11.
    pub(crate) exponent_bits: u32,
    /// Bits of the mantissa field, 1 to 52, without the implicit leading one.
    pub(crate) mantissa_bits: u32,
    /// Whether the highest exponent represents numbers (e4m3fn) instead of infinity and NaN (IEEE 754).
    pub(crate) finite: bool,
}

impl FloatFormat {
    /// fp64: 1 + 11 + 52 bits.
    pub(crate) const FP64: Self = Self::ieee(11, 52);
    /// fp32: 1 + 8 + 23 bits.
    pub(crate) const FP32: Self = Self::ieee(8, 23);
    /// tf32: 1 + 8 + 10 bits, stored in 32.
    pub(crate) const TF32: Self = Self::ieee(8, 10);
    /// fp16: 1 + 5 + 10 bits.
    pub(crate) const FP16: Self = Self::ieee(5, 10);
    /// bf16: 1 + 8 + 7 bits.
    pub(crate) const BF16: Self = Self::ieee(8, 7);
    /// fp8 e4m3fn: 1 + 4 + 3 bits, no infinity.
    pub(crate) const E4M3: Self = Self { exponent_bits: 4, mantissa_bits: 3, finite: true };
    /// fp8 e5m2: 1 + 5 + 2 bits.
    pub(crate) const E5M2: Self = Self::ieee(5, 2);

    const fn ieee(exponent_bits: u32, mantissa_bits: u32) -> Self {
        Self { exponent_bits, mantissa_bits, finite: false }
    }

    /// Returns the exponent's bias `2^(E-1) - 1`.
    pub(crate) const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// The code of the largest finite number.
    const fn max_code(self) -> u64 {
        let highest_exponent = (1 << self.exponent_bits) - 1;
        let all_ones = (1 << self.mantissa_bits) - 1;
        if self.finite {
            (highest_exponent << self.mantissa_bits) | (all_ones - 1)
        } else {
            ((highest_exponent - 1) << self.mantissa_bits) | all_ones
        }
    }

    /// Returns the largest finite number.
    pub(crate) fn max(self) -> f64 {
        self.decode(self.max_code())
    }

    /// Returns the smallest positive normal number, `2^(1-B)`.
    pub(crate) fn min_normal(self) -> f64 {
        self.decode(1 << self.mantissa_bits)
    }

    /// Returns the smallest positive number, `2^(1-B-M)`.
    pub(crate) fn min_subnormal(self) -> f64 {
        self.decode(1)
    }

    /// Returns the distance from 1 to the next number, `2^-M`.
    pub(crate) fn epsilon(self) -> f64 {
        power_of_two(-(self.mantissa_bits as i32))
    }

    /// Returns the number of decimal digits that always survive a round trip, `⌊M · log10 2⌋` (C's `FLT_DIG`).
    pub(crate) fn decimal_digits(self) -> u32 {
        (f64::from(self.mantissa_bits) * std::f64::consts::LOG10_2) as u32
    }

    /// Returns the value of the code in the low [`bits`](Self::bits) bits of `code`; higher bits are ignored.
    pub(crate) fn decode(self, code: u64) -> f64 {
        let mantissa_field = code & ((1 << self.mantissa_bits) - 1);
        let exponent_field = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1);
        let negative = (code >> (self.exponent_bits + self.mantissa_bits)) & 1 == 1;
        let highest = (1 << self.exponent_bits) - 1;
        let fraction = mantissa_field as f64 * power_of_two(-(self.mantissa_bits as i32));
        let magnitude = if exponent_field == highest && !self.finite {
            if mantissa_field == 0 { f64::INFINITY } else { f64::NAN }
        } else if self.finite && code & (self.sign_bit() - 1) == self.sign_bit() - 1 {
            f64::NAN
        } else if exponent_field == 0 {
            // Two factors, because 2^(1-B-M) alone would underflow for fp64's own subnormal numbers.
            fraction * power_of_two(1 - self.bias())
        } else {
            (1.0 + fraction) * power_of_two(exponent_field as i32 - self.bias())
        };
        if negative { -magnitude } else { magnitude }
    }

    /// Returns the code nearest to `value`, a tie to the even code; see the [module](self) for overflow.
    pub(crate) fn encode(self, value: f64) -> u64 {
        let sign = if value.is_sign_negative() { self.sign_bit() } else { 0 };
        if value.is_nan() {
            return sign | (self.sign_bit() - 1);
        }
        if value.is_infinite() {
            return sign | self.overflow_code();
        }
        if value == 0.0 {
            return sign;
        }
        let bits = value.abs().to_bits();
        let (field, fraction) = (bits >> 52, bits & ((1 << 52) - 1));
        // value = significand · 2^(exponent - 52), where a normal number's significand has its leading one at bit 52.
        let (significand, exponent) =
            if field == 0 { (fraction, -1022) } else { (fraction | 1 << 52, field as i32 - 1023) };
        let lowest_exponent = 1 - self.bias();
        let scale = exponent.max(lowest_exponent);
        let dropped = (52 - self.mantissa_bits as i32) + (scale - exponent);
        let kept = round_to_even(significand, dropped as u32);
        // `kept` counts units of 2^(scale - M). A carry out of the mantissa increments the exponent field, because
        // consecutive codes represent consecutive numbers; the step from subnormal to normal works likewise.
        let code = ((scale - lowest_exponent) as u64) * (1 << self.mantissa_bits) + kept;
        sign | if code > self.max_code() { self.overflow_code() } else { code }
    }

    /// Rounds `value` to the format.
    pub(crate) fn round(self, value: f64) -> f64 {
        self.decode(self.encode(value))
    }

    const fn sign_bit(self) -> u64 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    const fn overflow_code(self) -> u64 {
        if self.finite { self.sign_bit() - 1 } else { self.max_code() + 1 }
    }
}

/// `significand / 2^dropped`, rounded to nearest, a tie to even.
fn round_to_even(significand: u64, dropped: u32) -> u64 {
    if dropped == 0 {
        return significand;
    }
    if dropped > 63 {
        return 0;
    }
    let (kept, rest, half) =
        (significand >> dropped, significand & ((1 << dropped) - 1), 1u64 << (dropped - 1));
    kept + u64::from(rest > half || (rest == half && kept & 1 == 1))
}

/// `2^exponent` exactly, for -1074 to 1023.
fn power_of_two(exponent: i32) -> f64 {
    if exponent >= -1022 {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    } else {
        f64::from_bits(1 << (exponent + 1074))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP8: [FloatFormat; 2] = [FloatFormat::E4M3, FloatFormat::E5M2];

    /// The value from the definition, without the code under test: 2^x by `powi`.
    fn by_definition(format: FloatFormat, code: u64) -> Option<f64> {
        let (e, m) = match format.mantissa_bits {
            3 => ((code >> 3) & 15, code & 7),
            _ => ((code >> 2) & 31, code & 3),
        };
        let (steps, bias) = if format.mantissa_bits == 3 { (8.0, 7) } else { (4.0, 15) };
        if (format.mantissa_bits == 3 && (e, m) == (15, 7)) || (format.mantissa_bits == 2 && e == 31) {
            return None;
        }
        let magnitude = if e == 0 {
            m as f64 / steps * 2f64.powi(1 - bias)
        } else {
            (1.0 + m as f64 / steps) * 2f64.powi(e as i32 - bias)
        };
        Some(if code & 128 != 0 { -magnitude } else { magnitude })
    }

    #[test]
    fn every_fp8_code_decodes_to_its_definition_and_encodes_to_itself() {
        for format in FP8 {
            let mut not_finite = 0;
            for code in 0..256 {
                let value = format.decode(code);
                match by_definition(format, code) {
                    Some(expected) => {
                        assert_eq!(value.to_bits(), expected.to_bits(), "{format:?} {code:#x}");
                        assert_eq!(format.encode(value), code, "{format:?} {code:#x}");
                    }
                    None => {
                        not_finite += 1;
                        assert!(!value.is_finite(), "{format:?} {code:#x}");
                        if value.is_infinite() {
                            assert_eq!(format.encode(value), code);
                        } else {
                            assert!(format.decode(format.encode(value)).is_nan());
                        }
                    }
                }
            }
            assert_eq!(not_finite, if format.finite { 2 } else { 8 });
        }
    }

    #[test]
    fn fp8_encoding_rounds_to_nearest_and_ties_to_even() {
        for format in FP8 {
            for code in 0..format.max_code() {
                let (low, high) = (format.decode(code), format.decode(code + 1));
                let middle = low + (high - low) / 2.0;
                let even = code + (code & 1);
                for sign in [0, 128] {
                    let signed = |value: f64| if sign == 0 { value } else { -value };
                    assert_eq!(format.encode(signed(middle)), sign | even, "{format:?} {middle}");
                    assert_eq!(format.encode(signed(middle.next_down())), sign | code, "{format:?} {middle}");
                    assert_eq!(
                        format.encode(signed(middle.next_up())),
                        sign | (code + 1),
                        "{format:?} {middle}"
                    );
                }
            }
        }
    }

    #[test]
    fn values_half_a_step_above_the_maximum_overflow() {
        let e4m3 = FloatFormat::E4M3;
        assert_eq!((e4m3.max(), e4m3.round(464.0)), (448.0, 448.0));
        assert!(e4m3.round(464.0_f64.next_up()).is_nan() && e4m3.round(f64::INFINITY).is_nan());
        let e5m2 = FloatFormat::E5M2;
        assert_eq!((e5m2.max(), e5m2.round(61440.0_f64.next_down())), (57344.0, 57344.0));
        assert_eq!(e5m2.round(61440.0), f64::INFINITY);
        assert_eq!(e5m2.round(-1e9), f64::NEG_INFINITY);
    }

    #[test]
    fn every_fp16_and_bf16_code_agrees_with_half() {
        for code in 0..=u16::MAX {
            let pairs = [
                (FloatFormat::FP16, half::f16::from_bits(code).to_f64()),
                (FloatFormat::BF16, half::bf16::from_bits(code).to_f64()),
            ];
            for (format, expected) in pairs {
                let value = format.decode(code.into());
                assert!(value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan()));
                if !value.is_nan() {
                    assert_eq!(format.encode(value), u64::from(code));
                    // Points inside the gap above the code, against half's rounding.
                    for fraction in [0.25, 0.5, 0.75] {
                        let next = format.decode(u64::from(code) + 1);
                        let point = value + (next - value) * fraction;
                        if point.is_finite() {
                            let by_half = match format.mantissa_bits {
                                10 => half::f16::from_f64(point).to_bits(),
                                _ => half::bf16::from_f64(point).to_bits(),
                            };
                            assert_eq!(format.encode(point), u64::from(by_half), "{format:?} {point}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn fp32_and_fp64_match_the_processor() {
        let mut state = 1u64;
        for _ in 0..100_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let value = f64::from_bits(state ^ (state >> 29));
            if value.is_nan() {
                continue;
            }
            assert_eq!(FloatFormat::FP64.encode(value), value.to_bits());
            assert_eq!(FloatFormat::FP64.decode(value.to_bits()), value);
            let single = f64::from((value as f32) * 1e-20);
            assert_eq!(FloatFormat::FP32.encode(value) as u32, (value as f32).to_bits(), "{value:e}");
            assert_eq!(FloatFormat::FP32.round(single), single);
        }
        for value in [f64::from_bits(1), f64::MIN_POSITIVE, f64::MAX, -0.0, 1e-310] {
            assert_eq!(FloatFormat::FP64.encode(value), value.to_bits());
            assert_eq!(FloatFormat::FP64.decode(value.to_bits()).to_bits(), value.to_bits());
            assert_eq!(FloatFormat::FP32.encode(value) as u32, (value as f32).to_bits());
        }
        assert_eq!(FloatFormat::FP32.max(), f64::from(f32::MAX));
        assert_eq!(FloatFormat::FP32.min_normal(), f64::from(f32::MIN_POSITIVE));
        assert_eq!(FloatFormat::FP32.epsilon(), f64::from(f32::EPSILON));
        assert_eq!((FloatFormat::FP32.decimal_digits(), FloatFormat::FP64.decimal_digits()), (6, 15));
        assert_eq!(FloatFormat::FP64.min_subnormal(), f64::from_bits(1));
    }
}
