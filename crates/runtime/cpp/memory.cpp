// A CPU allocator that counts exactly, and the statistics of CUDA's.
#include "memory.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>

namespace {

// libtorch aligns to 64 bytes; a header of the same size keeps that, and lets a free know its size without a lookup.
constexpr size_t kHeader = 64;
constexpr size_t kHugePage = size_t{2} << 20;

// The counters are written by every allocation, so they share a cache line with nothing else.
struct alignas(128) Counters {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> allocations{0};
};
Counters counters;
std::atomic<bool> huge_pages{true};
c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_deleter = nullptr;

void raise_peak(int64_t candidate) {
  int64_t peak = counters.peak.load(std::memory_order_relaxed);
  while (candidate > peak && !counters.peak.compare_exchange_weak(peak, candidate, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  int64_t size;
  std::memcpy(&size, block, sizeof size);
  counters.live.fetch_sub(size, std::memory_order_relaxed);
  base_deleter(block);
}

struct TrackingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    char* block = static_cast<char*>(base->raw_allocate(size + kHeader));
    const auto counted = static_cast<int64_t>(size);
    if (size >= 2 * kHugePage && huge_pages.load(std::memory_order_relaxed)) {
      // A fresh block of 64 MiB costs 16 384 page faults with small pages and 32 with huge ones.
      const auto begin = (reinterpret_cast<uintptr_t>(block) + kHugePage - 1) & ~(kHugePage - 1);
      const auto end = (reinterpret_cast<uintptr_t>(block) + size) & ~(kHugePage - 1);
      if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    }
    std::memcpy(block, &counted, sizeof counted);
    raise_peak(counters.live.fetch_add(counted, std::memory_order_relaxed) + counted);
    counters.allocations.fetch_add(1, std::memory_order_relaxed);
    void* data = block + kHeader;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

c10::CachingDeviceAllocator::DeviceStats cuda_stats(int index) {
  return at::accelerator::getDeviceStats(static_cast<c10::DeviceIndex>(index));
}

}  // namespace

extern "C" {

rt_status rt_cpu_tracking_install() {
  return guard([] {
    static std::once_flag once;
    std::call_once(once, [] {
      base = c10::GetCPUAllocator();
      base_deleter = base->raw_deleter();
      if (base_deleter == nullptr) {
        throw std::runtime_error("libtorch's CPU allocator was replaced by one that cannot be counted");
      }
      // Never destroyed: tensors in static storage are freed after any static destructor of ours.
      c10::SetCPUAllocator(new TrackingAllocator(), /*priority=*/1);
    });
  });
}

rt_status rt_cpu_live(int64_t* live, int64_t* allocations) {
  return guard([&] {
    *live = counters.live.load();
    *allocations = counters.allocations.load();
  });
}

rt_status rt_cpu_take_peak(int64_t* peak) {
  return guard([&] {
    *peak = counters.peak.exchange(counters.live.load());
    // An allocation between the two steps above must not be lost to the new peak.
    raise_peak(counters.live.load());
  });
}

rt_status rt_cpu_huge_pages(int enabled, int* previous) {
  return guard([&] { *previous = huge_pages.exchange(enabled != 0); });
}

rt_status rt_cuda_live(int index, int64_t* live, int64_t* allocations) {
  return guard([&] {
    const auto stats = cuda_stats(index);
    *live = stats.allocated_bytes[0].current;
    *allocations = stats.allocation[0].allocated;
  });
}

rt_status rt_cuda_take_peak(int index, int64_t* peak) {
  return guard([&] {
    *peak = cuda_stats(index).allocated_bytes[0].peak;
    at::accelerator::resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

rt_status rt_cuda_empty_cache() {
  return guard([] { at::accelerator::emptyCache(); });
}

}  // extern "C"
