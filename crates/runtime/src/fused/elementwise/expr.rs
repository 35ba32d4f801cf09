//! Expressions as they are written: operators and methods that note down what they are asked for.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::graph::{Graph, Id, Node};
use crate::sys::elementwise::program::{Binary, Ternary, Unary};

/// A number at each place, which the closure of an [`Elementwise`](super::Elementwise) computes with. `Copy`; `+ − × ÷` take
/// another expression or an `f64`.
#[derive(Clone, Copy)]
pub struct Expr<'g> {
    graph: &'g RefCell<Graph>,
    id: Id,
    /// One closure's expressions are its own.
    _own: PhantomData<fn(&'g ()) -> &'g ()>,
}

/// A comparison of two expressions: true or false at each place.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'g>(Expr<'g>);

impl std::fmt::Debug for Expr<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.graph.borrow().node(self.id))
    }
}

/// What may stand beside an expression: another one, or a constant.
pub trait Term<'g>: private::Sealed {
    #[doc(hidden)]
    fn beside(self, other: Expr<'g>) -> Expr<'g>;
}

mod private {
    pub trait Sealed {}
    impl Sealed for super::Expr<'_> {}
    impl Sealed for f64 {}
}

impl<'g> Term<'g> for Expr<'g> {
    fn beside(self, _: Expr<'g>) -> Expr<'g> {
        self
    }
}

impl<'g> Term<'g> for f64 {
    fn beside(self, other: Expr<'g>) -> Expr<'g> {
        other.constant(self)
    }
}

impl<'g> Expr<'g> {
    pub(super) fn input(graph: &'g RefCell<Graph>, index: usize) -> Self {
        Self::of(graph, Node::Input(index))
    }

    pub(super) fn id(self) -> Id {
        self.id
    }

    fn of(graph: &'g RefCell<Graph>, node: Node) -> Self {
        let id = graph.borrow_mut().add(node);
        Self { graph, id, _own: PhantomData }
    }

    fn constant(self, value: f64) -> Self {
        Self::of(self.graph, Node::Constant(value.to_bits()))
    }

    fn unary(self, function: Unary) -> Self {
        Self::of(self.graph, Node::Unary(function, self.id))
    }

    fn binary(self, function: Binary, other: Self) -> Self {
        Self::of(self.graph, Node::Binary(function, self.id, other.id))
    }

    /// 1/x.
    pub fn recip(self) -> Self {
        self.unary(Unary::Reciprocal)
    }

    /// √x; NaN below 0.
    pub fn sqrt(self) -> Self {
        self.unary(Unary::Sqrt)
    }

    /// 1/√x.
    pub fn rsqrt(self) -> Self {
        self.unary(Unary::Rsqrt)
    }

    /// eˣ.
    pub fn exp(self) -> Self {
        self.unary(Unary::Exp)
    }

    /// The natural logarithm; NaN below 0.
    pub fn ln(self) -> Self {
        self.unary(Unary::Ln)
    }

    /// The hyperbolic tangent.
    pub fn tanh(self) -> Self {
        self.unary(Unary::Tanh)
    }

    /// The error function, 2/√π ∫₀ˣ e^(−t²) dt.
    pub fn erf(self) -> Self {
        self.unary(Unary::Erf)
    }

    /// σ(x) = 1/(1 + e⁻ˣ).
    pub fn sigmoid(self) -> Self {
        self.unary(Unary::Sigmoid)
    }

    /// x·σ(x).
    pub fn silu(self) -> Self {
        self * self.sigmoid()
    }

    /// x where x > 0, else 0; NaN for NaN. The slope at 0 is 0.
    pub fn relu(self) -> Self {
        self.unary(Unary::Relu)
    }

    /// x·Φ(x) with the normal distribution Φ(x) = (1 + erf(x/√2))/2: libtorch's `gelu("none")`.
    pub fn gelu(self) -> Self {
        self.unary(Unary::Gelu)
    }

