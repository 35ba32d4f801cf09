//! Operators of libtorch that `tch` lacks.
//!
//! [`call`] calls any operator of libtorch's dispatcher by its name; the typed functions of the modules here are thin
//! layers over it. To add one, look up the schema in libtorch's `native_functions.yaml`, pass the arguments in its
//! order, and omit those with suitable defaults.
//!
//! ```
//! use runtime::ops::{self, Value};
//! use tch::Tensor;
//!
//! let x = Tensor::from_slice(&[1.0f32, 2.0]);
//! let results = ops::call("aten::add", "Tensor", &[(&x).into(), (&x).into()], &[("alpha", Value::Int(10))])?;
//! assert_eq!(ops::single(results)?, Tensor::from_slice(&[11.0f32, 22.0]));
//!
//! let error = ops::call("aten::add", "Tensor", &[(&x).into()], &[]).unwrap_err();
//! assert!(error.to_string().starts_with("ops::call: aten::add() is missing value for argument 'other'"));
//! # Ok::<(), runtime::Error>(())
//! ```
//!
//! Calls go through the whole dispatcher, including autograd: an operator with a derivative records its node.

pub mod amp;
pub mod attention;
pub mod foreach;
pub mod norm;
pub mod optimizer;
mod scalar;
pub mod settings;
mod value;

use std::borrow::Borrow;

use tch::{Kind, Tensor};

use crate::device::graph::operators_only;
use crate::error::{Error, Result};
use crate::profile::{Flops, is_counting, record_external};
pub use scalar::TryScalar;
pub use value::Value;

/// Calls an operator, for example `call("aten::_foreach_add_", "Scalar", …)`; the overload without a name is `""`.
///
/// `named` arguments follow the `positional` ones, and the schema's defaults fill the rest. The results are those of
/// the schema, in its order; an undefined tensor is returned as [`Value::None`].
///
/// # Errors
/// [`Error::Invalid`] for an unknown name or overload, and for arguments that do not match the schema, which it prints;
/// [`Error::Unavailable`] if the operator has no kernel for the arguments' device; [`Error::Torch`] for errors of the
/// operator itself.
pub fn call(name: &str, overload: &str, positional: &[Value], named: &[(&str, Value)]) -> Result<Vec<Value>> {
    crate::sys::ops::call(name, overload, positional, named)
}

/// Returns the single tensor of an operator's results.
///
/// # Errors
/// [`Error::Invalid`] if the results are anything else.
pub fn single(results: Vec<Value>) -> Result<Tensor> {
    let [tensor] = tensors(results)?;
    Ok(tensor)
}

/// Returns the first `N` results of an operator, which must be tensors.
///
/// # Errors
/// [`Error::Invalid`] if there are fewer results or one of them is not a tensor.
pub fn tensors<const N: usize>(results: Vec<Value>) -> Result<[Tensor; N]> {
    let count = results.len();
    let tensors: Vec<Tensor> = results.into_iter().take(N).map(Value::into_tensor).collect::<Result<_>>()?;
    tensors.try_into().map_err(|_| {
        Error::invalid("ops::tensors", format!("expected {N} tensors, the operator gave {count} values"))
    })
}

/// Computes `out = a·b`, or with `accumulate` `out += a·b`, by libtorch's operator (`mm.out`, `addmm_`), which allocates nothing.
///
/// # Errors
/// Errors of libtorch: shapes, dtypes or devices that do not match.
pub fn mm_out(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    crate::sys::tensor::mm(out, a, b, accumulate)
}

/// Computes `out = a·b`, or with `accumulate` `out += a·b`, by the operators of [`mm_out`] on the CPU, without a view of an operand.
///
/// Each of the three is a matrix, or a contiguous tensor whose leading dimensions are rows, all strided, of one dtype, and on the CPU; `a`
/// and `b` come with whether they are transposed. No gradient is recorded.
///
/// # Errors
/// Another device, layout or dtype; errors of libtorch: shapes that do not match.
pub fn mm_of_rows(out: &mut Tensor, a: (&Tensor, bool), b: (&Tensor, bool), accumulate: bool) -> Result<()> {
    crate::sys::tensor::mm_of_rows(out, a, b, accumulate)
}

/// Multiplies the elements of a tensor by a number, in place. Few elements on a CPU take no operator, unless one is recorded or counted.
///
/// # Errors
/// Errors of libtorch: a leaf that requires a gradient, while gradients are recorded.
pub fn scale_(tensor: &mut Tensor, factor: f64) -> Result<()> {
    crate::sys::tensor::scale(tensor, factor, needs_operators())
}

/// Copies `row` `[width]` into each row of `target` `[…, width]`. As [`scale_`], few elements on a CPU take no operator.
///
/// # Errors
/// Errors of libtorch: shapes that do not match; a leaf that requires a gradient, while gradients are recorded.
pub fn fill_rows_(target: &mut Tensor, row: &Tensor) -> Result<()> {
    crate::sys::tensor::fill_rows(target, row, needs_operators())
}

/// Returns whether a recording or a counter has to see every operator.
fn needs_operators() -> bool {
    operators_only() || is_counting()
}

/// Copies the elements of a real tensor to the host, in fp64. This waits for the device; concatenate several tensors first to wait
/// only once.
///
/// A [`Counter`](crate::profile::Counter) sees each call as [`READ`], whatever the device, so that a test can count how
/// often a program synchronises.
///
/// # Errors
/// Errors of libtorch, including earlier errors of the device.
pub fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    crate::sys::recorder::refuse("the host reads values of a device (`ops::read`)")?;
    let bytes = (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    record_external(READ, Flops::default(), bytes)?;
    Ok(Vec::try_from(tensor.f_detach()?.f_to_kind(Kind::Double)?.f_reshape([-1])?)?)
}

/// The name of [`read`] in counters.
pub const READ: &str = "runtime::read";

/// Returns a list argument that shares its tensors with the caller.
fn list(tensors: &[impl Borrow<Tensor>]) -> Value {
    Value::TensorList(tensors.iter().map(|tensor| tensor.borrow().shallow_clone()).collect())
}
