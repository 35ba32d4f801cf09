// A node of libtorch's graph whose backward is written in Rust, and the engine's entry points.
#include "autograd.h"
#include "versions.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_set>

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

Tensor* hand_out(Tensor&& tensor) { return tensor.defined() ? new Tensor(std::move(tensor)) : nullptr; }

variable_list copy_list(const Tensor* const* tensors, size_t count) {
  variable_list list;
  list.reserve(count);
  for (size_t i = 0; i < count; i++) list.push_back(tensors[i] == nullptr ? Tensor() : *tensors[i]);
  return list;
}

uint32_t version_of(const Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<uint32_t>(tensor._version()) : 0;
}

bool is_among(const Tensor* const* tensors, size_t count, const at::TensorImpl* impl) {
  return std::any_of(tensors, tensors + count, [&](const Tensor* tensor) { return tensor->unsafeGetTensorImpl() == impl; });
}

// Few functions have more saved tensors, inputs or outputs; the lists of those that have are on the heap.
using SavedList = c10::SmallVector<Tensor, 8>;
constexpr unsigned kInputs = 8;
constexpr unsigned kOutputs = 4;

using Outputs = c10::SmallVector<std::optional<Tensor>, kOutputs>;

// For each output a tensor that only the node connects to the graph.
struct OwnOutputs {
  Outputs tensors;
  // Of each output that is returned for the first time and has no history, what the function returned; null for the others.
  c10::SmallVector<at::TensorImpl*, kOutputs> fresh;
};

// Connecting a tensor to the node changes it: it gets another history, or loses its own. So a tensor that other code also holds
// is connected through an alias: an input, a captured tensor with history (a view, so that an in-place change of it is refused),
// one without history that other code still holds, and an output that is returned twice.
OwnOutputs own_outputs(const Tensor* const* inputs, size_t input_count, const Tensor* const* outputs, size_t output_count,
                       const bool* differentiable, const SavedList& saved) {
  OwnOutputs own;
  for (size_t i = 0; i < output_count; i++) {
    const Tensor& output = *outputs[i];
    auto* impl = output.unsafeGetTensorImpl();
    own.fresh.push_back(nullptr);
    if (!output.defined()) {
      own.tensors.emplace_back(output);
    } else if (is_among(inputs, input_count, impl) || output.requires_grad()) {
      const at::AutoGradMode no_grad(false);
      own.tensors.emplace_back(differentiable[i] ? output.view_as(output) : output.detach());
    } else {
      // Handles of the function; other code has the rest.
      const auto is_same = [&](const Tensor& tensor) { return tensor.unsafeGetTensorImpl() == impl; };
      size_t handles = std::count_if(saved.begin(), saved.end(), is_same);
      for (size_t j = 0; j < output_count; j++) handles += is_same(*outputs[j]);
      const bool shared = static_cast<size_t>(output.use_count()) > handles;
      const bool again = is_among(outputs, i, impl);
      if (!again) own.fresh[i] = impl;
      own.tensors.emplace_back(shared || again ? output.detach() : output);
    }
  }
  return own;
}

// Connects tensors that no other code holds to the node. Returns false, with nothing changed, for those with rules of their own: views, and
// outputs without a gradient.
bool connect(const NodePointer<torch::autograd::Node>& node, const OwnOutputs& own, const bool* differentiable) {
  for (size_t i = 0; i < own.tensors.size(); i++) {
    const Tensor& tensor = *own.tensors[i];
    const bool plain = tensor.defined() && differentiable[i] && !tensor.is_view() && !tensor.requires_grad() &&
                       torch::autograd::isDifferentiableType(tensor.scalar_type());
    if (!plain) return false;
  }
  for (const auto& tensor : own.tensors) torch::autograd::set_history(*tensor, node);
  return true;
}

// Connects outputs of any kind, as libtorch's own custom functions do.
Outputs wrapped(const NodePointer<torch::autograd::Node>& node, const variable_list& inputs, const OwnOutputs& own,
                const bool* differentiable) {
  std::unordered_set<at::TensorImpl*> non_differentiable;
  for (size_t i = 0; i < own.tensors.size(); i++) {
    if (!differentiable[i]) non_differentiable.insert(own.tensors[i]->unsafeGetTensorImpl());
  }
  auto no_forward_mode = [](variable_list, variable_list) -> variable_list {
    throw RustFailure("forward-mode differentiation of a custom function is not supported");
  };
  auto view_as_self = [](Tensor tensor) { return tensor.view_as(tensor); };
  auto results = torch::autograd::_wrap_outputs(inputs, non_differentiable, {}, own.tensors, node, no_forward_mode, {},
                                                view_as_self, false);
  return Outputs(results.begin(), results.end());
}

