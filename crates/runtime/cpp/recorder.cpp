// Records operators between autograd and the backends, and runs them again. Contracts are in recorder.h.
//
// The dispatch key Fake is below autograd and above the backends, and no tensor has it. While a thread records, its operators go through
// the fallback of this key, which computes them by the backend and keeps handle, arguments and results. Operators that these call are
// part of them and are not recorded.
#include "recorder.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace {

// Where a tensor argument lies, so that it can be compared with the same argument of another run.
struct Operand {
  int64_t call = -1;  // that made its memory; -1 for memory from before the recording
  int64_t output = -1;
  const void* address = nullptr;  // of memory from before the recording
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool from_host = false;  // no recorded operator wrote it
  std::string bytes;       // then its content
};

struct RecordedCall {
  c10::OperatorHandle op;
  c10::DispatchKeySet keys;
  std::vector<c10::IValue> inputs, outputs;
  std::vector<std::vector<Operand>> operands;  // of each input
  bool computes;  // false if it only makes views, or memory without content
};

struct Origin {
  int64_t call, output;
  bool written;
  bool zeros;  // made by aten::zeros, into which tch copies data of the host
};

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// The same memory without the graph.
at::Tensor without_graph(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// Calls `visit` with each tensor, and returns the value with what it returned.
template <class Visit>
c10::IValue map_tensors(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(visit(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(visit(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

std::string name_of(const c10::OperatorHandle& op) {
  std::ostringstream text;
  text << op.operator_name();
  return text.str();
}

std::string argument_of(const c10::OperatorHandle& op, size_t index) {
  return "`" + name_of(op) + "`, argument `" + op.schema().arguments()[index].name() + "`";
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// Refuses an operator for which the host waits for values of a device.
void refuse_host_read(const c10::OperatorHandle& op, const torch::jit::Stack& inputs) {
  const auto name = name_of(op);
  if (name.find("index") != std::string::npos) {
    // Only a mask has as many elements as it is true.
    for (const auto& value : inputs) {
      if (!value.isOptionalTensorList()) continue;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        const bool is_mask = tensor.has_value() && tensor->defined() &&
            (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        TORCH_CHECK(!is_mask, "`", name, "` counts the true elements of a mask on the host, which a captured step cannot");
      }
    }
    return;
  }
  const bool waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  TORCH_CHECK(!waits, "`", name, "` reads values on the host, which a captured step cannot");
}

std::string content_of(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  return std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
}

template <class Value>
void expect_equal(const Value& first, const Value& second, const std::string& what, const char* kind, const char* remedy) {
  if (first == second) return;
  std::ostringstream text;
  text << what << ": " << kind << " is " << first << " at one step and " << second << " at the next; " << remedy;
  throw std::runtime_error(text.str());
}

constexpr const char* kScalarRemedy = "a captured step repeats the first, so keep the value in a tensor that is written before the step";
constexpr const char* kTensorRemedy = "a captured step repeats the first, so copy new values into the same tensor";

void compare_operands(const Operand& a, const Operand& b, const std::string& what) {
  expect_equal(a.dtype, b.dtype, what, "its dtype", kTensorRemedy);
  expect_equal(c10::IntArrayRef(a.sizes), c10::IntArrayRef(b.sizes), what, "its shape", kTensorRemedy);
  expect_equal(c10::IntArrayRef(a.strides), c10::IntArrayRef(b.strides), what, "its layout", kTensorRemedy);
  const auto origin = [](const Operand& operand) {
    std::ostringstream text;
    if (operand.call < 0) text << "at address " << operand.address;
    else text << "result " << operand.output << " of operator " << operand.call;
    text << ", element " << operand.offset;
    return text.str();
  };
  expect_equal(origin(a), origin(b), what, "its memory", kTensorRemedy);
  TORCH_CHECK(a.bytes == b.bytes && a.from_host == b.from_host, what,
              ": its content, which no recorded operator wrote, differs between two steps; it comes from the host, or from a kernel "
              "outside the dispatcher; ", kTensorRemedy);
}

bool same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble()) {
    const double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  return a.tagKind() == b.tagKind() && a == b;
}

}  // namespace

struct rt_recording {
  std::vector<RecordedCall> calls;
  std::unordered_map<const c10::StorageImpl*, Origin> origins;
  std::unordered_set<const c10::StorageImpl*> external;

  // `written` is whether the operator writes the tensor, `viewed` whether it only makes a view of it, which reads nothing.
  Operand describe(const at::Tensor& tensor, bool written, bool viewed) {
    Operand operand;
    if (!tensor.defined()) return operand;
    operand.dtype = tensor.scalar_type();
    operand.sizes = tensor.sizes().vec();
    const auto* storage = storage_of(tensor);
    if (storage == nullptr) return operand;
    operand.strides = tensor.strides().vec();
    operand.offset = tensor.storage_offset();
    const auto made = origins.find(storage);
    if (made == origins.end()) {
      external.insert(storage);
      operand.address = storage->data_ptr().get();
      return operand;
    }
    operand.call = made->second.call;
    operand.output = made->second.output;
    auto& origin = made->second;
    if (origin.written || viewed) return operand;
    const auto content = written && !origin.zeros ? std::string() : content_of(tensor);
    const bool is_zero = origin.zeros && content.find_first_not_of('\0') == std::string::npos;
    if (written) {
      TORCH_CHECK(!origin.zeros || is_zero, "a captured step cannot change data of the host in place; copy it first");
      origin.written = true;
    } else if (!is_zero) {
      operand.from_host = true;
      operand.bytes = content;
      // A replay must not overwrite it.
      calls[static_cast<size_t>(origin.call)].computes = false;
    }
    return operand;
  }

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size();
    torch::jit::Stack arguments(stack->end() - count, stack->end());
    refuse_host_read(op, arguments);
    RecordedCall call{op, keys, {}, {}, {}, false};
    bool mutates = false;
    std::unordered_set<const c10::StorageImpl*> given;
    for (size_t i = 0; i < count; ++i) {
      const bool written = writes(schema.arguments()[i]);
      const bool viewed = !written && schema.arguments()[i].alias_info() != nullptr;
      mutates |= written;
      auto& operands = call.operands.emplace_back();
      call.inputs.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
        operands.push_back(describe(tensor, written, viewed));
        if (tensor.defined()) given.insert(storage_of(tensor));
        return without_graph(tensor);
      }));
    }
    arguments.clear();
    op.redispatchBoxed(keys, stack);
    const bool empty = starts_with(name_of(op), "aten::empty") || starts_with(name_of(op), "aten::new_empty");
    const bool zeros = name_of(op) == "aten::zeros";
    const int64_t number = static_cast<int64_t>(calls.size());
    int64_t output = 0;
    bool makes = schema.returns().empty();
    const size_t results = schema.returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); ++i) {
      call.outputs.push_back(map_tensors((*stack)[i], [&](const at::Tensor& tensor) {
        const auto* storage = tensor.defined() ? storage_of(tensor) : nullptr;
        if (storage != nullptr && given.count(storage) == 0) {
          makes = true;
          if (external.count(storage) == 0) origins.emplace(storage, Origin{number, output, !empty && !zeros, zeros});
        }
        output++;
        return without_graph(tensor);
      }));
    }
    call.computes = mutates || (makes && !empty);
    calls.push_back(std::move(call));
  }

  void replay() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& call : calls) {
      if (!call.computes) continue;
      torch::jit::Stack stack(call.inputs.begin(), call.inputs.end());
      std::unordered_set<const c10::StorageImpl*> given;
      for (const auto& input : call.inputs) {
        map_tensors(input, [&](const at::Tensor& tensor) {
          if (tensor.defined()) given.insert(storage_of(tensor));
          return tensor;
        });
      }
      call.op.redispatchBoxed(call.keys, &stack);
      std::vector<at::Tensor> computed;
      for (const auto& value : stack) map_tensors(value, [&](const at::Tensor& tensor) { computed.push_back(tensor); return tensor; });
      size_t index = 0;
      for (const auto& value : call.outputs) {
        map_tensors(value, [&](const at::Tensor& recorded) {
          const auto& result = computed.at(index++);
          if (!recorded.defined() || given.count(storage_of(recorded)) != 0) return recorded;
          TORCH_CHECK(recorded.sizes() == result.sizes(), "`", name_of(call.op), "`: its result has another shape when it is repeated");
          recorded.copy_(result);
          return recorded;
        });
      }
    }
  }
};

