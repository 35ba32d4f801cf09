// Contracts are in nccl_stand_in.h.
#include "nccl_stand_in.h"

#include <cstring>
#include <utility>

// What waits for it is the calling thread, as a stream would.
class NcclStandIn::Operation : public c10d::Work {
 public:
  Operation(int rank, std::function<void()> run) : c10d::Work(rank, c10d::OpType::UNKNOWN), run_(std::move(run)) {}

  // `failure` is that of the group, if it has one.
  std::exception_ptr complete(std::exception_ptr failure) {
    if (!failure) {
      try {
        run_();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    run_ = nullptr;
    const std::lock_guard<std::mutex> guard(done_lock_);
    failure_ = failure;
    is_done_ = true;
    done_.notify_all();
    return failure;
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    std::unique_lock<std::mutex> guard(done_lock_);
    done_.wait(guard, [&] { return is_done_; });
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

 private:
  std::function<void()> run_;
  std::mutex done_lock_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::exception_ptr failure_;
};

namespace {

// Long enough for the calling thread to go on, and of another length each time.
std::chrono::microseconds delay_of_operation(uint64_t number) {
  return std::chrono::microseconds((number * 0x9e3779b97f4a7c15ull >> 56) * 2);
}

// Above the tags of c10d's barrier. The size keeps messages of different sizes apart, which would end the process.
int tag_of_message(uint64_t number, int64_t bytes) {
  const uint64_t hash = static_cast<uint64_t>(bytes) * 0x9e3779b97f4a7c15ull >> 49;
  return static_cast<int>(1u << 30 | (number & 0x7fff) << 15 | (hash & 0x7fff));
}

at::Tensor flat_bytes(const at::Tensor& tensor) { return tensor.detach().view({-1}).view(at::kByte); }

// Reduces in descending order of ranks, in the tensors' dtype.
at::Tensor reduce_backwards(const std::vector<at::Tensor>& values, bool maximum) {
  at::Tensor sum = values.back().clone();
  for (size_t i = values.size() - 1; i-- > 0;) {
    if (maximum) {
      at::maximum_out(sum, sum, values[i]);
    } else {
      sum.add_(values[i]);
    }
  }
  return sum;
}

}  // namespace

NcclStandIn::NcclStandIn(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout)
    : c10d::Backend(rank, size), gloo_(std::move(gloo)), timeout_(timeout), sent_(size), received_(size) {
  thread_ = std::thread([this] { work_off(); });
}

NcclStandIn::~NcclStandIn() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    ends_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void NcclStandIn::work_off() {
  const at::NoGradGuard no_grad;
  for (;;) {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [&] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto operation = std::move(queue_.front());
    queue_.pop_front();
    const std::exception_ptr failure = failure_;
    guard.unlock();
    if (!failure) std::this_thread::sleep_for(delay_of_operation(operations_++));
    const std::exception_ptr outcome = operation->complete(failure);
    guard.lock();
    if (!failure_) failure_ = outcome;
  }
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::begin(std::function<void()> run) {
  auto operation = c10::make_intrusive<Operation>(getRank(), std::move(run));
  const std::lock_guard<std::mutex> guard(lock_);
  if (failure_) std::rethrow_exception(failure_);
  queue_.push_back(operation);
  changed_.notify_all();
  return operation;
}

void NcclStandIn::abort() {
  const std::lock_guard<std::mutex> guard(lock_);
  if (!failure_) failure_ = std::make_exception_ptr(std::runtime_error("the group was aborted"));
}

void NcclStandIn::move(const Messages& messages) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const Message& message : messages) {
    std::vector<at::Tensor> bytes{flat_bytes(message.tensor)};
    const int64_t size = bytes[0].numel();
    if (message.received) {
      std::memset(bytes[0].data_ptr(), 0xff, size);
      works.push_back(gloo_->recv(bytes, message.peer, tag_of_message(received_[message.peer]++, size)));
    } else {
      works.push_back(gloo_->send(bytes, message.peer, tag_of_message(sent_[message.peer]++, size)));
    }
  }
  const auto until = std::chrono::steady_clock::now() + timeout_;
  for (const auto& work : works) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    work->wait(std::max(left, std::chrono::milliseconds(1)));
  }
}

void NcclStandIn::startCoalescing() { is_coalescing_ = true; }

c10::intrusive_ptr<c10d::Work> NcclStandIn::endCoalescing() {
  is_coalescing_ = false;
  Messages messages = std::exchange(coalesced_, {});
  if (messages.empty()) return nullptr;
  return begin([this, messages = std::move(messages)] { move(messages); });
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::send(std::vector<at::Tensor>& tensors, int to, int /*tag*/) {
  Message message{to, false, tensors.at(0)};
  if (!is_coalescing_) return begin([this, message] { move({message}); });
  coalesced_.push_back(std::move(message));
  return nullptr;
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::recv(std::vector<at::Tensor>& tensors, int from, int /*tag*/) {
  Message message{from, true, tensors.at(0)};
  if (!is_coalescing_) return begin([this, message] { move({message}); });
  coalesced_.push_back(std::move(message));
  return nullptr;
}

NcclStandIn::Messages NcclStandIn::with_others(const std::function<at::Tensor(int)>& source,
                                               const std::function<at::Tensor(int)>& target) const {
  Messages messages;
  for (int rank = 0; rank < getSize(); rank++) {
    if (rank == getRank()) continue;
    messages.push_back({rank, true, target(rank)});
    messages.push_back({rank, false, source(rank)});
  }
  return messages;
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const bool maximum = options.reduceOp == c10d::ReduceOp::MAX;
  return begin([this, tensor = tensors.at(0), maximum]() mutable {
    std::vector<at::Tensor> values;
    for (int rank = 0; rank < getSize(); rank++) values.push_back(rank == getRank() ? tensor.clone() : at::empty_like(tensor));
    move(with_others([&](int) { return tensor; }, [&](int rank) { return values[rank]; }));
    tensor.copy_(reduce_backwards(values, maximum));
  });
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& /*options*/) {
  return begin([this, output, input] {
    const int64_t length = input.numel();
    const auto part = [&](int rank) { return output.narrow(0, rank * length, length); };
    if (part(getRank()).data_ptr() != input.data_ptr()) part(getRank()).copy_(input);
    move(with_others([&](int) { return input; }, part));
  });
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& /*options*/) {
  return begin([this, output, input]() mutable {
    const int64_t length = output.numel();
    const auto part = [&](int rank) { return input.narrow(0, rank * length, length); };
    std::vector<at::Tensor> values;
    for (int rank = 0; rank < getSize(); rank++) {
      values.push_back(rank == getRank() ? part(rank).clone() : at::empty_like(output));
    }
    move(with_others(part, [&](int rank) { return values[rank]; }));
    output.copy_(reduce_backwards(values, /*maximum=*/false));
  });
}
