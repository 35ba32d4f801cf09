// A group over Gloo that behaves as one over NCCL does, for tests of what is written for GPUs on machines without one.
//
// Its tensors are on the CPU, and the calling thread stands for the device's current stream:
// - Operations begin one after the other, in the order in which they are called, and only when the one before has ended.
// - Messages are matched by their order alone, whatever their tag. Ranks that call operations in different orders wait for each other
//   until the timeout.
// - An operation begins when it or a later one is waited for, or a while after the call: sources are read and targets are written then. A
//   target is filled with ones bits first, so that who reads it before the wait, or overwrites a source, computes other numbers.
// - Sums are added in another order than that of ranks.
// - After a failure, and after `abort`, every operation fails.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class NcclStandIn : public c10d::Backend {
 public:
  // `gloo` has the same ranks, and is used by nothing else.
  NcclStandIn(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout);
  // Ends the operations that were begun.
  ~NcclStandIn() override;

  const std::string getBackendName() const override { return "nccl-stand-in"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override;
  void abort() override;

 private:
  class Operation;
  struct Queue;
  struct Message {
    int peer;
    bool received;
    at::Tensor tensor;
  };
  using Messages = std::vector<Message>;

  c10::intrusive_ptr<c10d::Work> begin(std::function<void()> run);
  void work_off();
  // Within an operation: moves all messages, together.
  void move(const Messages& messages);
  // The messages of a collective: to each other rank `source(rank)`, and from it into `target(rank)`.
  Messages with_others(const std::function<at::Tensor(int)>& source, const std::function<at::Tensor(int)>& target) const;

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::chrono::milliseconds timeout_;
  // Of the calling thread.
  bool is_coalescing_ = false;
  Messages coalesced_;
  // Of the thread that runs operations: how many messages went to and came from each rank.
  std::vector<uint64_t> sent_, received_;

  // Operations that are left after the group still wake nobody.
  const std::shared_ptr<Queue> queue_;
  std::thread thread_;
};
