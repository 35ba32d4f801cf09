// CUDA graphs without CUDA's headers. Contracts are in graph.h.
//
// The class that every supported libtorch has is at::cuda::CUDAGraph of libtorch_cuda, whose header includes
// cuda_runtime_api.h (a device-generic graph, at::accelerator::Graph, is in 2.13 alone). Its methods are exported, so they
// are found by name when libtorch_cuda is open, and called as the Itanium C++ ABI (Linux on x86-64 and on AArch64) says a
// method is: a function whose first argument is the object. What the names do not pin is the object's size, and what the
// methods return.
#include "graph.h"
#include "versions.h"

#include "device.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <dlfcn.h>
#include <new>

// The signatures below were read in ATen/cuda/CUDAGraph.h of each version that versions.h admits.
static_assert(std::is_trivially_copy_constructible_v<c10::MempoolId_t>, "passed in registers");

namespace {

// sizeof(CUDAGraph) is about 120 bytes in 2.11 and 370 in 2.13. `kSize` is what it may be; the rest is watched.
constexpr size_t kSize = 512;
constexpr size_t kStorage = 1024;
constexpr unsigned char kUntouched = 0xA5;

struct Methods {
  void (*construct)(void*, bool);
  void (*destroy)(void*);
  void (*begin)(void*, c10::MempoolId_t, int);
  void (*end)(void*);
  void (*replay)(void*);
};

template <class Function>
void find(Function& function, const char* name) {
  void* address = dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(address != nullptr, "this libtorch_cuda has no ", name);
  function = reinterpret_cast<Function>(address);
}

Methods methods() {
  Methods found;
  find(found.construct, "_ZN2at4cuda9CUDAGraphC1Eb");
  find(found.destroy, "_ZN2at4cuda9CUDAGraphD1Ev");
  find(found.begin, "_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode");
  find(found.end, "_ZN2at4cuda9CUDAGraph11capture_endEv");
  find(found.replay, "_ZN2at4cuda9CUDAGraph6replayEv");
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
      // The object is not destroyed: its size is not the one that was read, so neither are its methods.
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

rt_status rt_graph_begin(rt_graph* graph) {
  return guard([&] {
    // cudaStreamCaptureModeThreadLocal: a call that no capture can hold fails on this thread. Another thread, a loader's, may
    // go on.
    graph->call.begin(graph->object, c10::MempoolId_t{0, 0}, 1);
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
