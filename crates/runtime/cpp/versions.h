// What differs between the versions of libtorch that the shim compiles against: 2.11 and 2.13. The other sources have no
// condition on the version. A version that is added here also gets a line in `xtask/src/torch/pairs.rs`.
#pragma once
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

// graph.cpp also depends on a class layout that the compiler does not check: see the comment at its top.
static_assert(TORCH_VERSION_MAJOR == 2 && (TORCH_VERSION_MINOR == 11 || TORCH_VERSION_MINOR == 13),
              "the shim is written for libtorch 2.11 and 2.13; for another version, compare ATen/cuda/CUDAGraph.h with the "
              "signatures and the size in cpp/graph.cpp, run the tests, and add it in cpp/versions.h");

// nccl.cpp constructs classes by name, which was checked against these two. In another one, groups over NCCL are refused.
constexpr bool kNcclIsKnown = TORCH_VERSION_PATCH == 0;

// Graph nodes are counted by std::shared_ptr up to 2.12, by c10::intrusive_ptr from 2.13 on. Nodes of `make_node` destroy long
// chains iteratively; recursion would overflow the stack.
#if TORCH_VERSION_MINOR >= 13
template <class Node>
using NodePointer = c10::intrusive_ptr<Node>;

template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}
#else
template <class Node>
using NodePointer = std::shared_ptr<Node>;

template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return NodePointer<Node>(new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
}
#endif

// A storage without memory: from 2.13 on, an access is an error that says why. In 2.11 that cannot be taken back; there the pointer
// is null, which libtorch's typed accesses refuse.
inline void refuse_access(c10::StorageImpl& storage) {
#if TORCH_VERSION_MINOR >= 13
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this tensor has no memory now: its layer is not in use (runtime::memory::MovableMemory)");
#endif
}

inline void permit_access(c10::StorageImpl& storage) {
#if TORCH_VERSION_MINOR >= 13
  storage.clear_data_ptr_access_error_msg_();
#endif
}
