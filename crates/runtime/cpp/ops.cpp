// Boxed calls: any operator of the dispatcher by its name.
#include "guard.h"
#include "operator_class.h"
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <memory>
#include <sstream>
#include <utility>

extern "C" {
// An argument or a result. `items` of an argument is borrowed; `items` of a result is owned by the receiver, who frees the tensors
// one by one and the block by `rt_value_free`.
struct rt_value {
  int32_t tag;
  int64_t integer; // INT, BOOL, KIND, and DEVICE as tch numbers it: -1 the CPU, from 0 on a CUDA device
  double real; // DOUBLE
  void* items; // TENSOR: at::Tensor*; TENSORS: at::Tensor*[]; INTS: int64_t[]; DOUBLES: double[]; BOOLS: uint8_t[]; STRING
  size_t size; // of the lists and STRING
};
}

namespace {
enum Tag : int32_t { NONE, TENSOR, TENSORS, INT, DOUBLE, BOOL, INTS, DOUBLES, BOOLS, STRING, KIND, DEVICE };
// How far a call got before it failed.
enum Stage : int { LOOK_UP, ARGUMENTS, NO_KERNEL, KERNEL };

std::string overloads_of(const std::string& name) {
  std::ostringstream text;
  const char* separator = "";
  for (const auto& operator_name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (operator_name.name != name) continue;
    text << separator << '`' << operator_name.overload_name << '`';
    separator = ", ";
  }
  return text.str();
}

c10::OperatorHandle look_up(const char* name, const char* overload) {
  auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (handle.has_value()) return *handle;
  const auto overloads = overloads_of(name);
  if (overloads.empty()) {
    throw std::runtime_error(
        std::string("there is no operator `") + name + "`; names are those of libtorch's native_functions.yaml with `aten::` in front");
  }
  throw std::runtime_error(std::string("`") + name + "` has no overload `" + overload + "`, only " + overloads);
}

c10::IValue tensor_list(const rt_value& value, const c10::Argument& argument) {
  auto** items = static_cast<at::Tensor**>(value.items);
  const auto list_type = argument.type()->cast<c10::ListType>();
  const bool optional = list_type && list_type->getElementType()->kind() == c10::TypeKind::OptionalType;
  if (optional) {
    c10::List<std::optional<at::Tensor>> list;
    for (size_t i = 0; i < value.size; ++i) {
      list.push_back(items[i] == nullptr ? std::optional<at::Tensor>() : *items[i]);
    }
    return list;
  }
  c10::List<at::Tensor> list;
  for (size_t i = 0; i < value.size; ++i) list.push_back(items[i] == nullptr ? at::Tensor() : *items[i]);
  return list;
}

c10::IValue to_ivalue(const rt_value& value, const c10::Argument& argument) {
  switch (value.tag) {
    case NONE:
      return {};
    case TENSOR:
      return *static_cast<at::Tensor*>(value.items);
    case TENSORS:
      return tensor_list(value, argument);
    case INT:
    case KIND:
      return value.integer;
    case DOUBLE:
      return value.real;
    case BOOL:
      return value.integer != 0;
    case INTS: {
      auto* items = static_cast<int64_t*>(value.items);
      return c10::IValue(std::vector<int64_t>(items, items + value.size));
    }
    case DOUBLES: {
      auto* items = static_cast<double*>(value.items);
      return c10::IValue(std::vector<double>(items, items + value.size));
    }
    case BOOLS: {
      auto* items = static_cast<uint8_t*>(value.items);
      c10::List<bool> list;
      for (size_t i = 0; i < value.size; ++i) list.push_back(items[i] != 0);
      return list;
    }
    case STRING:
      return std::string(static_cast<char*>(value.items), value.size);
    case DEVICE:
      return value.integer < 0 ? c10::Device(c10::kCPU)
                               : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(value.integer));
    default:
      throw std::logic_error("a value with an unknown tag");
  }
}

