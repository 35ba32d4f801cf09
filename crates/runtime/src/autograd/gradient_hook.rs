//! Hooks that run when a gradient arrives.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::sys::autograd as sys;
use crate::sys::tensor::bump_version;

/// Calls a closure after each addition to a leaf's `.grad`, during backward: PyTorch's
/// `Tensor.register_post_accumulate_grad_hook`. Dropping it removes the hook.
///
/// A backward adds once, and once more for each recomputed segment that uses the leaf. The closure may take the gradient away
/// ([`set_grad`](super::set_grad)).
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use runtime::autograd::{self, GradientHook};
/// use tch::{Kind, Tensor};
///
/// let w = Tensor::from_slice(&[1.0f32, 2.0]).set_requires_grad(true);
/// // A tensor may be sent to another thread, and shared behind a lock.
/// let seen = Arc::new(Mutex::new((w.shallow_clone(), Vec::new())));
/// let shared = seen.clone();
/// let hook = GradientHook::new(&w, move || {
///     let (leaf, sums) = &mut *shared.lock().unwrap();
///     sums.push(leaf.grad().sum(Kind::Double).double_value(&[]));
///     autograd::set_grad(leaf, None)
/// })?;
/// for _ in 0..2 {
///     autograd::backward(&[&(&w * &w).sum(Kind::Float)])?;
/// }
/// drop(hook);
/// autograd::backward(&[&w.sum(Kind::Float)])?;
/// assert_eq!(seen.lock().unwrap().1, [6.0, 6.0]);
/// # Ok::<(), runtime::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientHook(Tensor);

impl GradientHook {
    /// Sets the hook of `leaf`, which has at most one. A failure of `body` is the backward's.
    ///
    /// # Errors
    /// A tensor that is no leaf, or needs no gradient.
    pub fn new(leaf: &Tensor, body: impl Fn() -> Result<()> + Send + Sync + 'static) -> Result<Self> {
        if !leaf.is_leaf() || !leaf.requires_grad() {
            return Err(Error::invalid("gradient hook", "the tensor is no leaf that requires a gradient"));
        }
        sys::set_gradient_hook(leaf, Box::new(body))?;
        Ok(Self(leaf.shallow_clone()))
    }
}

impl Drop for GradientHook {
    fn drop(&mut self) {
        // Fails for an undefined tensor alone.
        let _ = sys::clear_gradient_hook(&self.0);
    }
}

/// Tells autograd that a tensor's memory was written by other means than its operators: a backward that saved it is refused.
///
/// # Errors
/// Errors of libtorch.
pub fn mark_written(tensor: &Tensor) -> Result<()> {
    bump_version(tensor)
}
