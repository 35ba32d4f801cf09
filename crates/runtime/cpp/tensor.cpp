// What kernels in Rust need to know about, and report to, libtorch's tensors.
#include "guard.h"

#include <ATen/ops/from_blob.h>
#include <memory>

extern "C" {
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

// 1 if no other code can access the memory of `tensor` (borrowed): this is the only handle of the tensor, its storage has no other
// tensor, and it requires no gradient. A saved variable or a view of it would be counted.
rt_status rt_is_sole_owner(const at::Tensor* tensor, int* sole) {
  return guard([&] {
    *sole = tensor->defined() && tensor->has_storage() && tensor->use_count() == 1 && tensor->storage().use_count() == 1 &&
            !tensor->requires_grad();
  });
}
}
