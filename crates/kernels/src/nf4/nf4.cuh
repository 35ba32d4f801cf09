// Weights of 4 bits to floating point; the format is in nf4/format.rs, contracts are in nf4/cuda.rs.
#include "prelude.cuh"

typedef unsigned char u8;

// The values of the weights' codes and, for nested scales, of the scales' codes. By value, so that nothing is kept on the device.
struct Nf4Tables { float weights[16]; float scales[256]; };

// W codes that lie one behind the other, the first in the high half of its byte. One code may begin within a byte.
template <int W> struct Codes {
  u32 word;
  DEVICE void read(const u8* codes, i64 at) {
    static_assert(W == 1 || W == 4 || W == 8, "");
    if constexpr (W == 1) word = codes[at / 2] >> (at % 2 ? 0 : 4);
    else if constexpr (W == 4) word = *(const u16*)(codes + at / 2);
    else word = *(const u32*)(codes + at / 2);
  }
  DEVICE u32 code(int j) const { return (word >> (W == 1 ? 0 : j % 2 ? 4 * j - 4 : 4 * j + 4)) & 15; }
};

// The scale of a block of 64 weights, as it is stored.
template <bool NESTED> struct Scale {
  float number;  // or the factor
  u32 code;
  DEVICE void read(const void* absmax, const float* factors, i64 block) {
    number = NESTED ? factors[block / 256] : ((const float*)absmax)[block];
    if constexpr (NESTED) code = ((const u8*)absmax)[block];
  }
  // A nested one is rounded after its product and after its sum.
  DEVICE float value(const Nf4Tables& tables, float mean) const {
    if constexpr (NESTED) return __fadd_rn(__fmul_rn(tables.scales[code], number), mean);
    else return number;
  }
};

// A window of the matrix, whose rows have `inner` weights: `packs` packs of W weights, `row_packs` in each row, from weight `first` on.
template <typename T, int W, bool NESTED, int THREADS, int PACKS>
__global__ void __launch_bounds__(THREADS) nf4_dequantize(
    Nf4Tables tables, const u8* codes, const void* absmax, const float* factors, const float* mean, i64 first, i64 inner,
    int row_packs, int packs, T* out, i64 stride) {
  // Sixteen numbers in sixteen banks: however different the codes of a warp's threads are, they read at once.
  __shared__ float weights[16];
  if (threadIdx.x < 16) weights[threadIdx.x] = tables.weights[threadIdx.x];
  __syncthreads();
  const float offset = NESTED ? *mean : 0.f;
  Codes<W> read[PACKS];
  Scale<NESTED> scales[PACKS];
  T* to[PACKS];
  UNROLL for (int k = 0; k < PACKS; k++) {
    const u32 pack = blockIdx.x * (THREADS * PACKS) + k * THREADS + threadIdx.x;
    to[k] = nullptr;
    if (pack >= (u32)packs) continue;
    const u32 row = pack / (u32)row_packs, column = (pack - row * (u32)row_packs) * W;
    const i64 at = first + row * inner + column;
    to[k] = out + row * stride + column;
    read[k].read(codes, at);
    scales[k].read(absmax, factors, at / 64);
  }
  UNROLL for (int k = 0; k < PACKS; k++) {
    if (!to[k]) continue;
    const float scale = scales[k].value(tables, offset);
    float f[W];
    UNROLL for (int j = 0; j < W; j++) f[j] = scale * weights[read[k].code(j)];
    store<T, W>(to[k], f);
  }
}
