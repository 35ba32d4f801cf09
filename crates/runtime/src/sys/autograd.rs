//! Nodes of libtorch's graph, and the engine (`cpp/autograd.cpp`).

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tch::Tensor;
use torch_sys::C_tensor;

use super::{Status, callback, check, pointers, take};
use crate::error::{Error, Result};

#[repr(C)]
struct RawNode {
    _private: [u8; 0],
}

type BackwardCallback = extern "C" fn(
    state: *mut c_void,
    grads: *const *mut C_tensor,
    grad_count: usize,
    saved: *const *mut C_tensor,
    saved_count: usize,
    needed: *const bool,
    out: *mut *mut C_tensor,
    out_count: usize,
    keep_saved: c_int,
    create_graph: c_int,
) -> Status;

unsafe extern "C" {
    fn rt_grad_mode(enabled: *mut c_int) -> Status;
    fn rt_grad_mode_set(enabled: c_int, previous: *mut c_int) -> Status;
    fn rt_node_begin(
        name: *const c_char,
        name_size: usize,
        inputs: *const *const C_tensor,
        input_count: usize,
        always: c_int,
        needs_grad: *mut bool,
        recording: *mut c_int,
        out: *mut *mut RawNode,
    ) -> Status;
    fn rt_node_save(node: *mut RawNode, tensor: *const C_tensor);
    fn rt_node_free(node: *mut RawNode);
    fn rt_node_attach(
        node: *mut RawNode,
        inputs: *const *const C_tensor,
        input_count: usize,
        outputs: *const *mut C_tensor,
        output_count: usize,
        differentiable: *const bool,
        twice_differentiable: c_int,
        backward: BackwardCallback,
        drop: extern "C" fn(*mut c_void),
        state: *mut c_void,
    ) -> Status;
    fn rt_backward_run(
        outputs: *const *const C_tensor,
        grads: *const *const C_tensor,
        output_count: usize,
        inputs: *const *const C_tensor,
        input_count: usize,
        retain_graph: c_int,
        create_graph: c_int,
    ) -> Status;
    fn rt_grad_run(
        outputs: *const *const C_tensor,
        grads: *const *const C_tensor,
        output_count: usize,
        inputs: *const *const C_tensor,
        input_count: usize,
        retain_graph: c_int,
        create_graph: c_int,
        result: *mut *mut C_tensor,
    ) -> Status;
    fn rt_set_grad(leaf: *const C_tensor, grad: *const C_tensor) -> Status;
    fn rt_gradients(leaves: *const *const C_tensor, count: usize, grads: *mut *mut C_tensor) -> Status;
    fn rt_clear_gradients(leaves: *const *const C_tensor, count: usize) -> Status;
    fn rt_is_checkpoint_valid(valid: *mut c_int) -> Status;
    fn rt_at_end_of_backward(
        context: *mut c_void,
        run: extern "C" fn(*mut c_void) -> Status,
        release: extern "C" fn(*mut c_void),
    ) -> Status;
    fn rt_set_gradient_hook(
        leaf: *const C_tensor,
        context: *mut c_void,
        run: extern "C" fn(*mut c_void) -> Status,
        release: extern "C" fn(*mut c_void),
    ) -> Status;
    fn rt_clear_gradient_hook(leaf: *const C_tensor) -> Status;
}

/// Sets whether this thread records gradients; returns the previous setting.
pub(crate) fn set_grad_mode(enabled: bool) -> Result<bool> {
    let mut previous = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_grad_mode_set(enabled.into(), &mut previous)) }?;
    Ok(previous != 0)
}

/// Whether this thread records gradients.
pub(crate) fn grad_mode() -> Result<bool> {
    let mut enabled = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_grad_mode(&mut enabled)) }?;
    Ok(enabled != 0)
}

/// Whether the running backward computes the gradient of every leaf.
pub(crate) fn is_checkpoint_valid() -> Result<bool> {
    let mut valid = 0;
    // SAFETY: the out-parameter outlives the call.
    unsafe { check(rt_is_checkpoint_valid(&mut valid)) }?;
    Ok(valid != 0)
}

