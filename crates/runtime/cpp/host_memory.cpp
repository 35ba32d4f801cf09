// Host memory in exact pages. Contracts are in host_memory.h.
#include "host_memory.h"

#include "device.h"
#include "memory.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <sys/mman.h>
#include <unistd.h>

namespace {


// Pages are counted outside the CPU allocator, so that a run on the CPU distinguishes bytes that stand for device memory from
// bytes that stand for host memory.
struct PageCounters {
  std::atomic<uint64_t> live{0};
  std::atomic<uint64_t> peak{0};
  std::atomic<uint64_t> held{0};
  std::atomic<uint64_t> powers_of_two{0};
};
PageCounters pageable;
PageCounters locked;

uint64_t power_of_two(uint64_t bytes) {
  if (bytes == 0) return 0;
  uint64_t power = 1;
  while (power < bytes) power <<= 1;
  return power;
}

// One memory mapping, counted from construction to destruction, and unmapped whether or not a tensor has taken it.
class Pages {
 public:
  explicit Pages(size_t bytes, PageCounters& counters) : counters_(counters), asked_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    // An empty tensor also gets a page, because from_blob needs an address.
    held_ = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
    address_ = mmap(nullptr, held_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address_ == MAP_FAILED) TORCH_CHECK(false, "out of host memory: ", bytes, " bytes were asked for");
    if (held_ >= 2 * kHugePage) (void)madvise(address_, held_, MADV_HUGEPAGE);
    const uint64_t live = counters_.live.fetch_add(asked_) + asked_;
    uint64_t peak = counters_.peak.load();
    while (peak < live && !counters_.peak.compare_exchange_weak(peak, live)) {
    }
    counters_.held.fetch_add(held_);
    counters_.powers_of_two.fetch_add(power_of_two(asked_));
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  // Locks the pages. Returns nothing, or the reason of a failure.
  std::optional<std::string> lock(const rt_page_locker& locker) {
    const int error = locker.lock(address_, held_, /*flags=*/0);
    if (error == 0) {
      locker_ = locker;
      return std::nullopt;
    }
    // Otherwise libtorch's next check after a kernel would report this error as the kernel's.
    locker.forget_error();
    const char* text = locker.describe(error);
    return std::string("cudaHostRegister of ") + std::to_string(held_) + " bytes: " + (text ? text : "an unknown error");
  }

  ~Pages() {
    bool unmapped = true;
    if (locker_) {
      // A copy may still run. It was submitted while its tensor existed, so waiting for the devices here waits for it. The status
      // is ignored: a device that has failed copies nothing more.
      std::free(rt_cuda_synchronize_used());
      // Pages that stay locked must stay mapped, because the device may access them.
      unmapped = locker_->unlock(address_) == 0;
      if (!unmapped) locker_->forget_error();
    }
    if (unmapped) (void)munmap(address_, held_);
    counters_.live.fetch_sub(asked_);
    counters_.held.fetch_sub(held_);
    counters_.powers_of_two.fetch_sub(power_of_two(asked_));
  }

  void* address() const { return address_; }

