//! The trait of custom functions, and the node that owns one.

use std::sync::Arc;

use parking_lot::ReentrantMutex;
use smallvec::{SmallVec, smallvec};
use tch::Tensor;

use super::engine::GradMode;
use crate::device::graph::{Progress, ProgressGuard, progress};
use crate::error::{Error, Result};
use crate::random::{Step, StepGuard, current_step};
use crate::sys::autograd as sys;

/// A differentiable function with a backward written by hand. See the [module](super).
///
/// The value itself carries everything that is not a tensor from forward to backward. Save tensors with
/// [`Forward::save`]: a tensor in the value is not protected against in-place changes.
pub trait Function: Send + 'static {
    /// Whether backward uses differentiable operators only, so that a second derivative is possible.
    const TWICE_DIFFERENTIABLE: bool = false;

    /// Returns the name in errors and printed graphs.
    fn name(&self) -> &'static str {
        let path = std::any::type_name::<Self>();
        let base = path.split('<').next().unwrap_or(path);
        base.rsplit("::").next().unwrap_or(base)
    }

    /// Computes the outputs. Runs without recording gradients; must not change the inputs.
    fn forward(&mut self, ctx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Vec<Tensor>>;

    /// Computes one gradient for each input, `None` for one that needs none, from one gradient for each output, `None`
    /// where none arrived. Each has its input's shape and dtype.
    fn backward(&self, ctx: &mut Backward, grads: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>>;
}

/// The context of a [`Function::forward`].
#[derive(Debug)]
pub struct Forward<'a> {
    needs: &'a [bool],
    node: Option<&'a sys::Node>,
    non_differentiable: SmallVec<[usize; 4]>,
}

impl Forward<'_> {
    /// Returns whether input `index` needs a gradient. False for every input while gradients are not recorded.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs.get(index).copied().unwrap_or(false)
    }

    /// Returns whether there can be a backward. If not, saved tensors are ignored.
    pub fn will_run_backward(&self) -> bool {
        self.node.is_some()
    }

    /// Keeps `tensor` (an input, an output, or an intermediate) for backward. Costs no copy.
    pub fn save(&mut self, tensor: &Tensor) {
        if let Some(node) = self.node {
            node.save(tensor);
        }
    }

    /// Declares that output `index` has no gradient (an argmax, a count).
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }
}

/// The context of a [`Function::backward`].
#[derive(Debug)]
pub struct Backward {
    needed: sys::Flags,
    saved: Vec<Tensor>,
    pass: sys::Pass,
}

impl Backward {
    /// Returns whether this backward uses the gradient of input `index`.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needed.get(index).copied().unwrap_or(false)
    }

    /// Returns the saved tensors, in the order in which they were saved.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Returns the saved tensors by value, so that each is freed when the caller drops it. Empty from the second call
    /// on.
    pub fn take_saved(&mut self) -> Vec<Tensor> {
        std::mem::take(&mut self.saved)
    }

    /// Returns whether no later or concurrent backward needs the saved tensors, so that a saved *intermediate*, which only this
    /// function has seen, may be overwritten. Never overwrite a saved input or output.
    pub fn may_overwrite_saved(&self) -> bool {
        !self.pass.keep_saved
    }

    /// Runs `body` once, after the whole backward pass has computed all gradients and before it returns: for work on other streams
    /// that the caller of backward expects to be done. The backward pass returns its error.
    ///
    /// # Errors
    /// Never fails during a backward.
    pub fn at_end(&self, body: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        sys::at_end_of_backward(Box::new(body))
    }

    /// Refuses two uses of a backward that recomputes its forward and accumulates gradients of captured leaves into `.grad`:
    /// gradients of chosen inputs alone, for which the engine does not say which leaves they are, and a second derivative.
    ///
    /// # Errors
    /// [`Error::Invalid`] in those two cases, with the remedy, in the name of `operation`.
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

    /// Returns whether a second derivative is requested. This backward is recorded only if the function declares
    /// [`Function::TWICE_DIFFERENTIABLE`].
    pub fn is_recorded(&self) -> bool {
        self.pass.create_graph
    }
}