// Calls Rust after a backward has added to a leaf's gradient.
struct GradientHook : torch::autograd::PostAccumulateGradHook {
  GradientHook(std::shared_ptr<void>&& context, rt_status (*run)(void*)) : context_(std::move(context)), run_(run) {}

  void operator()(const torch::autograd::Variable&) override {
    // The call may clear the hook, and with it this object.
    auto context = context_;
    throw_on_failure(run_(context.get()), "after a gradient arrived");
  }

 private:
  std::shared_ptr<void> context_;
  rt_status (*run_)(void*);
};

}  // namespace

// Owns the Rust state from `attach` on, and drops it when backward can no longer run: at the node's destruction, or when
// the engine releases the graph. `state_` is a shared pointer, so that a release on one thread does not free it while another
// thread runs backward.
struct RustNode : public torch::autograd::Node {
  RustNode(torch::autograd::edge_list&& edges, std::string_view name, size_t inputs)
      : Node(std::move(edges)), name_(name), inputs_(inputs) {}

  std::string name() const override { return std::string(name_); }

  void release_variables() override {
    std::shared_ptr<void> dropped;  // destroyed after the lock is released: the drop runs a user's code
    std::vector<SavedVariable> saved;
    std::lock_guard<std::mutex> lock(mutex_);
    release(dropped, saved);
  }

  variable_list apply(variable_list&& grads) override {
    const bool create_graph = at::GradMode::is_enabled();
    const bool keep_graph = torch::autograd::get_current_graph_task_keep_graph();
    bool alone = false;
    std::optional<Running> running;
    std::shared_ptr<void> state, dropped;
    std::vector<SavedVariable> saved_variables;
    SavedList saved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (released_) {
        throw RustFailure("backward through `" + name() +
                          "` a second time, after its saved tensors were freed; pass retain_graph to the first backward");
      }
      state = state_;
      saved.reserve(saved_.size());
      for (auto& variable : saved_) saved.push_back(variable.unpack(getptr()));
      // No later run can begin, so backward may free each saved tensor as soon as it is used, unless another run, on another
      // thread or around this one, still has them.
      if (!keep_graph) {
        release(dropped, saved_variables);
        alone = running_ == 0;
      }
      running.emplace(*this);
    }
    saved_variables.clear();

    c10::SmallVector<Tensor*, kOutputs> grads_in;
    c10::SmallVector<Tensor*, 8> saved_in;
    c10::SmallVector<Tensor*, kInputs> grads_out(inputs_, nullptr);
    c10::SmallVector<bool, kInputs> needed(inputs_, false);
    for (size_t i = 0; i < inputs_; i++) needed[i] = task_should_compute_output(i);
    // The edges that a second derivative would pass through, taken before the gradients are moved.
    auto upstream = create_graph && !twice_differentiable_ ? torch::autograd::collect_next_edges(grads)
                                                           : torch::autograd::edge_list();
    for (auto& grad : grads) grads_in.push_back(hand_out(std::move(grad)));
    for (auto& tensor : saved) saved_in.push_back(hand_out(std::move(tensor)));
    grads.clear();
    saved.clear();

    rt_status status;
    {
      at::AutoGradMode mode(create_graph && twice_differentiable_);
      status = backward_(state.get(), grads_in.data(), grads_in.size(), saved_in.data(), saved_in.size(), needed.data(),
                         grads_out.data(), grads_out.size(), !alone, create_graph);
    }
    variable_list result;
    result.reserve(inputs_);
    for (Tensor* pointer : grads_out) {
      if (pointer == nullptr) {
        result.emplace_back();
      } else {
        result.push_back(std::move(*pointer));
        delete pointer;
      }
    }
    if (status != nullptr) throw_on_failure(status, "backward of `" + name() + "`");
    if (create_graph && !twice_differentiable_) fail_on_second_derivative(result, std::move(upstream));
    return result;
  }

  // Of Rust, static.
  std::string_view name_;
  size_t inputs_;
  bool twice_differentiable_ = false;
  rt_backward backward_ = nullptr;
  std::shared_ptr<void> state_;
  std::vector<SavedVariable> saved_;
  bool released_ = false;
  // Runs of `apply` that hold the saved tensors.
  int running_ = 0;

 private:
  struct Running {
    // Called with the node's lock held.
    explicit Running(RustNode& node) : node_(node) { node_.running_++; }
    ~Running() {
      std::lock_guard<std::mutex> lock(node_.mutex_);
      node_.running_--;
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    RustNode& node_;
  };

  // A second derivative through a backward that was not recorded must be an error, not silently zero or absent. The error node
  // has edges to this node's inputs and to the upstream gradients' nodes, so that the engine reaches it on every path to what the
  // derivative depends on.
  void fail_on_second_derivative(variable_list& grads, torch::autograd::edge_list&& upstream) {
    auto edges = next_edges();
    edges.insert(edges.end(), upstream.begin(), upstream.end());
    NodePointer<Node> error =
        make_node<torch::autograd::Error>("the backward of `" + name() + "` is not differentiable, so a second derivative "
                                          "through it does not exist; declare TWICE_DIFFERENTIABLE where its backward "
                                          "uses differentiable operators only",
                                          std::move(edges));
    for (auto& grad : grads) {
      if (!grad.defined()) continue;
      grad = grad.detach();
      torch::autograd::set_history(grad, error);
    }
  }

  void release(std::shared_ptr<void>& dropped, std::vector<SavedVariable>& saved) {
    released_ = true;
    dropped.swap(state_);
    saved.swap(saved_);
  }
};

