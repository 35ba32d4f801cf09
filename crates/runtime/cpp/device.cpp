// Devices, streams, events and host memory. Contracts are in device.h.
#include "device.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <unistd.h>

namespace {

c10::Device cuda_device(int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }

c10::Stream cuda_stream(int device, int64_t id) {
  return c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(device), c10::kCUDA);
}

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

// The folder of libtorch_cpu; empty if the loader does not know it.
std::string libtorch_folder() {
  Dl_info info;
  const void* symbol = reinterpret_cast<const void*>(&at::globalContext);
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string path(info.dli_fname);
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// On Linux, in a container, under WSL.
bool driver_visible() {
  for (const char* sign : {"/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg"}) {
    if (access(sign, F_OK) == 0) return true;
  }
  return false;
}

// libtorch checks for CUDA once per process, and many calls on the CPU trigger the check: a seed, pinned memory, a trace. So
// libtorch_cuda, which the linker drops, is opened before main where a driver is visible, as by `import torch`. If that fails,
// Rust tries again when CUDA is requested, and reports the loader's error.
[[maybe_unused]] const bool opened_before_main = [] {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!driver_visible() || (visible != nullptr && *visible == '\0')) return false;
  return dlopen((libtorch_folder() + "/libtorch_cuda.so").c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
}();

}  // namespace

extern "C" {

rt_status rt_libtorch_folder(char** out) {
  return guard([&] {
    const std::string folder = libtorch_folder();
    TORCH_CHECK(!folder.empty(), "the loader does not say where libtorch is");
    *out = rt_message(folder.c_str());
  });
}

int rt_driver_visible() { return driver_visible() ? 1 : 0; }

rt_status rt_cuda_device_count(int* out) {
  return guard([&] { *out = c10::impl::hasDeviceGuardImpl(c10::kCUDA) ? cuda().deviceCount() : 0; });
}

rt_status rt_cuda_initialise(int* out) {
  return guard([&] {
    if (!at::detail::getCUDAHooks().hasCUDA()) {
      *out = 0;
      return;
    }
    at::globalContext().lazyInitDevice(c10::kCUDA);
    *out = 1;
  });
}

void* rt_cuda_runtime(const char* name) {
  for (const char* library : {static_cast<const char*>(nullptr), "libcudart.so.13", "libcudart.so.12"}) {
    void* handle = library == nullptr ? RTLD_DEFAULT : dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
    if (library != nullptr && handle == nullptr) continue;
    if (void* address = dlsym(handle, name)) return address;
  }
  return nullptr;
}

rt_status rt_cuda_synchronize(int device) {
  return guard([&] { cuda().synchronizeDevice(static_cast<c10::DeviceIndex>(device)); });
}

rt_status rt_cuda_make_current(int device) {
  return guard([&] { cuda().setDevice(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))); });
}

rt_status rt_cuda_synchronize_used() {
  return guard([&] {
    // Only with libtorch_cuda loaded may hasCUDA be called: libtorch keeps the first answer.
    if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return;
    const auto& hooks = at::detail::getCUDAHooks();
    if (!hooks.hasCUDA()) return;
    const auto count = cuda().deviceCount();
    for (c10::DeviceIndex device = 0; device < count; ++device) {
      // Synchronising with an unused device would create its context, some hundred MiB.
      if (hooks.hasPrimaryContext(device)) cuda().synchronizeDevice(device);
    }
  });
}

rt_status rt_cuda_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes) {
  return guard([&] {
    const auto info = c10::getDeviceAllocator(c10::kCUDA)->getMemoryInfo(static_cast<c10::DeviceIndex>(device));
    *free_bytes = info.first;
    *total_bytes = info.second;
  });
}

rt_status rt_stream_new(int device, int high_priority, int64_t* id) {
  return guard([&] { *id = cuda().getStreamFromGlobalPool(cuda_device(device), high_priority != 0).id(); });
}

rt_status rt_stream_current(int device, int64_t* id) {
  return guard([&] { *id = cuda().getStream(cuda_device(device)).id(); });
}

rt_status rt_stream_query(int device, int64_t id, int* out) {
  return guard([&] { *out = cuda_stream(device, id).query() ? 1 : 0; });
}

rt_status rt_stream_synchronize(int device, int64_t id) {
  return guard([&] { cuda_stream(device, id).synchronize(); });
}

rt_status rt_stream_native(int device, int64_t id, void** out) {
  return guard([&] { *out = cuda_stream(device, id).native_handle(); });
}

rt_status rt_stream_enter(int device, int64_t id, c10::StreamGuard** out) {
  return guard([&] { *out = new c10::StreamGuard(cuda_stream(device, id)); });
}

rt_status rt_stream_leave(c10::StreamGuard* stream_guard) {
  return guard([&] { delete stream_guard; });
}

rt_status rt_stream_keep(int device, int64_t id, const at::Tensor* tensor) {
  return guard([&] {
    const c10::Stream stream = cuda_stream(device, id);
    if (tensor->is_cuda()) {
      tensor->record_stream(stream);
    } else if (tensor->is_pinned()) {
      at::getHostAllocator(c10::kCUDA)
          ->record_event(const_cast<void*>(tensor->storage().data()), tensor->storage().data_ptr().get_context(), stream);
    }
  });
}

rt_status rt_copy_async(at::Tensor* target, const at::Tensor* source) {
  return guard([&] { target->copy_(*source, /*non_blocking=*/true); });
}

rt_status rt_event_new(int timed, c10::Event** out) {
  return guard([&] {
    const auto flag = timed != 0 ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
    *out = new c10::Event(c10::kCUDA, flag);
  });
}

void rt_event_free(c10::Event* event) { delete event; }

rt_status rt_event_record(c10::Event* event, int device, int64_t id) {
  return guard([&] { event->record(cuda_stream(device, id)); });
}

rt_status rt_event_block(const c10::Event* event, int device, int64_t id) {
  return guard([&] { event->block(cuda_stream(device, id)); });
}

rt_status rt_event_query(const c10::Event* event, int* out) {
  return guard([&] { *out = event->query() ? 1 : 0; });
}

rt_status rt_event_synchronize(const c10::Event* event) {
  return guard([&] { event->synchronize(); });
}

rt_status rt_event_elapsed(const c10::Event* start, const c10::Event* end, double* out) {
  return guard([&] { *out = start->elapsedTime(*end); });
}

rt_status rt_thread_state_capture(at::ThreadLocalState** out) {
  return guard([&] { *out = new at::ThreadLocalState(); });
}

void rt_thread_state_free(at::ThreadLocalState* state) { delete state; }

rt_status rt_thread_state_enter(const at::ThreadLocalState* state, at::ThreadLocalStateGuard** out) {
  return guard([&] { *out = new at::ThreadLocalStateGuard(*state); });
}

rt_status rt_thread_state_leave(at::ThreadLocalStateGuard* state_guard) {
  return guard([&] { delete state_guard; });
}

rt_status rt_storage_users(const at::Tensor* tensor, uint64_t* out) {
  return guard([&] {
    *out = tensor->storage().use_count();
    // The count is read relaxed; the decrements before it release.
    std::atomic_thread_fence(std::memory_order_acquire);
  });
}
}
