// A step of Adam or AdamW over many tensors in one call, instead of one for each entry of five lists.
#include "guard.h"
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <algorithm>
#include <optional>
#include <vector>

namespace {
// Adds to numbers of steps, float scalars: on a CPU without an operator, which would make two tensors of the number for each, unless
// `as_operators`.
void add_to_steps(const std::vector<at::Tensor>& numbers, float number, bool as_operators) {
  const auto is_plain = [](const at::Tensor& one) { return one.is_cpu() && one.scalar_type() == at::kFloat && one.numel() == 1; };
  if (as_operators || !std::all_of(numbers.begin(), numbers.end(), is_plain)) {
    at::_foreach_add_(numbers, number);
    return;
  }
  for (const auto& one : numbers) {
    *one.mutable_data_ptr<float>() += number;
    one.unsafeGetTensorImpl()->bump_version();
  }
}
}  // namespace

extern "C" {
// As `RawAdam` in src/sys/optimizer.rs.
struct rt_adam {
  double lr, beta1, beta2, weight_decay, eps;
  int32_t decoupled, maximize, as_operators;
};

// Runs libtorch's fused kernel without recording gradients: AdamW if decoupled, else Adam. All tensors are borrowed; the five lists have
// `count` entries. The steps are incremented before the kernel runs, and decremented again if it fails, or where `found_inf` is 1, for
// which it changes nothing; `rate`, which replaces the learning rate,
// `scale` and `found_inf` may be NULL. The versions of parameters and moments are incremented, which the
// kernel does not do.
rt_status rt_fused_adam(const rt_adam* options, size_t count, const at::Tensor* const* params, const at::Tensor* const* grads,
                        const at::Tensor* const* exp_avgs, const at::Tensor* const* exp_avg_sqs,
                        const at::Tensor* const* steps, const at::Tensor* rate, const at::Tensor* scale, const at::Tensor* found_inf) {
  return guard([&] {
    const at::AutoGradMode no_grad(false);
    const auto list = [&](const at::Tensor* const* tensors) {
      std::vector<at::Tensor> all;
      all.reserve(count);
      for (size_t i = 0; i < count; i++) all.push_back(*tensors[i]);
      return all;
    };
    const auto optional = [](const at::Tensor* tensor) {
      return tensor == nullptr ? std::optional<at::Tensor>() : std::optional<at::Tensor>(*tensor);
    };
    const auto parameters = list(params), gradients = list(grads), means = list(exp_avgs), squares = list(exp_avg_sqs);
    const auto numbers = list(steps);
    const auto bump = [&] {
      for (const auto* changed : {&parameters, &means, &squares}) {
        for (const auto& tensor : *changed) tensor.unsafeGetTensorImpl()->bump_version();
      }
    };
    add_to_steps(numbers, 1, options->as_operators != 0);
    try {
      const auto& o = *options;
      const auto step = [&](const auto& lr) {
        if (o.decoupled != 0) {
          at::_fused_adamw_(parameters, gradients, means, squares, {}, numbers, lr, o.beta1, o.beta2, o.weight_decay, o.eps,
                            /*amsgrad=*/false, o.maximize != 0, optional(scale), optional(found_inf));
        } else {
          at::_fused_adam_(parameters, gradients, means, squares, {}, numbers, lr, o.beta1, o.beta2, o.weight_decay, o.eps,
                           /*amsgrad=*/false, o.maximize != 0, optional(scale), optional(found_inf));
        }
      };
      if (rate != nullptr) {
        step(*rate);
      } else {
        step(o.lr);
      }
    } catch (...) {
      add_to_steps(numbers, -1, options->as_operators != 0);
      bump();
      throw;
    }
    if (found_inf != nullptr) {
      at::_foreach_sub_(numbers, std::vector<at::Tensor>(count, found_inf->reshape({})));
    }
    bump();
  });
}
}
