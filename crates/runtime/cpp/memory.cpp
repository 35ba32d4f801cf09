// A CPU allocator that counts exactly and maps large blocks by itself, and the statistics of CUDA's.
#include "memory.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <sys/mman.h>

namespace {

// What a block begins with, so that freeing needs no lookup; 64 bytes keep libtorch's alignment.
struct Header {
  int64_t size;
  bool mapped;
};
constexpr size_t kHeader = 64;
static_assert(sizeof(Header) <= kHeader);

Header header_of(const char* block) {
  Header header;
  std::memcpy(&header, block, sizeof header);
  return header;
}

// The counters are written by every allocation, so they share a cache line with nothing else.
struct alignas(128) CpuCounters {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};
};
CpuCounters cpu_counters;
std::atomic<bool> huge_pages{true};
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
// No allocation makes more bytes live than this.
std::atomic<int64_t> limit{kUnlimited};

// Allocations that fail on request: those of more than kScalar bytes are numbered from 0 while `first` is not negative.
struct Failures {
  std::atomic<int64_t> first{-1};
  std::atomic<int64_t> end{0};
  std::atomic<int64_t> seen{0};
  std::atomic<int64_t> failed{0};
};
Failures failures;
// libtorch wraps each number that an operator gets in a tensor. A block so small comes from the C library's heap, whose exhaustion ends
// any program.
constexpr int64_t kScalar = 64;
c10::Allocator* base = nullptr;
c10::DeleterFnPtr base_deleter = nullptr;

// Blocks of this size and more are mapped one by one, so that a freed one leaves no hole in the C library's heap.
constexpr size_t kMapped = size_t{1} << 18;

// The bytes of a mapping, and of what it takes to begin it at a huge page.
struct Mapping {
  size_t bytes;
  bool huge;

  explicit Mapping(size_t size)
      : bytes((size + kHeader + kPage - 1) & ~(kPage - 1)), huge(size >= 2 * kHugePage) {}
};

// Maps a block for `size` bytes behind a header; null if the system refuses it.
char* map_block(size_t size) {
  const Mapping mapping(size);
  const size_t room = mapping.bytes + (mapping.huge ? kHugePage : 0);
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (!mapping.huge) return static_cast<char*>(mapped);
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const auto aligned = (begin + kHugePage - 1) & ~(kHugePage - 1);
  if (aligned > begin) (void)munmap(mapped, aligned - begin);
  const auto end = aligned + mapping.bytes;
  if (begin + room > end) (void)munmap(reinterpret_cast<void*>(end), begin + room - end);
  char* block = reinterpret_cast<char*>(aligned);
  // A fresh block of 64 MiB costs 16 384 page faults with small pages and 32 with huge ones.
  if (huge_pages.load(std::memory_order_relaxed)) (void)madvise(block, mapping.bytes, MADV_HUGEPAGE);
  return block;
}

// Gives a large block back, whose release was reported.
void give_back(char* block) {
  const Header header = header_of(block);
  if (header.mapped) {
    (void)munmap(block, Mapping(static_cast<size_t>(header.size)).bytes);
  } else {
    c10::free_cpu(block);
  }
}

