//! Functions whose backward is written by hand, as real nodes of libtorch's graph.
//!
//! For y = f(x), backward gets v = ∂L/∂y and returns vᵀ·∂y/∂x for every input that needs it. A [`Function`] is that
//! pair. [`apply`] runs the forward without recording, makes one node, and connects the outputs to it.
//!
//! What the node guarantees:
//! - Saved tensors are held as libtorch's own operators hold theirs: an in-place change between forward and backward is
//!   an error, never a wrong gradient; an output that is saved does not keep its own node alive.
//! - Which inputs need a gradient is known at entry ([`Forward::needs_input_grad`]), so that forward can save less, and
//!   is asked again for each backward ([`Backward::needs_input_grad`]).
//! - The function is dropped with the node, whether backward ran or not. Backward may run as often as the caller retains
//!   the graph; after release it is an error that says so.
//! - Saved tensors that nobody can ask for again are given away: in a backward that does not retain the graph,
//!   [`Backward::take_saved`] hands out the last reference, so that each can be freed, or overwritten
//!   ([`Backward::may_overwrite_saved`]), as soon as it is used.
//! - An `Err` or a panic in backward becomes the `Err` of [`backward`], [`grad`], or `tch`'s `f_backward`.
//! - Forward must leave its inputs as they are: an in-place change of one is an error.
//! - An output that is not the function's alone (an input, a tensor that it captured, one that is given twice) is connected
//!   through an alias, and stays what it was for everyone else. A captured tensor that requires a gradient may not be changed
//!   in place through its alias. Without a node, no output has a history.
//! - The engine may run backward on a thread of its own, as it does for CUDA: nothing is read there from a thread-local of
//!   the caller. What backward must know of it (random state, autocast) is captured in forward, as [`checkpoint()`] does.
//!
//! How this differs from PyTorch's `torch.autograd.Function`: a missing upstream gradient is `None` and not a tensor of
//! zeros; a second derivative is an error unless the function declares it
//! ([`Function::TWICE_DIFFERENTIABLE`]), where PyTorch's default silently records whatever backward does.
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
//! let y = autograd::apply(Square, &[&x])?.remove(0);
//! autograd::backward(&[&y.sum(kind::Kind::Double)])?;
//! assert_eq!(Vec::<f64>::try_from(x.grad())?, [2.0, -6.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use parking_lot::ReentrantMutex;
use std::marker::PhantomData;
use tch::Tensor;

use crate::error::{Error, Result};
use crate::sys::autograd as sys;

mod checkpoint;
mod gradcheck;
mod park;
pub mod retain;
mod settings;
mod surroundings;

pub use checkpoint::{Checkpoint, SequentialSegment, checkpoint, checkpoint_sequential};
pub use gradcheck::{GradcheckOptions, GradcheckReport, gradcheck};
pub use park::{Park, Parked};
pub use settings::{Settings, note_setting};
pub use surroundings::{Surrounded, Surroundings};

/// A differentiable function with a backward written by hand. See the [module](self).
///
/// The value itself carries what is not a tensor from forward to backward. A tensor that it holds is not protected
/// against in-place changes: save tensors through [`Forward::save`].
pub trait Function: Send + 'static {
    /// Whether backward uses differentiable operators only, so that a second derivative may go through it.
    const TWICE_DIFFERENTIABLE: bool = false;

    /// The name that errors and printed graphs show.
    fn name(&self) -> String {
        let path = std::any::type_name::<Self>();
        let base = path.split('<').next().unwrap_or(path);
        base.rsplit("::").next().unwrap_or(base).to_owned()
    }

    /// Computes the outputs. Runs without recording gradients; must not change the inputs.
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>>;

    /// Computes one gradient for each input, `None` for one that needs none, from one gradient for each output, `None`
    /// where none arrived. Each has its input's shape and dtype.
    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>>;
}

/// What a [`Function::forward`] knows and may ask for.
#[derive(Debug)]
pub struct Forward<'a> {
    needs: &'a [bool],
    recording: bool,
    saved: Vec<Tensor>,
    non_differentiable: Vec<usize>,
}

impl Forward<'_> {
    /// Whether input `index` needs a gradient. False for every input while gradients are not recorded.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs.get(index).copied().unwrap_or(false)
    }

    /// Whether there will be a backward at all. When not, saving is for nothing (and is ignored).
    pub fn will_run_backward(&self) -> bool {
        self.recording
    }

    /// Keeps `tensor` (an input, an output, or an intermediate) for backward. Costs no copy.
    pub fn save(&mut self, tensor: &Tensor) {
        if self.recording {
            self.saved.push(tensor.shallow_clone());
        }
    }

    /// Declares that output `index` has no gradient (an argmax, a count).
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }
}

/// What a [`Function::backward`] knows.
#[derive(Debug)]
pub struct Backward {
    needed: Vec<bool>,
    saved: Vec<Tensor>,
    pass: sys::Pass,
}

