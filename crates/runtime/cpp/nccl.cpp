// Contracts are in nccl.h.
//
// c10d::ProcessGroupNCCL and its Options derive from c10d::Backend and Backend::Options alone, so their addresses are those of the
// bases. Once they exist, the bases' virtual functions suffice. Their constructors are exported by libtorch_cuda; the two names below
// are in libtorch 2.11.0 and 2.13.0.
#include "nccl.h"

#include "cuda_symbol.h"
#include "versions.h"

#include <cstring>
#include <utility>

namespace {

// sizeof(ProcessGroupNCCL) is 1112 in 2.11.0 and 1152 in 2.13.0, and its Options have less than 260 bytes (x86-64). At most `kSize` is
// accepted: a constructor must not change the storage after it.
constexpr size_t kNcclSize = 2048;
constexpr size_t kNcclStorage = 4096;
constexpr unsigned char kNcclUntouched = 0xA5;

using NcclStore = c10::intrusive_ptr<c10d::Store>;
using NcclOptions = c10::intrusive_ptr<c10d::Backend::Options>;

}  // namespace

// An object in memory of this class. Its memory is not given back by its deleting destructor, which would name the size to `operator
// delete`; so it takes no part in counting references, and its owner destroys it by the virtual destructor of its base.
template <class Base>
class NcclGroup::Object {
 public:
  // `construct` is given the memory. What it throws leaves no object.
  template <class Construct>
  explicit Object(const Construct& construct) {
    std::memset(bytes_, kNcclUntouched, kNcclStorage);
    construct(static_cast<void*>(bytes_));
  }

  ~Object() { base()->~Base(); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Base* base() { return reinterpret_cast<Base*>(bytes_); }

  c10::intrusive_ptr<Base> reference() {
    return c10::intrusive_ptr<Base>::unsafe_adapt_non_heap_allocated(base(), /*expected_decrefs=*/1);
  }

  bool fits() const {
    for (size_t i = kNcclSize; i < kNcclStorage; i++) {
      if (bytes_[i] != kNcclUntouched) return false;
    }
    return true;
  }

 private:
  alignas(64) unsigned char bytes_[kNcclStorage];
};

namespace {

// An object that does not fit is leaked: with another size, the class may also have other functions.
template <class Pointer>
void check_nccl_size(Pointer& object, const char* name) {
  if (object->fits()) return;
  object.release();
  TORCH_CHECK(false, "c10d::", name, " is larger than ", kNcclSize, " bytes in this libtorch_cuda");
}

}  // namespace

std::unique_ptr<NcclGroup> NcclGroup::make(c10::intrusive_ptr<c10d::Store> store, const std::string& name, int rank, int size,
                                           std::chrono::milliseconds timeout) {
  TORCH_CHECK(kNcclIsKnown, "groups over NCCL are written for libtorch 2.11.0 and 2.13.0, and this is ", TORCH_VERSION,
              "; use one of them, or connect CPUs");
  const auto make_options = cuda_symbol<void (*)(void*, bool)>("_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb");
  // Both references are arguments by value, of classes with a destructor: the caller makes them and passes their addresses, as for every
  // class whose pointee has this base.
  const auto make_group = cuda_symbol<void (*)(void*, NcclStore, int, int, NcclOptions)>(
      "_ZN4c10d16ProcessGroupNCCLC1EN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_typeIS3_EEEEii"
      "NS2_INS0_7OptionsENS5_IS8_EEEE");
  std::unique_ptr<NcclGroup> made(new NcclGroup);
  made->options_ = std::make_unique<Object<c10d::Backend::Options>>(
      [&](void* memory) { make_options(memory, /*is_high_priority_stream=*/false); });
  check_nccl_size(made->options_, "ProcessGroupNCCL::Options");
  NcclOptions options = made->options_->reference();
  options->timeout = timeout;
  options->group_name = name;
  made->group_ = std::make_unique<Object<c10d::Backend>>(
      [&](void* memory) { make_group(memory, std::move(store), rank, size, std::move(options)); });
  check_nccl_size(made->group_, "ProcessGroupNCCL");
  made->backend_ = made->group_->reference();
  return made;
}

NcclGroup::~NcclGroup() {
  // The destructor of the class aborts what is under way where neither function was called.
  if (!backend_ || ended_) return;
  try {
    backend_->shutdown();
  } catch (...) {
    abort();
  }
}

void NcclGroup::abort() {
  if (std::exchange(ended_, true)) return;
  try {
    backend_->abort();
  } catch (...) {
    // It did not end in time; the group is not used again.
  }
}
