// Attention: for each head and each pair of a query and a key, forward makes one score (2·d operations) and adds one value
// (2·dv); backward recomputes the score, which was not saved, and makes the gradients of the weight (2·dv), of the value
// (2·dv), of the query (2·d) and of the key (2·d). Softmax and masks count as nothing, as elementwise work does.
#include "attention_flops.h"
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <algorithm>
#include <unordered_map>
#include <vector>

namespace {
using Inputs = c10::ArrayRef<c10::IValue>;

enum class Mask { TOP_LEFT, BOTTOM_RIGHT, BY_NUMBER };
enum class Layout { HEADS_FIRST, TOKENS_FIRST };

// Indices of the arguments that determine an operator's work; -1 for those that it does not have.
struct ArgumentIndices {
  int query;
  int causal;
  Mask mask;
  Layout layout;
  bool backward;
  int starts_q;
  int starts_k;
  int window; // two integers: left, right
};

// Σ over i in [0, n) of clamp(i + offset, 0, limit)
uint64_t clamped_sum(int64_t n, int64_t offset, int64_t limit) {
  const auto first = std::clamp<int64_t>(-offset, 0, n); // terms before it are 0
  const auto full = std::clamp<int64_t>(limit - offset, first, n); // terms from it on are `limit`
  const auto rising = full - first;
  const auto sum = rising * (first + offset) + rising * (rising - 1) / 2 + (n - full) * limit;
  return sum > 0 ? static_cast<uint64_t>(sum) : 0;
}

// A query attends to keys from `left` before to `right` after its own position; a negative bound is no bound.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
  bool from_the_end = false;
};

uint64_t kept_pairs(int64_t queries, int64_t keys, const Window& window) {
  const auto place = window.from_the_end ? keys - queries : 0;
  const auto up_to = window.right < 0 ? static_cast<uint64_t>(queries * keys) : clamped_sum(queries, place + window.right + 1, keys);
  const auto before = window.left < 0 ? 0 : clamped_sum(queries, place - window.left, keys);
  return up_to > before ? up_to - before : 0;
}

std::optional<int64_t> integer(Inputs inputs, int index) {
  if (index < 0 || static_cast<size_t>(index) >= inputs.size() || !inputs[index].isInt()) return std::nullopt;
  return inputs[index].toInt();
}

Window window_of(Inputs inputs, const ArgumentIndices& indices) {
  Window window;
  const auto& causal = inputs[indices.causal];
  window.from_the_end = indices.mask == Mask::BOTTOM_RIGHT;
  if (indices.mask == Mask::BY_NUMBER) {
    const auto number = causal.isInt() ? causal.toInt() : 0;
    window.from_the_end = number == 2;
    if (number != 0) window.right = 0;
  } else if (causal.isBool() && causal.toBool()) {
    window.right = 0;
  }
  if (indices.window >= 0) {
    window.left = integer(inputs, indices.window).value_or(-1);
    if (window.right < 0) window.right = integer(inputs, indices.window + 1).value_or(-1);
  }
  return window;
}

const at::Tensor* starts(Inputs inputs, int index) {
  if (index < 0 || static_cast<size_t>(index) >= inputs.size() || !inputs[index].isTensor()) return nullptr;
  const auto& tensor = inputs[index].toTensor();
  return tensor.defined() && tensor.numel() > 1 ? &tensor : nullptr;
}

// Waits for the device where the starts are on one.
std::vector<int64_t> lengths(const at::Tensor& starts) {
  const auto host = starts.to(at::kCPU, at::kLong).contiguous();
  const auto* data = host.const_data_ptr<int64_t>();
  std::vector<int64_t> result;
  for (int64_t i = 1; i < host.numel(); ++i) result.push_back(data[i] - data[i - 1]);
  return result;
}

std::optional<Flops> attention(Inputs inputs, const ArgumentIndices& indices) {
  if (inputs.size() <= static_cast<size_t>(std::max(indices.query + 2, indices.causal))) return std::nullopt;
  for (int i = 0; i < 3; ++i) {
    const auto& value = inputs[indices.query + i];
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().is_nested()) return std::nullopt;
  }
  const auto& q = inputs[indices.query].toTensor();
  const auto& k = inputs[indices.query + 1].toTensor();
  const auto& v = inputs[indices.query + 2].toTensor();
  const auto window = window_of(inputs, indices);

  uint64_t dense = 0, kept = 0, heads = 0;
  const auto *starts_q = starts(inputs, indices.starts_q), *starts_k = starts(inputs, indices.starts_k);
  if (starts_q != nullptr && starts_k != nullptr) {
    if (q.dim() < 3 || starts_q->is_meta() || starts_k->is_meta()) return std::nullopt;
    const auto queries = lengths(*starts_q), keys = lengths(*starts_k);
    for (size_t i = 0; i < std::min(queries.size(), keys.size()); ++i) {
      dense += static_cast<uint64_t>(queries[i] * keys[i]);
      kept += kept_pairs(queries[i], keys[i], window);
    }
    heads = static_cast<uint64_t>(q.size(-2));
  } else {
    if (q.dim() != 4 || k.dim() != 4) return std::nullopt;
    const int tokens = indices.layout == Layout::HEADS_FIRST ? 2 : 1;
    dense = static_cast<uint64_t>(q.size(tokens) * k.size(tokens));
    kept = kept_pairs(q.size(tokens), k.size(tokens), window);
    heads = static_cast<uint64_t>(q.size(0) * q.size(3 - tokens));
  }
  const auto d = static_cast<uint64_t>(q.size(-1)), dv = static_cast<uint64_t>(v.size(-1));
  const uint64_t per_pair = heads * (indices.backward ? 6 * d + 4 * dv : 2 * d + 2 * dv);
  return Flops{dense * per_pair, kept * per_pair};
}

