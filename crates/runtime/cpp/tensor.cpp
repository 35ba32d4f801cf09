// What kernels in Rust need to know about, and report to, libtorch's tensors.
#include "guard.h"

#include "versions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/Storage.h>
#include <memory>

extern "C" {
// Bytes without memory, on a device of the prototype: a tensor of bytes with a storage of its own.
rt_status rt_movable_new(size_t bytes, const at::Tensor* prototype, at::Tensor** out) {
  return guard([&] {
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                         c10::DataPtr(nullptr, prototype->device()), nullptr,
                                                         /*resizable=*/false);
    at::Tensor tensor = at::empty({0}, prototype->options().dtype(at::kByte));
    // Compares the storages' deleters.
    tensor.set_(c10::Storage(storage), 0, {static_cast<int64_t>(bytes)}, {1});
    refuse_access(*storage);
    *out = new at::Tensor(std::move(tensor));
  });
}

// Lets the storage of `movable` use the bytes of `memory` (both borrowed), which lives until the storage is detached, or null: none.
rt_status rt_movable_set(const at::Tensor* movable, const at::Tensor* memory) {
  return guard([&] {
    auto* storage = movable->storage().unsafeGetStorageImpl();
    if (memory == nullptr) {
      storage->set_data_ptr_noswap(c10::DataPtr(nullptr, movable->device()));
      refuse_access(*storage);
      return;
    }
    auto* owner = new at::Tensor(*memory);
    permit_access(*storage);
    storage->set_data_ptr_noswap(c10::DataPtr(
        memory->data_ptr(), owner, [](void* held) { delete static_cast<at::Tensor*>(held); }, memory->device()));
  });
}

// A CPU tensor, contiguous and of the prototype's dtype, over memory that is not libtorch's. `owner` is taken, also on failure:
// `release` gets it once, when no tensor uses the memory any more, on any thread.
rt_status rt_tensor_over(void* memory, const int64_t* shape, size_t dims, const at::Tensor* prototype, void* owner,
                         void (*release)(void*), at::Tensor** out) {
  return guard([&] {
    // Released once, also if `from_blob` throws.
    std::shared_ptr<void> held(owner, release);
    const at::IntArrayRef sizes(shape, dims);
    *out = new at::Tensor(at::from_blob(memory, sizes, [held](void*) mutable { held.reset(); }, prototype->options()));
  });
}

// Computes out = a·b, or out += a·b; all three borrowed.
rt_status rt_mm(const at::Tensor* out, const at::Tensor* a, const at::Tensor* b, int accumulate) {
  return guard([&] {
    at::Tensor target = *out;
    if (accumulate != 0) {
      target.addmm_(*a, *b);
    } else {
      at::mm_out(target, *a, *b);
    }
  });
}

// Multiplies the elements of `tensor` (borrowed) by a number.
rt_status rt_scale(const at::Tensor* tensor, double factor) {
  return guard([&] {
    at::Tensor target = *tensor;
    target.mul_(factor);
  });
}

// Counts one in-place change of `tensor` (borrowed), so that a graph which saved it refuses to use it.
rt_status rt_bump_version(const at::Tensor* tensor) {
  return guard([&] { tensor->unsafeGetTensorImpl()->bump_version(); });
}

// The address range of the elements of `tensor` (borrowed), end exclusive; both zero when it has none.
rt_status rt_memory_range(const at::Tensor* tensor, uintptr_t* begin, uintptr_t* end) {
  return guard([&] {
    *begin = *end = 0;
    if (tensor->numel() == 0) return;
    int64_t last = 0;
    for (int64_t i = 0; i < tensor->dim(); i++) last += (tensor->size(i) - 1) * tensor->stride(i);
    *begin = reinterpret_cast<uintptr_t>(tensor->const_data_ptr());
    *end = *begin + (last + 1) * tensor->element_size();
  });
}

// The address of the TensorImpl of `tensor` (borrowed), which all handles of one tensor share.
rt_status rt_identity(const at::Tensor* tensor, uintptr_t* identity) {
  return guard([&] { *identity = reinterpret_cast<uintptr_t>(tensor->unsafeGetTensorImpl()); });
}

// 1 if no other code can access the memory of `tensor` (borrowed): see layout.cpp.
rt_status rt_is_sole_owner(const at::Tensor* tensor, int* sole) {
  return guard([&] { *sole = is_sole_owner(*tensor); });
}

// How many handles `tensor` (borrowed) has: those of callers, of graphs, and this one. Views of its memory are other tensors.
rt_status rt_use_count(const at::Tensor* tensor, size_t* count) {
  return guard([&] { *count = tensor->defined() ? tensor->use_count() : 0; });
}
}