torch::jit::Stack arguments(const c10::FunctionSchema& schema, const rt_value* positional, size_t positional_count,
                            const char* const* keys, const rt_value* named, size_t named_count) {
  const auto& formal = schema.arguments();
  torch::jit::Stack stack;
  stack.reserve(formal.size());
  for (size_t i = 0; i < positional_count; ++i) {
    // The check below reports surplus values; they are converted as the last argument's type.
    stack.push_back(to_ivalue(positional[i], formal.empty() ? c10::Argument() : formal[std::min(i, formal.size() - 1)]));
  }
  std::unordered_map<std::string, c10::IValue> keyword;
  for (size_t i = 0; i < named_count; ++i) {
    const auto index = schema.argumentIndexWithName(keys[i]);
    keyword.emplace(keys[i], to_ivalue(named[i], index.has_value() ? formal[*index] : c10::Argument()));
  }
  schema.checkAndNormalizeInputs(stack, keyword);
  return stack;
}

template <class Item>
Item* allocate(size_t count) {
  // At least one item, because calloc may return null for an empty list.
  auto* block = static_cast<Item*>(std::calloc(count == 0 ? 1 : count, sizeof(Item)));
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

template <class Item, class List>
void set_list(rt_value& value, Tag tag, const List& list) {
  auto* items = allocate<Item>(list.size());
  value.tag = tag;
  value.items = items;
  value.size = list.size();
  for (size_t i = 0; i < value.size; ++i) items[i] = static_cast<Item>(list.get(i));
}

at::Tensor* own(const at::Tensor& tensor) { return tensor.defined() ? new at::Tensor(tensor) : nullptr; }

// Writes `result` to the empty `value`. Whenever this may throw, the tag, items and size of `value` describe exactly what it owns.
void to_value(const c10::IValue& result, rt_value& value) {
  if (result.isTensor()) {
    value.items = own(result.toTensor());
    value.tag = value.items == nullptr ? NONE : TENSOR;
  } else if (result.isTensorList()) {
    const auto list = result.toTensorVector();
    auto** items = allocate<at::Tensor*>(list.size());
    value.tag = TENSORS;
    value.items = items;
    value.size = list.size();
    for (size_t i = 0; i < value.size; ++i) items[i] = own(list[i]);
  } else if (result.isInt()) {
    value.tag = INT;
    value.integer = result.toInt();
  } else if (result.isSymInt()) {
    value.tag = INT;
    value.integer = result.toSymInt().guard_int(__FILE__, __LINE__);
  } else if (result.isDouble()) {
    value.tag = DOUBLE;
    value.real = result.toDouble();
  } else if (result.isBool()) {
    value.tag = BOOL;
    value.integer = result.toBool();
  } else if (result.isIntList()) {
    set_list<int64_t>(value, INTS, result.toIntList());
  } else if (result.isDoubleList()) {
    set_list<double>(value, DOUBLES, result.toDoubleList());
  } else if (result.isBoolList()) {
    set_list<uint8_t>(value, BOOLS, result.toBoolList());
  } else if (result.isString()) {
    const auto& text = result.toStringRef();
    value.items = allocate<char>(text.size());
    value.tag = STRING;
    value.size = text.size();
    std::memcpy(value.items, text.data(), value.size);
  } else if (!result.isNone()) {
    throw std::runtime_error("the operator ran, but gave a value of type " + result.tagKind());
  }
}

// Owns the results of a call until the receiver takes them.
class Results {
 public:
  explicit Results(const torch::jit::Stack& stack) : values_(allocate<rt_value>(stack.size())), size_(stack.size()) {}
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  // Values that were not written are zero, that is, NONE.
  ~Results() {
    if (values_ == nullptr) return;
    for (size_t i = 0; i < size_; ++i) free_items(values_[i]);
    std::free(values_);
  }

  rt_value& operator[](size_t index) { return values_[index]; }
  rt_value* release() { return std::exchange(values_, nullptr); }

 private:
  static void free_items(rt_value& value) {
    if (value.tag == TENSOR) {
      delete static_cast<at::Tensor*>(value.items);
      return;
    }
    if (value.tag == TENSORS) {
      auto** items = static_cast<at::Tensor**>(value.items);
      for (size_t i = 0; i < value.size; ++i) delete items[i];
    }
    std::free(value.items);
  }

  rt_value* values_;
  size_t size_;
};
} // namespace

