// The two passes over a tile of logits; mathematics and contracts are in src/fused/cross_entropy.rs.
#include "prelude.cuh"

struct Transform {
  const float* bias;  // or null
  float scale, cap;   // cap 0: none
  DEVICE float operator()(float r, int column) const {
    if (bias) r += bias[column];
    return cap > 0.f ? cap * tanhf(r * (scale / cap)) : r * scale;
  }
};

DEVICE float possible(float m) { return m == -infinity() ? 0.f : m; }
// e^(a − reference), 0 where nothing has been possible.
DEVICE float power(float a, float reference) { return a == -infinity() ? 0.f : exp_fast(a - reference); }

struct Best {
  float value;
  i64 column;
  // NaN is larger than every number; of equal ones the first.
  DEVICE void see(float v, i64 c) {
    const bool nan = v != v, had = value != value;
    const bool takes = nan ? !had || c < column : !had && (v > value || (v == value && c < column));
    if (takes) { value = v; column = c; }
  }
};

// Products to logits, and a row's statistics, which are folded into what is known. One block for each row.
template <typename T, int W, bool CHANGES, bool EXTRA, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_statistics(
    T* tile, i64 stride, int columns, i64 first, const float* bias, float scale, float cap, const i64* labels,
    const float* dense, i64 dense_stride, const float* weights, float* maximum, float* sum, float* target, float* mass,
    float* total, float* moment, i64* best) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float part[6][WARPS];
  __shared__ Best bests[WARPS];
  const i64 row = blockIdx.x;
  T* z = tile + row * stride;
  const Transform transform{bias, scale, cap};
  const i64 label = labels ? labels[row] : -1;
  const float* t = dense ? dense + row * dense_stride : nullptr;
  float m = -infinity(), s = 0.f, of_target = 0.f, of_mass = 0.f, of_total = 0.f, of_moment = 0.f;
  Best top_column{-infinity(), (i64)columns};
  for (int i = threadIdx.x * W; i < columns; i += THREADS * W) {
    float f[W];
    load<T, W>(z + i, f);
    if constexpr (CHANGES) {
      UNROLL for (int j = 0; j < W; j++) f[j] = transform(f[j], i + j);
      store<T, W>(z + i, f);
    }
    float top = f[0];
    UNROLL for (int j = 1; j < W; j++) top = max_nan(top, f[j]);
    const float n = max_nan(m, top), reference = possible(n);
    const float shrink = m == n ? 1.f : power(m, reference);
    float powers = 0.f, products = 0.f;
    UNROLL for (int j = 0; j < W; j++) {
      const float p = exp_fast(f[j] - reference);
      powers += p;
      if (EXTRA && moment) products += p == 0.f ? 0.f : p * f[j];
    }
    s = s * shrink + powers;
    if (EXTRA && moment) of_moment = of_moment * shrink + products;
    m = n;
    if (label >= i && label < i + W) {
      UNROLL for (int j = 0; j < W; j++) of_target = label == i + j ? f[j] : of_target;
    }
    if constexpr (EXTRA) {
      UNROLL for (int j = 0; j < W; j++) {
        const float w = weights ? weights[i + j] : 1.f;
        if (t) {
          const float weighted = t[i + j] * w;
          of_target += weighted == 0.f ? 0.f : weighted * f[j];
          of_mass += weighted;
        }
        if (total) of_total += w * f[j];
        if (best) top_column.see(f[j], i + j);
      }
    }
  }
  const float top = block_max<THREADS>(m, part[0]);
  s = block_sum<THREADS>(m == top ? s : s * power(m, possible(top)), part[1]);
  of_target = block_sum<THREADS>(of_target, part[2]);
  if constexpr (EXTRA) {
    of_mass = block_sum<THREADS>(of_mass, part[3]);
    of_total = block_sum<THREADS>(of_total, part[4]);
    of_moment = block_sum<THREADS>(m == top ? of_moment : of_moment * power(m, possible(top)), part[5]);
    UNROLL for (int o = 16; o; o >>= 1) {
      const float v = __shfl_xor_sync(0xffffffffu, top_column.value, o);
      const i64 c = __shfl_xor_sync(0xffffffffu, top_column.column, o);
      top_column.see(v, c);
    }
    if ((threadIdx.x & 31) == 0) bests[threadIdx.x >> 5] = top_column;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const float before = maximum[row], n = max_nan(before, top), reference = possible(n);
  const float shrink = before == n ? 1.f : power(before, reference), own = top == n ? 1.f : power(top, reference);
  sum[row] = sum[row] * shrink + s * own;
  target[row] += of_target;
  if constexpr (EXTRA) {
    if (mass) mass[row] += of_mass;
    if (total) total[row] += of_total;
    if (moment) moment[row] = moment[row] * shrink + of_moment * own;
    if (best) {
      for (int i = 1; i < WARPS; i++) top_column.see(bests[i].value, bests[i].column);
      if (before == before && !(top_column.value <= before)) best[row] = first + top_column.column;
    }
  }
  maximum[row] = n;
}