/// The function that runs once at the end of a backward.
type AtEnd = Mutex<Option<Box<dyn FnOnce() -> Result<()> + Send>>>;

extern "C" fn run_at_end(context: *mut c_void) -> Status {
    // SAFETY: the context is the box that `at_end_of_backward` gave away, alive until `release_at_end`.
    let body = unsafe { &*context.cast::<AtEnd>() }.lock().take();
    callback(move || body.map_or(Ok(()), |body| body()))
}

extern "C" fn release_at_end(context: *mut c_void) {
    // As in `drop_state`.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the context is the box that `at_end_of_backward` gave away, and comes back once.
        drop(unsafe { Box::from_raw(context.cast::<AtEnd>()) });
    }));
}

/// Runs `body` when the backward that is running on this thread has computed all gradients.
pub(crate) fn at_end_of_backward(body: Box<dyn FnOnce() -> Result<()> + Send>) -> Result<()> {
    let context = Box::into_raw(Box::<AtEnd>::new(Mutex::new(Some(body)))).cast::<c_void>();
    // SAFETY: the shim takes the context over and gives it to `release_at_end` once; both functions take what it is, and neither
    // unwinds.
    unsafe { check(rt_at_end_of_backward(context, run_at_end, release_at_end)) }
}

/// A hook that runs after each addition to a gradient.
type AfterGradient = Box<dyn Fn() -> Result<()> + Send + Sync>;

extern "C" fn run_after_gradient(context: *mut c_void) -> Status {
    // SAFETY: the context is the box that `set_gradient_hook` gave away, alive until `release_after_gradient`; the closure may be
    // called from any thread.
    let body = unsafe { &*context.cast::<AfterGradient>() };
    callback(body)
}

extern "C" fn release_after_gradient(context: *mut c_void) {
    // As in `drop_state`.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the context is the box that `set_gradient_hook` gave away, and comes back once.
        drop(unsafe { Box::from_raw(context.cast::<AfterGradient>()) });
    }));
}

/// Calls `body` after each addition to the gradient of `leaf`.
pub(crate) fn set_gradient_hook(leaf: &Tensor, body: AfterGradient) -> Result<()> {
    let context = Box::into_raw(Box::new(body)).cast::<c_void>();
    // SAFETY: the tensor is alive; the shim takes the context over and gives it to `release_after_gradient` once; both functions take
    // what it is, and neither unwinds.
    unsafe { check(rt_set_gradient_hook(leaf.as_ptr(), context, run_after_gradient, release_after_gradient)) }
}

/// Removes the hook of `leaf`.
pub(crate) fn clear_gradient_hook(leaf: &Tensor) -> Result<()> {
    // SAFETY: the tensor is alive.
    unsafe { check(rt_clear_gradient_hook(leaf.as_ptr())) }
}

/// The conditions of one run of a node's backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    /// Another backward, running or later, needs the saved tensors.
    pub(crate) keep_saved: bool,
    /// A second derivative is requested.
    pub(crate) create_graph: bool,
}

/// The backward that a node calls when gradients arrive.
pub(crate) trait NodeBackward: Send + Sync {
    fn run(
        &self,
        grads: Vec<Option<Tensor>>,
        saved: Vec<Tensor>,
        needed: Flags,
        pass: Pass,
    ) -> Result<Vec<Option<Tensor>>>;
}

/// A flag for each input or output of a function.
pub(crate) type Flags = SmallVec<[bool; 16]>;

/// A node that has no outputs yet.
#[derive(Debug)]
pub(crate) struct Node(NonNull<RawNode>);

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and dropped once.
        unsafe { rt_node_free(self.0.as_ptr()) }
    }
}

/// The beginning of a function's forward, which does not record gradients.
pub(crate) struct Begun {
    /// A node over the inputs, if gradients were recorded and an input needs one (or always).
    pub(crate) node: Option<Node>,
    /// The inputs that need a gradient.
    pub(crate) needs: Flags,
    /// Whether this thread recorded gradients before.
    pub(crate) recorded: bool,
}

