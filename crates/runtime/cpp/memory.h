// Bytes of the device allocators. See guard.h for the contract.
#pragma once
#include <cstddef>
#include <cstdint>

#include "guard.h"

// Bytes of a huge page, which madvise requests.
inline constexpr size_t kHugePage = size_t{2} << 20;
// Bytes that a mapping is a multiple of: the largest page of the processors that libtorch runs on.
inline constexpr size_t kPage = size_t{64} << 10;

extern "C" {
// Wraps libtorch's CPU allocator in a counting one, once per process. Memory that was allocated before is never counted.
rt_status rt_cpu_tracking_install();

// Live bytes on the CPU.
rt_status rt_cpu_live(int64_t* live);
// Peak of live bytes since the last call; the next peak starts at the live bytes.
rt_status rt_cpu_take_peak(int64_t* peak);

// The most bytes that may be live on the CPU from this call on; negative for no limit. An allocation beyond it throws
// c10::OutOfMemoryError and counts nothing. Frees cached blocks that exceed the limit together with the live bytes.
rt_status rt_cpu_limit(int64_t bytes);

// From this call on, allocations on the CPU of more than 64 bytes are numbered from 0, and those from `first` to before `end` throw
// c10::OutOfMemoryError; a negative `first` ends it.
rt_status rt_cpu_fail_allocations(int64_t first, int64_t end);
// How many allocations were numbered, and how many of them failed, since the last call of rt_cpu_fail_allocations.
rt_status rt_cpu_failed_allocations(int64_t* seen, int64_t* failed);

// Sets whether large blocks request huge pages. Returns the previous setting.
rt_status rt_cpu_huge_pages(int enabled, int* previous);

// Sets whether freed large blocks are cached for the next tensors of their size. Returns the previous setting; off frees all.
rt_status rt_cpu_block_cache(int enabled, int* previous);
// Sets by how many per cent of the maximum of live bytes live and cached bytes may exceed it. Returns the previous setting.
rt_status rt_cpu_cache_slack(int64_t percent, int64_t* previous);
// Bytes of cached blocks.
rt_status rt_cpu_cached(int64_t* bytes);
// Frees cached blocks.
rt_status rt_cpu_empty_cache();

// The same for the caching allocator of CUDA device `index`.
rt_status rt_cuda_live(int index, int64_t* live);
rt_status rt_cuda_take_peak(int index, int64_t* peak);
rt_status rt_cuda_cached(int index, int64_t* bytes);
// Frees cached blocks, to the driver.
rt_status rt_cuda_empty_cache();
}
