// CUDA graphs without CUDA's headers. Contracts are in graph.h.
//
// Every supported libtorch has the class at::cuda::CUDAGraph in libtorch_cuda, but its header includes cuda_runtime_api.h (the
// device-generic at::accelerator::Graph is only in 2.13). Its methods are exported, so they are found by name (cuda_symbol.h).
#include "graph.h"
#include "versions.h"

#include "cuda_symbol.h"
#include "device.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <new>

// The signatures below are from ATen/cuda/CUDAGraph.h of each version that versions.h admits.
static_assert(std::is_trivially_copy_constructible_v<c10::MempoolId_t>, "passed in registers");

namespace {

// sizeof(CUDAGraph) is about 120 bytes in 2.11 and 370 in 2.13. At most `kSize` is accepted: the constructor must not change the
// storage after it.
constexpr size_t kSize = 512;
constexpr size_t kStorage = 1024;
constexpr unsigned char kUntouched = 0xA5;

struct Methods {
  void (*construct)(void*, bool);
  void (*destroy)(void*);
  void (*begin)(void*, c10::MempoolId_t, int);
  void (*end)(void*);
  void (*replay)(void*);
  c10::MempoolId_t (*pool)(void*);
};

Methods methods() {
  Methods found;
  found.construct = cuda_symbol<decltype(found.construct)>("_ZN2at4cuda9CUDAGraphC1Eb");
  found.destroy = cuda_symbol<decltype(found.destroy)>("_ZN2at4cuda9CUDAGraphD1Ev");
  found.begin = cuda_symbol<decltype(found.begin)>("_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode");
  found.end = cuda_symbol<decltype(found.end)>("_ZN2at4cuda9CUDAGraph11capture_endEv");
  found.replay = cuda_symbol<decltype(found.replay)>("_ZN2at4cuda9CUDAGraph6replayEv");
  found.pool = cuda_symbol<decltype(found.pool)>("_ZN2at4cuda9CUDAGraph4poolEv");
  return found;
}

}  // namespace

struct rt_graph {
  Methods call;
  alignas(64) unsigned char object[kStorage];
};

extern "C" {

rt_status rt_graph_new(rt_graph** out) {
  return guard([&] {
    auto graph = std::make_unique<rt_graph>();
    graph->call = methods();
    std::memset(graph->object, kUntouched, kStorage);
    graph->call.construct(graph->object, /*keep_graph=*/false);
    for (size_t i = kSize; i < kStorage; i++) {
      // The object is leaked: with another size, the class may also have other methods.
      if (graph->object[i] != kUntouched) {
        graph.release();
        TORCH_CHECK(false, "at::cuda::CUDAGraph is larger than ", kSize, " bytes in this libtorch_cuda");
      }
    }
    *out = graph.release();
  });
}

void rt_graph_free(rt_graph* graph) {
  if (graph == nullptr) return;
  // A destructor is noexcept.
  graph->call.destroy(graph->object);
  delete graph;
}

rt_status rt_graph_begin(rt_graph* graph, const uint64_t* pool) {
  return guard([&] {
    // cudaStreamCaptureModeThreadLocal: a call that cannot be captured fails on this thread. Other threads, such as a loader's, are
    // not restricted.
    graph->call.begin(graph->object, c10::MempoolId_t{pool[0], pool[1]}, 1);
  });
}

rt_status rt_graph_pool(rt_graph* graph, uint64_t* pool) {
  return guard([&] {
    const auto id = graph->call.pool(graph->object);
    pool[0] = id.first;
    pool[1] = id.second;
  });
}

rt_status rt_graph_end(rt_graph* graph) {
  return guard([&] { graph->call.end(graph->object); });
}

rt_status rt_graph_restart(rt_graph*) {
  return guard([&] {
    const auto begin = reinterpret_cast<int (*)(void*, int)>(rt_cuda_runtime("cudaStreamBeginCapture"));
    TORCH_CHECK(begin != nullptr, "the CUDA runtime that libtorch uses does not show cudaStreamBeginCapture");
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    const int error = begin(cuda.getStreamNativeHandle(cuda.getStream(cuda.getDevice())), /*cudaStreamCaptureModeRelaxed*/ 2);
    TORCH_CHECK(error == 0, "cudaStreamBeginCapture: error ", error);
  });
}

rt_status rt_graph_replay(rt_graph* graph) {
  return guard([&] { graph->call.replay(graph->object); });
}
}
