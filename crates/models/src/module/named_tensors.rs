//! The tensors of a module by name: lists, counts and freezing.

use std::collections::BTreeSet;

use kernels::quantized::{is_quantized, matrix_shape};
use regex::Regex;
use tch::Tensor;

use super::{Module, Role, Visitor};
use crate::error::{Error, Result};

/// A tensor of a module.
#[derive(Debug)]
pub struct NamedTensor<'a> {
    /// Its dotted path.
    pub name: String,
    /// The tensor.
    pub tensor: &'a Tensor,
    /// Parameter or buffer.
    pub role: Role,
}

/// Lists every tensor of the state, in order. A shared tensor is listed once, under its first name.
pub fn tensors(module: &(impl Module + ?Sized)) -> Vec<NamedTensor<'_>> {
    let (mut list, mut seen) = (Vec::new(), BTreeSet::new());
    let mut add = |name: &str, tensor, role| {
        if seen.insert(identity(tensor)) {
            list.push(NamedTensor { name: name.to_owned(), tensor, role });
        }
    };
    module.visit(&mut Visitor::new(&mut add));
    list
}

/// Lists every parameter with its name, in order; a shared one once.
pub fn parameters(module: &(impl Module + ?Sized)) -> Vec<(String, &Tensor)> {
    let all = tensors(module).into_iter();
    all.filter(|named| named.role == Role::Parameter).map(|named| (named.name, named.tensor)).collect()
}

/// Lists the parameters that require a gradient, with their names, in order.
pub fn trainable(module: &(impl Module + ?Sized)) -> Vec<(String, &Tensor)> {
    parameters(module).into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
}

/// Number of elements of all parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCount {
    /// All of them.
    pub total: u64,
    /// Parameters that require a gradient.
    pub trainable: u64,
}

/// Counts the elements of all parameters; a shared tensor once.
pub fn parameter_count(module: &(impl Module + ?Sized)) -> ParameterCount {
    let mut count = ParameterCount { total: 0, trainable: 0 };
    for (_, tensor) in parameters(module) {
        // Bytes of a quantized weight hold more than one parameter, or less.
        let stored = matrix_shape(tensor).filter(|_| is_quantized(tensor));
        let numel = stored.map_or(tensor.numel() as u64, |[out, inner]| (out * inner).unsigned_abs());
        count.total += numel;
        count.trainable += if tensor.requires_grad() { numel } else { 0 };
    }
    count
}

/// Freezes (or, with `frozen` false, unfreezes) every parameter whose full name matches `pattern`, a regular expression such as
/// `h\.[0-3]\..*` or `.*bias`. Returns their names.
///
/// # Errors
/// An invalid regular expression, or one that matches no name.
pub fn freeze(module: &(impl Module + ?Sized), pattern: &str, frozen: bool) -> Result<Vec<String>> {
    let refuse =
        |reason: &str| Error::Invalid(format!("the pattern `{pattern}` for parameter names: {reason}"));
    let anchored = Regex::new(&format!("^(?:{pattern})$")).map_err(|cause| refuse(&cause.to_string()))?;
    let mut names = Vec::new();
    for (name, tensor) in parameters(module) {
        if anchored.is_match(&name) {
            let _ = tensor.f_set_requires_grad(!frozen)?;
            names.push(name);
        }
    }
    if names.is_empty() {
        let first: Vec<String> = parameters(module).into_iter().map(|(name, _)| name).take(8).collect();
        return Err(refuse(&format!("it matches no parameter; the first are {}", first.join(", "))));
    }
    Ok(names)
}

/// Identifies a tensor by its memory, shape and strides. Empty tensors are all different.
pub(super) fn identity(tensor: &Tensor) -> (usize, Vec<i64>, Vec<i64>) {
    let address =
        if tensor.numel() == 0 { std::ptr::from_ref(tensor) as usize } else { tensor.data_ptr() as usize };
    (address, tensor.size(), tensor.stride())
}
