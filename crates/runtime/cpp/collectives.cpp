// c10d behind the border. Contracts are in collectives.h.
#include "collectives.h"
#include "nccl.h"
#include "nccl_stand_in.h"
#include "versions.h"

#include <c10/util/Logging.h>

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <memory>
#include <vector>

struct rt_store {
  c10::intrusive_ptr<c10d::Store> store;
};

struct rt_group {
  // What `backend` is over NCCL, and null otherwise.
  std::unique_ptr<NcclGroup> nccl;
  c10::intrusive_ptr<c10d::Backend> backend;
  // Whether operations are enqueued on a device or what stands for one.
  bool is_in_stream_order;
};

struct rt_transfer {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> tensors;
  bool on_device;
};

namespace {

std::chrono::milliseconds in_milliseconds(int64_t count) { return std::chrono::milliseconds(count); }

std::shared_ptr<gloo::transport::Device> gloo_device(const char* interface, const char* host) {
  if (interface != nullptr) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (host != nullptr) return c10d::ProcessGroupGloo::createDeviceForHostname(host);
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

rt_transfer* transfer_of(const rt_group& group, c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors) {
  return new rt_transfer{std::move(work), std::move(tensors), group.is_in_stream_order};
}

c10::intrusive_ptr<c10d::Store> store_below(const rt_store& store, const char* name) {
  return c10::make_intrusive<c10d::PrefixStore>(name, store.store);
}

// The memory of a contiguous tensor. Neither backend has all dtypes, and what is moved is only bytes.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.detach().view({-1}).view(at::kByte); }

// Sends and receives in one coalesced group.
c10::intrusive_ptr<c10d::Work> exchange(c10d::Backend& backend, const std::vector<at::Tensor>& tensors, const int* peers,
                                        size_t receives) {
  for (size_t i = 0; i < tensors.size(); i++) {
    std::vector<at::Tensor> bytes{as_bytes(tensors[i])};
    if (i < receives) {
      backend.recv(bytes, peers[i], /*tag=*/0);
    } else {
      backend.send(bytes, peers[i], /*tag=*/0);
    }
  }
  auto work = backend.endCoalescing();
  TORCH_CHECK(work, "NCCL gave no work for ", tensors.size(), " messages");
  return work;
}

c10::intrusive_ptr<c10d::Work> native_work(c10d::Backend& backend, int operation, at::Tensor input, at::Tensor output,
                                      std::chrono::milliseconds timeout) {
  if (operation == 2) {
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    at::Tensor to = as_bytes(output), from = as_bytes(input);
    return backend._allgather_base(to, from, options);
  }
  if (operation == 3) {
    c10d::ReduceScatterOptions options;
    options.timeout = timeout;
    return backend._reduce_scatter_base(output, input, options);
  }
  c10d::AllreduceOptions options;
  options.timeout = timeout;
  options.reduceOp = operation == 1 ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> tensors{std::move(input)};
  return backend.allreduce(tensors, options);
}

}  // namespace

extern "C" {

rt_status rt_store_connect(const char* host, int port, int server, int listen_fd, const char* prefix, int64_t timeout,
                           rt_store** out) {
  return guard([&] {
    // Reads TORCH_CPP_LOG_LEVEL, as Python's torch does.
    c10::initLogging();
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = server != 0;
    options.waitWorkers = false;
    options.timeout = in_milliseconds(timeout);
    if (listen_fd >= 0) options.masterListenFd = listen_fd;
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    *out = new rt_store{c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store))};
  });
}

void rt_store_free(rt_store* store) { delete store; }

rt_status rt_store_set(rt_store* store, const char* key, const char* bytes, size_t size) {
  return guard([&] { store->store->set(key, std::vector<uint8_t>(bytes, bytes + size)); });
}

rt_status rt_store_get(rt_store* store, const char* key, int64_t timeout, char** out, size_t* size) {
  return guard([&] {
    store->store->wait({key}, in_milliseconds(timeout));
    const std::vector<uint8_t> value = store->store->get(key);
    char* copy = static_cast<char*>(std::malloc(value.size() + 1));
    if (copy == nullptr) throw std::bad_alloc();
    std::memcpy(copy, value.data(), value.size());
    *out = copy;
    *size = value.size();
  });
}

