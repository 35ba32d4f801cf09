// Host memory for copies to and from a device: whole pages of this process, page-locked if the CUDA runtime can do it.
// See guard.h for the contract.
#pragma once
#include "guard.h"

#include <cstdint>

extern "C" {
// cudaHostRegister, cudaHostUnregister, cudaGetErrorString and cudaGetLastError; the last one clears the error.
typedef struct {
  int (*lock)(void* memory, size_t bytes, unsigned flags);
  int (*unlock)(void* memory);
  const char* (*describe)(int error);
  int (*forget_error)();
} rt_page_locker;

// Bytes of one kind of host memory, page-locked or not.
typedef struct {
  uint64_t live;            // requested by live tensors
  uint64_t peak;            // the maximum of `live`
  uint64_t held;            // `live` in whole pages
  uint64_t powers_of_two;   // `live` with each block rounded up to a power of two
  uint64_t fallback;        // part of `held` in libtorch's pinned allocator, which rounds up to powers of two and caches freed blocks
} rt_host_usage;

// An uninitialised CPU tensor of `prototype`'s dtype on pages of its own; page-locked for copies of CUDA device `device`
// unless that is negative. Where pages cannot be locked, libtorch's pinned allocator is used.
rt_status rt_host_empty(const int64_t* shape, size_t dims, const at::Tensor* prototype, int device, at::Tensor** out);
// The same with pages locked by `locker`, which is used until the tensor is gone, and without the fallback. If locking fails,
// `out` is null and `reason` a message that the caller frees.
rt_status rt_host_locked(const int64_t* shape, size_t dims, const at::Tensor* prototype, const rt_page_locker* locker,
                         at::Tensor** out, char** reason);
rt_status rt_host_usage_of(int pinned, rt_host_usage* out);
// Why libtorch's pinned allocator was used the last time: a message that the caller frees, or null if it never was.
rt_status rt_host_fallback_reason(char** out);
}