struct Bound<F> {
    /// One thread at a time runs the function. The same thread may re-enter it: an engine thread that waits inside one backward runs
    /// others.
    function: ReentrantMutex<F>,
    /// The training step of the forward, and how far its capture is, which a thread of the engine does not have.
    step: Option<Arc<Step>>,
    progress: Progress,
}

impl<F: Function> sys::NodeBackward for Bound<F> {
    fn run(
        &self,
        grads: Vec<Option<Tensor>>,
        saved: Vec<Tensor>,
        needed: sys::Flags,
        pass: sys::Pass,
    ) -> Result<Vec<Option<Tensor>>> {
        let _step = self.step.clone().map(|step| StepGuard::enter(Some(step)));
        let is_captured = self.progress != Progress::Eager;
        let _progress = is_captured.then(|| ProgressGuard::enter(self.progress));
        self.function.lock().backward(&mut Backward { needed, saved, pass }, grads)
    }
}

/// Runs `function` on `inputs` and connects its outputs to the graph. The pattern that takes the outputs says how many there are:
/// `let [y] = apply(function, &[&x])?`.
///
/// # Errors
/// Errors of forward; another number of outputs than the pattern has; an output index out of range in
/// [`Forward::mark_non_differentiable`].
pub fn apply<F: Function, const OUTPUTS: usize>(
    function: F,
    inputs: &[&Tensor],
) -> Result<[Tensor; OUTPUTS]> {
    exactly(function.name(), apply_with(function, inputs, false)?)
}

/// As [`apply`], for a function whose number of outputs depends on its value.
///
/// # Errors
/// As [`apply`].
pub fn apply_any<F: Function>(function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    apply_with(function, inputs, false)
}

/// As [`apply`], for a function with its own parameters, whose gradients its backward accumulates into `.grad` itself: a node is
/// created whenever gradients are recorded, even if no input needs one.
///
/// # Errors
/// As [`apply`].
pub fn apply_always<F: Function, const OUTPUTS: usize>(
    function: F,
    inputs: &[&Tensor],
) -> Result<[Tensor; OUTPUTS]> {
    exactly(function.name(), apply_with(function, inputs, true)?)
}

/// As [`apply_always`], for a function whose number of outputs depends on its value.
///
/// # Errors
/// As [`apply`].
pub fn apply_always_any<F: Function>(function: F, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    apply_with(function, inputs, true)
}

pub(super) fn exactly<const OUTPUTS: usize>(name: &str, outputs: Vec<Tensor>) -> Result<[Tensor; OUTPUTS]> {
    outputs.try_into().map_err(|outputs: Vec<Tensor>| {
        let count = outputs.len();
        Error::invalid("autograd::apply", format!("`{name}` has {count} outputs; {OUTPUTS} were expected"))
    })
}

fn apply_with<F: Function>(mut function: F, inputs: &[&Tensor], always: bool) -> Result<Vec<Tensor>> {
    let name = function.name();
    let sys::Begun { node, needs, recorded } = sys::Node::begin(name, inputs, always)?;
    // Nothing is recorded from here on, until the outputs are connected or this guard is dropped.
    let no_grad = recorded.then(GradMode::turned_off);
    let mut ctx = Forward { needs: &needs, node: node.as_ref(), non_differentiable: SmallVec::new() };
    let mut outputs = function.forward(&mut ctx, inputs)?;
    let marked = ctx.non_differentiable;
    let Some(node) = node else {
        // Returned directly, an input or a captured tensor would carry gradients past this function.
        let without_history =
            |output: Tensor| if output.requires_grad() { output.f_detach() } else { Ok(output) };
        return Ok(outputs.into_iter().map(without_history).collect::<std::result::Result<_, _>>()?);
    };
    let mut differentiable: sys::Flags = smallvec![true; outputs.len()];
    for index in marked {
        *differentiable.get_mut(index).ok_or_else(|| {
            let count = outputs.len();
            Error::invalid(
                "autograd::apply",
                format!("output {index} of `{name}` was marked, but it has {count}"),
            )
        })? = false;
    }
    std::mem::forget(no_grad);
    let bound = Bound { function: ReentrantMutex::new(function), step: current_step(), progress: progress() };
    node.attach(inputs, &mut outputs, &differentiable, F::TWICE_DIFFERENTIABLE, bound)?;
    Ok(outputs)
}