// A cache of freed large blocks, by size. The system frees a block of 64 MiB page by page and allocates the next one page by page,
// zeroed, which costs as much as several elementwise passes over it; a training step frees and allocates the same sizes again
// and again. Live and cached bytes together never exceed the maximum of live bytes by more than the slack; without slack the
// cache does not raise the process's peak.
class KeptBlocks {
 public:
  // Takes a cached block of exactly this size; null if there is none.
  char* take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(size);
    if (found == blocks_.end()) return nullptr;
    char* block = found->second;
    blocks_.erase(found);
    bytes_ -= size;
    return block;
  }

  // Caches a freed block if it fits under the maximum; `live` does not include it.
  bool keep(char* block, size_t size, int64_t live) {
    if (!enabled.load(std::memory_order_relaxed)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    if (live + static_cast<int64_t>(bytes_ + size) > bound()) return false;
    // Before another thread can take it. A trace shows a release here, and an allocation at the next use.
    c10::profiledCPUMemoryReporter().Delete(block);
    blocks_.emplace(size, block);
    bytes_ += size;
    return true;
  }

  // After the allocation of a new block: frees cached blocks that no longer fit beside `live` bytes.
  void made(int64_t live) {
    std::lock_guard<std::mutex> lock(mutex_);
    most_ = std::max(most_, live);
    trim(live);
  }

  // Frees cached blocks that do not fit beside `live` bytes.
  void fit(int64_t live) {
    std::lock_guard<std::mutex> lock(mutex_);
    trim(live);
  }

  size_t bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!blocks_.empty()) release_one();
  }

  // Off until a program asks for it: counting alone keeps no memory.
  std::atomic<bool> enabled{false};
  // Per cent of the maximum of live bytes.
  std::atomic<int64_t> slack{0};

 private:
  void release_one();
  int64_t bound() const {
    const int64_t most = most_ + most_ / 100 * slack.load(std::memory_order_relaxed);
    return std::min(most, limit.load(std::memory_order_relaxed));
  }
  void trim(int64_t live) {
    while (!blocks_.empty() && live + static_cast<int64_t>(bytes_) > bound()) release_one();
  }

  std::mutex mutex_;
  std::multimap<size_t, char*> blocks_;
  size_t bytes_ = 0;
  int64_t most_ = 0;
};

// Never destroyed: tensors in static storage are freed after any static destructor of ours.
KeptBlocks& kept() {
  static auto* blocks = new KeptBlocks();
  return *blocks;
}

void raise_peak(int64_t candidate) {
  int64_t peak = cpu_counters.peak.load(std::memory_order_relaxed);
  while (candidate > peak && !cpu_counters.peak.compare_exchange_weak(peak, candidate, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  const int64_t size = header_of(block).size;
  const int64_t live = cpu_counters.live.fetch_sub(size, std::memory_order_relaxed) - size;
  const auto bytes = static_cast<size_t>(size);
  if (bytes < kMapped) return base_deleter(block);
  if (kept().keep(block, bytes, live)) return;
  c10::profiledCPUMemoryReporter().Delete(block);
  give_back(block);
}

void KeptBlocks::release_one() {
  auto largest = std::prev(blocks_.end());
  give_back(largest->second);
  bytes_ -= largest->first;
  blocks_.erase(largest);
}

void fail_on_request(int64_t size) {
  const int64_t first = failures.first.load(std::memory_order_acquire);
  if (first < 0 || size <= kScalar) return;
  const int64_t number = failures.seen.fetch_add(1, std::memory_order_relaxed);
  if (number < first || number >= failures.end.load(std::memory_order_relaxed)) return;
  failures.failed.fetch_add(1, std::memory_order_relaxed);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on the CPU: ", size, " bytes were asked for, and allocation ", number,
                   " fails on request (runtime::memory::fail_allocations)");
}

// Counts `size` bytes before they are allocated, if the limit permits. Returns the live bytes including them.
int64_t admit(int64_t size) {
  fail_on_request(size);
  int64_t live = cpu_counters.live.load(std::memory_order_relaxed);
  while (true) {
    const int64_t most = limit.load(std::memory_order_relaxed);
    if (size > most - live) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on the CPU: ", size, " bytes were asked for, ", live,
                       " are live and the limit is ", most,
                       "; free tensors, take smaller batches, or raise the limit (runtime::memory::limit)");
    }
    if (cpu_counters.live.compare_exchange_weak(live, live + size, std::memory_order_relaxed)) return live + size;
  }
}

