// Messages of statuses.
#include "guard.h"

#include <torch/version.h>

extern "C" {
// The version of libtorch's headers; static, not to be freed.
const char* rt_torch_version() { return TORCH_VERSION; }

// Frees a status. `message` is taken.
void rt_free_message(rt_status message) { std::free(message); }

// Copies `size` bytes of UTF-8 into a status that C++ may free; for callbacks. `text` is borrowed.
rt_status rt_copy_message(const char* text, size_t size) {
  char* copy = static_cast<char*>(std::malloc(size + 1));
  if (copy == nullptr) std::abort();
  std::memcpy(copy, text, size);
  copy[size] = 0;
  return copy;
}
}
