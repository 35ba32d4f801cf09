//! What one pass does, as a short list of steps over registers, each of which holds one tile of elements.

/// A register. Its content is valid from the step that writes it to the last that reads it.
pub(crate) type Register = usize;

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Unary {
    Negate,
    Reciprocal,
    Sqrt,
    Rsqrt,
    Exp,
    Ln,
    Tanh,
    Sigmoid,
    Erf,
    Relu,
    Abs,
    Sign,
    /// x·Φ(x), Φ the normal distribution.
    Gelu,
    /// Its derivative Φ(x) + x·φ(x), φ the normal density.
    GeluSlope,
    /// s·(1 − s), the derivative of σ where it is s.
    LogisticSlope,
}

/// Functions of two numbers. A comparison gives 1 or 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Maximum,
    Minimum,
    Less,
    LessEqual,
    Equal,
    NotEqual,
}

/// Functions of three numbers: two operations in one step, which round after each as two steps would.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Ternary {
    /// a·b + c.
    MultiplyAdd,
    /// a·b − c.
    MultiplySubtract,
    /// c − a·b.
    SubtractProduct,
    /// a·b·c.
    Product,
    /// b where a is not 0, else c.
    Select,
}

/// Where a step reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(Register),
    Constant(f64),
}

/// One step over a tile. `to` is none of the registers that the step reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    /// Reads a tile of source `source`.
    Load {
        to: Register,
        source: usize,
    },
    Unary {
        function: Unary,
        to: Register,
        of: Register,
    },
    Binary {
        function: Binary,
        to: Register,
        a: Operand,
        b: Operand,
    },
    Ternary {
        function: Ternary,
        to: Register,
        operands: [Operand; 3],
    },
    /// Writes a tile of target `target`, or adds it to the sums of a target that is reduced.
    Store {
        from: Operand,
        target: usize,
    },
}

/// A whole pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    pub(crate) registers: usize,
}

impl Unary {
    /// The function in f64, for constants.
    pub(crate) fn of(self, x: f64) -> f64 {
        use super::math::Real;
        x.unary(self)
    }
}

impl Binary {
    /// The function in f64, for constants.
    pub(crate) fn of(self, a: f64, b: f64) -> f64 {
        use super::math::Real;
        a.binary(self, b)
    }

    /// Whether the order of the operands is indifferent.
    pub(crate) fn commutes(self) -> bool {
        matches!(
            self,
            Self::Add | Self::Multiply | Self::Maximum | Self::Minimum | Self::Equal | Self::NotEqual
        )
    }
}
