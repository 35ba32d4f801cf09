// The two passes over a tile of logits; mathematics and contracts are in cross_entropy.rs. T is the dtype of the tile; all else
// is fp32. The statistics are those of the logits as they are stored, which are what the gradient reads.
#include "prelude.cuh"

// A number for each column, or none; read N at a time where they are aligned to 16 bytes.
struct PerColumn {
  const float* values;
  bool wide;
  DEVICE explicit PerColumn(const float* p) : values(p), wide(((unsigned long long)p & 15) == 0) {}
  template <int N> DEVICE void read(int column, float* f) const {
    if (N > 1 && wide) {
      load<float, N>(values + column, f);
    } else {
      UNROLL for (int j = 0; j < N; j++) f[j] = values[column + j];
    }
  }
};

struct Transform {
  PerColumn bias;
  float scale, cap;   // cap 0: none
  template <int N> DEVICE void apply(float* f, int column) const {
    if (bias.values) {
      float b[N];
      bias.read<N>(column, b);
      UNROLL for (int j = 0; j < N; j++) f[j] += b[j];
    }
    UNROLL for (int j = 0; j < N; j++) f[j] = cap > 0.f ? cap * tanhf(f[j] * (scale / cap)) : f[j] * scale;
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

// A thread's part of a row's statistics.
template <bool CHANGES, bool EXTRA> struct Seen {
  Transform transform;
  i64 label;
  PerColumn dense, weights;  // the row's distribution; class weights
  bool wants_total, wants_moment, wants_best;
  float m, s, of_target, of_mass, of_total, of_moment;
  Best best;
  // Folds N products in, from a column on.
  template <int N, typename T> DEVICE void fold(T* z, int i) {
    float f[N];
    load<T, N>(z + i, f);
    if constexpr (CHANGES) {
      transform.apply<N>(f, i);
      store_rounded<T, N>(z + i, f);
    }
    float top = f[0];
    UNROLL for (int j = 1; j < N; j++) top = max_nan(top, f[j]);
    const float n = max_nan(m, top), reference = possible(n);
    const float shrink = m == n ? 1.f : power(m, reference);
    float powers = 0.f, products = 0.f;
    UNROLL for (int j = 0; j < N; j++) {
      const float p = exp_fast(f[j] - reference);
      powers += p;
      if (EXTRA && wants_moment) products += p == 0.f ? 0.f : p * f[j];
    }
    s = s * shrink + powers;
    if (EXTRA && wants_moment) of_moment = of_moment * shrink + products;
    m = n;
    if (label >= i && label < i + N) {
      UNROLL for (int j = 0; j < N; j++) of_target = label == i + j ? f[j] : of_target;
    }
    if constexpr (EXTRA) {
      float w[N], t[N];
      UNROLL for (int j = 0; j < N; j++) w[j] = 1.f;
      if (weights.values) weights.read<N>(i, w);
      if (dense.values) {
        dense.read<N>(i, t);
        UNROLL for (int j = 0; j < N; j++) {
          const float weighted = t[j] * w[j];
          of_target += weighted == 0.f ? 0.f : weighted * f[j];
          of_mass += weighted;
        }
      }
      if (wants_total) {
        UNROLL for (int j = 0; j < N; j++) of_total += w[j] * f[j];
      }
      if (wants_best) {
        UNROLL for (int j = 0; j < N; j++) best.see(f[j], i + j);
      }
    }
  }
};

// Products to logits, and a row's statistics, which are folded into what is known. One block for each row, whose last numbers, too few
// for W, are one thread's each.
template <typename T, int W, bool CHANGES, bool EXTRA, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_statistics(
    T* tile, i64 stride, int columns, i64 first, const float* bias, float scale, float cap, const i64* labels,
    const float* dense, i64 dense_stride, const float* weights, float* maximum, float* sum, float* target, float* mass,
    float* total, float* moment, i64* best) {
  constexpr int WARPS = THREADS / 32;
  __shared__ float part[6][WARPS];
  __shared__ Best bests[WARPS];
  const i64 row = blockIdx.x;
  const int whole = columns / W * W;
  T* z = tile + row * stride;
  Seen<CHANGES, EXTRA> seen{{PerColumn(bias), scale, cap}, labels ? labels[row] : -1,
                            PerColumn(dense ? dense + row * dense_stride : nullptr), PerColumn(weights),
                            total != nullptr, moment != nullptr, best != nullptr,
                            -infinity(), 0.f, 0.f, 0.f, 0.f, 0.f, {-infinity(), (i64)columns}};
  for (int i = threadIdx.x * W; i < whole; i += THREADS * W) seen.template fold<W>(z, i);
  if (W > 1 && whole + (int)threadIdx.x < columns) seen.template fold<1>(z, whole + (int)threadIdx.x);
  const float m = seen.m;
  float s = seen.s, of_target = seen.of_target, of_mass = seen.of_mass, of_total = seen.of_total, of_moment = seen.of_moment;
  Best top_column = seen.best;
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

// Products to logits alone. The row's last block has its last numbers, too few for W.
template <typename T, int W, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_logits(T* tile, i64 stride, int columns, int blocks, const float* bias, float scale, float cap) {
  const i64 row = blockIdx.x / blocks;
  const int block = (int)(blockIdx.x - row * blocks), whole = columns / W * W;
  const int i = (block * THREADS + threadIdx.x) * W, last = whole + (int)threadIdx.x;
  const Transform transform{PerColumn(bias), scale, cap};
  T* z = tile + row * stride;
  float f[W];
  if (i < whole) {
    load<T, W>(z + i, f);
    transform.apply<W>(f, i);
    store<T, W>(z + i, f);
  }
  if (W == 1 || block != blocks - 1 || last >= columns) return;
  load<T, 1>(z + last, f);
  transform.apply<1>(f, last);
  store<T, 1>(z + last, f);
}

// Logits of a row to ∂L/∂r. Which products are added in one operation is written here, not chosen by the compiler for each N: a number
// has the same bits wherever it lies.
template <bool EXTRA> struct Gradient {
  float scale, cap;
  i64 label;
  PerColumn dense, weights;  // the row's distribution; class weights
  bool constant;
  float m, alpha, beta, gamma;
  template <int N> DEVICE void apply(float* f, int column) const {
    float w[N], t[N];
    if constexpr (EXTRA) {
      UNROLL for (int j = 0; j < N; j++) w[j] = 1.f;
      if (weights.values) weights.read<N>(column, w);
      if (dense.values) dense.read<N>(column, t);
    }
    UNROLL for (int j = 0; j < N; j++) {
      float g = __fmul_rn(alpha, exp_fast(f[j] - m));
      if constexpr (EXTRA) {
        if (constant) g = fmaf(-gamma, w[j], g);
        if (dense.values) g = fmaf(-__fmul_rn(beta, t[j]), w[j], g);
      }
      if (label == column + j) g -= beta;
      const float bent = f[j] / (cap > 0.f ? cap : 1.f);
      f[j] = g * (cap > 0.f ? scale * fmaf(-bent, bent, 1.f) : scale);
    }
  }
};

// Logits to the gradient of the products. The row's last block has its last numbers, too few for W.
template <typename T, int W, bool EXTRA, int THREADS>
__global__ void __launch_bounds__(THREADS) ce_gradient(
    T* tile, i64 stride, int columns, int blocks, float scale, float cap, const i64* labels, const float* dense,
    i64 dense_stride, const float* weights, const float* maximum, const float* powers, const float* target,
    const float* constant) {
  constexpr int PACKS = 4;
  const i64 row = blockIdx.x / blocks;
  const int block = (int)(blockIdx.x - row * blocks), whole = columns / W * W;
  const int begin = block * (THREADS * W * PACKS) + threadIdx.x * W;
  T* z = tile + row * stride;
  const Gradient<EXTRA> gradient{scale, cap, labels ? labels[row] : -1, PerColumn(dense ? dense + row * dense_stride : nullptr),
                                 PerColumn(weights), constant != nullptr, maximum[row], powers[row], target[row],
                                 EXTRA && constant ? constant[row] : 0.f};
  Raw<T, W> raw[PACKS];
  UNROLL for (int k = 0; k < PACKS; k++) {
    const int i = begin + k * THREADS * W;
    if (i < whole) raw[k].read(z + i);
  }
  float f[W];
  UNROLL for (int k = 0; k < PACKS; k++) {
    const int i = begin + k * THREADS * W;
    if (i >= whole) continue;
    raw[k].unpack(f);
    gradient.template apply<W>(f, i);
    store<T, W>(z + i, f);
  }
  const int last = whole + (int)threadIdx.x;
  if (W == 1 || block != blocks - 1 || last >= columns) return;
  load<T, 1>(z + last, f);
  gradient.template apply<1>(f, last);
  store<T, 1>(z + last, f);
}

// The same, rounded to O and written over the row's own beginning: number i of a row lies where bytes of numbers at or before i
// were, so that a block goes from left to right and writes only what all its threads have read.
template <typename O, int W, bool EXTRA, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) ce_gradient_narrow(
    float* tile, i64 stride, int columns, float scale, float cap, const i64* labels, const float* dense,
    i64 dense_stride, const float* weights, const float* maximum, const float* powers, const float* target,
    const float* constant) {
  constexpr int PACKS = EXTRA ? 1 : 2;
  const i64 row = blockIdx.x;
  const int whole = columns / W * W;
  float* z = tile + row * stride;
  O* out = (O*)z;
  const Gradient<EXTRA> gradient{scale, cap, labels ? labels[row] : -1, PerColumn(dense ? dense + row * dense_stride : nullptr),
                                 PerColumn(weights), constant != nullptr, maximum[row], powers[row], target[row],
                                 EXTRA && constant ? constant[row] : 0.f};
  // The row's last numbers, too few for W, are one thread's each; what is written before reaches none of them.
  const int last = whole + (int)threadIdx.x;
  float end[1];
  if (last < columns) load<float, 1>(z + last, end);
  Raw<float, W> next[PACKS];
  auto read = [&](int begin) {
    UNROLL for (int k = 0; k < PACKS; k++) {
      const int i = begin + (threadIdx.x + k * THREADS) * W;
      if (i < whole) next[k].read(z + i);
    }
  };
  read(0);
  for (int begin = 0; begin < whole; begin += PACKS * THREADS * W) {
    float f[PACKS][W];
    UNROLL for (int k = 0; k < PACKS; k++) next[k].unpack(f[k]);
    read(begin + PACKS * THREADS * W);
    UNROLL for (int k = 0; k < PACKS; k++) {
      const int i = begin + (threadIdx.x + k * THREADS) * W;
      if (i < whole) gradient.template apply<W>(f[k], i);
    }
    __syncthreads();
    UNROLL for (int k = 0; k < PACKS; k++) {
      const int i = begin + (threadIdx.x + k * THREADS) * W;
      if (i < whole) store<O, W>(out + i, f[k]);
    }
  }
  if (whole == columns) return;
  __syncthreads();
  if (last >= columns) return;
  gradient.template apply<1>(end, last);
  store<O, 1>(out + last, end);
}