extern "C" {
void rt_value_free(void* block) { std::free(block); }

// Calls the operator `name` with `overload` ("" for the unnamed one). Missing arguments take the schema's defaults. Names and
// values are borrowed; the caller owns `results` and what its values hold. `stage` is written in every case.
rt_status rt_op_call(const char* name, const char* overload, const rt_value* positional, size_t positional_count,
                     const char* const* keys, const rt_value* named, size_t named_count, rt_value** results,
                     size_t* result_count, int* stage) {
  *stage = LOOK_UP;
  const auto status = guard([&] {
    const auto handle = look_up(name, overload);
    *stage = ARGUMENTS;
    auto stack = arguments(handle.schema(), positional, positional_count, keys, named, named_count);
    *stage = KERNEL;
    try {
      handle.callBoxed(stack);
    } catch (const c10::NotImplementedError&) {
      *stage = NO_KERNEL;
      throw;
    }
    Results values(stack);
    for (size_t i = 0; i < stack.size(); ++i) to_value(stack[i], values[i]);
    *results = values.release();
    *result_count = stack.size();
  });
  return status;
}

// Returns the FLOPs of such a call without executing it; `known` is 0 when there is no formula for it.
rt_status rt_op_flops(const char* name, const char* overload, const rt_value* positional, size_t positional_count,
                      const char* const* keys, const rt_value* named, size_t named_count, uint64_t* dense,
                      uint64_t* causal, int* known) {
  return guard([&] {
    const auto handle = look_up(name, overload);
    const auto stack = arguments(handle.schema(), positional, positional_count, keys, named, named_count);
    const auto* op = find_operator(name, overload);
    const auto flops = op != nullptr && op->formula != nullptr ? op->formula(stack) : std::nullopt;
    *known = flops.has_value();
    *dense = flops.has_value() ? flops->dense : 0;
    *causal = flops.has_value() ? flops->causal : 0;
  });
}

rt_status rt_set_num_threads(int count) {
  return guard([&] { at::set_num_threads(count); });
}

rt_status rt_num_threads(int* count) {
  return guard([&] { *count = at::get_num_threads(); });
}

rt_status rt_set_deterministic(int on, int warn_only) {
  return guard([&] { at::globalContext().setDeterministicAlgorithms(on != 0, warn_only != 0); });
}

rt_status rt_deterministic(int* on) {
  return guard([&] { *on = at::globalContext().deterministicAlgorithms(); });
}

// Writes the numbers (at::SDPBackend) of the backends of `scaled_dot_product_attention` in the order in which it tries them; `order` has
// room for `count`, the number of backends.
rt_status rt_attention_order(int64_t* order, size_t count) {
  return guard([&] {
    const auto backends = at::globalContext().sDPPriorityOrder();
    TORCH_CHECK(count == backends.size(), "libtorch has ", backends.size(), " backends of attention, not ", count);
    for (size_t i = 0; i < count; ++i) order[i] = static_cast<int64_t>(backends[i]);
  });
}

// Sets the order, a permutation of all backends, for the whole process.
rt_status rt_set_attention_order(const int64_t* order, size_t count) {
  return guard([&] {
    TORCH_CHECK(count == static_cast<size_t>(at::num_sdp_backends), "libtorch has ", at::num_sdp_backends, " backends of attention, not ", count);
    at::globalContext().setSDPPriorityOrder(std::vector<int64_t>(order, order + count));
  });
}
}
