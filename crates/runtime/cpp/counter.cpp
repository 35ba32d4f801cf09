// Counts the work of dispatched operators by a callback around every operator, registered only while a counter runs.
//
// A classified operator includes the operators that it calls, which are not counted again. A composite operator is not counted,
// only the operators that it calls. So no work is counted twice.
#include "guard.h"
#include "operator_class.h"
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

extern "C" {
struct rt_work {
  uint64_t calls;
  uint64_t dense;
  uint64_t causal;
  uint64_t bytes;
};
struct rt_row {
  rt_work total;
  rt_work recomputed; // part of the total
  int32_t unknown;
};
// `name` has `size` bytes and is valid during the call.
typedef rt_status (*rt_visit_row)(void* context, const char* name, size_t size, const rt_row* row);

// How many counters run. Rust reads it, so that a kernel without a counter makes no call.
std::atomic<size_t> rt_running_counters{0};
}

// The rows of a counter. With a marker, a thread-local callback without effect, it counts only threads that have this marker:
// libtorch's autograd engine copies a thread's callbacks to the threads that run its backward.
struct rt_counter {
  std::mutex mutex;
  std::unordered_map<std::string, rt_row> rows;
  at::CallbackHandle marker = at::INVALID_CALLBACK_HANDLE;
};

namespace {
std::mutex registry_mutex;
std::vector<std::shared_ptr<rt_counter>> registry;
at::CallbackHandle callback_handle = at::INVALID_CALLBACK_HANDLE;
thread_local int recompute_depth = 0;

struct Frame : at::ObserverContext {
  Frame* parent = nullptr;
  const Operator* op = nullptr;
  OperatorClass operator_class = OperatorClass::UNKNOWN;
  bool understood = true;
  bool has_parts = false;
  Flops flops;
  uint64_t bytes = 0;

  bool stands_for_what_it_calls() const {
    return operator_class != OperatorClass::COMPOSITE && operator_class != OperatorClass::UNKNOWN;
  }
};
thread_local Frame* current = nullptr;

bool on_this_thread(at::CallbackHandle marker) {
  const auto& callbacks = at::get_record_function_tls_().sorted_tls_callbacks_;
  return std::any_of(callbacks.begin(), callbacks.end(), [&](const auto& entry) { return entry.handle_ == marker; });
}

void commit(const std::string& name, const Flops& flops, uint64_t bytes, bool unknown) {
  const rt_work work{1, flops.dense, flops.causal, bytes};
  const auto add = [&](rt_work& to) {
    to.calls += work.calls;
    to.dense += work.dense;
    to.causal += work.causal;
    to.bytes += work.bytes;
  };
  std::lock_guard<std::mutex> lock(registry_mutex);
  for (const auto& counter : registry) {
    if (counter->marker != at::INVALID_CALLBACK_HANDLE && !on_this_thread(counter->marker)) continue;
    std::lock_guard<std::mutex> rows_lock(counter->mutex);
    auto& row = counter->rows[name];
    add(row.total);
    if (recompute_depth > 0) add(row.recomputed);
    if (unknown) row.unknown = 1;
  }
}

void measure(Frame& frame, const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  frame.operator_class = frame.op->operator_class(inputs);
  switch (frame.operator_class) {
    case OperatorClass::CONTRACTION: {
      const auto flops = frame.op->formula(inputs);
      frame.understood = flops.has_value();
      if (flops.has_value()) frame.flops = *flops;
      break;
    }
    case OperatorClass::SILENT:
    case OperatorClass::COMPOSITE:
      return;
    default:
      break;
  }
  frame.bytes = frame.op->input_bytes(inputs);
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  if (current != nullptr && current->stands_for_what_it_calls()) return nullptr;
  const auto* op = find_operator(function.name(), function.overload_name());
  if (op == nullptr) return nullptr;
  auto frame = std::make_unique<Frame>();
  frame->op = op;
  try {
    measure(*frame, function);
  } catch (...) {
    // An operand without a known size: the operator is listed as unknown.
    frame->understood = false;
  }
  frame->parent = current;
  current = frame.get();
  return frame;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* frame = static_cast<Frame*>(context);
  if (frame == nullptr) return;
  current = frame->parent;
  const auto operator_class = frame->operator_class;
  const bool is_part = frame->has_parts || operator_class == OperatorClass::CONTRACTION ||
      operator_class == OperatorClass::PLAIN || operator_class == OperatorClass::UNKNOWN;
  if (frame->parent != nullptr && is_part) frame->parent->has_parts = true;
  if (operator_class == OperatorClass::COMPOSITE || operator_class == OperatorClass::SILENT) return;

  bool unknown = !frame->understood;
  if (operator_class == OperatorClass::UNKNOWN) {
    // With a composite kernel it is counted by its parts; otherwise the parts may not be all of its work.
    if (frame->has_parts && frame->op->made_of_operators) return;
    unknown = true;
  }
  // An operator that threw has no results.
  if (function.outputs().empty() && !frame->op->schema->returns().empty()) return;
  try {
    frame->bytes = frame->has_parts ? 0 : frame->bytes + frame->op->output_bytes(function.outputs());
    commit(frame->op->name, frame->flops, frame->bytes, unknown);
  } catch (...) {
    // Out of memory for a row: a callback cannot report it.
  }
}

std::unique_ptr<at::ObserverContext> mark(const at::RecordFunction&) { return nullptr; }
} // namespace