struct rt_node {
  NodePointer<RustNode> node;
  // Versions of the inputs before forward ran.
  c10::SmallVector<uint32_t, kInputs> versions;
  SavedList saved;
};

namespace {
// Handles that this thread has used, for its next nodes.
thread_local std::vector<std::unique_ptr<rt_node>> spare_handles;
constexpr size_t kSpareHandles = 8;

std::unique_ptr<rt_node> new_handle() {
  if (spare_handles.empty()) return std::make_unique<rt_node>();
  auto handle = std::move(spare_handles.back());
  spare_handles.pop_back();
  return handle;
}

struct Recycle {
  void operator()(rt_node* handle) const noexcept {
    std::unique_ptr<rt_node> owned(handle);
    owned->node = {};
    owned->versions.clear();
    owned->saved.clear();
    // Reserved for all of them at once, so that this cannot throw.
    if (spare_handles.size() < spare_handles.capacity()) spare_handles.push_back(std::move(owned));
  }
};
}  // namespace

extern "C" {

rt_status rt_grad_mode(int* enabled) {
  return guard([&] { *enabled = at::GradMode::is_enabled(); });
}

rt_status rt_grad_mode_set(int enabled, int* previous) {
  return guard([&] {
    *previous = at::GradMode::is_enabled();
    at::GradMode::set_enabled(enabled != 0);
  });
}

rt_status rt_node_begin(const char* name, size_t name_size, const Tensor* const* inputs, size_t input_count, int always,
                        bool* needs_grad, int* recording, rt_node** out) {
  return guard([&] {
    *recording = at::GradMode::is_enabled();
    *out = nullptr;
    bool any = always != 0;
    for (size_t i = 0; i < input_count; i++) {
      needs_grad[i] = *recording && inputs[i]->defined() && inputs[i]->requires_grad();
      any = any || needs_grad[i];
    }
    if (*recording && any) {
      spare_handles.reserve(kSpareHandles);
      auto made = std::unique_ptr<rt_node, Recycle>(new_handle().release());
      torch::autograd::edge_list edges;
      edges.reserve(input_count);
      for (size_t i = 0; i < input_count; i++) {
        edges.push_back(inputs[i]->defined() ? torch::autograd::impl::gradient_edge(*inputs[i]) : torch::autograd::Edge());
        made->versions.push_back(version_of(*inputs[i]));
      }
      made->node = make_node<RustNode>(std::move(edges), std::string_view(name, name_size), input_count);
      *out = made.release();
    }
    at::GradMode::set_enabled(false);
  });
}

void rt_node_save(rt_node* node, const Tensor* tensor) { node->saved.push_back(*tensor); }

void rt_node_free(rt_node* node) { Recycle{}(node); }

rt_status rt_node_attach(rt_node* handle, const Tensor* const* inputs, size_t input_count, Tensor* const* outputs,
                         size_t output_count, const bool* differentiable, int twice_differentiable, rt_backward backward,
                         rt_drop drop, void* state) {
  at::GradMode::set_enabled(true);
  const std::unique_ptr<rt_node, Recycle> taken(handle);
  // Takes the state, whatever fails below.
  std::shared_ptr<void> owned;
  rt_status status = guard([&] { owned = std::shared_ptr<void>(state, drop); });
  if (status != nullptr) return status;
  return guard([&] {
    auto& node = taken->node;
    for (size_t i = 0; i < input_count; i++) {
      if (version_of(*inputs[i]) != taken->versions[i]) {
        throw RustFailure("forward of `" + node->name() + "` changed input " + std::to_string(i) +
                          " in place; work on a copy of it");
      }
    }
    node->state_ = std::move(owned);
    node->backward_ = backward;
    node->twice_differentiable_ = twice_differentiable != 0;
    const auto own = own_outputs(inputs, input_count, outputs, output_count, differentiable, taken->saved);
    const auto results = connect(node, own, differentiable)
        ? own.tensors
        : wrapped(node, copy_list(inputs, input_count), own, differentiable);
    node->saved_.reserve(taken->saved.size());
    for (const Tensor& saved : taken->saved) {
      auto* impl = saved.unsafeGetTensorImpl();
      const auto output = std::find(own.fresh.begin(), own.fresh.end(), impl);
      if (is_among(inputs, input_count, impl)) {
        node->saved_.emplace_back(saved, /*is_output=*/false);
      } else if (output != own.fresh.end()) {
        const Tensor& connected = *results[output - own.fresh.begin()];
        node->saved_.emplace_back(connected, connected.grad_fn().get() == node.get());
      } else {
        // An intermediate has no history. A view is detached, because one of an output would keep the output, and with it this
        // node, alive; so is a captured tensor with history. The version counter stays shared.
        const bool alone = !saved.is_view() && !saved.requires_grad();
        node->saved_.emplace_back(alone ? saved : saved.detach(), /*is_output=*/false);
      }
    }
    for (size_t i = 0; i < output_count; i++) *outputs[i] = *results[i];
  });
}

rt_status rt_backward_run(const Tensor* const* outputs, const Tensor* const* grads, size_t output_count,
                          const Tensor* const* inputs, size_t input_count, int retain_graph, int create_graph) {
  return guard([&] {
    torch::autograd::backward(copy_list(outputs, output_count), copy_list(grads, output_count), retain_graph != 0,
                              create_graph != 0, copy_list(inputs, input_count));
  });
}

rt_status rt_grad_run(const Tensor* const* outputs, const Tensor* const* grads, size_t output_count,
                      const Tensor* const* inputs, size_t input_count, int retain_graph, int create_graph,
                      Tensor** result) {
  return guard([&] {
    auto found = torch::autograd::grad(copy_list(outputs, output_count), copy_list(inputs, input_count),
                                       copy_list(grads, output_count), retain_graph != 0, create_graph != 0,
                                       /*allow_unused=*/true);
    for (size_t i = 0; i < input_count; i++) result[i] = hand_out(std::move(found[i]));
  });
}

// Replaces the `.grad` of `leaf` (both borrowed); a null `grad` removes it.
rt_status rt_set_grad(const Tensor* leaf, const Tensor* grad) {
  return guard([&] { leaf->mutable_grad() = grad == nullptr ? Tensor() : *grad; });
}

rt_status rt_gradients(const Tensor* const* leaves, size_t count, Tensor** grads) {
  return guard([&] {
    for (size_t i = 0; i < count; i++) {
      const Tensor& grad = leaves[i]->grad();
      grads[i] = grad.defined() ? new Tensor(grad) : nullptr;
    }
  });
}

rt_status rt_clear_gradients(const Tensor* const* leaves, size_t count) {
  return guard([&] {
    for (size_t i = 0; i < count; i++) leaves[i]->mutable_grad() = Tensor();
  });
}

rt_status rt_at_end_of_backward(void* context, rt_status (*run)(void*), void (*release)(void*)) {
  // Released once: with the callback, or here if the engine refuses it.
  std::shared_ptr<void> held(context, release);
  return guard([&] {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [held, run] { throw_on_failure(run(held.get()), "at the end of backward"); });
  });
}

rt_status rt_set_gradient_hook(const at::Tensor* leaf, void* context, rt_status (*run)(void*), void (*release)(void*)) {
  std::shared_ptr<void> held(context, release);
  return guard([&] {
    torch::autograd::impl::set_post_acc_grad_hooks(*leaf, std::make_unique<GradientHook>(std::move(held), run));
  });
}

rt_status rt_clear_gradient_hook(const at::Tensor* leaf) {
  return guard([&] { torch::autograd::impl::set_post_acc_grad_hooks(*leaf, nullptr); });
}

rt_status rt_is_checkpoint_valid(int* valid) {
  return guard([&] { *valid = torch::autograd::Engine::get_default_engine().is_checkpoint_valid(); });
}

}  // extern "C"
