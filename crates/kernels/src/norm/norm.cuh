// Layer norm and RMS norm; mathematics and contracts are in norm.rs. A row is in the registers of one block, which has
// the rows blockIdx.x, blockIdx.x + gridDim.x, …; backward reads very wide rows twice.
#include "prelude.cuh"

extern __shared__ __align__(16) char ring[];

// A matrix whose rows are read ahead: STAGES rows are in shared memory, where asynchronous copies put them. Each thread copies and
// reads its own numbers alone, so that no barrier is needed. With 0 stages a row is read when it is used, as numbers that are not
// 16 bytes together must be. `place` is the matrix's part of a stage in the ring, `stage` the size of a stage.
template <typename T, int W, int THREADS, int VECS, int STAGES> struct Rows {
  static constexpr int WORDS = STAGES ? W * sizeof(T) / 16 : 1, LANES = 16 / sizeof(T);
  static constexpr int BYTES = THREADS * VECS * W * sizeof(T);
  const T* matrix;
  int width;
  DEVICE const T* at(int row, int k) const { return matrix + (i64)row * width + (threadIdx.x + k * THREADS) * W; }
  DEVICE static u32 slot(int place, int k, int word) { return shared_address(ring + place) + ((k * WORDS + word) * THREADS + threadIdx.x) * 16; }
  DEVICE void copy(int row, int place, int k) const {
    if constexpr (STAGES > 0) { UNROLL for (int i = 0; i < WORDS; i++) copy_async16(slot(place, k, i), at(row, k) + i * LANES); }
  }
  DEVICE void get(int row, int place, int k, float* f) const {
    if constexpr (STAGES > 0) { UNROLL for (int i = 0; i < WORDS; i++) Lanes<T>::unpack(read_shared16(slot(place, k, i)), f + i * LANES); }
    else load<T, W>(at(row, k), f);
  }
};

template <typename T, typename P, typename O, int W, int THREADS, int VECS, int STAGES, bool CENTER>
__global__ void __launch_bounds__(THREADS) norm_forward(const T* x, const T* residual, T* sum, const P* weight, const P* bias, O* y, float* mean, float* rstd, int rows, int width, float eps) {
  typedef Rows<T, W, THREADS, VECS, STAGES> Input;
  __shared__ float part[2][3][THREADS / 32];
  const Input input{x, width}, other{residual, width};
  const int stage_bytes = residual ? 2 * Input::BYTES : Input::BYTES;
  auto begin = [&](int row, int stage) {
    if constexpr (STAGES > 0) {
      UNROLL for (int k = 0; k < VECS; k++) {
        if (row >= rows || (threadIdx.x + k * THREADS) * W >= width) continue;
        input.copy(row, stage * stage_bytes, k);
        if (residual) other.copy(row, stage * stage_bytes + Input::BYTES, k);
      }
      commit_copies();
    }
  };
  UNROLL for (int s = 0; s < STAGES - 1; s++) begin(blockIdx.x + s * gridDim.x, s);
  // A thread that has few of them keeps the weights.
  constexpr bool KEEPS = VECS <= 2;
  Raw<P, W> weights[KEEPS ? VECS : 1];
  UNROLL for (int k = 0; k < (KEEPS ? VECS : 0); k++) {
    const int i = (threadIdx.x + k * THREADS) * W;
    if (i < width && weight) weights[k].read(weight + i);
  }
  int phase = 0, stage = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, phase ^= 1) {
    const i64 base = (i64)row * width;
    if constexpr (STAGES > 0) {
      begin(row + (STAGES - 1) * gridDim.x, stage == 0 ? STAGES - 1 : stage - 1);
      wait_for_copies<STAGES - 1>();
    }
    float f[VECS][W];
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W;
      UNROLL for (int j = 0; j < W; j++) f[k][j] = 0.f;
      if (i >= width) continue;
      input.get(row, stage * stage_bytes, k, f[k]);
      if (residual) {
        float r[W];
        other.get(row, stage * stage_bytes + Input::BYTES, k, r);
        UNROLL for (int j = 0; j < W; j++) f[k][j] = widen(round_to<T>(f[k][j] + r[j]));
        store<T, W>(sum + base + i, f[k]);
      }
    }
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
      if (weight) {
        if constexpr (KEEPS) weights[k].unpack(w);
        else load<P, W>(weight + i, w);
      }
      if (bias) load<P, W>(bias + i, b);
      UNROLL for (int j = 0; j < W; j++) {
        float v = (f[k][j] - error) * r;
        if (weight) v *= w[j];
        if (bias) v += b[j];
        f[k][j] = v;
      }
      store<O, W>(y + base + i, f[k]);
    }
    if constexpr (STAGES > 0) stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
}