extern "C" {
// Starts counting every thread of the process, or (`this_thread` not 0) the calling thread and the engine's threads that
// run a backward pass for it. The caller owns `counter` and passes it to `rt_counter_stop` on the same thread.
rt_status rt_counter_start(int this_thread, std::shared_ptr<rt_counter>** counter) {
  return guard([&] {
    auto made = std::make_unique<std::shared_ptr<rt_counter>>(std::make_shared<rt_counter>());
    if (this_thread != 0) {
      (*made)->marker = at::addThreadLocalCallback(at::RecordFunctionCallback(mark).scopes({at::RecordScope::FUNCTION}));
    }
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry.push_back(*made);
    if (rt_running_counters.fetch_add(1) == 0) {
      callback_handle = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end)
                                                  .needsInputs(true)
                                                  .needsOutputs(true)
                                                  .scopes({at::RecordScope::FUNCTION}));
    }
    *counter = made.release();
  });
}

// Stops counting and frees the counter, which is taken.
rt_status rt_counter_stop(std::shared_ptr<rt_counter>* counter) {
  return guard([&] {
    std::unique_ptr<std::shared_ptr<rt_counter>> taken(counter);
    if ((*taken)->marker != at::INVALID_CALLBACK_HANDLE) at::removeCallback((*taken)->marker);
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry.erase(std::find(registry.begin(), registry.end(), *taken));
    if (rt_running_counters.fetch_sub(1) == 1) at::removeCallback(callback_handle);
  });
}

// Calls `visit` with each row and its current counts. `counter` is borrowed.
rt_status rt_counter_rows(const std::shared_ptr<rt_counter>* counter, rt_visit_row visit, void* context) {
  return guard([&] {
    std::unordered_map<std::string, rt_row> rows;
    {
      std::lock_guard<std::mutex> lock((*counter)->mutex);
      rows = (*counter)->rows;
    }
    for (const auto& [name, row] : rows) throw_on_failure(visit(context, name.data(), name.size(), &row), "counter");
  });
}

// Adds work outside of the dispatcher, as one call of `name` (`size` bytes of UTF-8, borrowed).
rt_status rt_counter_record(const char* name, size_t size, uint64_t dense, uint64_t causal, uint64_t bytes) {
  return guard([&] {
    commit(std::string(name, size), Flops{dense, causal}, bytes, false);
  });
}

// Between a call with 1 and a call with -1, this thread's work counts as recomputed.
void rt_recompute(int change) { recompute_depth += change; }
}
