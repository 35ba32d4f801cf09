// Host memory that a device copies from and to: whole pages of the process's own, locked where CUDA's runtime can do it.
// See guard.h for the border's contract.
#pragma once
#include "guard.h"

#include <cstdint>

extern "C" {
// What cudaHostRegister, cudaHostUnregister, cudaGetErrorString and cudaGetLastError are; the last forgets the error.
typedef struct {
  int (*lock)(void* memory, size_t bytes, unsigned flags);
  int (*unlock)(void* memory);
  const char* (*describe)(int error);
  int (*forget_error)();
} rt_page_locker;

// Bytes of one kind of host memory, page-locked or not.
typedef struct {
  uint64_t live;            // asked for by tensors that live
  uint64_t peak;            // the most of `live`
  uint64_t held;            // what they hold, in whole pages
  uint64_t powers_of_two;   // what they would hold in blocks that are rounded up to powers of two
  uint64_t fallback;        // of `held`: in libtorch's allocator, which rounds so and keeps what is freed
} rt_host_usage;

// An uninitialised CPU tensor of `prototype`'s dtype on pages of its own; page-locked for copies of CUDA device `device`
// unless that is negative. Where pages cannot be locked, the tensor is libtorch's own pinned one.
rt_status rt_host_empty(const int64_t* shape, size_t dims, const at::Tensor* prototype, int device, at::Tensor** out);
// The first half of it: pages locked by `locker`, which is used until the tensor is gone. `out` is null and `reason` a
// message that the caller frees where it cannot be done.
rt_status rt_host_locked(const int64_t* shape, size_t dims, const at::Tensor* prototype, const rt_page_locker* locker,
                         at::Tensor** out, char** reason);
rt_status rt_host_usage_of(int pinned, rt_host_usage* out);
// Why page-locked memory was libtorch's the last time it was: a message that the caller frees, or null if it never was.
rt_status rt_host_fallback_reason(char** out);
}
