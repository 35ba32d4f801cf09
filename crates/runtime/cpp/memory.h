// Bytes of the device allocators. See guard.h for the border's contract.
#pragma once
#include <cstddef>
#include <cstdint>

#include "guard.h"

// Bytes of a page that the kernel maps as one where it is asked to (madvise).
inline constexpr size_t kHugePage = size_t{2} << 20;

extern "C" {
// Puts a counting allocator before libtorch's CPU allocator, once per process. Memory handed out before is not counted,
// then or when it is freed.
rt_status rt_cpu_tracking_install();

// Live bytes on the CPU.
rt_status rt_cpu_live(int64_t* live);
// Largest number of live bytes since the last call, and starts a new peak at what is live.
rt_status rt_cpu_take_peak(int64_t* peak);

// The most bytes that may be live on the CPU from this call on; negative for no limit. An allocation beyond it throws
// c10::OutOfMemoryError and counts nothing. Gives kept blocks back that do not fit beside what is live.
rt_status rt_cpu_limit(int64_t bytes);

// Whether large blocks are offered to the kernel for huge pages. Returns what it was.
rt_status rt_cpu_huge_pages(int enabled, int* previous);

// Whether freed large blocks are kept for the next tensors of their size. Returns what it was; off gives all back.
rt_status rt_cpu_keep_blocks(int enabled, int* previous);
// Bytes of freed blocks that are kept.
rt_status rt_cpu_cached(int64_t* bytes);
// Gives kept blocks back to the system.
rt_status rt_cpu_empty_cache();

// The same for the caching allocator of CUDA device `index`.
rt_status rt_cuda_live(int index, int64_t* live);
rt_status rt_cuda_take_peak(int index, int64_t* peak);
rt_status rt_cuda_cached(int index, int64_t* bytes);
// Gives cached blocks back to the driver.
rt_status rt_cuda_empty_cache();
}
