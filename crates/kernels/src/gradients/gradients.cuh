// Passes over all gradients of a step; mathematics and contracts are in gradients.rs and gradients/cuda.rs.
#include "prelude.cuh"

// One gradient: `numbers` elements without gaps.
struct Gradient {
  void* values;
  i64 numbers;
  i64 first_block;
};

// By value, within the 4 KiB that a kernel's parameters may have.
struct GradientTable { Gradient entries[160]; };

// The block's part of a gradient: CHUNK numbers, fewer at its end.
template <typename T> struct Part {
  T* values;
  int numbers;
};
template <typename T, int CHUNK> DEVICE Part<T> part_of(const GradientTable& table, int entries) {
  const Gradient& g = table.entries[entry_of(table, entries, blockIdx.x)];
  const i64 first = ((i64)blockIdx.x - g.first_block) * CHUNK;
  const i64 rest = g.numbers - first;
  return {(T*)g.values + first, rest < CHUNK ? (int)rest : CHUNK};
}

// Calls pass.visit<N>(address, numbers) with N = W numbers at a time, read ahead, then with the last ones, N = 1.
template <typename T, int W, int THREADS, typename Pass> DEVICE void visit_part(const Part<T>& part, Pass& pass) {
  constexpr int AHEAD = 4, STEP = THREADS * W;
  const int whole = part.numbers / W * W;
  for (int i = threadIdx.x * W; i < whole; i += AHEAD * STEP) {
    Raw<T, W> raw[AHEAD];
    UNROLL for (int k = 0; k < AHEAD; k++) {
      if (i + k * STEP < whole) raw[k].read(part.values + i + k * STEP);
    }
    UNROLL for (int k = 0; k < AHEAD; k++) {
      if (i + k * STEP >= whole) continue;
      float f[W];
      raw[k].unpack(f);
      pass.template visit<W>(part.values + i + k * STEP, f);
    }
  }
  for (int i = whole + threadIdx.x; i < part.numbers; i += THREADS) {
    float f[1];
    load<T, 1>(part.values + i, f);
    pass.template visit<1>(part.values + i, f);
  }
}

// The sum of W squares: in fp32, and again in double where they may have overflowed or vanished there.
template <int W> DEVICE double squares(const float* f) {
  float s = 0.f;
  UNROLL for (int j = 0; j < W; j++) s = fmaf(f[j], f[j], s);
  if (s > 1e-30f && s < 1e38f) return s;
  double exact = 0.0;
  UNROLL for (int j = 0; j < W; j++) exact = fma((double)f[j], (double)f[j], exact);
  return exact;
}

// Adds squares to `sum`, of the numbers multiplied by the factor and as they are stored, rounded once.
template <typename T> struct Squares {
  float factor;
  double sum;
  template <int N> DEVICE void visit(T* at, float* f) {
    if (factor != 1.f) {
      UNROLL for (int j = 0; j < N; j++) f[j] = widen(round_to<T>(f[j] * factor));
      store<T, N>(at, f);
    }
    sum += squares<N>(f);
  }
};

// The sum of squares of each block's numbers; with SCALED they are multiplied by *factor first, in place. It is finite exactly if
// all numbers are: the squares of as many as a memory holds do not overflow in double.
template <typename T, int W, bool SCALED, int THREADS, int CHUNK>
__global__ void __launch_bounds__(THREADS) gradient_squares(GradientTable table, int entries, const float* factor, double* parts) {
  __shared__ double scratch[THREADS / 32];
  Squares<T> pass = {SCALED ? *factor : 1.f, 0.0};
  visit_part<T, W, THREADS>(part_of<T, CHUNK>(table, entries), pass);
  const double sum = block_sum<THREADS>(pass.sum, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// The root of the sum of all parts, in one block, and 1 in `found` if it is not finite, else 0; both may be null.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) gradient_norm(const double* parts, i64 count, double* norm, float* found) {
  constexpr int AHEAD = 8;
  __shared__ double scratch[THREADS / 32];
  double sums[AHEAD];
  UNROLL for (int k = 0; k < AHEAD; k++) sums[k] = 0.0;
  for (i64 i = threadIdx.x; i < count; i += THREADS * AHEAD) {
    UNROLL for (int k = 0; k < AHEAD; k++) {
      if (i + k * THREADS < count) sums[k] += parts[i + k * THREADS];
    }
  }
  UNROLL for (int k = 1; k < AHEAD; k++) sums[0] += sums[k];
  const double sum = block_sum<THREADS>(sums[0], scratch);
  if (threadIdx.x != 0) return;
  if (norm) *norm = sqrt(sum);
  if (found) *found = sum < (double)infinity() ? 0.f : 1.f;
}

template <typename T> struct Scale {
  float factor;
  template <int N> DEVICE void visit(T* at, float* f) {
    UNROLL for (int j = 0; j < N; j++) f[j] *= factor;
    store<T, N>(at, f);
  }
};

// Multiplies all numbers by *factor. Returns at once where it is 1, which the host cannot know without waiting.
template <typename T, int W, int THREADS, int CHUNK>
__global__ void __launch_bounds__(THREADS) scale_many(GradientTable table, int entries, const float* factor) {
  Scale<T> pass = {*factor};
  if (pass.factor == 1.f) return;
  visit_part<T, W, THREADS>(part_of<T, CHUNK>(table, entries), pass);
}