template <const ArgumentIndices& indices>
std::optional<Flops> formula(Inputs inputs) {
  // The operators that read the starts are not counted.
  at::RecordFunctionGuard silent(false);
  return attention(inputs, indices);
}

// clang-format off
constexpr ArgumentIndices CPU            {0, 4, Mask::TOP_LEFT, Layout::HEADS_FIRST, false, -1, -1, -1};
constexpr ArgumentIndices CPU_BACKWARD   {1, 7, Mask::TOP_LEFT, Layout::HEADS_FIRST, true, -1, -1, -1};
constexpr ArgumentIndices SDPA_FLASH     {0, 4, Mask::TOP_LEFT, Layout::HEADS_FIRST, false, -1, -1, -1};
constexpr ArgumentIndices SDPA_FLASH_BACKWARD {1, 11, Mask::TOP_LEFT, Layout::HEADS_FIRST, true, -1, -1, -1};
constexpr ArgumentIndices SDPA_EFFICIENT {0, 6, Mask::TOP_LEFT, Layout::HEADS_FIRST, false, -1, -1, -1};
constexpr ArgumentIndices SDPA_EFFICIENT_BACKWARD {1, 11, Mask::TOP_LEFT, Layout::HEADS_FIRST, true, -1, -1, -1};
constexpr ArgumentIndices SDPA_CUDNN     {0, 6, Mask::TOP_LEFT, Layout::HEADS_FIRST, false, -1, -1, -1};
constexpr ArgumentIndices CUDNN          {0, 10, Mask::TOP_LEFT, Layout::HEADS_FIRST, false, 4, 5, -1};
constexpr ArgumentIndices CUDNN_BACKWARD {1, 14, Mask::TOP_LEFT, Layout::HEADS_FIRST, true, 9, 10, -1};
constexpr ArgumentIndices OVERRIDEABLE   {0, 5, Mask::TOP_LEFT, Layout::HEADS_FIRST, false, -1, -1, -1};
constexpr ArgumentIndices OVERRIDEABLE_BACKWARD {1, 13, Mask::TOP_LEFT, Layout::HEADS_FIRST, true, -1, -1, -1};
constexpr ArgumentIndices FLASH          {0, 8, Mask::BOTTOM_RIGHT, Layout::TOKENS_FIRST, false, 3, 4, 11};
constexpr ArgumentIndices FLASH_BACKWARD {1, 11, Mask::BOTTOM_RIGHT, Layout::TOKENS_FIRST, true, 6, 7, 15};
constexpr ArgumentIndices EFFICIENT      {0, 9, Mask::BY_NUMBER, Layout::TOKENS_FIRST, false, 4, 5, -1};
constexpr ArgumentIndices EFFICIENT_BACKWARD {1, 14, Mask::BY_NUMBER, Layout::TOKENS_FIRST, true, 6, 7, -1};
// clang-format on
} // namespace

FlopFormula attention_formula(const std::string& name) {
  static const std::unordered_map<std::string, FlopFormula> table{
      {"_scaled_dot_product_flash_attention_for_cpu", formula<CPU>},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", formula<CPU_BACKWARD>},
      {"_scaled_dot_product_flash_attention", formula<SDPA_FLASH>},
      {"_scaled_dot_product_flash_attention_backward", formula<SDPA_FLASH_BACKWARD>},
      {"_scaled_dot_product_efficient_attention", formula<SDPA_EFFICIENT>},
      {"_scaled_dot_product_efficient_attention_backward", formula<SDPA_EFFICIENT_BACKWARD>},
      {"_scaled_dot_product_cudnn_attention", formula<SDPA_CUDNN>},
      {"_scaled_dot_product_cudnn_attention_backward", formula<CUDNN_BACKWARD>},
      {"_cudnn_attention_forward", formula<CUDNN>},
      {"_cudnn_attention_backward", formula<CUDNN_BACKWARD>},
      {"_scaled_dot_product_fused_attention_overrideable", formula<OVERRIDEABLE>},
      {"_scaled_dot_product_fused_attention_overrideable_backward", formula<OVERRIDEABLE_BACKWARD>},
      {"_flash_attention_forward", formula<FLASH>},
      {"_flash_attention_backward", formula<FLASH_BACKWARD>},
      {"_efficient_attention_forward", formula<EFFICIENT>},
      {"_efficient_attention_backward", formula<EFFICIENT_BACKWARD>},
  };
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}