// Products to logits alone.
template <typename T, int W, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_logits(T* tile, i64 stride, int columns, int blocks, const float* bias, float scale, float cap) {
  const i64 row = blockIdx.x / blocks;
  const int i = ((int)(blockIdx.x - row * blocks) * THREADS + threadIdx.x) * W;
  if (i >= columns) return;
  const Transform transform{bias, scale, cap};
  T* z = tile + row * stride + i;
  float f[W];
  load<T, W>(z, f);
  UNROLL for (int j = 0; j < W; j++) f[j] = transform(f[j], i + j);
  store<T, W>(z, f);
}

// One number of a row: ∂L/∂r of a logit.
template <bool EXTRA> struct Gradient {
  float scale, cap;
  i64 label;
  const float* dense;    // the row's distribution, or null
  const float* weights;  // or null
  bool constant;
  float m, alpha, beta, gamma;
  DEVICE float operator()(float logit, int column) const {
    float g = alpha * exp_fast(logit - m);
    if constexpr (EXTRA) {
      const float w = weights ? weights[column] : 1.f;
      if (constant) g -= gamma * w;
      if (dense) g -= beta * dense[column] * w;
    }
    if (label == column) g -= beta;
    const float bent = logit / (cap > 0.f ? cap : 1.f);
    return g * (cap > 0.f ? scale * (1.f - bent * bent) : scale);
  }
};

// Logits to the gradient of the products.
template <typename T, int W, bool EXTRA, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_gradient(
    T* tile, i64 stride, int columns, int blocks, float scale, float cap, const i64* labels, const float* dense,
    i64 dense_stride, const float* weights, const float* maximum, const float* powers, const float* target,
    const float* constant) {
  constexpr int PACKS = 4;
  const i64 row = blockIdx.x / blocks;
  const int begin = (int)(blockIdx.x - row * blocks) * (THREADS * W * PACKS) + threadIdx.x * W;
  T* z = tile + row * stride;
  const Gradient<EXTRA> gradient{scale, cap, labels ? labels[row] : -1, dense ? dense + row * dense_stride : nullptr, weights,
                                 constant != nullptr, maximum[row], powers[row], target[row], EXTRA && constant ? constant[row] : 0.f};
  float f[PACKS][W];
  UNROLL for (int k = 0; k < PACKS; k++) {
    const int i = begin + k * THREADS * W;
    if (i < columns) load<T, W>(z + i, f[k]);
  }
  UNROLL for (int k = 0; k < PACKS; k++) {
    const int i = begin + k * THREADS * W;
    if (i >= columns) continue;
    UNROLL for (int j = 0; j < W; j++) f[k][j] = gradient(f[k][j], i + j);
    store<T, W>(z + i, f[k]);
  }
}

// The same, rounded to O and written over the row's own beginning: number i of a row lies where bytes of numbers at or before i
// were, so that a block goes from left to right and writes only what all its threads have read.
template <typename O, int W, bool EXTRA, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_gradient_narrow(
    float* tile, i64 stride, int columns, float scale, float cap, const i64* labels, const float* dense,
    i64 dense_stride, const float* weights, const float* maximum, const float* powers, const float* target,
    const float* constant) {
  constexpr int PACKS = 2;
  const i64 row = blockIdx.x;
  float* z = tile + row * stride;
  O* out = (O*)z;
  const Gradient<EXTRA> gradient{scale, cap, labels ? labels[row] : -1, dense ? dense + row * dense_stride : nullptr, weights,
                                 constant != nullptr, maximum[row], powers[row], target[row], EXTRA && constant ? constant[row] : 0.f};
  Raw<float, W> next[PACKS];
  auto read = [&](int begin) {
    UNROLL for (int k = 0; k < PACKS; k++) {
      const int i = begin + (threadIdx.x + k * THREADS) * W;
      if (i < columns) next[k].read(z + i);
    }
  };
  read(0);
  for (int begin = 0; begin < columns; begin += PACKS * THREADS * W) {
    float f[PACKS][W];
    UNROLL for (int k = 0; k < PACKS; k++) next[k].unpack(f[k]);
    read(begin + PACKS * THREADS * W);
    UNROLL for (int k = 0; k < PACKS; k++) {
      const int i = begin + (threadIdx.x + k * THREADS) * W;
      if (i >= columns) continue;
      UNROLL for (int j = 0; j < W; j++) f[k][j] = gradient(f[k][j], i + j);
    }
    __syncthreads();
    UNROLL for (int k = 0; k < PACKS; k++) {
      const int i = begin + (threadIdx.x + k * THREADS) * W;
      if (i < columns) store<O, W>(out + i, f[k]);
    }
  }
}
