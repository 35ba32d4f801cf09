// Matrix products and convolutions; attention is in attention_flops.cpp. A multiply-add is two operations. Complex products
// count as real products of the same shape.
#include "contraction.h"
#include "attention_flops.h"
#include <ATen/ATen.h>
#include <unordered_map>

namespace {
using Inputs = c10::ArrayRef<c10::IValue>;

uint64_t count(int64_t number) { return number > 0 ? static_cast<uint64_t>(number) : 0; }

// An operand whose sizes determine the work; NULL if it is missing, sparse or nested.
const at::Tensor* operand(Inputs inputs, size_t index) {
  if (index >= inputs.size() || !inputs[index].isTensor()) return nullptr;
  const auto& tensor = inputs[index].toTensor();
  if (!tensor.defined() || tensor.is_nested()) return nullptr;
  return tensor.layout() == at::kStrided || tensor.layout() == at::kMkldnn ? &tensor : nullptr;
}

std::optional<Flops> both(uint64_t flops) { return Flops{flops, flops}; }

// [.., m, k] by [.., k, n]
template <size_t a_index>
std::optional<Flops> product(Inputs inputs) {
  const auto *a = operand(inputs, a_index), *b = operand(inputs, a_index + 1);
  if (a == nullptr || b == nullptr || b->dim() < 2) return std::nullopt;
  return both(2 * count(a->numel()) * count(b->size(-1)));
}

// [.., k] by the transpose of [n, k]
std::optional<Flops> product_with_transpose(Inputs inputs) {
  const auto *a = operand(inputs, 0), *b = operand(inputs, 1);
  if (a == nullptr || b == nullptr || b->dim() != 2) return std::nullopt;
  return both(2 * count(a->numel()) * count(b->size(0)));
}

// [.., k] by [k]
template <size_t a_index>
std::optional<Flops> product_with_vector(Inputs inputs) {
  const auto* a = operand(inputs, a_index);
  if (a == nullptr || operand(inputs, a_index + 1) == nullptr) return std::nullopt;
  return both(2 * count(a->numel()));
}

// The groups divide the rows of one operand, the contracted index, or the columns of the other operand.
std::optional<Flops> grouped_product(Inputs inputs) {
  const auto *a = operand(inputs, 0), *b = operand(inputs, 1);
  if (a == nullptr || b == nullptr || b->dim() < 2) return std::nullopt;
  const uint64_t all = 2 * count(a->numel()) * count(b->size(-1));
  const bool groups_of_columns = a->dim() == 3 && b->dim() == 2;
  return both(groups_of_columns && a->size(0) > 0 ? all / count(a->size(0)) : all);
}

int64_t at_or_last(const std::vector<int64_t>& list, size_t index) { return index < list.size() ? list[index] : list.back(); }

// Multiply-adds for each element that is produced (consumed, when transposed).
uint64_t taps(const at::Tensor& weight) {
  return weight.size(0) > 0 ? count(weight.numel()) / count(weight.size(0)) : 0;
}

// input, weight, bias, stride, padding, dilation, transposed. Taps that fall on the padding count.
std::optional<Flops> convolution(Inputs inputs) {
  const auto *input = operand(inputs, 0), *weight = operand(inputs, 1);
  if (input == nullptr || weight == nullptr || inputs.size() < 7 || weight->dim() < 3) return std::nullopt;
  if (inputs[6].toBool()) return both(2 * count(input->numel()) * taps(*weight));
  const auto stride = inputs[3].toIntVector(), padding = inputs[4].toIntVector(), dilation = inputs[5].toIntVector();
  const auto spatial = static_cast<size_t>(weight->dim() - 2);
  if (stride.empty() || padding.empty() || dilation.empty()) return std::nullopt;
  uint64_t produced = count(weight->size(0));
  if (input->dim() == weight->dim()) produced *= count(input->size(0));
  for (size_t i = 0; i < spatial; ++i) {
    const auto kernel = at_or_last(dilation, i) * (weight->size(2 + static_cast<int64_t>(i)) - 1) + 1;
    const auto size = input->size(input->dim() - static_cast<int64_t>(spatial - i));
    produced *= count((size + 2 * at_or_last(padding, i) - kernel) / at_or_last(stride, i) + 1);
  }
  return both(2 * produced * taps(*weight));
}

// grad_output, input, weight, …, transposed at 7, output_mask at 10: one product for each gradient that is requested.
std::optional<Flops> convolution_backward(Inputs inputs) {
  const auto *grad = operand(inputs, 0), *input = operand(inputs, 1), *weight = operand(inputs, 2);
  if (grad == nullptr || input == nullptr || weight == nullptr || inputs.size() < 11) return std::nullopt;
  const auto& taps_of = inputs[7].toBool() ? *input : *grad;
  const auto mask = inputs[10].toBoolList();
  const uint64_t wanted = (mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0);
  return both(wanted * 2 * count(taps_of.numel()) * taps(*weight));
}

const std::unordered_map<std::string, FlopFormula>& formulas() {
  static const std::unordered_map<std::string, FlopFormula> table{
      {"mm", product<0>},
      {"bmm", product<0>},
      {"addmm", product<1>},
      {"_addmm_activation", product<1>},
      {"baddbmm", product<1>},
      {"addbmm", product<1>},
      {"_int_mm", product<0>},
      {"_scaled_mm", product<0>},
      {"_scaled_mm_v2", product<0>},
      {"mv", product_with_vector<0>},
      {"addmv", product_with_vector<1>},
      {"dot", product_with_vector<0>},
      {"vdot", product_with_vector<0>},
      {"linear", product_with_transpose},
      {"mkldnn_linear", product_with_transpose},
      {"_weight_int8pack_mm", product_with_transpose},
      {"_grouped_mm", grouped_product},
      {"_scaled_grouped_mm", grouped_product},
      {"_scaled_grouped_mm_v2", grouped_product},
      {"convolution", convolution},
      {"_convolution", convolution},
      {"convolution_overrideable", convolution},
      {"convolution_backward", convolution_backward},
  };
  return table;
}
} // namespace

FlopFormula flop_formula(const std::string& name) {
  const auto found = formulas().find(name);
  return found != formulas().end() ? found->second : attention_formula(name);
}
