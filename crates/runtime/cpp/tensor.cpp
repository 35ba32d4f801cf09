// What Rust code that writes into a tensor's memory must tell libtorch.
#include "guard.h"

#include <ATen/ops/from_blob.h>
#include <memory>

extern "C" {
// A CPU tensor, contiguous and of the prototype's dtype, over memory that is not libtorch's. `owner` is taken, also on failure:
// `release` gets it once, when nobody sees the memory any more, on whichever thread that is.
rt_status rt_tensor_over(void* memory, const int64_t* shape, size_t dims, const at::Tensor* prototype, void* owner,
                         void (*release)(void*), at::Tensor** out) {
  return guard([&] {
    // Freed once, whether or not `from_blob` had taken the deleter over when it threw.
    std::shared_ptr<void> held(owner, release);
    const at::IntArrayRef sizes(shape, dims);
    *out = new at::Tensor(at::from_blob(memory, sizes, [held](void*) mutable { held.reset(); }, prototype->options()));
  });
}

// Counts one in-place change of `tensor` (borrowed), so that a graph which saved it refuses to use it.
rt_status rt_bump_version(const at::Tensor* tensor) {
  return guard([&] { tensor->unsafeGetTensorImpl()->bump_version(); });
}

// Bytes from the first to after the last element that `tensor` (borrowed) can reach; both zero when it has none.
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

// The address of the tensor (borrowed) behind its handles.
rt_status rt_identity(const at::Tensor* tensor, uintptr_t* identity) {
  return guard([&] { *identity = reinterpret_cast<uintptr_t>(tensor->unsafeGetTensorImpl()); });
}

// 1 where nobody else can see the memory of `tensor` (borrowed): this is the only handle of the tensor, the tensor the only
// one on its storage, and no history refers to it. What saved it, what views it and what waits to receive it would each count.
rt_status rt_is_sole_owner(const at::Tensor* tensor, int* sole) {
  return guard([&] {
    *sole = tensor->defined() && tensor->has_storage() && tensor->use_count() == 1 && tensor->storage().use_count() == 1 &&
            !tensor->requires_grad();
  });
}
}
