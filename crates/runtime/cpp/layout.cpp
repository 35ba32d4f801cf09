// What kernels in Rust check of a tensor before they touch its memory, in one call.
#include "guard.h"

#include <ATen/core/grad_mode.h>

namespace {
constexpr int64_t kLayoutDims = 4;
// As `Raw` in src/sys/layout.rs.
struct TensorLayout {
  int64_t sizes[kLayoutDims];
  int64_t strides[kLayoutDims];
  uintptr_t begin, end;
  int32_t dims;
  int16_t device;
  int8_t kind;
  uint8_t flags;
};
constexpr uint8_t kStrided = 1, kNegated = 2, kContiguous = 4, kMemory = 8, kOtherDevice = 16, kRecorded = 32,
                  kSoleOwner = 64;

// Whether no other code can access the memory of the tensor: this is the only handle of it, its storage has no other tensor, and it
// requires no gradient. A saved variable or a view of it would be counted.
bool is_sole_owner(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         !tensor.requires_grad();
}
}  // namespace

extern "C" {
// Describes `tensor` (borrowed): the number of dimensions, sizes and strides of the first four, the address range of its elements (zero without
// elements), its dtype, its device (the index of a CUDA device, or -1), and the flags above. A tensor that is not defined has the dtype -1.
rt_status rt_layout(const at::Tensor* tensor, TensorLayout* out) {
  return guard([&] {
    TensorLayout layout{};
    layout.device = -1;
    layout.kind = -1;
    if (tensor->defined()) {
      layout.kind = static_cast<int8_t>(tensor->scalar_type());
      const c10::Device device = tensor->device();
      if (device.is_cuda()) layout.device = device.index();
      if (!device.is_cuda() && !device.is_cpu()) layout.flags |= kOtherDevice;
      const int64_t dims = tensor->dim();
      layout.dims = static_cast<int32_t>(dims);
      for (int64_t i = 0; i < dims && i < kLayoutDims; i++) layout.sizes[i] = tensor->size(i);
      if (tensor->is_neg()) layout.flags |= kNegated;
      if (at::GradMode::is_enabled() && tensor->requires_grad()) layout.flags |= kRecorded;
      if (is_sole_owner(*tensor)) layout.flags |= kSoleOwner;
      if (tensor->layout() == c10::kStrided) {
        layout.flags |= kStrided;
        int64_t last = 0;
        for (int64_t i = 0; i < dims; i++) {
          last += (tensor->size(i) - 1) * tensor->stride(i);
          if (i < kLayoutDims) layout.strides[i] = tensor->stride(i);
        }
        if (tensor->is_contiguous()) layout.flags |= kContiguous;
        const c10::StorageImpl* storage = tensor->has_storage() ? tensor->storage().unsafeGetStorageImpl() : nullptr;
        // Asking a storage without memory for its address throws from libtorch 2.13 on, and returns null before.
        const void* data = nullptr;
        if (storage != nullptr && tensor->numel() > 0) {
          try {
            data = tensor->const_data_ptr();
          } catch (const c10::Error&) {
          }
        }
        if (data != nullptr) {
          layout.begin = reinterpret_cast<uintptr_t>(data);
          layout.end = layout.begin + (last + 1) * tensor->element_size();
        }
        if (data != nullptr || tensor->numel() == 0) layout.flags |= kMemory;
      }
    }
    *out = layout;
  });
}
}
