// The states of the default random generators, and separate generators.
#include "guard.h"
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <algorithm>
#include <mutex>

namespace {
// As tch numbers devices: -1 is the CPU, from 0 on a CUDA device.
at::Generator default_generator(int device) {
  return at::globalContext().defaultGenerator(
      device < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}
} // namespace

extern "C" {
// Seeds the CPU's generator and that of every device of the accelerator, when there is one.
rt_status rt_random_seed(uint64_t seed) {
  return guard([&] { at::manual_seed(seed); });
}

// Writes at most `capacity` bytes of the device's state to `bytes` (borrowed); `size` is the state's full size.
rt_status rt_random_state(int device, uint8_t* bytes, size_t capacity, size_t* size) {
  return guard([&] {
    auto generator = default_generator(device);
    at::Tensor state;
    {
      std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state();
    }
    const auto count = static_cast<size_t>(state.numel());
    std::memcpy(bytes, state.const_data_ptr<uint8_t>(), std::min(count, capacity));
    *size = count;
  });
}

// Sets the device's state to `size` bytes that `rt_random_state` returned for a device of the same type. `bytes` is borrowed.
rt_status rt_random_restore(int device, const uint8_t* bytes, size_t size) {
  return guard([&] {
    // The generator copies from the tensor, and `from_blob` dispatches no operator.
    auto state = at::from_blob(const_cast<uint8_t*>(bytes), {static_cast<int64_t>(size)}, at::kByte);
    auto generator = default_generator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  });
}

// A separate CPU generator; the caller owns it and frees it with `rt_generator_free`.
rt_status rt_generator_new(uint64_t seed, at::Generator** generator) {
  return guard([&] { *generator = new at::Generator(at::make_generator<at::CPUGeneratorImpl>(seed)); });
}

void rt_generator_free(at::Generator* generator) { delete generator; }

// Fills a CPU tensor with normally distributed numbers. Both are borrowed.
rt_status rt_generator_normal(const at::Generator* generator, at::Tensor* tensor, double mean, double deviation) {
  return guard([&] {
    tensor->normal_(mean, deviation, *generator);
  });
}

// Fills a CPU tensor with uniformly distributed numbers in [low, high). Both are borrowed.
rt_status rt_generator_uniform(const at::Generator* generator, at::Tensor* tensor, double low, double high) {
  return guard([&] {
    tensor->uniform_(low, high, *generator);
  });
}
}
