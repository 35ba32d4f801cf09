//! One call over many tensors, for the steps of optimizers.
//!
//! On CUDA a `_foreach_` operator runs in a few kernels whatever the number of tensors; on the CPU it is a loop inside
//! libtorch. Lists of a different length, and an in-place change of a leaf that requires gradients outside
//! [`tch::no_grad`], are libtorch's errors. An empty list has no effect.

use std::borrow::Borrow;

use tch::Tensor;

use super::{Value, call, list};
use crate::error::Result;

/// In-place functions: name, operator, overload, and the arguments after the list, as values.
macro_rules! in_place {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty => $value:expr),*) = $operator:literal, $overload:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// Errors of [`call`].
        pub fn $name(tensors: &[impl Borrow<Tensor>], $($argument: $type),*) -> Result<()> {
            in_place(concat!("aten::_foreach_", $operator), $overload, &[list(tensors), $($value),*], &[])
        }
    )*};
}

in_place! {
    /// `tensors[i] += others[i]`
    add_(others: &[impl Borrow<Tensor>] => list(others)) = "add_", "List";
    /// `tensors[i] += scalar`
    add_scalar_(scalar: f64 => scalar.into()) = "add_", "Scalar";
    /// `tensors[i] -= others[i]`
    sub_(others: &[impl Borrow<Tensor>] => list(others)) = "sub_", "List";
    /// `tensors[i] *= others[i]`
    mul_(others: &[impl Borrow<Tensor>] => list(others)) = "mul_", "List";
    /// `tensors[i] *= scalar`
    mul_scalar_(scalar: f64 => scalar.into()) = "mul_", "Scalar";
    /// `tensors[i] *= factor`, a tensor of one element: no synchronisation with the device.
    mul_tensor_(factor: &Tensor => factor.into()) = "mul_", "Tensor";
    /// `tensors[i] += scale · a[i] · b[i]`
    addcmul_(a: &[impl Borrow<Tensor>] => list(a), b: &[impl Borrow<Tensor>] => list(b), scale: f64 => scale.into()) = "addcmul_", "Scalar";
    /// `tensors[i] += scale · a[i] / b[i]`
    addcdiv_(a: &[impl Borrow<Tensor>] => list(a), b: &[impl Borrow<Tensor>] => list(b), scale: f64 => scale.into()) = "addcdiv_", "Scalar";
    /// `tensors[i] += weight · (ends[i] − tensors[i])`
    lerp_(ends: &[impl Borrow<Tensor>] => list(ends), weight: f64 => weight.into()) = "lerp_", "Scalar";
    /// `tensors[i] = 0`
    zero_() = "zero_", "";
    /// `tensors[i] = sources[i]`, converted to its kind and device.
    copy_(sources: &[impl Borrow<Tensor>] => list(sources)) = "copy_", "";
}

/// `tensors[i] += alpha · others[i]`
///
/// # Errors
/// Errors of [`call`].
pub fn add_scaled_(
    tensors: &[impl Borrow<Tensor>],
    others: &[impl Borrow<Tensor>],
    alpha: f64,
) -> Result<()> {
    in_place("aten::_foreach_add_", "List", &[list(tensors), list(others)], &[("alpha", alpha.into())])
}

fn in_place(name: &str, overload: &str, positional: &[Value], named: &[(&str, Value)]) -> Result<()> {
    let is_empty = |value: &Value| matches!(value, Value::TensorList(tensors) if tensors.is_empty());
    if positional.iter().all(|value| is_empty(value) || !matches!(value, Value::TensorList(_))) {
        return Ok(());
    }
    call(name, overload, positional, named).map(drop)
}

/// New tensors `tensors[i] + alpha · others[i]`.
///
/// # Errors
/// Errors of [`call`].
pub fn add_scaled(
    tensors: &[impl Borrow<Tensor>],
    others: &[impl Borrow<Tensor>],
    alpha: f64,
) -> Result<Vec<Tensor>> {
    new("aten::_foreach_add", "List", &[list(tensors), list(others)], &[("alpha", alpha.into())])
}

/// New tensors `√tensors[i]`.
///
/// # Errors
/// Errors of [`call`].
pub fn sqrt(tensors: &[impl Borrow<Tensor>]) -> Result<Vec<Tensor>> {
    new("aten::_foreach_sqrt", "", &[list(tensors)], &[])
}

fn new(name: &str, overload: &str, positional: &[Value], named: &[(&str, Value)]) -> Result<Vec<Tensor>> {
    if matches!(&positional[0], Value::TensorList(tensors) if tensors.is_empty()) {
        return Ok(Vec::new());
    }
    let results = call(name, overload, positional, named)?;
    results.into_iter().next().unwrap_or(Value::None).into_tensors()
}

/// Returns the norm of the given order of every tensor, as tensors of no dimension.
///
/// ```
/// use tch::Tensor;
///
/// let norms = runtime::ops::foreach::norm(&[Tensor::from_slice(&[3.0f32, 4.0])], 2.0)?;
/// assert_eq!(norms[0].double_value(&[]), 5.0);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// Errors of [`call`].
pub fn norm(tensors: &[impl Borrow<Tensor>], order: f64) -> Result<Vec<Tensor>> {
    new("aten::_foreach_norm", "Scalar", &[list(tensors), order.into()], &[])
}