 private:
  PageCounters& counters_;
  size_t asked_;
  size_t held_;
  void* address_;
  std::optional<rt_page_locker> locker_;
};

size_t bytes_of(at::IntArrayRef shape, const at::TensorOptions& options) {
  return static_cast<size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize();
}

at::Tensor over(std::shared_ptr<Pages> pages, at::IntArrayRef shape, const at::TensorOptions& options) {
  void* address = pages->address();
  // Freed once, with the last copy of the deleter, also if `from_blob` throws.
  return at::from_blob(address, shape, [pages](void*) mutable { pages.reset(); }, options);
}

const rt_page_locker* runtime_locker() {
  static const std::optional<rt_page_locker> found = []() -> std::optional<rt_page_locker> {
    rt_page_locker locker;
    locker.lock = reinterpret_cast<int (*)(void*, size_t, unsigned)>(rt_cuda_runtime("cudaHostRegister"));
    locker.unlock = reinterpret_cast<int (*)(void*)>(rt_cuda_runtime("cudaHostUnregister"));
    locker.describe = reinterpret_cast<const char* (*)(int)>(rt_cuda_runtime("cudaGetErrorString"));
    locker.forget_error = reinterpret_cast<int (*)()>(rt_cuda_runtime("cudaGetLastError"));
    if (locker.lock && locker.unlock && locker.describe && locker.forget_error) return locker;
    return std::nullopt;
  }();
  return found ? &*found : nullptr;
}

std::mutex reason_mutex;
std::string& last_reason() {
  static auto* reason = new std::string();
  return *reason;
}

at::Tensor locked_empty(at::IntArrayRef shape, const at::TensorOptions& options, int device) {
  std::string reason = "the CUDA runtime that libtorch uses does not show cudaHostRegister";
  if (const rt_page_locker* locker = runtime_locker()) {
    auto pages = std::make_shared<Pages>(bytes_of(shape, options), locked);
    // Locking creates a context of the current device, some hundred MiB, so the device in use is made current.
    const c10::DeviceGuard on_device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    auto failure = pages->lock(*locker);
    if (!failure) return over(std::move(pages), shape, options);
    reason = *failure;
  }
  at::Tensor tensor = at::empty(shape, options.pinned_memory(true));
  std::lock_guard<std::mutex> hold(reason_mutex);
  last_reason() = reason;
  return tensor;
}

}  // namespace

extern "C" {

rt_status rt_host_empty(const int64_t* shape, size_t dims, const at::Tensor* prototype, int device, at::Tensor** out) {
  return guard([&] {
    const at::IntArrayRef sizes(shape, dims);
    const auto options = prototype->options();
    *out = new at::Tensor(device >= 0 ? locked_empty(sizes, options, device)
                                      : over(std::make_shared<Pages>(bytes_of(sizes, options), pageable), sizes, options));
  });
}

rt_status rt_host_locked(const int64_t* shape, size_t dims, const at::Tensor* prototype, const rt_page_locker* locker,
                         at::Tensor** out, char** reason) {
  return guard([&] {
    const at::IntArrayRef sizes(shape, dims);
    const auto options = prototype->options();
    auto pages = std::make_shared<Pages>(bytes_of(sizes, options), locked);
    const auto failure = pages->lock(*locker);
    *reason = failure ? rt_message(failure->c_str()) : nullptr;
    *out = failure ? nullptr : new at::Tensor(over(std::move(pages), sizes, options));
  });
}

rt_status rt_host_usage_of(int pinned, rt_host_usage* out) {
  return guard([&] {
    const PageCounters& counters = pinned != 0 ? locked : pageable;
    rt_host_usage usage{counters.live, counters.peak, counters.held, counters.powers_of_two, 0};
    // Only with libtorch_cuda loaded may hasCUDA be called: libtorch keeps the first answer.
    if (pinned != 0 && c10::impl::hasDeviceGuardImpl(c10::kCUDA) && at::detail::getCUDAHooks().hasCUDA()) {
      const auto stats = at::getHostAllocator(c10::kCUDA)->get_stats();
      const auto count = [](int64_t bytes) { return static_cast<uint64_t>(std::max<int64_t>(bytes, 0)); };
      usage.live += count(stats.active_bytes.current);
      usage.peak += count(stats.active_bytes.peak);
      usage.fallback = count(stats.allocated_bytes.current);
      usage.held += usage.fallback;
      usage.powers_of_two += usage.fallback;
    }
    *out = usage;
  });
}

rt_status rt_host_fallback_reason(char** out) {
  return guard([&] {
    std::lock_guard<std::mutex> hold(reason_mutex);
    *out = last_reason().empty() ? nullptr : rt_message(last_reason().c_str());
  });
}
}
