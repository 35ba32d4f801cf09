// Stochastic rounding of many tensors; mathematics and contracts are in stochastic_rounding.rs and
// stochastic_rounding/cuda.rs.
#include "prelude.cuh"

typedef unsigned long long u64;

// One tensor: contiguous, of `numbers` elements, of which the first has the index `first` in its parameter. The step's number is
// `host_step`, or `*step` where that is given.
struct RoundingEntry {
  const float* source;
  void* target;
  u64 key;
  u64 first;
  i64 host_step;
  const float* step;
  i64 numbers;
  i64 first_block;
};

// By value, within the 4 KiB that a kernel's parameters may have.
struct RoundingTable { RoundingEntry entries[60]; };

// SplitMix64's output at a counter.
DEVICE u64 hash_of(u64 seed, u64 counter) {
  u64 z = seed + counter * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Rounds with a uniform integer below 2^16. From the largest number of the dtype on, to nearest.
template <typename T> DEVICE T round_with(float v, u32 random);
template <> DEVICE bf16 round_with<bf16>(float v, u32 random) {
  const u32 bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) >= 0x7f7f0000u) return round_to<bf16>(v);
  return bf16{(u16)((bits + random) >> 16)};
}
template <> DEVICE f16 round_with<f16>(float v, u32 random) {
  const u32 bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477fe000u) return round_to<f16>(v);
  u32 rounded = (magnitude - (112u << 23) + (random >> 3)) >> 13;
  if (magnitude < 0x38800000u) {
    const float scaled = __uint_as_float(magnitude) * 16777216.f;
    const u32 whole = (u32)scaled;
    rounded = whole + (((u32)((scaled - (float)whole) * 65536.f) + random) >> 16);
  }
  return f16{(u16)(rounded | (bits >> 16 & 0x8000u))};
}

// Each block has CHUNK numbers of one tensor, a thread those that share a hash.
template <typename T, int THREADS, int CHUNK>
__global__ void __launch_bounds__(THREADS) stochastic_rounding(RoundingTable table, int entries) {
  const RoundingEntry e = table.entries[entry_of(table, entries, blockIdx.x)];
  const u64 seed = hash_of(e.key, e.step ? (u64)*e.step : (u64)e.host_step);
  const i64 begin = ((i64)blockIdx.x - e.first_block) * CHUNK;
  const i64 end = begin + CHUNK < e.numbers ? begin + CHUNK : e.numbers;
  T* target = (T*)e.target;
  // The first four that share a hash may begin before the tensor does.
  const i64 shift = (i64)(e.first % 4);
  for (i64 i = begin + 4 * (i64)threadIdx.x - shift; i < end; i += 4 * THREADS) {
    const u64 hash = hash_of(seed, (e.first + i) / 4 + 1);
    UNROLL for (int j = 0; j < 4; j++) {
      if (i + j >= begin && i + j < end) target[i + j] = round_with<T>(e.source[i + j], (u32)(hash >> (16 * j)) & 0xffffu);
    }
  }
}