    /// x/2·(1 + tanh(√(2/π)·(x + 0.044715 x³))): libtorch's `gelu("tanh")`.
    pub fn gelu_tanh(self) -> Self {
        let slope = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
        let inner = self * (self * self * 0.044715 + 1.0) * slope;
        self * ((inner.tanh() + 1.0) * 0.5)
    }

    /// |x|. The slope at 0 is 0.
    pub fn abs(self) -> Self {
        self.unary(Unary::Abs)
    }

    /// x².
    pub fn square(self) -> Self {
        self.powi(2)
    }

    /// xⁿ by repeated squaring; 1 for n = 0.
    pub fn powi(self, exponent: i32) -> Self {
        Self::of(self.graph, Node::Power(self.id, exponent))
    }

    /// The larger one; NaN where one is. A tie gives each half of the gradient.
    pub fn max(self, other: impl Term<'g>) -> Self {
        self.binary(Binary::Maximum, other.beside(self))
    }

    /// The smaller one; NaN where one is. A tie gives each half of the gradient.
    pub fn min(self, other: impl Term<'g>) -> Self {
        self.binary(Binary::Minimum, other.beside(self))
    }

    /// At least `low` and at most `high` (which wins where `low` is above it); NaN for NaN. The slope at the bounds is 1.
    pub fn clamp(self, low: f64, high: f64) -> Self {
        Self::of(self.graph, Node::Clamp(self.id, low.to_bits(), high.to_bits()))
    }

    /// x < y; false where one is NaN.
    pub fn lt(self, other: impl Term<'g>) -> Mask<'g> {
        Mask(self.binary(Binary::Less, other.beside(self)))
    }

    /// x ≤ y; false where one is NaN.
    pub fn le(self, other: impl Term<'g>) -> Mask<'g> {
        Mask(self.binary(Binary::LessEqual, other.beside(self)))
    }

    /// x > y; false where one is NaN.
    pub fn gt(self, other: impl Term<'g>) -> Mask<'g> {
        Mask(other.beside(self).binary(Binary::Less, self))
    }

    /// x ≥ y; false where one is NaN.
    pub fn ge(self, other: impl Term<'g>) -> Mask<'g> {
        Mask(other.beside(self).binary(Binary::LessEqual, self))
    }

    /// x = y; false where one is NaN.
    pub fn equals(self, other: impl Term<'g>) -> Mask<'g> {
        Mask(self.binary(Binary::Equal, other.beside(self)))
    }

    /// x ≠ y; true where one is NaN.
    pub fn differs(self, other: impl Term<'g>) -> Mask<'g> {
        Mask(self.binary(Binary::NotEqual, other.beside(self)))
    }
}

impl<'g> Mask<'g> {
    /// `yes` where it is true, else `no`: libtorch's `where`. The gradient goes to the one that was taken.
    pub fn select(self, yes: impl Term<'g>, no: impl Term<'g>) -> Expr<'g> {
        let (yes, no) = (yes.beside(self.0), no.beside(self.0));
        Expr::of(self.0.graph, Node::Ternary(Ternary::Select, self.0.id, yes.id, no.id))
    }
}

impl Neg for Expr<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        self.unary(Unary::Negate)
    }
}

macro_rules! operators {
    ($($operator:ident $method:ident => $function:ident),*) => { $(
        impl<'g, T: Term<'g>> $operator<T> for Expr<'g> {
            type Output = Self;
            fn $method(self, other: T) -> Self {
                self.binary(Binary::$function, other.beside(self))
            }
        }

        impl<'g> $operator<Expr<'g>> for f64 {
            type Output = Expr<'g>;
            fn $method(self, other: Expr<'g>) -> Expr<'g> {
                other.constant(self).binary(Binary::$function, other)
            }
        }
    )* };
}
operators!(Add add => Add, Sub sub => Subtract, Mul mul => Multiply, Div div => Divide);
