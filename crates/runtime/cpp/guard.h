// The boundary between C++ and Rust.
//
// Contract of every function of the shim:
// - it is `extern "C"` and noexcept in effect: the whole body runs inside `guard`, which catches everything;
// - it returns a status: NULL on success, else a message in UTF-8 that the caller owns and frees with `rt_free_message`;
// - results go through out-parameters, which are written only on success;
// - an `at::Tensor*` that comes in is borrowed unless the declaration says "taken"; one that goes out is owned by the
//   caller, who wraps it in a `tch::Tensor`.
// A callback into Rust never unwinds: it returns a status of the same kind, allocated by `rt_copy_message`.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

typedef char* rt_status;

// An error or panic of a Rust callback, thrown through C++ back to Rust.
struct RustFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline rt_status rt_message(const char* text) noexcept {
  const size_t size = std::strlen(text) + 1;
  char* copy = static_cast<char*>(std::malloc(size));
  if (copy != nullptr) std::memcpy(copy, text, size);
  // Out of memory for the message itself; a static text cannot be returned, because the caller frees it.
  if (copy == nullptr) std::abort();
  return copy;
}

template <class Body>
rt_status guard(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return rt_message(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return rt_message(error.what());
  } catch (...) {
    return rt_message("an exception that is not a std::exception");
  }
}

// Turns a callback's status into a C++ exception.
inline void throw_on_failure(rt_status status, const std::string& where) {
  if (status == nullptr) return;
  std::string text = where + ": " + status;
  std::free(status);
  throw RustFailure(text);
}