impl Node {
    /// Makes a node over `inputs` if gradients are recorded and an input needs one (or `always`), and turns the recording off on this
    /// thread. [`Node::attach`] turns it on again; without a node, the caller does.
    pub(crate) fn begin(name: &'static str, inputs: &[&Tensor], always: bool) -> Result<Begun> {
        let pointers = pointers(inputs);
        let mut needs: Flags = SmallVec::from_elem(false, inputs.len());
        let (mut recorded, mut node) = (0, null_mut());
        // SAFETY: `pointers` and `needs` have `inputs.len()` entries and outlive the call; C++ writes 0 or 1 into each of `needs`. The
        // name is static, so that it outlives the node.
        unsafe {
            check(rt_node_begin(
                name.as_ptr().cast(),
                name.len(),
                pointers.as_ptr(),
                pointers.len(),
                always.into(),
                needs.as_mut_ptr(),
                &mut recorded,
                &mut node,
            ))
        }?;
        Ok(Begun { node: NonNull::new(node).map(Self), needs, recorded: recorded != 0 })
    }

    /// Keeps a reference to `tensor` for backward.
    pub(crate) fn save(&self, tensor: &Tensor) {
        // SAFETY: the node is ours and has no outputs yet; the tensor outlives the call, which takes a reference.
        unsafe { rt_node_save(self.0.as_ptr(), tensor.as_ptr()) }
    }

    /// Connects the outputs to this node, gives it the state, and turns the recording of gradients on. An output that other code also
    /// holds becomes an alias.
    pub(crate) fn attach<B: NodeBackward>(
        self,
        inputs: &[&Tensor],
        outputs: &mut [Tensor],
        differentiable: &[bool],
        twice_differentiable: bool,
        backward: B,
    ) -> Result<()> {
        assert_eq!(outputs.len(), differentiable.len());
        let inputs = pointers(inputs);
        let outputs: SmallVec<[*mut C_tensor; 4]> = outputs.iter_mut().map(Tensor::as_mut_ptr).collect();
        let state = Box::into_raw(Box::new(backward)).cast::<c_void>();
        let node = self.0.as_ptr();
        std::mem::forget(self);
        // SAFETY: every array has the length given beside it and outlives the call, which writes to the outputs, borrowed mutably.
        // `state` is a Box of the type that both callbacks expect. C++ takes the node and the state in every case.
        unsafe {
            check(rt_node_attach(
                node,
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
                differentiable.as_ptr(),
                twice_differentiable.into(),
                run_backward::<B>,
                drop_state::<B>,
                state,
            ))
        }
    }
}

extern "C" fn run_backward<B: NodeBackward>(
    state: *mut c_void,
    grads: *const *mut C_tensor,
    grad_count: usize,
    saved: *const *mut C_tensor,
    saved_count: usize,
    needed: *const bool,
    out: *mut *mut C_tensor,
    out_count: usize,
    keep_saved: c_int,
    create_graph: c_int,
) -> Status {
    callback(|| {
        // SAFETY: `state` is the Box that `attach` gave, alive while the node runs (C++ holds a shared pointer), and a
        // `NodeBackward` is Sync, so that several threads may run it.
        let state = unsafe { &*state.cast::<B>() };
        // SAFETY: each array has the length given beside it; the tensors in `grads` and `saved` are given to us.
        let (grads, saved, needed) = unsafe {
            let grads: Vec<_> = (0..grad_count).map(|i| take(*grads.add(i))).collect();
            let saved: Vec<_> = (0..saved_count).map(|i| take(*saved.add(i)).unwrap_or_default()).collect();
            let needed: Flags = (0..out_count).map(|i| *needed.add(i)).collect();
            (grads, saved, needed)
        };
        let result = state.run(
            grads,
            saved,
            needed,
            Pass { keep_saved: keep_saved != 0, create_graph: create_graph != 0 },
        )?;
        if result.len() != out_count {
            return Err(Error::invalid(
                "backward",
                format!("it returned {} gradients for {out_count} inputs", result.len()),
            ));
        }
        for (index, gradient) in result.into_iter().enumerate() {
            if let Some(mut gradient) = gradient {
                let pointer = gradient.as_mut_ptr();
                std::mem::forget(gradient);
                // SAFETY: `out` has `out_count` entries; ownership of the tensor moves to C++.
                unsafe { *out.add(index) = pointer };
            }
        }
        Ok(())
    })
}

