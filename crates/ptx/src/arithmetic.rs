//! Integer and logical instructions, comparisons and choices, on the 32 lanes of a warp at once.

use crate::scalar::{Scalar, signed, truncate};

/// A value for each lane of a warp. The bits above a register's width are zero.
pub(crate) type Lanes = [u64; 32];

/// Computes an instruction of up to four inputs, lane by lane, so that lanes that do not run may compute nonsense.
pub(crate) type Compute = Box<dyn Fn([&Lanes; 4]) -> Lanes + Send + Sync>;

pub(crate) fn lanes(f: impl Fn(usize) -> u64) -> Lanes {
    let mut out = [0; 32];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = f(lane);
    }
    out
}

pub(crate) fn unary(f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Compute {
    Box::new(move |[a, ..]| lanes(|lane| f(a[lane])))
}

pub(crate) fn binary(f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Compute {
    Box::new(move |[a, b, ..]| lanes(|lane| f(a[lane], b[lane])))
}

pub(crate) fn ternary(f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Compute {
    Box::new(move |[a, b, c, _]| lanes(|lane| f(a[lane], b[lane], c[lane])))
}

/// An integer or logical instruction: the words of its opcode without the type. `None` where there is no such one.
pub(crate) fn integer(words: &[&str], scalar: Scalar) -> Option<Compute> {
    let width = scalar.bytes();
    if scalar == Scalar::Predicate {
        return Some(match words {
            ["and"] => binary(|a, b| a & b),
            ["or"] => binary(|a, b| a | b),
            ["xor"] => binary(|a, b| a ^ b),
            ["not"] => unary(|a| u64::from(a == 0)),
            _ => return None,
        });
    }
    if !scalar.is_integer() {
        return None;
    }
    if let Some(bits) = logical(words, width) {
        return Some(bits);
    }
    if matches!(scalar, Scalar::Bits(_)) {
        return match words {
            ["shr"] => Some(binary(move |a, b| shift_right(a, b, width))),
            _ => None,
        };
    }
    if scalar.is_signed() { of_signed(words, width) } else { of_unsigned(words, width) }
}

/// Operations that do not depend on the sign.
fn logical(words: &[&str], width: usize) -> Option<Compute> {
    let bits = 8 * width as u64;
    Some(match words {
        ["and"] => binary(|a, b| a & b),
        ["or"] => binary(|a, b| a | b),
        ["xor"] => binary(|a, b| a ^ b),
        ["not"] => unary(move |a| truncate(!a, width)),
        ["shl"] => binary(move |a, b| {
            let by = truncate(b, 4);
            if by >= bits { 0 } else { truncate(a << by, width) }
        }),
        ["popc"] => unary(move |a| u64::from(truncate(a, width).count_ones())),
        ["clz"] => unary(move |a| u64::from(truncate(a, width).leading_zeros()) - (64 - bits)),
        ["brev"] => unary(move |a| a.reverse_bits() >> (64 - bits)),
        ["prmt"] => ternary(permute),
        // a's low bits into b, at a position and of a length.
        ["bfi"] => Box::new(move |[a, b, position, length]| {
            lanes(|lane| {
                let length = (length[lane] & 0xff) as u32;
                let field = u64::MAX.checked_shr(64 - length.min(64)).unwrap_or(0);
                let position = (position[lane] & 0xff) as u32;
                let at = |bits: u64| bits.checked_shl(position).unwrap_or(0);
                truncate(b[lane] & !at(field) | at(a[lane] & field), width)
            })
        }),
        ["shf", "l", "wrap"] => ternary(|a, b, c| {
            let both = truncate(b, 4) << 32 | truncate(a, 4);
            both.rotate_left((c & 31) as u32) >> 32 & 0xffff_ffff
        }),
        ["shf", "r", "wrap"] => ternary(|a, b, c| {
            let both = truncate(b, 4) << 32 | truncate(a, 4);
            both >> (c & 31) & 0xffff_ffff
        }),
        _ => return None,
    })
}

fn of_unsigned(words: &[&str], width: usize) -> Option<Compute> {
    let wide = move |a, b| u128::from(truncate(a, width)) * u128::from(truncate(b, width));
    let t = move |bits| truncate(bits, width);
    Some(match words {
        ["add"] => binary(move |a, b| t(a.wrapping_add(b))),
        ["sub"] => binary(move |a, b| t(a.wrapping_sub(b))),
        ["mul", "lo"] => binary(move |a, b| t(a.wrapping_mul(b))),
        ["mul", "hi"] => binary(move |a, b| t((wide(a, b) >> (8 * width)) as u64)),
        ["mul", "wide"] => binary(move |a, b| wide(a, b) as u64),
        ["mad", "lo"] => ternary(move |a, b, c| t(a.wrapping_mul(b).wrapping_add(c))),
        ["mad", "wide"] => ternary(move |a, b, c| truncate((wide(a, b) as u64).wrapping_add(c), 2 * width)),
        // The hardware gives all ones for a division by zero.
        ["div"] => binary(move |a, b| t(a).checked_div(t(b)).unwrap_or(t(u64::MAX))),
        ["rem"] => binary(move |a, b| t(a).checked_rem(t(b)).unwrap_or(t(a))),
        ["min"] => binary(move |a, b| t(a).min(t(b))),
        ["max"] => binary(move |a, b| t(a).max(t(b))),
        ["shr"] => binary(move |a, b| shift_right(a, b, width)),
        ["bfe"] => ternary(move |a, b, c| {
            let (position, length) = ((b & 0xff) as u32, (c & 0xff) as u32);
            let field = t(a).checked_shr(position).unwrap_or(0);
            if length >= 64 { field } else { field & ((1 << length) - 1) }
        }),
        _ => return None,
    })
}

fn of_signed(words: &[&str], width: usize) -> Option<Compute> {
    let wide = move |a, b| i128::from(signed(a, width)) * i128::from(signed(b, width));
    let s = move |bits| signed(bits, width);
    let t = move |number: i64| truncate(number as u64, width);
    Some(match words {
        ["add"] => binary(move |a, b| t(s(a).wrapping_add(s(b)))),
        ["sub"] => binary(move |a, b| t(s(a).wrapping_sub(s(b)))),
        ["neg"] => unary(move |a| t(s(a).wrapping_neg())),
        ["abs"] => unary(move |a| t(s(a).wrapping_abs())),
        ["mul", "lo"] => binary(move |a, b| t(s(a).wrapping_mul(s(b)))),
        ["mul", "hi"] => binary(move |a, b| t((wide(a, b) >> (8 * width)) as i64)),
        ["mul", "wide"] => binary(move |a, b| truncate(wide(a, b) as u64, 2 * width)),
        ["mad", "lo"] => ternary(move |a, b, c| t(s(a).wrapping_mul(s(b)).wrapping_add(s(c)))),
        ["mad", "wide"] => ternary(move |a, b, c| truncate((wide(a, b) as u64).wrapping_add(c), 2 * width)),
        ["div"] => {
            binary(move |a, b| if s(b) == 0 { truncate(u64::MAX, width) } else { t(s(a).wrapping_div(s(b))) })
        }
        ["rem"] => binary(move |a, b| if s(b) == 0 { t(s(a)) } else { t(s(a).wrapping_rem(s(b))) }),
        ["min"] => binary(move |a, b| t(s(a).min(s(b)))),
        ["max"] => binary(move |a, b| t(s(a).max(s(b)))),
        ["shr"] => binary(move |a, b| t(s(a) >> truncate(b, 4).min(8 * width as u64 - 1))),
        _ => return None,
    })
}

fn shift_right(a: u64, b: u64, width: usize) -> u64 {
    let by = truncate(b, 4);
    if by >= 8 * width as u64 { 0 } else { truncate(a, width) >> by }
}

/// Four bytes out of the eight of `b:a`, each chosen by four bits of `c`, whose highest one repeats the byte's sign.
fn permute(a: u64, b: u64, c: u64) -> u64 {
    let bytes = (truncate(b, 4) << 32 | truncate(a, 4)).to_le_bytes();
    (0..4).fold(0, |out, at| {
        let choice = c >> (4 * at) & 0xf;
        let byte = bytes[(choice & 7) as usize];
        let byte = if choice < 8 { byte } else { ((byte as i8) >> 7) as u8 };
        out | u64::from(byte) << (8 * at)
    })
}

/// A comparison: `lt`, or `lt` and a predicate that it is combined with.
pub(crate) fn compare(operator: &str, combination: Option<&str>, scalar: Scalar) -> Option<Compute> {
    let test = comparison(operator, scalar)?;
    Some(match combination {
        None => binary(move |a, b| u64::from(test(a, b))),
        Some("and") => ternary(move |a, b, c| u64::from(test(a, b)) & c),
        Some("or") => ternary(move |a, b, c| u64::from(test(a, b)) | c),
        Some("xor") => ternary(move |a, b, c| u64::from(test(a, b)) ^ c),
        Some(_) => return None,
    })
}

type Test = fn(u64, u64) -> bool;

// A comparison that fails is not its opposite where an operand is NaN.
#[expect(clippy::neg_cmp_op_on_partial_ord)]
fn comparison(operator: &str, scalar: Scalar) -> Option<Test> {
    macro_rules! tests {
        ($read:expr) => {
            match operator {
                "eq" => |a, b| $read(a) == $read(b),
                "ne" => |a, b| $read(a) != $read(b),
                "lt" | "lo" => |a, b| $read(a) < $read(b),
                "le" | "ls" => |a, b| $read(a) <= $read(b),
                "gt" | "hi" => |a, b| $read(a) > $read(b),
                "ge" | "hs" => |a, b| $read(a) >= $read(b),
                _ => return None,
            }
        };
    }
    // The ones that end in u are true where an operand is NaN.
    macro_rules! float_tests {
        ($read:expr) => {
            match operator {
                "eq" => |a, b| $read(a) == $read(b),
                "ne" => |a, b| $read(a) < $read(b) || $read(a) > $read(b),
                "lt" => |a, b| $read(a) < $read(b),
                "le" => |a, b| $read(a) <= $read(b),
                "gt" => |a, b| $read(a) > $read(b),
                "ge" => |a, b| $read(a) >= $read(b),
                "equ" => |a, b| !($read(a) < $read(b) || $read(a) > $read(b)),
                "neu" => |a, b| $read(a) != $read(b),
                "ltu" => |a, b| !($read(a) >= $read(b)),
                "leu" => |a, b| !($read(a) > $read(b)),
                "gtu" => |a, b| !($read(a) <= $read(b)),
                "geu" => |a, b| !($read(a) < $read(b)),
                "num" => |a, b| !$read(a).is_nan() && !$read(b).is_nan(),
                "nan" => |a, b| $read(a).is_nan() || $read(b).is_nan(),
                _ => return None,
            }
        };
    }
    Some(match scalar {
        Scalar::F32 => float_tests!((|bits: u64| f32::from_bits(bits as u32))),
        Scalar::F64 => float_tests!(f64::from_bits),
        Scalar::Signed(2) => tests!((|bits| signed(bits, 2))),
        Scalar::Signed(4) => tests!((|bits| signed(bits, 4))),
        Scalar::Signed(8) => tests!((|bits| signed(bits, 8))),
        Scalar::Unsigned(2) | Scalar::Bits(2) => tests!((|bits| truncate(bits, 2))),
        Scalar::Unsigned(4) | Scalar::Bits(4) => tests!((|bits| truncate(bits, 4))),
        Scalar::Unsigned(8) | Scalar::Bits(8) => tests!((|bits| truncate(bits, 8))),
        _ => return None,
    })
}
