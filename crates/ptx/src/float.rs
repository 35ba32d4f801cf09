//! Floating-point instructions in fp32 and fp64, and the approximations of the special-function unit.
//!
//! A NaN that an instruction makes is the one that the hardware makes, so results have the same bits on every host. The
//! approximations (`ex2.approx`, …) are the correctly rounded value here, while the hardware's may be 2 units in the last place
//! away; [`crate::Launch::approximation_error`] moves them.

use crate::arithmetic::{Compute, binary, ternary, unary};
use crate::scalar::Scalar;

const NAN_32: u32 = 0x7fff_ffff;
const NAN_64: u64 = 0x7ff8_0000_0000_0000;

pub(crate) fn of_f32(number: f32) -> u64 {
    u64::from(if number.is_nan() { NAN_32 } else { number.to_bits() })
}

pub(crate) fn of_f64(number: f64) -> u64 {
    if number.is_nan() { NAN_64 } else { number.to_bits() }
}

pub(crate) fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

/// Subnormal numbers as zero of their sign, the meaning of `.ftz`.
fn flushed(number: f32) -> f32 {
    if number.is_subnormal() { 0f32.copysign(number) } else { number }
}

/// An instruction in fp32 or fp64: the words of its opcode without the type. `None` where there is no such one.
pub(crate) fn float(words: &[&str], scalar: Scalar) -> Option<Compute> {
    match scalar {
        Scalar::F32 => {
            let flush = words.contains(&"ftz");
            let words: Vec<&str> = words.iter().copied().filter(|word| *word != "ftz").collect();
            let plain = single(&words)?;
            Some(if flush { flushing(plain) } else { plain })
        }
        Scalar::F64 => double(words),
        _ => None,
    }
}

/// The same with inputs and result flushed.
fn flushing(compute: Compute) -> Compute {
    let flush = |lanes: &[u64; 32]| lanes.map(|bits| u64::from(flushed(f32_of(bits)).to_bits()));
    Box::new(move |inputs| {
        let inputs = inputs.map(flush);
        flush(&compute(inputs.each_ref()))
    })
}

fn single(words: &[&str]) -> Option<Compute> {
    let one = |f: fn(f32) -> f32| unary(move |a| of_f32(f(f32_of(a))));
    let two = |f: fn(f32, f32) -> f32| binary(move |a, b| of_f32(f(f32_of(a), f32_of(b))));
    Some(match words {
        ["add" | "sub" | "mul", "rn"] | ["add" | "sub" | "mul"] => match words[0] {
            "add" => binary(|a, b| of_f32(f32_of(a) + f32_of(b))),
            "sub" => binary(|a, b| of_f32(f32_of(a) - f32_of(b))),
            _ => binary(|a, b| of_f32(f32_of(a) * f32_of(b))),
        },
        ["fma", "rn"] => ternary(|a, b, c| of_f32(f32_of(a).mul_add(f32_of(b), f32_of(c)))),
        ["div", "rn"] => binary(|a, b| of_f32(f32_of(a) / f32_of(b))),
        ["rcp", "rn"] => one(|a| 1.0 / a),
        ["sqrt", "rn"] => one(f32::sqrt),
        ["ex2", "approx"] => one(|a| f64::from(a).exp2() as f32),
        ["lg2", "approx"] => one(|a| f64::from(a).log2() as f32),
        ["rcp", "approx"] => one(|a| 1.0 / a),
        ["sqrt", "approx"] => one(f32::sqrt),
        ["rsqrt", "approx"] => one(|a| (1.0 / f64::from(a).sqrt()) as f32),
        ["sin", "approx"] => one(|a| f64::from(a).sin() as f32),
        ["cos", "approx"] => one(|a| f64::from(a).cos() as f32),
        ["tanh", "approx"] => one(|a| f64::from(a).tanh() as f32),
        ["div", "approx" | "full"] => two(|a, b| a / b),
        // The sign alone changes, of NaN too.
        ["neg"] => unary(|a| a ^ 0x8000_0000),
        ["abs"] => unary(|a| a & 0x7fff_ffff),
        ["copysign"] => binary(|a, b| a & 0x8000_0000 | b & 0x7fff_ffff),
        ["min"] => two(|a, b| minimum(a, b, false)),
        ["max"] => two(|a, b| -minimum(-a, -b, false)),
        ["min", "NaN"] => two(|a, b| minimum(a, b, true)),
        ["max", "NaN"] => two(|a, b| -minimum(-a, -b, true)),
        _ => return None,
    })
}

/// −0 is less than +0; NaN is dropped, or kept.
fn minimum(a: f32, b: f32, keeps_nan: bool) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (false, false) if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        (false, false) => {
            if a < b {
                a
            } else {
                b
            }
        }
        (true, true) => a,
        (a_is, _) => {
            if a_is == keeps_nan {
                a
            } else {
                b
            }
        }
    }
}

fn double(words: &[&str]) -> Option<Compute> {
    let one = |f: fn(f64) -> f64| unary(move |a| of_f64(f(f64::from_bits(a))));
    let two = |f: fn(f64, f64) -> f64| binary(move |a, b| of_f64(f(f64::from_bits(a), f64::from_bits(b))));
    Some(match words {
        ["add"] | ["add", "rn"] => two(|a, b| a + b),
        ["sub"] | ["sub", "rn"] => two(|a, b| a - b),
        ["mul"] | ["mul", "rn"] => two(|a, b| a * b),
        ["div", "rn"] => two(|a, b| a / b),
        ["fma", "rn"] => {
            ternary(|a, b, c| of_f64(f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c))))
        }
        ["rcp", "rn"] => one(|a| 1.0 / a),
        ["sqrt", "rn"] => one(f64::sqrt),
        ["neg"] => unary(|a| a ^ 1 << 63),
        ["abs"] => unary(|a| a & !(1 << 63)),
        ["copysign"] => binary(|a, b| a & 1 << 63 | b & !(1 << 63)),
        ["min"] => two(f64::min),
        ["max"] => two(f64::max),
        _ => return None,
    })
}

/// Whether the hardware computes an instruction only to within some units in the last place.
pub(crate) fn is_approximate(words: &[&str]) -> bool {
    words.iter().any(|word| matches!(*word, "approx" | "full"))
}

/// A number some units in the last place away: how many, of −`most` to `most`, is a function of the number alone.
pub(crate) fn moved(bits: u64, most: u32) -> u64 {
    let number = f32_of(bits);
    if !number.is_normal() || most == 0 {
        return bits;
    }
    let hash = (bits.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as i64;
    let by = hash % i64::from(2 * most + 1) - i64::from(most);
    let near = f32::from_bits((bits as i64 + by) as u32);
    if near.is_normal() { u64::from(near.to_bits()) } else { bits }
}
