//! libtorch's autograd engine: grad mode, backward passes and gradients.

use std::marker::PhantomData;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::sys::autograd as sys;

/// A guard of this thread's grad mode; dropping it restores the previous mode.
#[derive(Debug)]
#[must_use = "the earlier state comes back as soon as the guard is dropped"]
pub struct GradMode {
    previous: bool,
    /// The mode is thread-local, so the guard must stay on its thread.
    _thread: PhantomData<*const ()>,
}

impl GradMode {
    /// Disables the recording of gradients while the guard lives.
    pub fn off() -> Self {
        Self::set(false)
    }

    /// Enables the recording of gradients while the guard lives.
    pub fn on() -> Self {
        Self::set(true)
    }

    /// Returns whether this thread records gradients.
    pub fn enabled() -> bool {
        sys::grad_mode().expect("reading a thread-local flag cannot fail")
    }

    /// Returns the guard of a mode that was on, and that a node has turned off.
    pub(super) fn turned_off() -> Self {
        Self { previous: true, _thread: PhantomData }
    }

    fn set(enabled: bool) -> Self {
        let previous = sys::set_grad_mode(enabled).expect("setting a thread-local flag cannot fail");
        Self { previous, _thread: PhantomData }
    }
}

impl Drop for GradMode {
    fn drop(&mut self) {
        let _ = sys::set_grad_mode(self.previous);
    }
}

/// State that the engine keeps after a backward.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// Keep the saved tensors, so that another backward may go through the same graph.
    pub graph: bool,
    /// Record the backward itself, for a second derivative. Implies `graph`.
    pub derivative: bool,
}

/// Accumulates the gradients of scalar `losses` into every leaf they depend on, and releases the graph.
///
/// # Errors
/// The error or the panic of a backward in the graph; a loss that is not a scalar, or needs no gradient.
pub fn backward(losses: &[&Tensor]) -> Result<()> {
    backward_with(losses, &vec![None; losses.len()], Keep::default())
}

/// [`backward`] from given upstream gradients (`None` for a scalar's 1), keeping what `keep` says.
///
/// # Errors
/// As [`backward`]; also when `outputs` and `grads` differ in number.
pub fn backward_with(outputs: &[&Tensor], grads: &[Option<&Tensor>], keep: Keep) -> Result<()> {
    same_count("autograd::backward", outputs, grads)?;
    sys::backward(outputs, grads, &[], keep.graph || keep.derivative, keep.derivative)
}

/// Gradients of `inputs` without touching any `.grad`; `None` for an input that the outputs do not depend on.
///
/// # Errors
/// As [`backward_with`].
pub fn grad(
    outputs: &[&Tensor],
    grads: &[Option<&Tensor>],
    inputs: &[&Tensor],
    keep: Keep,
) -> Result<Vec<Option<Tensor>>> {
    same_count("autograd::grad", outputs, grads)?;
    sys::grad(outputs, grads, inputs, keep.graph || keep.derivative, keep.derivative)
}

/// Replaces the accumulated gradient of `leaf`; `None` removes it and frees its memory. The next backward then stores its gradient
/// instead of adding to it, which saves a pass over memory, and an optimizer can distinguish a parameter without a gradient from
/// one whose gradient is zero. (`tch`'s `zero_grad` fills with zeros.)
///
/// # Errors
/// An undefined leaf; a gradient of another shape, dtype or device than the leaf.
pub fn set_grad(leaf: &Tensor, grad: Option<&Tensor>) -> Result<()> {
    let invalid = |reason: String| Err(Error::invalid("autograd::set_grad", reason));
    if !leaf.defined() || grad.is_some_and(|grad| !grad.defined()) {
        return invalid("a tensor is undefined".into());
    }
    if let Some(grad) = grad
        && (grad.size() != leaf.size() || grad.kind() != leaf.kind() || grad.device() != leaf.device())
    {
        let of =
            |tensor: &Tensor| format!("{:?} {:?} on {:?}", tensor.kind(), tensor.size(), tensor.device());
        return invalid(format!("the gradient is {} and the leaf {}", of(grad), of(leaf)));
    }
    sys::set_grad(leaf, grad)
}

/// Returns the accumulated gradient of each leaf, sharing memory; `None` where it has none. One call into libtorch, which is what an optimizer
/// needs of hundreds of parameters.
///
/// # Errors
/// An undefined leaf.
pub fn gradients(leaves: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
    sys::gradients(leaves)
}

/// Removes the accumulated gradient of each leaf, as [`set_grad`] with `None`.
///
/// # Errors
/// An undefined leaf.
pub fn clear_gradients(leaves: &[&Tensor]) -> Result<()> {
    sys::clear_gradients(leaves)
}

fn same_count(operation: &'static str, outputs: &[&Tensor], grads: &[Option<&Tensor>]) -> Result<()> {
    if outputs.len() == grads.len() {
        return Ok(());
    }
    let reason =
        format!("{} outputs but {} upstream gradients; give one for each output", outputs.len(), grads.len());
    Err(Error::invalid(operation, reason))
}
