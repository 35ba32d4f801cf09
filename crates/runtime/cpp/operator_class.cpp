// How an operator is classified, in this order:
// 1. its CompositeImplicitAutograd kernel is the one that runs on this device: composite;
// 2. it has a formula: a contraction;
// 3. its schema says that a result shares memory with an argument and that nothing is written (a view), it is tagged
//    inplace_view, or it is in the first table below: silent;
// 4. it is tagged pointwise, reduction or view_copy, or it is in the other tables: plain, or a factory;
// 5. else unknown.
// So the tables list only operators with their own kernel and without a tag.
#include "operator_class.h"
#include <ATen/ATen.h>
#include <ATen/core/enum_tag.h>
#include <memory>
#include <unordered_map>
#include <unordered_set>

namespace {
using Names = std::unordered_set<std::string>;

// clang-format off
// Neither compute nor access a tensor's memory.
const Names& silent() {
  static const Names names{
    "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "new_empty", "new_empty_strided", "resize",
    "resize_as", "set", "detach", "_efficientzerotensor", "record_stream", "is_pinned", "is_set_to", "is_same_size",
    "is_coalesced", "dense_dim", "sparse_dim", "_nnz", "_fused_sdp_choice", "_has_same_storage_numel", "_local_scalar_dense",
    "_print", "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_make_dual", "_fw_primal",
  };
  return names;
}

const Names& factories() {
  static const Names names{
    "arange", "eye", "from_file", "full", "full_like", "hann_window", "linspace", "logspace", "new_full", "new_ones", "new_zeros",
    "ones", "ones_like", "range", "scalar_tensor", "tril_indices", "triu_indices", "zeros", "zeros_like", "complex",
    "_cudnn_init_dropout_state",
  };
  return names;
}

// Neither tagged nor contracting. A prefix ends in '*'.
const Names& plain() {
  static const Names names{
    // copies, joins and indexing
    "_copy_from", "_copy_from_and_resize", "_foreach_copy", "_lazy_clone", "_pin_memory", "_reshape_copy", "_stack", "_to_copy",
    "block_diag", "bucketize", "cat", "clone", "col2im", "constant_pad_nd", "contiguous", "copy", "diag_embed",
    "diagonal_backward", "diagonal_scatter", "embedding", "embedding_dense_backward", "embedding_renorm", "fill_diagonal",
    "flip", "gather", "im2col", "index", "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "index_select",
    "isin", "masked_fill", "masked_scatter", "masked_scatter_backward", "masked_select", "nonzero", "nonzero_static", "put",
    "repeat", "repeat_interleave", "roll", "rot90", "scatter", "scatter_add", "scatter_reduce", "searchsorted",
    "select_backward", "select_scatter", "slice_backward", "slice_scatter", "split_with_sizes_copy", "stack", "take", "tril",
    "triu", "unfold_backward", "_unsafe_index", "_unsafe_index_put", "_unsafe_view", "_index_put_impl", "channel_shuffle",
    "pixel_shuffle", "pixel_unshuffle", "as_strided_scatter", "_chunk_cat", "_unsafe_masked_index", "unsafe_split",
    "unsafe_split_with_sizes", "_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward", "lift", "_conj_physical",
    // random numbers
    "_fused_dropout", "_masked_scale", "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial",
    "native_dropout", "native_dropout_backward", "normal", "normal_functional", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random", "randperm", "uniform", "binomial", "_standard_gamma", "_sample_dirichlet",
    // softmax, normalisation and losses
    "_log_softmax", "_log_softmax_backward_data", "_masked_softmax", "_masked_softmax_backward", "_safe_softmax", "_softmax",
    "_softmax_backward_data", "_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
    "cudnn_batch_norm_backward", "batch_norm_stats", "batch_norm_elemt", "_weight_norm_interface",
    "_weight_norm_interface_backward", "renorm", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
    "nll_loss2d_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss",
    "huber_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "soft_margin_loss", "soft_margin_loss_backward",
    // elementwise without the tag
    "_add_relu", "_prelu_kernel", "_prelu_kernel_backward", "addr", "celu", "clamp", "elu", "elu_backward", "fill", "floor_divide",
    "gelu", "gelu_backward", "glu", "glu_backward", "glu_jvp", "hardsigmoid", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh", "hardtanh_backward", "leaky_relu", "leaky_relu_backward", "log_sigmoid_backward",
    "log_sigmoid_forward", "mish", "mish_backward", "polar", "rrelu_with_noise", "rsub", "softplus_backward",
    "softshrink_backward", "threshold", "threshold_backward", "heaviside", "copysign", "xlogy", "relu", "silu", "silu_backward",
    "zero", "abs", "lcm", "gcd", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "logical_and",
    // reductions, scans and orders without the tag
    "_aminmax", "_cummax_helper", "_cummin_helper", "_is_all_true", "_is_any_true", "_logcumsumexp", "_unique", "_unique2",
    "allclose", "bincount", "cummax", "cummin", "cumprod", "cumsum", "dist", "equal", "histc", "kthvalue", "logcumsumexp", "median",
    "mode", "nanmedian", "native_norm", "sort", "topk", "trace", "unique_consecutive", "unique_dim", "aminmax", "var_mean",
    "linalg_vector_norm", "hash_tensor",
    // optimizers and gradient scaling
    "_amp_foreach_non_finite_check_and_unscale", "_amp_update_scale", "_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd",
    // number formats
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask", "quantize_per_channel", "quantize_per_tensor", "dequantize", "int_repr",
    "view_as_complex", "view_as_real",
    "_foreach_*", "max_pool*", "avg_pool*", "adaptive_*", "_adaptive_*", "reflection_pad*", "replication_pad*", "upsample_nearest*",
    "_upsample_nearest*", "_thnn_fused_*", "_embedding_bag*",
  };
  return names;
}

const Names& write_only() {
  static const Names names{
    "copy", "fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential", "log_normal", "cauchy", "geometric",
    "_foreach_copy", "_foreach_zero",
  };
  return names;
}
// clang-format on

const Names& gathering() {
  static const Names names{"embedding", "index_select", "gather", "index", "take", "masked_select"};
  return names;
}

bool is_plain(const std::string& name) {
  if (plain().count(name) != 0) return true;
  for (const auto& entry : plain()) {
    if (entry.back() == '*' && name.compare(0, entry.size() - 1, entry, 0, entry.size() - 1) == 0) return true;
  }
  return false;
}

bool is_view(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const auto& result : schema.returns()) aliases |= result.alias_info() != nullptr;
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return false;
  }
  return aliases;
}

