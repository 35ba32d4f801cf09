//! Arguments and results of operators.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// An argument or a result of an operator. Its tensors share memory with those that it was made from.
#[derive(Debug)]
#[non_exhaustive]
pub enum Value {
    /// No value, for an argument marked `?` in a schema; also an undefined tensor among the results.
    None,
    /// `Tensor`, `Tensor?`
    Tensor(Tensor),
    /// `Tensor[]`
    TensorList(Vec<Tensor>),
    /// `Tensor?[]`
    OptionalTensorList(Vec<Option<Tensor>>),
    /// `int`, `SymInt`, `Scalar`, and the numbers of `Layout` and `MemoryFormat`
    Int(i64),
    /// `float`, `Scalar`
    Double(f64),
    /// `bool`, `Scalar`
    Bool(bool),
    /// `int[]`, `SymInt[]`
    IntList(Vec<i64>),
    /// `float[]`
    DoubleList(Vec<f64>),
    /// `bool[]`
    BoolList(Vec<bool>),
    /// `str`
    String(String),
    /// `ScalarType`
    Kind(Kind),
    /// `Device`
    Device(Device),
}

impl Value {
    /// Returns the tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is something else, which is named.
    pub fn into_tensor(self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor),
            other => Err(other.is_not("a tensor")),
        }
    }

    /// Returns the list of tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is something else, which is named.
    pub fn into_tensors(self) -> Result<Vec<Tensor>> {
        match self {
            Self::TensorList(tensors) => Ok(tensors),
            other => Err(other.is_not("a list of tensors")),
        }
    }

    fn is_not(&self, expected: &str) -> Error {
        let kind = match self {
            Self::None => "no value",
            Self::Tensor(_) => "a tensor",
            Self::TensorList(_) => "a list of tensors",
            Self::OptionalTensorList(_) => "a list of optional tensors",
            Self::Int(_) => "an integer",
            Self::Double(_) => "a double",
            Self::Bool(_) => "a boolean",
            Self::IntList(_) => "a list of integers",
            Self::DoubleList(_) => "a list of doubles",
            Self::BoolList(_) => "a list of booleans",
            Self::String(_) => "a string",
            Self::Kind(_) => "a kind",
            Self::Device(_) => "a device",
        };
        Error::invalid("ops::Value", format!("expected {expected}, got {kind}"))
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::None, Into::into)
    }
}

impl From<&Tensor> for Value {
    fn from(tensor: &Tensor) -> Self {
        Self::Tensor(tensor.shallow_clone())
    }
}

impl From<&[i64]> for Value {
    fn from(items: &[i64]) -> Self {
        Self::IntList(items.to_vec())
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident),* $(,)?) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
    )*};
}

from! {
    Tensor => Tensor,
    Vec<Tensor> => TensorList,
    i64 => Int,
    f64 => Double,
    bool => Bool,
    Vec<i64> => IntList,
    Vec<f64> => DoubleList,
    Vec<bool> => BoolList,
    Kind => Kind,
    Device => Device,
}