rt_status rt_store_check(rt_store* store, const char* key, int* out) {
  return guard([&] { *out = store->store->check({key}); });
}

rt_status rt_group_new(rt_store* store, const char* name, int rank, int size, const char* interface, const char* host,
                       int64_t timeout, int stand_in, rt_group** out) {
  return guard([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(in_milliseconds(timeout));
    options->devices.push_back(gloo_device(interface, host));
    auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store_below(*store, name), rank, size, std::move(options));
    if (stand_in == 0) {
      *out = new rt_group{nullptr, std::move(gloo), false};
      return;
    }
    auto group = c10::make_intrusive<NcclStandIn>(std::move(gloo), rank, size, in_milliseconds(timeout));
    *out = new rt_group{nullptr, std::move(group), true};
  });
}

rt_status rt_group_new_nccl(rt_store* store, const char* name, int rank, int size, int64_t timeout, rt_group** out) {
  return guard([&] {
    auto nccl = NcclGroup::make(store_below(*store, name), name, rank, size, in_milliseconds(timeout));
    auto backend = nccl->backend();
    *out = new rt_group{std::move(nccl), std::move(backend), true};
  });
}

rt_status rt_group_connect(rt_group* group, int device) {
  return guard([&] { group->backend->eagerConnectSingleDevice(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))); });
}

void rt_group_abort(rt_group* group) {
  if (group->nccl != nullptr) {
    group->nccl->abort();
  } else if (group->is_in_stream_order) {
    group->backend->abort();
  }
}

void rt_group_free(rt_group* group) { delete group; }

rt_status rt_group_send(rt_group* group, const at::Tensor* tensor, int peer, int tag, rt_transfer** out) {
  return guard([&] {
    std::vector<at::Tensor> tensors{*tensor};
    auto work = group->backend->send(tensors, peer, tag);
    *out = transfer_of(*group, std::move(work), std::move(tensors));
  });
}

rt_status rt_group_recv(rt_group* group, const at::Tensor* tensor, int peer, int tag, rt_transfer** out) {
  return guard([&] {
    std::vector<at::Tensor> tensors{*tensor};
    auto work = group->backend->recv(tensors, peer, tag);
    *out = transfer_of(*group, std::move(work), std::move(tensors));
  });
}

rt_status rt_group_exchange(rt_group* group, const at::Tensor* const* tensors, const int* peers, size_t receives, size_t count,
                            rt_transfer** out) {
  return guard([&] {
    std::vector<at::Tensor> kept;
    for (size_t i = 0; i < count; i++) kept.push_back(*tensors[i]);
    group->backend->startCoalescing();
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = exchange(*group->backend, kept, peers, receives);
    } catch (...) {
      // NCCL's group is this thread's: one that stays open would hold back all that the thread does later.
      std::free(guard([&] { group->backend->endCoalescing(); }));
      throw;
    }
    *out = transfer_of(*group, std::move(work), std::move(kept));
  });
}

rt_status rt_group_native(rt_group* group, int operation, const at::Tensor* input, const at::Tensor* output, int64_t timeout,
                          rt_transfer** out) {
  return guard([&] {
    const at::Tensor target = output == nullptr ? at::Tensor() : *output;
    auto work = native_work(*group->backend, operation, *input, target, in_milliseconds(timeout));
    *out = transfer_of(*group, std::move(work), {*input, target});
  });
}

rt_status rt_group_monitored_barrier(rt_group* group, int64_t timeout) {
  return guard([&] {
    c10d::BarrierOptions options;
    options.timeout = in_milliseconds(timeout);
    group->backend->monitoredBarrier(options, /*waitAllRanks=*/true);
  });
}

rt_status rt_transfer_wait(rt_transfer* transfer, int64_t timeout) {
  return guard([&] {
    // With a timeout, NCCL's work would wait on the host.
    const auto limit = transfer->on_device ? kNoTimeout : in_milliseconds(timeout);
    if (!transfer->work->wait(limit)) throw std::runtime_error("the transfer was aborted");
  });
}

void rt_transfer_free(rt_transfer* transfer) { delete transfer; }
}
