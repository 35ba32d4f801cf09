// Gloo's headers do not come with libtorch, whose ProcessGroupGloo.hpp includes them. These declarations are what that header
// names; pointers to the types are all that is stored, so their layouts do not matter, and no function of them is called here.
#pragma once
#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