// Which rows meet in which partial sum depends on the grid alone.
template <typename T, typename P, typename U, int W, int THREADS, int VECS, int STAGES, bool CENTER, bool BIAS>
__global__ void __launch_bounds__(THREADS) norm_backward(const T* x, const U* upstream, const T* added, const P* weight, const float* mean, const float* rstd, T* grad, float* of_weight, float* of_bias, int rows, int width) {
  typedef Rows<T, W, THREADS, VECS, STAGES> Input;
  typedef Rows<U, W, THREADS, VECS, STAGES> Upstream;
  constexpr int STAGE = Input::BYTES + Upstream::BYTES;
  // A thread has x, upstream and the sums in registers. Where there are too few of them, x and upstream are read again to write the
  // gradient. Where the sums alone are too many, those of the bias are in shared memory behind the stages, each thread's at its own
  // addresses; the host gives that memory by the same condition.
  constexpr bool AGAIN = (BIAS ? 4 : 3) * VECS * W + 16 + CENTER > 65536 / THREADS, BESIDE = BIAS && THREADS * VECS * W > 16384;
  constexpr int KEPT = AGAIN ? 1 : VECS;
  __shared__ float part[2][2][THREADS / 32];
  const Input input{x, width};
  const Upstream above{upstream, width};
  auto begin = [&](int row, int stage) {
    if constexpr (STAGES > 0) {
      UNROLL for (int k = 0; k < VECS; k++) {
        if (row >= rows || (threadIdx.x + k * THREADS) * W >= width) continue;
        input.copy(row, stage * STAGE, k);
        above.copy(row, stage * STAGE + Input::BYTES, k);
      }
      commit_copies();
    }
  };
  UNROLL for (int s = 0; s < STAGES - 1; s++) begin(blockIdx.x + s * gridDim.x, s);
  constexpr bool KEEPS = VECS <= 2;
  Raw<P, W> weights[KEEPS ? VECS : 1];
  UNROLL for (int k = 0; k < (KEEPS ? VECS : 0); k++) {
    const int i = (threadIdx.x + k * THREADS) * W;
    if (i < width && weight) weights[k].read(weight + i);
  }
  float sums[VECS][W], in_registers[BESIDE ? 1 : VECS][W];
  auto plain = [&](int k, int j) -> float& {
    if constexpr (BESIDE) return ((float*)(ring + STAGES * STAGE))[(k * W + j) * THREADS + threadIdx.x];
    else return in_registers[k][j];
  };
  UNROLL for (int k = 0; k < VECS; k++) {
    UNROLL for (int j = 0; j < W; j++) {
      sums[k][j] = 0.f;
      if constexpr (BIAS) plain(k, j) = 0.f;
    }
  }
  int phase = 0, stage = 0;
  for (int row = blockIdx.x; row < rows; row += gridDim.x, phase ^= 1) {
    const i64 base = (i64)row * width;
    const float r = rstd[row], center = CENTER ? mean[row] : 0.f;
    if constexpr (STAGES > 0) {
      begin(row + (STAGES - 1) * gridDim.x, stage == 0 ? STAGES - 1 : stage - 1);
      wait_for_copies<STAGES - 1>();
    }
    float f[KEPT][W], d[KEPT][W];
    const int place = stage * STAGE;
    auto get = [&](int k, int at) {
      input.get(row, place, k, f[at]);
      above.get(row, place + Input::BYTES, k, d[at]);
    };
    UNROLL for (int k = 0; k < (AGAIN ? 0 : VECS); k++) {
      if ((threadIdx.x + k * THREADS) * W < width) get(k, k);
    }
    if constexpr (STAGES > 0) stage = stage == STAGES - 1 ? 0 : stage + 1;
    float s = 0.f, products = 0.f;
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W, at = AGAIN ? 0 : k;
      if (i >= width) continue;
      if constexpr (AGAIN) get(k, at);
      if constexpr (BESIDE) { UNROLL for (int j = 0; j < W; j++) plain(k, j) += d[at][j]; }
      float w[W];
      if (weight) {
        if constexpr (KEEPS) weights[k].unpack(w);
        else load<P, W>(weight + i, w);
      }
      UNROLL for (int j = 0; j < W; j++) {
        f[at][j] = (f[at][j] - center) * r;
        sums[k][j] = fmaf(d[at][j], f[at][j], sums[k][j]);
        if constexpr (BIAS && !BESIDE) plain(k, j) += d[at][j];
        if (weight) d[at][j] *= w[j];
        s += d[at][j];
        products = fmaf(d[at][j], f[at][j], products);
      }
    }
    if (!grad) continue;
    products = block_sum<THREADS>(products, part[phase][0]) / width;
    if constexpr (CENTER) s = block_sum<THREADS>(s, part[phase][1]) / width;
    UNROLL for (int k = 0; k < VECS; k++) {
      const int i = (threadIdx.x + k * THREADS) * W, at = AGAIN ? 0 : k;
      if (i >= width) continue;
      if constexpr (AGAIN) {
        get(k, at);
        float w[W];
        if (weight) load<P, W>(weight + i, w);
        UNROLL for (int j = 0; j < W; j++) {
          f[at][j] = (f[at][j] - center) * r;
          if (weight) d[at][j] *= w[j];
        }
      }
      float a[W];
      if (added) load<T, W>(added + base + i, a);
      UNROLL for (int j = 0; j < W; j++) {
        float v = r * (d[at][j] - (CENTER ? s : 0.f) - f[at][j] * products);
        if (added) v += a[j];
        f[at][j] = v;
      }
      store<T, W>(grad + base + i, f[at]);
    }
  }
  UNROLL for (int k = 0; k < VECS; k++) {
    const int i = (threadIdx.x + k * THREADS) * W;
    if (i >= width) continue;
    if (of_weight) store<float, W>(of_weight + (i64)blockIdx.x * width + i, sums[k]);
    if constexpr (BIAS) {
      float of_pack[W];
      UNROLL for (int j = 0; j < W; j++) of_pack[j] = plain(k, j);
      store<float, W>(of_bias + (i64)blockIdx.x * width + i, of_pack);
    }
  }
}

// Sums of the columns of one or two [rows, width], rounded once to the dtype of the parameters: 32 columns of one of them for each block
// of 8 warps. `second` may be null.
template <typename P>
__global__ void __launch_bounds__(256) column_sums(const float* first, P* of_first, const float* second, P* of_second, int rows, int width) {
  __shared__ float part[8][33];
  const int blocks = (width + 31) / 32, is_second = blockIdx.x >= blocks;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = (blockIdx.x - is_second * blocks) * 32 + lane;
  const float* partial = is_second ? second : first;
  float s = 0.f;
  if (column < width) {
    _Pragma("unroll 8") for (int row = warp; row < rows; row += 8) s += partial[(i64)row * width + column];
  }
  part[warp][lane] = s;
  __syncthreads();
  if (warp == 0 && column < width) {
    float all = part[0][lane];
    UNROLL for (int i = 1; i < 8; i++) all += part[i][lane];
    (is_second ? of_second : of_first)[column] = round_to<P>(all);
  }
}
