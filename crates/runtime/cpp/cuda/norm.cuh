// Layer norm and RMS norm; mathematics and contracts are in src/fused/norm.rs. A row is in the registers of one block, which has
// the rows blockIdx.x, blockIdx.x + gridDim.x, … and reads the next one while it computes, where there are registers for it.
#include "prelude.cuh"

DEVICE constexpr bool reads_ahead(int vecs) { return vecs == 1; }

template <typename T, typename P, typename O, int W, int THREADS, int VECS, bool CENTER>
__global__ void __launch_bounds__(THREADS) norm_forward(const T* x, const T* residual, T* sum, const P* weight, const P* bias, O* y, float* mean, float* rstd, int rows, int width, float eps) {
  __shared__ float part[2][3][THREADS / 32];
  Raw<P, W> weights[VECS];
  Raw<T, W> next[VECS], other[VECS];
  auto read = [&](int row) {
    const i64 base = (i64)row * width;
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      if (i >= width) continue;
      next[k].read(x + base + i);
      if (residual) other[k].read(residual + base + i);
    }
  };
  UNROLL for (int k = 0; k < VECS; k++) {
    const int i = (threadIdx.x + k * THREADS) * W;
    if (i < width && weight) weights[k].read(weight + i);
  }
  if constexpr (reads_ahead(VECS)) read(blockIdx.x);
  int phase = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, phase ^= 1) {
    if constexpr (!reads_ahead(VECS)) read(row);
    const i64 base = (i64)row * width;
    float f[VECS][W];
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      UNROLL for (int j = 0; j < W; j++) f[k][j] = 0.f;
      if (i >= width) continue;
      next[k].unpack(f[k]);
      if (residual) {
        float r[W];
        other[k].unpack(r);
        UNROLL for (int j = 0; j < W; j++) f[k][j] = widen(round_to<T>(f[k][j] + r[j]));
        store<T, W>(sum + base + i, f[k]);
      }
    }
    if (reads_ahead(VECS) && row + (int)gridDim.x < rows) read(row + gridDim.x);
    float center = 0.f;
    if constexpr (CENTER) {
      float s = 0.f;
      UNROLL for (int k = 0; k < VECS; k++) { UNROLL for (int j = 0; j < W; j++) s += f[k][j]; }
      center = block_sum<THREADS>(s, part[phase][0]) / width;
    }
    // Deviations from the mean, whose own rounding error is in their sum.
    float s = 0.f, squares = 0.f;
    UNROLL for (int k = 0; k < VECS; k++) {
      if ((threadIdx.x + k * THREADS) * W >= width) continue;
      UNROLL for (int j = 0; j < W; j++) {
        f[k][j] -= center;
        s += f[k][j];
        squares = fmaf(f[k][j], f[k][j], squares);
      }
    }
    float error = 0.f;
    if constexpr (CENTER) error = block_sum<THREADS>(s, part[phase][1]) / width;
    const float variance = block_sum<THREADS>(squares, part[phase][2]) / width - error * error;
    const float r = rsqrtf(variance + eps);
    if (threadIdx.x == 0) {
      rstd[row] = r;
      if (CENTER && mean) mean[row] = center + error;
    }
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      if (i >= width) continue;
      float w[W], b[W];
      if (weight) weights[k].unpack(w);
      if (bias) load<P, W>(bias + i, b);
      UNROLL for (int j = 0; j < W; j++) {
        float v = (f[k][j] - error) * r;
        if (weight) v *= w[j];
        if (bias) v += b[j];
        f[k][j] = v;
      }
      store<O, W>(y + base + i, f[k]);
    }
  }
}

// Which rows meet in which partial sum depends on the grid alone.
template <typename T, typename P, typename U, int W, int THREADS, int VECS, bool CENTER, bool BIAS>
__global__ void __launch_bounds__(THREADS) norm_backward(const T* x, const U* upstream, const T* added, const P* weight, const float* mean, const float* rstd, T* grad, float* of_weight, float* of_bias, int rows, int width) {
  __shared__ float part[2][2][THREADS / 32];
  float sums[VECS][W], plain[VECS][W];
  UNROLL for (int k = 0; k < VECS; k++) { UNROLL for (int j = 0; j < W; j++) sums[k][j] = plain[k][j] = 0.f; }
  Raw<T, W> next_x[VECS];
  Raw<U, W> next_d[VECS];
  float next_r = 0.f, next_center = 0.f;
  auto read = [&](int row) {
    const i64 base = (i64)row * width;
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      if (i >= width) continue;
      next_x[k].read(x + base + i);
      next_d[k].read(upstream + base + i);
    }
    next_r = rstd[row];
    if constexpr (CENTER) next_center = mean[row];
  };
  if constexpr (reads_ahead(VECS)) read(blockIdx.x);
  int phase = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, phase ^= 1) {
    if constexpr (!reads_ahead(VECS)) read(row);
    const i64 base = (i64)row * width;
    const float r = next_r, center = next_center;
    float f[VECS][W], d[VECS][W];
    UNROLL for (int k = 0; k < VECS; k++) {
      if ((threadIdx.x + k * THREADS) * W >= width) continue;
      next_x[k].unpack(f[k]);
      next_d[k].unpack(d[k]);
    }
    if (reads_ahead(VECS) && row + (int)gridDim.x < rows) read(row + gridDim.x);
    float s = 0.f, products = 0.f;
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      if (i >= width) continue;
      float w[W];
      if (weight) load<P, W>(weight + i, w);
      UNROLL for (int j = 0; j < W; j++) {
        f[k][j] = (f[k][j] - center) * r;
        sums[k][j] = fmaf(d[k][j], f[k][j], sums[k][j]);
        if constexpr (BIAS) plain[k][j] += d[k][j];
        if (weight) d[k][j] *= w[j];
        s += d[k][j];
        products = fmaf(d[k][j], f[k][j], products);
      }
    }
    if (!grad) continue;
    products = block_sum<THREADS>(products, part[phase][0]) / width;
    if constexpr (CENTER) s = block_sum<THREADS>(s, part[phase][1]) / width;
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      if (i >= width) continue;
      float a[W];
      if (added) load<T, W>(added + base + i, a);
      UNROLL for (int j = 0; j < W; j++) {
        float v = r * (d[k][j] - (CENTER ? s : 0.f) - f[k][j] * products);
        if (added) v += a[j];
        f[k][j] = v;
      }
      store<T, W>(grad + base + i, f[k]);
    }
  }
  UNROLL for (int k = 0; k < VECS; k++) {
    const int i = (threadIdx.x + k * THREADS) * W;
    if (i >= width) continue;
    if (of_weight) store<float, W>(of_weight + (i64)blockIdx.x * width + i, sums[k]);
    if constexpr (BIAS) store<float, W>(of_bias + (i64)blockIdx.x * width + i, plain[k]);
  }
}

// Sums of the columns of [rows, width]: 32 columns for each block of 8 warps.
__global__ void __launch_bounds__(256) column_sums(const float* partial, float* out, int rows, int width) {
  __shared__ float part[8][33];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = blockIdx.x * 32 + lane;
  float s = 0.f;
  if (column < width) {
    _Pragma("unroll 8") for (int row = warp; row < rows; row += 8) s += partial[(i64)row * width + column];
  }
  part[warp][lane] = s;
  __syncthreads();
  if (warp == 0 && column < width) {
    float all = part[0][lane];
    UNROLL for (int i = 1; i < 8; i++) all += part[i][lane];
    out[column] = all;
  }
}
