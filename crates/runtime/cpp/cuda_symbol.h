// Functions of libtorch_cuda, found by their mangled names where it is loaded. The shim does not link with it, and its headers need
// those of CUDA.
//
// A constructor or method is called by the Itanium C++ ABI (Linux on x86-64 and on AArch64): as a function whose first argument is the
// object. A mangled name determines the types of the arguments, but not the size of the object nor the type of the result.
#pragma once
#include <c10/util/Exception.h>

#include <dlfcn.h>

// `Function` is a pointer to a function with the arguments of the name.
template <class Function>
Function cuda_symbol(const char* name) {
  void* address = dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(address != nullptr, "this libtorch_cuda has no ", name);
  return reinterpret_cast<Function>(address);
}
