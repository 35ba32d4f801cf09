//! `cvt`: between integers and floating-point numbers of every width.

use crate::arithmetic::{Compute, binary, unary};
use crate::float::{f32_of, of_f32, of_f64};
use crate::scalar::{Scalar, signed, truncate};

/// How a number is rounded to an integer or to a narrower format.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// A conversion: the words between `cvt` and the two types. `None` where it is not known.
pub(crate) fn convert(words: &[&str], to: Scalar, from: Scalar) -> Option<Compute> {
    let mut rounding = None;
    let (mut flush, mut saturate) = (false, false);
    for word in words {
        match *word {
            "rn" | "rni" => rounding = Some(Rounding::Nearest),
            "rz" | "rzi" => rounding = Some(Rounding::Zero),
            "rm" | "rmi" => rounding = Some(Rounding::Down),
            "rp" | "rpi" => rounding = Some(Rounding::Up),
            "ftz" => flush = true,
            "sat" => saturate = true,
            _ => return None,
        }
    }
    // Flushing concerns fp32 alone, saturation integers alone; neither is emitted for our kernels in another place.
    if flush && from != Scalar::F32 || saturate && !(from.is_integer() && to.is_integer()) {
        return None;
    }
    if matches!(to, Scalar::F16x2 | Scalar::Bf16x2) {
        let half = if to == Scalar::F16x2 { Scalar::F16 } else { Scalar::Bf16 };
        let nearest = from == Scalar::F32 && rounding == Some(Rounding::Nearest) && !flush;
        // The first operand goes into the upper half.
        return nearest.then(|| {
            binary(move |a, b| {
                encode(half, f32_of(a).into(), Rounding::Nearest) << 16
                    | encode(half, f32_of(b).into(), Rounding::Nearest)
            })
        });
    }
    let flushed = move |bits: u64| {
        if flush && f32_of(bits).is_subnormal() { bits & 0x8000_0000 } else { bits }
    };
    let to_integer = words.iter().any(|word| word.ends_with('i'));
    Some(match (from.is_integer(), to.is_integer()) {
        (true, true) => unary(move |a| integer_to_integer(a, from, to, saturate)),
        (true, false) => {
            integer_to_float(from, to, rounding.filter(|rounding| *rounding == Rounding::Nearest)?)?
        }
        (false, true) => {
            let rounding = rounding.filter(|_| to_integer)?;
            unary(move |a| float_to_integer(decode(from, flushed(a)), to, rounding))
        }
        (false, false) if to_integer => {
            let rounding = rounding?;
            if from != to {
                return None;
            }
            unary(move |a| encode(to, round(decode(from, flushed(a)), rounding), Rounding::Nearest))
        }
        (false, false) if to.bytes() < from.bytes() => {
            let rounding = rounding?;
            unary(move |a| encode(to, decode(from, flushed(a)), rounding))
        }
        (false, false) => unary(move |a| encode(to, decode(from, flushed(a)), Rounding::Nearest)),
    })
}

/// An integer as a float. A wide integer becomes fp32 at once: by way of fp64 it would be rounded twice.
fn integer_to_float(from: Scalar, to: Scalar, rounding: Rounding) -> Option<Compute> {
    let is_signed = from.is_signed();
    let (signed, unsigned) = (move |a| signed(a, from.bytes()), move |a| truncate(a, from.bytes()));
    Some(match to {
        Scalar::F32 => unary(move |a| of_f32(if is_signed { signed(a) as f32 } else { unsigned(a) as f32 })),
        Scalar::F64 => unary(move |a| of_f64(if is_signed { signed(a) as f64 } else { unsigned(a) as f64 })),
        _ if from.bytes() <= 4 => unary(move |a| {
            encode(to, if is_signed { signed(a) as f64 } else { unsigned(a) as f64 }, rounding)
        }),
        _ => return None,
    })
}

fn integer_to_integer(bits: u64, from: Scalar, to: Scalar, saturate: bool) -> u64 {
    let number = if from.is_signed() {
        i128::from(signed(bits, from.bytes()))
    } else {
        i128::from(truncate(bits, from.bytes()))
    };
    let number = if saturate {
        let (least, most) = limits(to);
        number.clamp(least, most)
    } else {
        number
    };
    truncate(number as u64, to.bytes())
}

fn limits(scalar: Scalar) -> (i128, i128) {
    let bits = 8 * scalar.bytes() as u32;
    if scalar.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// Out of range: the nearest integer; NaN: 0, and for 64 bits the lowest one, as the hardware has it.
fn float_to_integer(number: f64, to: Scalar, rounding: Rounding) -> u64 {
    if number.is_nan() {
        return if to.bytes() == 8 { 1 << 63 } else { 0 };
    }
    let (least, most) = limits(to);
    truncate((round(number, rounding) as i128).clamp(least, most) as u64, to.bytes())
}

fn round(number: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => number.round_ties_even(),
        Rounding::Zero => number.trunc(),
        Rounding::Down => number.floor(),
        Rounding::Up => number.ceil(),
    }
}

fn decode(scalar: Scalar, bits: u64) -> f64 {
    match scalar {
        Scalar::F16 => {
            let (sign, exponent, fraction) = (bits >> 15 & 1, (bits >> 10 & 31) as i32, (bits & 1023) as f64);
            let size = match exponent {
                31 if fraction != 0.0 => f64::NAN,
                31 => f64::INFINITY,
                0 => fraction * 2f64.powi(-24),
                _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
            };
            if sign == 1 { -size } else { size }
        }
        Scalar::Bf16 => f32_of(truncate(bits, 2) << 16).into(),
        Scalar::F32 => f32_of(bits).into(),
        _ => f64::from_bits(bits),
    }
}

/// Rounds to a format, once. fp64 has more than twice the digits of every input that comes here, so it is exact.
fn encode(scalar: Scalar, number: f64, rounding: Rounding) -> u64 {
    // Digits of the fraction, the smallest exponent, the largest one.
    let (digits, least, most, nan) = match scalar {
        Scalar::F16 => (10, -14, 15, 0x7fff),
        Scalar::Bf16 => (7, -126, 127, 0x7fff),
        Scalar::F32 => (23, -126, 127, 0x7fff_ffff),
        _ => return of_f64(number),
    };
    let sign_at = 8 * scalar.bytes() - 1;
    let sign = u64::from(number.is_sign_negative()) << sign_at;
    if number.is_nan() {
        return nan;
    }
    let infinity = sign | ((most - least + 2) as u64) << digits;
    if number.is_infinite() {
        return infinity;
    }
    let exponent = ((number.to_bits() >> 52 & 2047) as i32 - 1023).max(least);
    // In units of the last digit; a normal number has at least 2^digits of them. The rounding knows the sign.
    let units = round(number * 2f64.powi(digits - exponent), rounding).abs() as u64;
    let biased = (exponent - least) as u64;
    let bits = (biased << digits) + units;
    if bits >= infinity & !(1 << sign_at) {
        let towards_zero = match rounding {
            Rounding::Nearest => false,
            Rounding::Zero => true,
            Rounding::Down => sign == 0,
            Rounding::Up => sign != 0,
        };
        return if towards_zero { infinity - 1 } else { infinity };
    }
    sign | bits
}
