// Custom nodes in libtorch's autograd graph. See guard.h for the contract.
#pragma once
#include <cstdint>

#include "guard.h"

struct rt_node;

extern "C" {
// Runs a Rust backward. `state` is borrowed. Rust takes `grads` (NULL where no gradient arrived) and `saved`.
// `needed[i]` says whether the gradient of input i is used. `out` holds `out_count` NULLs; Rust puts tensors there that
// C++ takes, also when it fails. `keep_saved`: another backward, running or later, needs the saved tensors. `create_graph`: a second
// derivative is requested.
typedef rt_status (*rt_backward)(void* state, at::Tensor** grads, size_t grad_count, at::Tensor** saved,
                                 size_t saved_count, const bool* needed, at::Tensor** out, size_t out_count,
                                 int keep_saved, int create_graph);
// Drops a Rust state. `state` is taken. Does not unwind.
typedef void (*rt_drop)(void* state);

// Whether this thread records gradients (grad mode).
rt_status rt_grad_mode(int* enabled);
rt_status rt_grad_mode_set(int enabled, int* previous);

// Begins a function's forward: returns which inputs need a gradient and whether this thread recorded gradients, makes a node over the
// inputs with their current versions, and turns the recording off. `out` is NULL when gradients were not recorded, or when no input
// needs one and `always` is 0: then the caller restores the recording. `name` (`name_size` bytes) outlives the node. The caller owns `out`
// and gives it to rt_node_attach, or to rt_node_free without outputs.
rt_status rt_node_begin(const char* name, size_t name_size, const at::Tensor* const* inputs, size_t input_count, int always,
                        bool* needs_grad, int* recording, rt_node** out);
// Keeps a reference to `tensor` (borrowed) for backward.
void rt_node_save(rt_node* node, const at::Tensor* tensor);
void rt_node_free(rt_node* node);

// Turns the recording of gradients on, and gives the node its outputs and state. `node` and `state` are taken in every case, also on
// failure; the inputs are borrowed; each of `outputs` is replaced by the tensor that is connected to the node, which it keeps alive.
rt_status rt_node_attach(rt_node* node, const at::Tensor* const* inputs, size_t input_count, at::Tensor* const* outputs,
                         size_t output_count, const bool* differentiable, int twice_differentiable, rt_backward backward,
                         rt_drop drop, void* state);

// Accumulates gradients into leaves. All tensors are borrowed; an entry of `grads` may be NULL for a scalar output;
// no `inputs` means every leaf.
rt_status rt_backward_run(const at::Tensor* const* outputs, const at::Tensor* const* grads, size_t output_count,
                          const at::Tensor* const* inputs, size_t input_count, int retain_graph, int create_graph);

// Gradients of the inputs, without accumulating. `result` receives `input_count` tensors that the caller owns, NULL for
// an input that the outputs do not depend on.
rt_status rt_grad_run(const at::Tensor* const* outputs, const at::Tensor* const* grads, size_t output_count,
                      const at::Tensor* const* inputs, size_t input_count, int retain_graph, int create_graph,
                      at::Tensor** result);

// The `.grad` of each leaf, NULL where it has none. The leaves are borrowed; `grads` receives `count` tensors that the caller owns.
rt_status rt_gradients(const at::Tensor* const* leaves, size_t count, at::Tensor** grads);
// Removes the `.grad` of each leaf.
rt_status rt_clear_gradients(const at::Tensor* const* leaves, size_t count);

// Runs `run(context)` once, when the backward that is running on this thread has computed all gradients and before it returns; its
// failure becomes that backward's. `context` is taken, also on failure, and given to `release` once, whether `run` ran or not. Outside
// of a backward, this is an error.
rt_status rt_at_end_of_backward(void* context, rt_status (*run)(void*), void (*release)(void*));

// Runs `run(context)` each time a backward has added to the leaf's gradient; its failure is that backward's. The leaf takes
// `context`, also on failure, and gives it to `release` once, when it ends or `rt_clear_gradient_hook` is called. A leaf has at most one.
rt_status rt_set_gradient_hook(const at::Tensor* leaf, void* context, rt_status (*run)(void*), void (*release)(void*));
rt_status rt_clear_gradient_hook(const at::Tensor* leaf);

// Whether the running backward computes the gradient of every leaf, which a recomputed segment requires.
rt_status rt_is_checkpoint_valid(int* valid);
}
