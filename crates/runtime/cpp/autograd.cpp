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

#include <mutex>
#include <optional>
#include <unordered_map>
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

// For each output a tensor that only the node connects to the graph.
struct OwnOutputs {
  std::vector<Tensor> tensors;
  // From a tensor without history that the function returned, to the index of the first output with it.
  std::unordered_map<at::TensorImpl*, size_t> fresh;
};

// Connecting a tensor to the node changes it: it gets another history, or loses its own. So a tensor that other code also holds
// is connected through an alias: an input, a captured tensor with history (a view, so that an in-place change of it is refused),
// one without history that other code still holds, and an output that is returned twice.
OwnOutputs own_outputs(const Tensor* const* inputs, size_t input_count, const Tensor* const* outputs, size_t output_count,
                       const uint8_t* differentiable, const Tensor* const* saved, size_t saved_count) {
  std::unordered_set<at::TensorImpl*> of_inputs;
  for (size_t i = 0; i < input_count; i++) of_inputs.insert(inputs[i]->unsafeGetTensorImpl());
  // Handles of the caller of this function; other code has the rest.
  std::unordered_map<at::TensorImpl*, size_t> handles;
  for (size_t i = 0; i < output_count; i++) handles[outputs[i]->unsafeGetTensorImpl()]++;
  for (size_t i = 0; i < saved_count; i++) handles[saved[i]->unsafeGetTensorImpl()]++;
  OwnOutputs own;
  for (size_t i = 0; i < output_count; i++) {
    const Tensor& output = *outputs[i];
    auto* impl = output.unsafeGetTensorImpl();
    if (!output.defined()) {
      own.tensors.push_back(output);
    } else if (of_inputs.count(impl) != 0 || output.requires_grad()) {
      const at::AutoGradMode no_grad(false);
      own.tensors.push_back(differentiable[i] ? output.view_as(output) : output.detach());
    } else {
      const bool shared = output.use_count() > handles[impl];
      const bool again = !own.fresh.emplace(impl, i).second;
      own.tensors.push_back(shared || again ? output.detach() : output);
    }
  }
  return own;
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
  RustNode(torch::autograd::edge_list&& edges, std::string name, size_t inputs)
      : Node(std::move(edges)), name_(std::move(name)), inputs_(inputs) {}

  std::string name() const override { return name_; }

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
    variable_list saved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (released_) {
        throw RustFailure("backward through `" + name_ +
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

    std::vector<Tensor*> grads_in, saved_in, grads_out(inputs_, nullptr);
    std::vector<uint8_t> needed(inputs_);
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
    throw_on_failure(status, "backward of `" + name_ + "`");
    if (create_graph && !twice_differentiable_) fail_on_second_derivative(result, std::move(upstream));
    return result;
  }

  std::string name_;
  size_t inputs_;
  bool twice_differentiable_ = false;
  // Versions of the inputs before forward ran.
  std::vector<uint32_t> versions_;
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
        make_node<torch::autograd::Error>("the backward of `" + name_ + "` is not differentiable, so a second derivative "
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
};

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

rt_status rt_node_new(const char* name, const Tensor* const* inputs, size_t input_count, int always, uint8_t* needs_grad,
                      rt_node** out) {
  return guard([&] {
    const auto list = copy_list(inputs, input_count);
    const bool recording = at::GradMode::is_enabled();
    bool any = always != 0;
    for (size_t i = 0; i < input_count; i++) {
      needs_grad[i] = recording && list[i].defined() && list[i].requires_grad();
      any = any || needs_grad[i];
    }
    if (!recording || !any) {
      *out = nullptr;
      return;
    }
    auto node = make_node<RustNode>(torch::autograd::collect_next_edges(list), name, input_count);
    for (const auto& input : list) node->versions_.push_back(version_of(input));
    *out = new rt_node{std::move(node)};
  });
}

void rt_node_free(rt_node* node) { delete node; }

rt_status rt_node_attach(rt_node* handle, const Tensor* const* inputs, size_t input_count, const Tensor* const* outputs,
                         size_t output_count, const uint8_t* differentiable, const Tensor* const* saved,
                         size_t saved_count, int twice_differentiable, rt_backward backward, rt_drop drop, void* state,
                         Tensor** wrapped) {
  // Takes the state, whatever fails below.
  std::shared_ptr<void> owned;
  rt_status status = guard([&] { owned = std::shared_ptr<void>(state, drop); });
  if (status != nullptr) return status;
  return guard([&] {
    auto& node = handle->node;
    for (size_t i = 0; i < input_count; i++) {
      if (version_of(*inputs[i]) != node->versions_[i]) {
        throw RustFailure("forward of `" + node->name_ + "` changed input " + std::to_string(i) +
                          " in place; work on a copy of it");
      }
    }
    node->state_ = std::move(owned);
    node->backward_ = backward;
    node->twice_differentiable_ = twice_differentiable != 0;
    const auto own = own_outputs(inputs, input_count, outputs, output_count, differentiable, saved, saved_count);
    std::unordered_set<at::TensorImpl*> non_differentiable;
    std::vector<std::optional<Tensor>> raw;
    for (size_t i = 0; i < output_count; i++) {
      raw.emplace_back(own.tensors[i]);
      if (!differentiable[i]) non_differentiable.insert(own.tensors[i].unsafeGetTensorImpl());
    }
    auto no_forward_mode = [](variable_list, variable_list) -> variable_list {
      throw RustFailure("forward-mode differentiation of a custom function is not supported");
    };
    auto view_as_self = [](Tensor tensor) { return tensor.view_as(tensor); };
    auto results = torch::autograd::_wrap_outputs(copy_list(inputs, input_count), non_differentiable, {}, raw, node,
                                                  no_forward_mode, {}, view_as_self, false);
    std::vector<Tensor> tensors;
    for (auto& result : results) tensors.push_back(result.value());
    std::unordered_set<at::TensorImpl*> of_inputs;
    for (size_t i = 0; i < input_count; i++) of_inputs.insert(inputs[i]->unsafeGetTensorImpl());
    for (size_t i = 0; i < saved_count; i++) {
      auto* impl = saved[i]->unsafeGetTensorImpl();
      if (of_inputs.count(impl) != 0) {
        node->saved_.emplace_back(*saved[i], /*is_output=*/false);
      } else if (const auto output = own.fresh.find(impl); output != own.fresh.end()) {
        const Tensor& connected = tensors[output->second];
        node->saved_.emplace_back(connected, connected.grad_fn().get() == node.get());
      } else {
        // An intermediate has no history. It is detached, because a view of an output would keep the output, and with it this
        // node, alive; the version counter stays shared.
        node->saved_.emplace_back(saved[i]->detach(), /*is_output=*/false);
      }
    }
    for (size_t i = 0; i < output_count; i++) wrapped[i] = new Tensor(std::move(tensors[i]));
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
