// Kernels written in Rust on the threads of libtorch's own kernels. A second pool beside it would share the processor with
// threads that spin while they wait for libtorch's next operator.
#include "guard.h"

#include <ATen/Parallel.h>

extern "C" {
// Calls `work(context, i)` for i from 0 to below `workers`, on up to as many threads at once; in turn where this thread is
// one of them already. Returns when all have returned. `work` must not unwind.
rt_status rt_parallel(int64_t workers, void (*work)(void*, int64_t), void* context) {
  return guard([&] {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) work(context, i);
    });
  });
}
}
