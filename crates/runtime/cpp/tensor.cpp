// What kernels in Rust need to know about, and report to, libtorch's tensors.
#include "guard.h"

#include "versions.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

namespace {
// Up to so many elements libtorch's elementwise operators run on one thread.
constexpr int64_t kFewElements = 32768;

// A tensor that stands for a matrix during one product. A view would be four allocations: a tensor, its versions, its place in a history of
// views, and a handle.
struct Slot {
  Slot() {
    const c10::InferenceMode counts_versions(false);
    tensor = at::empty({0}, at::kFloat);
    none = tensor.storage();
  }

  at::Tensor tensor;
  c10::Storage none;
};

// Makes a slot the matrix of a CPU tensor: the tensor itself, or the rows `[…, width]` of a contiguous one; transposed if `transposed`.
class Matrix {
 public:
  Matrix(Slot& slot, const at::Tensor& source, bool transposed) : slot_(slot) {
    const auto dims = source.dim();
    TORCH_CHECK(source.layout() == c10::kStrided && source.is_cpu() && !source.is_neg() && !source.is_conj() &&
                    (dims == 2 || (dims > 2 && source.is_contiguous())),
                "expected matrices or contiguous tensors on the CPU, got one of shape ", source.sizes(), " and strides ",
                source.strides(), " on ", source.device());
    TORCH_CHECK(!(at::GradMode::is_enabled() && source.requires_grad()), "an operand requires a gradient, which is not recorded here");
    const int64_t columns = source.size(dims - 1);
    std::array<int64_t, 2> sizes{dims == 2 ? source.size(0) : 1, columns};
    std::array<int64_t, 2> strides{dims == 2 ? source.stride(0) : columns, dims == 2 ? source.stride(1) : 1};
    for (int64_t i = 0; dims > 2 && i < dims - 1; i++) sizes[0] *= source.size(i);
    if (transposed) {
      std::swap(sizes[0], sizes[1]);
      std::swap(strides[0], strides[1]);
    }
    auto* impl = slot_.tensor.unsafeGetTensorImpl();
    impl->set_storage_and_dtype(source.storage(), source.dtype());
    impl->set_sizes_and_strides(sizes, strides, source.storage_offset());
  }
  ~Matrix() { slot_.tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(slot_.none); }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  at::Tensor& tensor() { return slot_.tensor; }

 private:
  Slot& slot_;
};

// Whether a loop over the elements is as fast as libtorch's operator, without the tensors that it makes of its scalars.
bool is_short(const at::Tensor& tensor) {
  const bool floating = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
  return floating && tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_neg() && tensor.numel() <= kFewElements;
}
// Counts one in-place change.
void bump(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}
}  // namespace

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

// Computes out = a·b, or out += a·b, by libtorch's operator. All three are borrowed: strided CPU tensors of one dtype that no graph records,
// each a matrix or a contiguous tensor whose leading dimensions are rows; a and b are transposed where so given.
rt_status rt_mm_of_rows(const at::Tensor* out, const at::Tensor* a, int a_transposed, const at::Tensor* b, int b_transposed,
                        int accumulate) {
  return guard([&] {
    static thread_local std::array<Slot, 3> slots;
    Matrix target(slots[0], *out, false), left(slots[1], *a, a_transposed != 0), right(slots[2], *b, b_transposed != 0);
    {
      const at::AutoDispatchBelowADInplaceOrView unrecorded;
      if (accumulate != 0) {
        target.tensor().addmm_(left.tensor(), right.tensor());
      } else {
        at::mm_out(target.tensor(), left.tensor(), right.tensor());
      }
    }
    bump(*out);
  });
}

// Multiplies the elements of `tensor` (borrowed) by a number: by libtorch's operator if `as_operator` or where it is faster.
rt_status rt_scale(const at::Tensor* tensor, double factor, int as_operator) {
  return guard([&] {
    at::Tensor target = *tensor;
    if (as_operator != 0 || !is_short(target) || (at::GradMode::is_enabled() && target.requires_grad())) {
      target.mul_(factor);
      return;
    }
    AT_DISPATCH_FLOATING_TYPES(target.scalar_type(), "rt_scale", [&] {
      auto* elements = target.mutable_data_ptr<scalar_t>();
      for (int64_t i = 0; i < target.numel(); i++) elements[i] *= static_cast<scalar_t>(factor);
    });
    bump(target);
  });
}

// Copies `row` into each row of `target` (both borrowed): `[width]` into `[…, width]`, by libtorch's operators if `as_operator` or where
// they are faster.
rt_status rt_fill_rows(const at::Tensor* target, const at::Tensor* row, int as_operator) {
  return guard([&] {
    at::Tensor rows = *target;
    const bool fits = row->dim() == 1 && rows.dim() > 0 && rows.size(-1) == row->size(0) && rows.dtype() == row->dtype();
    if (as_operator != 0 || !fits || !is_short(rows) || !is_short(*row) || rows.numel() == 0) {
      rows.copy_(row->expand_as(rows));
      return;
    }
    const size_t bytes = row->nbytes();
    const auto* from = row->const_data_ptr();
    auto* to = static_cast<char*>(rows.mutable_data_ptr());
    for (int64_t i = 0; i < rows.numel() / row->numel(); i++) std::memcpy(to + i * bytes, from, bytes);
    bump(rows);
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