// Without the namespace and the underscore of the in-place form: "aten::add_" is "add", "__ior__" stays.
std::string base_name(const std::string& name) {
  auto base = name.substr(name.rfind(':') + 1);
  const bool dunder = base.size() > 2 && base.compare(base.size() - 2, 2, "__") == 0;
  if (!dunder && base.size() > 1 && base.back() == '_') base.pop_back();
  return base;
}

OperatorClass classify(const c10::OperatorHandle& handle, const std::string& base) {
  using at::Tag;
  if (flop_formula(base) != nullptr) return OperatorClass::CONTRACTION;
  if (is_view(handle.schema()) || handle.hasTag(Tag::inplace_view) || silent().count(base) != 0) return OperatorClass::SILENT;
  if (factories().count(base) != 0) return OperatorClass::FACTORY;
  const bool tagged = handle.hasTag(Tag::pointwise) || handle.hasTag(Tag::reduction) || handle.hasTag(Tag::view_copy);
  return tagged || is_plain(base) ? OperatorClass::PLAIN : OperatorClass::UNKNOWN;
}

const Operator* make_operator(const char* name, const char* overload) {
  using c10::DispatchKey;
  const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!handle.has_value()) return nullptr;
  auto made = std::make_unique<Operator>();
  const auto base = base_name(name);
  const bool implicit = handle->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
  made->name = name;
  made->schema = &handle->schema();
  made->formula = flop_formula(base);
  made->composite_cpu = implicit && !handle->hasKernelForDispatchKey(DispatchKey::CPU);
  made->composite_cuda = implicit && !handle->hasKernelForDispatchKey(DispatchKey::CUDA);
  made->made_of_operators = implicit || handle->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      handle->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  made->writes_only = write_only().count(base) != 0;
  made->gathers = gathering().count(base) != 0;
  made->otherwise = classify(*handle, base);
  return made.release();
}

template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, visit);
  }
}

// Bytes of the memory that the tensor spans: an expanded dimension counts once.
uint64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_nested() || tensor.layout() != at::kStrided) return 0;
  uint64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) != 0 || tensor.size(i) == 0) elements *= static_cast<uint64_t>(tensor.size(i));
  }
  return elements * tensor.element_size();
}
} // namespace

OperatorClass Operator::operator_class(c10::ArrayRef<c10::IValue> inputs) const {
  if (!composite_cpu && !composite_cuda) return otherwise;
  bool cuda = false;
  for (const auto& input : inputs) {
    each_tensor(input, [&](const at::Tensor& tensor) { cuda |= tensor.defined() && tensor.is_cuda(); });
  }
  return (cuda ? composite_cuda : composite_cpu) ? OperatorClass::COMPOSITE : otherwise;
}

uint64_t Operator::input_bytes(c10::ArrayRef<c10::IValue> inputs) const {
  uint64_t bytes = 0;
  const auto& arguments = schema->arguments();
  for (size_t i = 0; i < inputs.size() && i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    // The destination of an out= form is only written; an in-place operand is read and written.
    const uint64_t times = written && !writes_only && !arguments[i].is_out() ? 2 : 1;
    if (gathers && i == 0) continue;
    each_tensor(inputs[i], [&](const at::Tensor& tensor) { bytes += times * bytes_of(tensor); });
  }
  return bytes;
}

uint64_t Operator::output_bytes(c10::ArrayRef<c10::IValue> outputs) const {
  uint64_t bytes = 0;
  const auto& returns = schema->returns();
  for (size_t i = 0; i < outputs.size() && i < returns.size(); ++i) {
    if (returns[i].alias_info() != nullptr) continue;
    each_tensor(outputs[i], [&](const at::Tensor& tensor) { bytes += (gathers ? 2 : 1) * bytes_of(tensor); });
  }
  return bytes;
}

const Operator* find_operator(const char* name, const char* overload) {
  static thread_local std::unordered_map<std::string, const Operator*> known;
  static thread_local std::string key;
  key.assign(name).append(1, '.').append(overload);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const auto* made = make_operator(name, overload);
  known.emplace(key, made);
  return made;
}
