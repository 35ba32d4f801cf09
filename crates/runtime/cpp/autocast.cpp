// libtorch's own autocast state, saved and restored.
#include "guard.h"
#include <ATen/autocast_mode.h>

namespace {
constexpr c10::DeviceType kTypes[2] = {c10::kCPU, c10::kCUDA};
}

extern "C" {
// This thread's autocast for CPU and CUDA: whether it is on, and the dtype. Both arrays have two entries.
rt_status rt_autocast_get(int* enabled, int* dtype) {
  return guard([&] {
    for (int i = 0; i < 2; i++) {
      enabled[i] = at::autocast::is_autocast_enabled(kTypes[i]);
      dtype[i] = static_cast<int>(at::autocast::get_autocast_dtype(kTypes[i]));
    }
  });
}

// Sets this thread's autocast. A change clears the cache of casts.
rt_status rt_autocast_set(const int* enabled, const int* dtype) {
  return guard([&] {
    for (int i = 0; i < 2; i++) {
      if (at::autocast::is_autocast_enabled(kTypes[i]) != (enabled[i] != 0)) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(kTypes[i], enabled[i] != 0);
      at::autocast::set_autocast_dtype(kTypes[i], static_cast<at::ScalarType>(dtype[i]));
    }
  });
}
}
