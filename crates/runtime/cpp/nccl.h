// c10d::ProcessGroupNCCL, of which only the base class is declared here: its header needs those of CUDA and NCCL.
//
// Written, never run on a GPU.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

class NcclGroup {
 public:
  // Preconditions: libtorch_cuda is loaded. Throws for a version of libtorch that is not known here, and what the constructors throw.
  static std::unique_ptr<NcclGroup> make(c10::intrusive_ptr<c10d::Store> store, const std::string& name, int rank, int size,
                                         std::chrono::milliseconds timeout);
  // Waits for the operations that are under way, unless `abort` was called.
  ~NcclGroup();

  // Valid as long as this object: references that are left then are never used.
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }

  // Ends the operations that are under way. Later ones fail.
  void abort();

 private:
  template <class Base>
  class Object;

  NcclGroup() = default;

  // The group holds a reference to the options, and is destroyed first.
  std::unique_ptr<Object<c10d::Backend::Options>> options_;
  std::unique_ptr<Object<c10d::Backend>> group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  bool ended_ = false;
};
