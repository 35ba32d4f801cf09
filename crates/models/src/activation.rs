//! Activation functions of MLPs.

use tch::Tensor;

use crate::error::Result;

/// The activation function of a two-layer MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// x·Φ(x) (Hendrycks & Gimpel 2016), exact.
    Gelu,
    /// Its tanh approximation, as in GPT-2.
    GeluTanh,
}

impl Activation {
    /// Computes f(x), element by element.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Relu => x.f_relu()?,
            Self::Gelu => x.f_gelu("none")?,
            Self::GeluTanh => x.f_gelu("tanh")?,
        })
    }
}
