//! Nodes of libtorch's graph, and the engine (`cpp/autograd.cpp`).

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};

use parking_lot::Mutex;
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
    needed: *const u8,
    out: *mut *mut C_tensor,
    out_count: usize,
    keep_saved: c_int,
    create_graph: c_int,
) -> Status;

unsafe extern "C" {
    fn rt_grad_mode(enabled: *mut c_int) -> Status;
    fn rt_grad_mode_set(enabled: c_int, previous: *mut c_int) -> Status;
    fn rt_node_new(
        name: *const c_char,
        inputs: *const *const C_tensor,
        input_count: usize,
        always: c_int,
        needs_grad: *mut u8,
        out: *mut *mut RawNode,
    ) -> Status;
    fn rt_node_free(node: *mut RawNode);
    fn rt_node_attach(
        node: *mut RawNode,
        inputs: *const *const C_tensor,
        input_count: usize,
        outputs: *const *const C_tensor,
        output_count: usize,
        differentiable: *const u8,
        saved: *const *const C_tensor,
        saved_count: usize,
        twice_differentiable: c_int,
        backward: BackwardCallback,
        drop: extern "C" fn(*mut c_void),
        state: *mut c_void,
        wrapped: *mut *mut C_tensor,
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
        needed: Vec<bool>,
        pass: Pass,
    ) -> Result<Vec<Option<Tensor>>>;
}

/// A node that has no outputs yet.
pub(crate) struct Node(NonNull<RawNode>);

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and dropped once; outputs hold their own reference to the node.
        unsafe { rt_node_free(self.0.as_ptr()) }
    }
}

impl Node {
    /// Returns a node over `inputs` if gradients are recorded and an input needs one (or `always`), and which inputs need one.
    pub(crate) fn new(name: &str, inputs: &[&Tensor], always: bool) -> Result<(Option<Self>, Vec<bool>)> {
        let name = CString::new(name.replace('\0', " ")).expect("NUL was replaced");
        let inputs = pointers(inputs);
        let mut needs = vec![0u8; inputs.len()];
        let mut node = null_mut();
        // SAFETY: `inputs` and `needs` have `inputs.len()` entries and outlive the call; so does the name.
        unsafe {
            check(rt_node_new(
                name.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                always.into(),
                needs.as_mut_ptr(),
                &mut node,
            ))
        }?;
        Ok((NonNull::new(node).map(Self), needs.into_iter().map(|need| need != 0).collect()))
    }

    /// Connects the outputs to this node and gives it the saved tensors and the state. Returns the connected outputs.
    pub(crate) fn attach(
        self,
        inputs: &[&Tensor],
        outputs: &[Tensor],
        differentiable: &[bool],
        saved: &[Tensor],
        twice_differentiable: bool,
        backward: Box<dyn NodeBackward>,
    ) -> Result<Vec<Tensor>> {
        assert_eq!(outputs.len(), differentiable.len());
        let (inputs, output_pointers, saved) = (pointers(inputs), pointers(outputs), pointers(saved));
        let differentiable: Vec<u8> = differentiable.iter().map(|&flag| flag.into()).collect();
        let state = Box::into_raw(Box::new(backward)).cast::<c_void>();
        let mut wrapped = vec![null_mut(); outputs.len()];
        // SAFETY: every array has the length given beside it and outlives the call; `state` is a Box of the type that
        // both callbacks expect, and C++ takes it in every case.
        unsafe {
            check(rt_node_attach(
                self.0.as_ptr(),
                inputs.as_ptr(),
                inputs.len(),
                output_pointers.as_ptr(),
                output_pointers.len(),
                differentiable.as_ptr(),
                saved.as_ptr(),
                saved.len(),
                twice_differentiable.into(),
                run_backward,
                drop_state,
                state,
                wrapped.as_mut_ptr(),
            ))
        }?;
        // SAFETY: on success each entry is a tensor that is ours.
        Ok(wrapped.into_iter().map(|pointer| unsafe { take(pointer) }.unwrap_or_default()).collect())
    }
}

type State = Box<dyn NodeBackward>;

extern "C" fn run_backward(
    state: *mut c_void,
    grads: *const *mut C_tensor,
    grad_count: usize,
    saved: *const *mut C_tensor,
    saved_count: usize,
    needed: *const u8,
    out: *mut *mut C_tensor,
    out_count: usize,
    keep_saved: c_int,
    create_graph: c_int,
) -> Status {
    callback(|| {
        // SAFETY: `state` is the Box that `attach` gave, alive while the node runs (C++ holds a shared pointer), and
        // `dyn NodeBackward` is Sync, so that several threads may run it.
        let state = unsafe { &*state.cast::<State>() };
        // SAFETY: each array has the length given beside it; the tensors in `grads` and `saved` are given to us.
        let (grads, saved, needed) = unsafe {
            let grads: Vec<_> = (0..grad_count).map(|i| take(*grads.add(i))).collect();
            let saved: Vec<_> = (0..saved_count).map(|i| take(*saved.add(i)).unwrap_or_default()).collect();
            let needed: Vec<_> = (0..out_count).map(|i| *needed.add(i) != 0).collect();
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

extern "C" fn drop_state(state: *mut c_void) {
    // A panic in the drop cannot be returned: the panic hook reports it, and it ends here.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: C++ gives the Box back once, when nothing uses it any more.
        drop(unsafe { Box::from_raw(state.cast::<State>()) });
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