impl Backward {
    /// Whether this backward uses the gradient of input `index`.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needed.get(index).copied().unwrap_or(false)
    }

    /// The saved tensors, in the order in which they were saved.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// The saved tensors by value, so that each is freed when the caller drops it. Empty from the second call on.
    pub fn take_saved(&mut self) -> Vec<Tensor> {
        std::mem::take(&mut self.saved)
    }

    /// Whether no other backward, to come or under way on another thread, needs the saved tensors, so that a saved
    /// *intermediate*, which nothing but this function has ever seen, may be overwritten. Never overwrite a saved input or
    /// output.
    pub fn may_overwrite_saved(&self) -> bool {
        !self.pass.keep_saved
    }

    /// Runs `body` once, when the backward that this one is a part of has computed all gradients, and before it returns: for work
    /// on other streams that the caller of backward expects to be done. Its failure is that backward's.
    ///
    /// # Errors
    /// None in practice: a backward is running.
    pub fn at_end(&self, body: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        sys::at_end_of_backward(Box::new(body))
    }

    /// Refuses what a backward cannot serve that runs its forward again and puts gradients of captured leaves into `.grad`: the
    /// gradients of chosen inputs alone, for which the engine does not say which leaves they are, and a second derivative.
    ///
    /// # Errors
    /// [`Error::Invalid`] in those two cases, with the remedy; `operation` is whose words they are.
    pub fn check_replay(&self, operation: &'static str) -> Result<()> {
        if !sys::is_checkpoint_valid()? {
            return Err(Error::invalid(
                operation,
                "gradients of chosen inputs were asked for, but the segment may hold weights that only an ordinary \
                 backward reaches; call autograd::backward and read .grad()",
            ));
        }
        if self.is_recorded() {
            return Err(Error::invalid(
                operation,
                "a second derivative was asked for, which a segment that runs again cannot give; run it with \
                 `recompute: false`",
            ));
        }
        Ok(())
    }

    /// Whether a second derivative is wanted. What this backward does is recorded only if the function declares
    /// [`Function::TWICE_DIFFERENTIABLE`].
    pub fn is_recorded(&self) -> bool {
        self.pass.create_graph
    }
}

/// One thread at a time runs the function. The same thread may come back to it: waiting inside one backward, an engine's
/// thread takes up others.
struct Bound<F>(ReentrantMutex<F>);

impl<F: Function> sys::NodeBackward for Bound<F> {
    fn run(
        &self,
        grads: Vec<Option<Tensor>>,
        saved: Vec<Tensor>,
        needed: Vec<bool>,
        pass: sys::Pass,
    ) -> Result<Vec<Option<Tensor>>> {
        self.0.lock().backward(&mut Backward { needed, saved, pass }, grads)
    }
}

/// Runs `function` on `inputs` and connects its outputs to the graph.
///
/// # Errors
/// What forward returns; an output index out of range in [`Forward::mark_non_differentiable`].
pub fn apply<F: Function>(function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    apply_with(function, inputs, false)
}

/// [`apply`] for a function that has parameters of its own, whose gradients its backward puts into `.grad` itself: a node is made
/// whenever gradients are recorded, even if no input needs one.
///
/// # Errors
/// As [`apply`].
pub fn apply_always<F: Function>(function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    apply_with(function, inputs, true)
}

fn apply_with<F: Function>(mut function: F, inputs: &[&Tensor], always: bool) -> Result<Vec<Tensor>> {
    let name = function.name();
    let (node, needs) = sys::Node::new(&name, inputs, always)?;
    let mut ctx = Forward {
        needs: &needs,
        recording: node.is_some(),
        saved: Vec::new(),
        non_differentiable: Vec::new(),
    };
    let outputs = {
        let _no_grad = GradMode::off();
        function.forward(&mut ctx, inputs)?
    };
    let Some(node) = node else {
        // An input or a captured tensor, handed on as it is, would take gradients past this function.
        let without_history =
            |output: Tensor| if output.requires_grad() { output.f_detach() } else { Ok(output) };
        return Ok(outputs.into_iter().map(without_history).collect::<std::result::Result<_, _>>()?);
    };
    let Forward { saved, non_differentiable, .. } = ctx;
    let mut differentiable = vec![true; outputs.len()];
    for index in non_differentiable {
        *differentiable.get_mut(index).ok_or_else(|| {
            let count = outputs.len();
            Error::invalid(
                "autograd::apply",
                format!("output {index} of `{name}` was marked, but it has {count}"),
            )
        })? = false;
    }
    let bound = Box::new(Bound(ReentrantMutex::new(function)));
    node.attach(inputs, &outputs, &differentiable, &saved, F::TWICE_DIFFERENTIABLE, bound)
}

/// Scoped recording of gradients on this thread; the earlier state comes back when it is dropped, also by a panic.
#[derive(Debug)]
#[must_use = "the earlier state comes back as soon as the guard is dropped"]
pub struct GradMode {
    previous: bool,
    /// The state is this thread's, so the guard stays on it.
    _thread: PhantomData<*const ()>,
}

impl GradMode {
    /// Gradients are not recorded while the guard lives.
    pub fn off() -> Self {
        Self::set(false)
    }

    /// Gradients are recorded while the guard lives.
    pub fn on() -> Self {
        Self::set(true)
    }

    /// Whether this thread records gradients now.
    pub fn enabled() -> bool {
        sys::grad_mode().expect("reading a thread-local flag cannot fail")
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

/// What the engine keeps after a backward.
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
/// What a backward in the graph returned, or its panic; a loss that is not a scalar, or needs no gradient.
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

/// Replaces the gradient that `leaf` has accumulated; with `None` it has none, and its memory is free. The next backward
/// then stores its gradient there instead of adding to what was, which saves a pass over memory, and an optimizer can
/// tell a parameter that got no gradient from one whose gradient is zero. (`tch`'s `zero_grad` fills with zeros.)
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

fn same_count(operation: &'static str, outputs: &[&Tensor], grads: &[Option<&Tensor>]) -> Result<()> {
    if outputs.len() == grads.len() {
        return Ok(());
    }
    let reason =
        format!("{} outputs but {} upstream gradients; give one for each output", outputs.len(), grads.len());
    Err(Error::invalid(operation, reason))
}
