// Contracts are in nccl_stand_in.h.
#include "nccl_stand_in.h"

#include <algorithm>
#include <cstring>
#include <utility>

// The operations that have not begun. Their numbers count from 1.
struct NcclStandIn::Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<Operation>> operations;
  uint64_t last = 0;
  // Up to which number they are waited for.
  uint64_t wanted = 0;
  std::exception_ptr failure;
  bool ends = false;
};

// What waits for it is the calling thread, as a stream would.
class NcclStandIn::Operation : public c10d::Work {
 public:
  Operation(int rank, std::shared_ptr<Queue> queue, uint64_t number, std::function<void()> run)
      : c10d::Work(rank, c10d::OpType::UNKNOWN), queue_(std::move(queue)), number_(number), run_(std::move(run)) {}

  uint64_t number() const { return number_; }

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
    {
      const std::lock_guard<std::mutex> guard(queue_->lock);
      queue_->wanted = std::max(queue_->wanted, number_);
      queue_->changed.notify_all();
    }
    std::unique_lock<std::mutex> guard(done_lock_);
    done_.wait(guard, [&] { return is_done_; });
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

 private:
  const std::shared_ptr<Queue> queue_;
  const uint64_t number_;
  std::function<void()> run_;
  std::mutex done_lock_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::exception_ptr failure_;
};

namespace {

// The longest that an operation waits to be waited for.
constexpr std::chrono::milliseconds kStandInPatience(1000);

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
    : c10d::Backend(rank, size),
      gloo_(std::move(gloo)),
      timeout_(timeout),
      sent_(size),
      received_(size),
      queue_(std::make_shared<Queue>()) {
  thread_ = std::thread([this] { work_off(); });
}

NcclStandIn::~NcclStandIn() {
  {
    const std::lock_guard<std::mutex> guard(queue_->lock);
    queue_->ends = true;
    queue_->changed.notify_all();
  }
  thread_.join();
}

void NcclStandIn::work_off() {
  const at::NoGradGuard no_grad;
  Queue& queue = *queue_;
  for (;;) {
    std::unique_lock<std::mutex> guard(queue.lock);
    queue.changed.wait(guard, [&] { return queue.ends || !queue.operations.empty(); });
    if (queue.operations.empty()) return;
    const auto operation = std::move(queue.operations.front());
    queue.operations.pop_front();
    queue.changed.wait_for(guard, kStandInPatience,
                           [&] { return queue.ends || queue.failure || queue.wanted >= operation->number(); });
    const std::exception_ptr failure = queue.failure;
    guard.unlock();
    const std::exception_ptr outcome = operation->complete(failure);
    guard.lock();
    if (!queue.failure) queue.failure = outcome;
  }
}

c10::intrusive_ptr<c10d::Work> NcclStandIn::begin(std::function<void()> run) {
  const std::lock_guard<std::mutex> guard(queue_->lock);
  if (queue_->failure) std::rethrow_exception(queue_->failure);
  auto operation = c10::make_intrusive<Operation>(getRank(), queue_, ++queue_->last, std::move(run));
  queue_->operations.push_back(operation);
  queue_->changed.notify_all();
  return operation;
}

void NcclStandIn::abort() {
  const std::lock_guard<std::mutex> guard(queue_->lock);
  if (!queue_->failure) queue_->failure = std::make_exception_ptr(std::runtime_error("the group was aborted"));
  queue_->changed.notify_all();
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
