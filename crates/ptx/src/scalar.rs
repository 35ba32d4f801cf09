//! The types of PTX's instructions and registers.

/// A fundamental type, or two packed halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scalar {
    Predicate,
    /// Bits of a width in bytes.
    Bits(u8),
    Unsigned(u8),
    Signed(u8),
    F16,
    Bf16,
    F32,
    F64,
    /// Two halves in 32 bits, the second operand in the low one.
    F16x2,
    Bf16x2,
}

impl Scalar {
    /// The type of a name without its dot.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Self::Predicate,
            "b8" => Self::Bits(1),
            "b16" => Self::Bits(2),
            "b32" => Self::Bits(4),
            "b64" => Self::Bits(8),
            "u8" => Self::Unsigned(1),
            "u16" => Self::Unsigned(2),
            "u32" => Self::Unsigned(4),
            "u64" => Self::Unsigned(8),
            "s8" => Self::Signed(1),
            "s16" => Self::Signed(2),
            "s32" => Self::Signed(4),
            "s64" => Self::Signed(8),
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "f16x2" => Self::F16x2,
            "bf16x2" => Self::Bf16x2,
            _ => return None,
        })
    }

    /// Width in bytes; 1 for a predicate.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Predicate => 1,
            Self::Bits(bytes) | Self::Unsigned(bytes) | Self::Signed(bytes) => usize::from(bytes),
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::F16x2 | Self::Bf16x2 => 4,
            Self::F64 => 8,
        }
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Self::Signed(_))
    }

    pub(crate) fn is_integer(self) -> bool {
        matches!(self, Self::Bits(_) | Self::Unsigned(_) | Self::Signed(_))
    }

    /// The bits of a constant as a register of this type holds them.
    pub(crate) fn constant(self, bits: u64) -> u64 {
        if self == Self::Predicate { u64::from(bits != 0) } else { truncate(bits, self.bytes()) }
    }
}

/// The low bytes.
pub(crate) fn truncate(bits: u64, bytes: usize) -> u64 {
    if bytes >= 8 { bits } else { bits & ((1 << (8 * bytes)) - 1) }
}

/// The low bytes as a signed number.
pub(crate) fn signed(bits: u64, bytes: usize) -> i64 {
    let unused = 64 - 8 * bytes.min(8) as u32;
    ((bits << unused) as i64) >> unused
}
