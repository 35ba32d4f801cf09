//! The pair of a forward and its backward, and the node that owns it.

use parking_lot::ReentrantMutex;
use tch::Tensor;

use super::engine::GradMode;
use crate::error::{Error, Result};
use crate::sys::autograd as sys;

/// A differentiable function with a backward written by hand. See the [module](super).
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
