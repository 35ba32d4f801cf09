// c10d: a key-value store over TCP, and groups of ranks over Gloo and NCCL.
//
// Stores, groups and transfers are owned by the caller and freed with the function of the same family; null is allowed there. A group
// keeps its store alive, a transfer its tensor. A text is NUL-terminated and borrowed. Times are in milliseconds, at least 1.
//
// Functions of one store may be called from any thread; they take turns. Posting to one group is one thread's at a time.
#pragma once
#include "guard.h"

#include <cstdint>

struct rt_store;
struct rt_group;
struct rt_transfer;

extern "C" {
// --- the store ---
// Connects to the store at `host` and `port`. With `server` it is kept in this process, on the
// listening socket `listen_fd`, which is taken, or on a new one where that is negative. Keys are below `prefix`.
rt_status rt_store_connect(const char* host, int port, int server, int listen_fd, const char* prefix, int64_t timeout,
                           rt_store** out);
// `store` is taken.
void rt_store_free(rt_store* store);
// `bytes` is borrowed.
rt_status rt_store_set(rt_store* store, const char* key, const char* bytes, size_t size);
// Waits for the key. `out` receives a block that the caller frees with `rt_free_message`.
rt_status rt_store_get(rt_store* store, const char* key, int64_t timeout, char** out, size_t* size);
// Whether the key is there.
rt_status rt_store_check(rt_store* store, const char* key, int* out);

// --- groups ---
// Connects this rank with all others of the group `name` over Gloo. They meet at the network interface `interface`, or where that is null
// at the address `host`, or where both are null at the address that this machine's name resolves to.
// With `stand_in` the group behaves as one over NCCL (nccl_stand_in.h): what is said below of groups over NCCL is true of it, with tensors
// on the CPU and the calling thread for the device's stream.
rt_status rt_group_new(rt_store* store, const char* name, int rank, int size, const char* interface, const char* host,
                       int64_t timeout, int stand_in, rt_group** out);
// The same over NCCL, without connecting. Preconditions of this and of all functions for such a group: libtorch_cuda is loaded, and the
// tensors are on one device, which exists. `timeout` is that of every operation: then libtorch ends the process.
rt_status rt_group_new_nccl(rt_store* store, const char* name, int rank, int size, int64_t timeout, rt_group** out);
// Creates NCCL's communicator, once, before any transfer: waits until all ranks call it, without limit.
rt_status rt_group_connect(rt_group* group, int device);
// Over NCCL, ends the operations that are under way, and later ones fail. Over Gloo it does nothing.
void rt_group_abort(rt_group* group);
// `group` is taken. Over NCCL it waits for the operations that are under way, unless they were aborted.
void rt_group_free(rt_group* group);
// Over Gloo, begin to send or receive the memory of `tensor` (borrowed; its memory is kept by the transfer). A message is received by the
// recv of the same peers and tag whose tensor has as many bytes; other sizes end the process.
rt_status rt_group_send(rt_group* group, const at::Tensor* tensor, int peer, int tag, rt_transfer** out);
rt_status rt_group_recv(rt_group* group, const at::Tensor* tensor, int peer, int tag, rt_transfer** out);
// Over NCCL, begins `count` messages with the ranks `peers`, at least one: the first `receives` are received, the others sent. The n-th
// message from a rank to another one is the n-th that this one receives from it, and has as many bytes. The tensors are contiguous,
// not empty, borrowed; their memory is kept by the transfer.
rt_status rt_group_exchange(rt_group* group, const at::Tensor* const* tensors, const int* peers, size_t receives, size_t count,
                            rt_transfer** out);
// The backend's own collectives: 0 all-reduce (sum) of `input` in place, 1 all-reduce (maximum), 2 all-gather of `input` to `output`,
// 3 reduce-scatter (sum) of `input` to `output`. `output` is null for the first two.
rt_status rt_group_native(rt_group* group, int operation, const at::Tensor* input, const at::Tensor* output, int64_t timeout,
                          rt_transfer** out);
// Over Gloo, waits until all ranks have come. Rank 0's message of a failure names those that have not.
rt_status rt_group_monitored_barrier(rt_group* group, int64_t timeout);

// --- transfers ---
// Waits until the transfer is done, once. Over NCCL the device's current stream waits instead, without a timeout.
rt_status rt_transfer_wait(rt_transfer* transfer, int64_t timeout);
// `transfer` is taken, done or not.
void rt_transfer_free(rt_transfer* transfer);
}
