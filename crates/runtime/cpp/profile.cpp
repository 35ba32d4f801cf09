// Traces and named ranges.
#include "guard.h"
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <memory>
#include <vector>
#include <torch/csrc/autograd/profiler_kineto.h>

namespace profiler = torch::autograd::profiler;
namespace kineto = torch::profiler::impl;

namespace {
// Kineto writes "unknown" for a name that is not ASCII, and does not escape names for JSON.
std::string printable(const char* name, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(name[i]);
    const bool continues = (byte & 0xC0) == 0x80;
    if (continues) continue;
    if (byte < 0x20 || byte >= 0x7F) {
      text += '?';
    } else if (byte == '"') {
      text += '\'';
    } else {
      text += byte == '\\' ? '/' : static_cast<char>(byte);
    }
  }
  return text;
}
// libtorch reports an allocation to the profiler state in the thread's debug info, which a session over all threads does not set.
// This state forwards the reports to the session; the autograd engine copies it to its threads.
struct MemoryReports : kineto::ProfilerStateBase {
  explicit MemoryReports(const kineto::ProfilerConfig& config) : ProfilerStateBase(config) {}
  kineto::ActiveProfilerType profilerType() override { return kineto::ActiveProfilerType::KINETO; }
  void reportMemoryUsage(void* pointer, int64_t size, size_t allocated, size_t reserved, c10::Device device) override {
    auto* session = ProfilerStateBase::get(/*global=*/true);
    if (session != nullptr) session->reportMemoryUsage(pointer, size, allocated, reserved, device);
  }
};

// NULL when nothing records. The inputs are read only if what records wants them, and not after this call.
at::RecordFunction* begin(at::RecordScope scope, const char* name, size_t size, at::Tensor* const* inputs, size_t count) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(scope);
  if (!callbacks.has_value()) return nullptr;
  auto made = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  if (count == 0 || !made->needsInputs()) {
    made->before(printable(name, size));
    return made.release();
  }
  std::vector<c10::IValue> values;
  values.reserve(count);
  for (size_t i = 0; i < count; ++i) values.emplace_back(*inputs[i]);
  made->before(printable(name, size), c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  return made.release();
}

c10::DebugInfoKind slot() { return c10::DebugInfoKind::PROFILER_STATE; }
} // namespace

extern "C" {
// Starts a trace of all threads. One at a time, stopped on the thread that started it.
rt_status rt_trace_start(int cuda, int shapes, int memory) {
  return guard([&] {
    kineto::ExperimentalConfig experimental;
    experimental.profile_all_threads = true;
    const kineto::ProfilerConfig config(kineto::ProfilerState::KINETO, shapes != 0, memory != 0, false, false, false,
                                        experimental);
    std::set<kineto::ActivityType> activities{kineto::ActivityType::CPU};
    if (cuda != 0) activities.insert(kineto::ActivityType::CUDA);
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities,
                             {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE, at::RecordScope::BACKWARD_FUNCTION});
    if (memory != 0) c10::ThreadLocalDebugInfo::_push(slot(), std::make_shared<MemoryReports>(config));
  });
}

// Stops the trace; the caller owns `result`.
rt_status rt_trace_stop(profiler::ProfilerResult** result) {
  return guard([&] {
    auto* reports = c10::ThreadLocalDebugInfo::get(slot());
    if (dynamic_cast<MemoryReports*>(reports) != nullptr) c10::ThreadLocalDebugInfo::_pop(slot());
    *result = profiler::disableProfiler().release();
  });
}

// Writes a stopped trace as Chrome's JSON. `result` and `path` are borrowed.
rt_status rt_trace_save(profiler::ProfilerResult* result, const char* path) {
  return guard([&] { result->save(path); });
}

// `result` is taken.
void rt_trace_free(profiler::ProfilerResult* result) { delete result; }

// Opens a range with `size` bytes of UTF-8 as its name; `range` is NULL when nothing records.
rt_status rt_range_begin(const char* name, size_t size, at::RecordFunction** range) {
  return guard([&] { *range = begin(at::RecordScope::USER_SCOPE, name, size, nullptr, 0); });
}

// Opens the scope of a kernel that bypasses the dispatcher, named as `rt_range_begin` does: a trace shows it as an operator of `count`
// tensors, which are borrowed.
rt_status rt_kernel_begin(const char* name, size_t size, at::Tensor* const* inputs, size_t count, at::RecordFunction** range) {
  return guard([&] { *range = begin(at::RecordScope::FUNCTION, name, size, inputs, count); });
}

// Closes a range or a kernel's scope on the thread that opened it. `range` is taken.
rt_status rt_range_end(at::RecordFunction* range) {
  return guard([&] { delete range; });
}
}
