// Devices, streams, events and host memory, through libtorch's device-generic headers: the build needs no CUDA header.
//
// A CUDA stream is passed as its id and its device's index, the fields of c10::Stream. Events, guards and thread states are
// owned by the caller and freed with the function of the same family.
#pragma once
#include "guard.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

extern "C" {
// --- discovery ---
// The folder of the libtorch_cpu that this process has loaded. `out` receives a message that the caller frees.
rt_status rt_libtorch_folder(char** out);
// Whether an NVIDIA driver seems to be installed.
int rt_driver_visible();
// Number of CUDA devices; 0 while libtorch_cuda is not loaded.
rt_status rt_cuda_device_count(int* out);
// Initialises CUDA in libtorch; call it after libtorch_cuda is loaded. `out` receives 0 when libtorch had
// checked for CUDA before that: it keeps its first answer, which is that CUDA is absent.
rt_status rt_cuda_initialise(int* out);

// The address of a function of the CUDA runtime that libtorch_cuda has loaded, or null. This loads no runtime: a second one would
// not share the first one's state.
void* rt_cuda_runtime(const char* name);

// --- a device ---
rt_status rt_cuda_synchronize(int device);
// Makes the device this thread's current one.
rt_status rt_cuda_make_current(int device);
// Waits for all work on every CUDA device that this process uses, and initialises no other; does nothing without CUDA.
rt_status rt_cuda_synchronize_used();
rt_status rt_cuda_memory(int device, uint64_t* free_bytes, uint64_t* total_bytes);

// --- streams ---
rt_status rt_stream_new(int device, int high_priority, int64_t* id);
rt_status rt_stream_current(int device, int64_t* id);
rt_status rt_stream_query(int device, int64_t id, int* out);
rt_status rt_stream_synchronize(int device, int64_t id);
// The stream's CUDA handle. Valid as long as the process.
rt_status rt_stream_native(int device, int64_t id, void** out);
// Makes the stream and its device current on this thread until `rt_stream_leave`, which is called on this thread.
rt_status rt_stream_enter(int device, int64_t id, c10::StreamGuard** out);
// `guard` is taken.
rt_status rt_stream_leave(c10::StreamGuard* guard);
// Keeps the allocator from reusing the memory of `tensor` (on a CUDA device, or pinned) before the stream's current work is done.
rt_status rt_stream_keep(int device, int64_t id, const at::Tensor* tensor);

// target.copy_(source) on the current stream, without waiting for it where the memory allows. Both are borrowed.
rt_status rt_copy_async(at::Tensor* target, const at::Tensor* source);

// --- events ---
rt_status rt_event_new(int timed, c10::Event** out);
// `event` is taken; null is allowed.
void rt_event_free(c10::Event* event);
rt_status rt_event_record(c10::Event* event, int device, int64_t id);
rt_status rt_event_block(const c10::Event* event, int device, int64_t id);
rt_status rt_event_query(const c10::Event* event, int* out);
rt_status rt_event_synchronize(const c10::Event* event);
// Milliseconds between two completed events that were created with timing.
rt_status rt_event_elapsed(const c10::Event* start, const c10::Event* end, double* out);

// --- libtorch's thread-local state: grad mode, autocast, dispatch keys ---
rt_status rt_thread_state_capture(at::ThreadLocalState** out);
// `state` is taken; null is allowed.
void rt_thread_state_free(at::ThreadLocalState* state);
// Applies `state` (borrowed during the call) to this thread until `rt_thread_state_leave`, which is called on this thread.
rt_status rt_thread_state_enter(const at::ThreadLocalState* state, at::ThreadLocalStateGuard** out);
// `guard` is taken.
rt_status rt_thread_state_leave(at::ThreadLocalStateGuard* guard);

// --- storages ---
// How many tensors share `tensor`'s storage, itself included. If the result is 1, all accesses of other threads to the storage
// happened before this call.
rt_status rt_storage_users(const at::Tensor* tensor, uint64_t* out);
}