namespace {
thread_local rt_recording* current_recording = nullptr;

void record_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inside(c10::DispatchKey::Fake);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake);
  if (current_recording == nullptr) {
    op.redispatchBoxed(below, stack);
  } else {
    current_recording->run(op, below, stack);
  }
}
}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record_operator>());
}

extern "C" {

rt_status rt_recording_new(rt_recording** out) {
  return guard([&] { *out = new rt_recording(); });
}

void rt_recording_free(rt_recording* recording) { delete recording; }

rt_status rt_recording_begin(rt_recording* recording) {
  return guard([&] {
    TORCH_CHECK(current_recording == nullptr, "this thread records a step already");
    current_recording = recording;
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, true);
  });
}

void rt_recording_end() {
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, false);
  current_recording = nullptr;
}

uint64_t rt_recording_size(const rt_recording* recording) { return recording->calls.size(); }

rt_status rt_recording_compare(const rt_recording* first, const rt_recording* second) {
  return guard([&] {
    const size_t count = std::min(first->calls.size(), second->calls.size());
    for (size_t i = 0; i < count; ++i) {
      const auto &a = first->calls[i], &b = second->calls[i];
      const auto number = "operator " + std::to_string(i);
      expect_equal(name_of(a.op), name_of(b.op), number, "it", "a captured step runs the same operators each time");
      for (size_t argument = 0; argument < a.inputs.size(); ++argument) {
        const auto what = argument_of(a.op, argument);
        const auto &x = a.operands[argument], &y = b.operands[argument];
        expect_equal(x.size(), y.size(), what, "its number of tensors", kTensorRemedy);
        for (size_t tensor = 0; tensor < x.size(); ++tensor) compare_operands(x[tensor], y[tensor], what);
        if (x.empty() && !same_value(a.inputs[argument], b.inputs[argument])) {
          std::ostringstream text;
          text << what << ": its value is " << a.inputs[argument] << " at one step and " << b.inputs[argument] << " at the next; "
               << kScalarRemedy;
          throw std::runtime_error(text.str());
        }
      }
    }
    expect_equal(first->calls.size(), second->calls.size(), "the step", "its number of operators",
                 "a captured step runs the same operators each time");
  });
}

rt_status rt_recording_replay(rt_recording* recording) {
  return guard([&] { recording->replay(); });
}
}