extern "C" fn drop_state<B: NodeBackward>(state: *mut c_void) {
    // A panic in the drop cannot be returned: the panic hook reports it, and it ends here.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: C++ gives the Box back once, when nothing uses it any more.
        drop(unsafe { Box::from_raw(state.cast::<B>()) });
    }));
}

/// Pointers to gradients; null for `None`.
fn optional_pointers(tensors: &[Option<&Tensor>]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.map_or(std::ptr::null(), Tensor::as_ptr)).collect()
}

/// Accumulates gradients into `inputs`, or into every leaf if `inputs` is empty.
pub(crate) fn backward(
    outputs: &[&Tensor],
    grads: &[Option<&Tensor>],
    inputs: &[&Tensor],
    retain_graph: bool,
    create_graph: bool,
) -> Result<()> {
    assert_eq!(outputs.len(), grads.len());
    let (outputs, grads, inputs) = (pointers(outputs), optional_pointers(grads), pointers(inputs));
    // SAFETY: every array has the length given beside it and outlives the call.
    unsafe {
        check(rt_backward_run(
            outputs.as_ptr(),
            grads.as_ptr(),
            outputs.len(),
            inputs.as_ptr(),
            inputs.len(),
            retain_graph.into(),
            create_graph.into(),
        ))
    }
}

/// Replaces the `.grad` of a leaf, or removes it.
pub(crate) fn set_grad(leaf: &Tensor, grad: Option<&Tensor>) -> Result<()> {
    // SAFETY: both tensors outlive the call; null is "no gradient".
    unsafe { check(rt_set_grad(leaf.as_ptr(), grad.map_or(std::ptr::null(), Tensor::as_ptr))) }
}

/// Returns the `.grad` of each leaf.
pub(crate) fn gradients(leaves: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
    let leaves = pointers(leaves);
    let mut grads = vec![null_mut(); leaves.len()];
    // SAFETY: both arrays have `leaves.len()` entries and outlive the call.
    unsafe { check(rt_gradients(leaves.as_ptr(), leaves.len(), grads.as_mut_ptr())) }?;
    // SAFETY: on success each entry is null or a tensor that is ours.
    Ok(grads.into_iter().map(|pointer| unsafe { take(pointer) }).collect())
}

/// Removes the `.grad` of each leaf.
pub(crate) fn clear_gradients(leaves: &[&Tensor]) -> Result<()> {
    let leaves = pointers(leaves);
    // SAFETY: the array has `leaves.len()` entries and outlives the call.
    unsafe { check(rt_clear_gradients(leaves.as_ptr(), leaves.len())) }
}

/// Returns the gradients of `inputs`; `None` for an input that the outputs do not depend on.
pub(crate) fn grad(
    outputs: &[&Tensor],
    grads: &[Option<&Tensor>],
    inputs: &[&Tensor],
    retain_graph: bool,
    create_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    assert_eq!(outputs.len(), grads.len());
    let (outputs, grads, inputs) = (pointers(outputs), optional_pointers(grads), pointers(inputs));
    let mut result = vec![null_mut(); inputs.len()];
    // SAFETY: every array has the length given beside it and outlives the call.
    unsafe {
        check(rt_grad_run(
            outputs.as_ptr(),
            grads.as_ptr(),
            outputs.len(),
            inputs.as_ptr(),
            inputs.len(),
            retain_graph.into(),
            create_graph.into(),
            result.as_mut_ptr(),
        ))
    }?;
    // SAFETY: on success each entry is null or a tensor that is ours.
    Ok(result.into_iter().map(|pointer| unsafe { take(pointer) }).collect())
}