// A block of the system's, with room for a header; null if it has no memory for one.
char* fresh_block(size_t size, bool large, bool* is_mapped) {
  try {
    if (!large) return static_cast<char*>(base->raw_allocate(size + kHeader));
    char* block = map_block(size);
    *is_mapped = block != nullptr;
    // A process has a limited number of mappings.
    return *is_mapped ? block : static_cast<char*>(c10::alloc_cpu(size + kHeader));
  } catch (const c10::Error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

struct TrackingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    const auto counted = static_cast<int64_t>(size);
    const bool large = size >= kMapped;
    const int64_t live = admit(counted);
    char* block = large ? kept().take(size) : nullptr;
    const bool fresh = block == nullptr;
    bool is_mapped = false;
    if (fresh) {
      // Before the allocation, so that cached and live bytes together never exceed the limit.
      if (limit.load(std::memory_order_relaxed) != kUnlimited) kept().fit(live);
      block = fresh_block(size, large, &is_mapped);
      if (block == nullptr) {
        // The cache may hold what the system lacks.
        kept().clear();
        block = fresh_block(size, large, &is_mapped);
      }
      if (block == nullptr) {
        cpu_counters.live.fetch_sub(counted, std::memory_order_relaxed);
        TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on the CPU: ", size, " bytes were asked for, ",
                         live - counted, " are live, and the system gives no more; free tensors, take smaller batches, or "
                         "let the process have more memory (ulimit -v, its control group, vm.overcommit_memory)");
      }
    }
    if (large) c10::profiledCPUMemoryReporter().New(block, size + kHeader);
    if (fresh) {
      const Header header{counted, is_mapped};
      std::memcpy(block, &header, sizeof header);
    }
    raise_peak(live);
    if (large && fresh) kept().made(live);
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

rt_status rt_cpu_live(int64_t* live) {
  return guard([&] { *live = cpu_counters.live.load(); });
}

rt_status rt_cpu_take_peak(int64_t* peak) {
  return guard([&] {
    *peak = cpu_counters.peak.exchange(cpu_counters.live.load());
    // An allocation between the two steps above must not be lost to the new peak.
    raise_peak(cpu_counters.live.load());
  });
}

rt_status rt_cpu_limit(int64_t bytes) {
  return guard([&] {
    limit.store(bytes < 0 ? kUnlimited : bytes);
    kept().fit(cpu_counters.live.load());
  });
}

rt_status rt_cpu_fail_allocations(int64_t first, int64_t end) {
  return guard([&] {
    failures.first.store(-1);
    failures.end.store(end);
    failures.seen.store(0);
    failures.failed.store(0);
    failures.first.store(first, std::memory_order_release);
  });
}

rt_status rt_cpu_failed_allocations(int64_t* seen, int64_t* failed) {
  return guard([&] {
    *seen = failures.seen.load();
    *failed = failures.failed.load();
  });
}

rt_status rt_cpu_huge_pages(int enabled, int* previous) {
  return guard([&] { *previous = huge_pages.exchange(enabled != 0); });
}

rt_status rt_cpu_block_cache(int enabled, int* previous) {
  return guard([&] {
    *previous = kept().enabled.exchange(enabled != 0);
    if (!enabled) kept().clear();
  });
}

rt_status rt_cpu_cache_slack(int64_t percent, int64_t* previous) {
  return guard([&] {
    *previous = kept().slack.exchange(percent);
    kept().fit(cpu_counters.live.load(std::memory_order_relaxed));
  });
}

rt_status rt_cpu_empty_cache() {
  return guard([] { kept().clear(); });
}

rt_status rt_cuda_live(int index, int64_t* live) {
  return guard([&] { *live = cuda_stats(index).allocated_bytes[0].current; });
}

rt_status rt_cpu_cached(int64_t* bytes) {
  return guard([&] { *bytes = static_cast<int64_t>(kept().bytes()); });
}

rt_status rt_cuda_cached(int index, int64_t* bytes) {
  return guard([&] {
    const auto stats = cuda_stats(index);
    *bytes = stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
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
