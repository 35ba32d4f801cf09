// Dropout whose mask is a function of a seed; mathematics and contracts are in dropout.rs and dropout/cuda.rs.
#include "prelude.cuh"

typedef unsigned long long u64;

// SplitMix64's output at a counter.
DEVICE u64 hash_of(u64 seed, u64 counter) {
  u64 z = seed + counter * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// out = x·keep·scale, rounded once; x may be null, for ones. A pair of elements shares a hash. Dropped elements are multiplied by 0, as
// by a mask, so that an infinite x gives NaN. With `base`, a training step's, `seed` is the number of a call in the step.
template <typename T, int W, int THREADS>
__global__ void __launch_bounds__(THREADS) dropout(const T* x, T* out, i64 numbers, const i64* base, i64 seed, i64 threshold, float scale) {
  static_assert(W == 1 || W % 2 == 0, "");
  if (base) seed = (i64)hash_of((u64)*base, (u64)seed + 1);
  for (i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * W; i < numbers; i += (i64)gridDim.x * THREADS * W) {
    float f[W];
    UNROLL for (int j = 0; j < W; j++) f[j] = 1.f;
    if (x) load<T, W>(x + i, f);
    u64 hash = 0;
    UNROLL for (int j = 0; j < W; j++) {
      const bool second = W == 1 ? i % 2 : j % 2;
      if (W == 1 || j % 2 == 0) hash = hash_of((u64)seed, (u64)((i + j) / 2 + 1));
      const u32 half = second ? (u32)(hash >> 32) : (u32)hash;
      f[j] *= half >= (u32)threshold ? scale : 0.f;
    }
    store<T, W>(out + i, f);
  }
}
