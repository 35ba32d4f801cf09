//! Custom autograd functions: hand-written backward passes as nodes of libtorch's graph.
//!
//! For y = f(x), backward gets v = ∂L/∂y and returns vᵀ·∂y/∂x for every input that needs it. A [`Function`] has both.
//! [`apply`] runs the forward without recording, creates one node, and connects the outputs to it.
//!
//! Guarantees of the node:
//! - Saved tensors are libtorch's `SavedVariable`s: an in-place change between forward and backward is an error, never
//!   a wrong gradient; a saved output does not keep its own node alive.
//! - [`Forward::needs_input_grad`] tells forward which inputs need a gradient, so that it can save less;
//!   [`Backward::needs_input_grad`] tells each backward which gradients it uses.
//! - The function is dropped with the node, whether backward ran or not. Backward may run as often as the caller retains
//!   the graph; after release it is an error that says so.
//! - In a backward that does not retain the graph, [`Backward::take_saved`] returns the last reference to each saved
//!   tensor, so that it can be freed, or overwritten ([`Backward::may_overwrite_saved`]), as soon as it has been used.
//! - An `Err` or a panic in backward becomes the `Err` of [`backward`], [`grad`], or `tch`'s `f_backward`.
//! - Forward must not change its inputs in place; that is an error.
//! - An output that other code also holds (an input, a captured tensor, one that is returned twice) is connected through an alias,
//!   and the tensor itself is unchanged. A captured tensor that requires a gradient may not be changed in place through its alias.
//!   Without a node, no output has a history.
//! - The engine may run backward on its own thread, as it does for CUDA, where the caller's thread-local state is not visible. A
//!   function that needs it in backward (random state, autocast) captures it in forward, as [`checkpoint()`] does.
//!
//! How this differs from PyTorch's `torch.autograd.Function`: a missing upstream gradient is `None` and not a tensor of
//! zeros; a second derivative is an error unless the function declares it ([`Function::TWICE_DIFFERENTIABLE`]);
//! PyTorch's default silently records whatever backward does.
//!
//! ```
//! use runtime::autograd::{self, Backward, Forward, Function};
//! use tch::{Tensor, kind};
//!
//! struct Square;
//! impl Function for Square {
//!     fn forward(&mut self, ctx: &mut Forward, inputs: &[&Tensor]) -> runtime::Result<Vec<Tensor>> {
//!         ctx.save(inputs[0]);
//!         Ok(vec![inputs[0].f_square()?])
//!     }
//!     fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> runtime::Result<Vec<Option<Tensor>>> {
//!         let x = ctx.take_saved().remove(0);
//!         Ok(vec![grads[0].as_ref().map(|g| g * x * 2.0)])
//!     }
//! }
//!
//! let x = Tensor::from_slice(&[1.0, -3.0]).set_requires_grad(true);
//! let [y] = autograd::apply(Square, &[&x])?;
//! autograd::backward(&[&y.sum(kind::Kind::Double)])?;
//! assert_eq!(Vec::<f64>::try_from(x.grad())?, [2.0, -6.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checkpoint;
mod engine;
mod function;
mod gradcheck;
mod gradient_hook;
pub mod retain;
mod saved_tensor_storage;
mod settings;
mod thread_local_state;

pub use checkpoint::{Checkpoint, checkpoint};
pub use engine::{GradMode, Keep, backward, backward_with, clear_gradients, grad, gradients, set_grad};
pub use function::{Backward, Forward, Function, apply, apply_always, apply_always_any, apply_any};
pub use gradcheck::{GradcheckConfig, GradcheckReport, gradcheck};
pub use gradient_hook::{GradientHook, mark_written};
pub use saved_tensor_storage::{SavedTensorStorage, StoredTensor};
pub use settings::{Settings, note_setting};
pub use thread_local_state::{ThreadLocalState, ThreadLocalStateGuard};
