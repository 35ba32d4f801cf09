// Runs kernels written in Rust on libtorch's own threads. A second pool would compete with libtorch's threads, which spin while
// they wait for the next operator.
#include "guard.h"

#include <ATen/Parallel.h>

extern "C" {
// Calls `work(context, i)` for i in [0, `workers`), on up to as many threads; sequentially if the calling thread is one of
// libtorch's workers. Returns when all calls have returned. `work` must not unwind.
rt_status rt_parallel(int64_t workers, void (*work)(void*, int64_t), void* context) {
  return guard([&] {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) work(context, i);
    });
  });
}
}
