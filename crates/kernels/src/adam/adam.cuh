// Adam and AdamW over many tensors; mathematics and contracts are in adam.rs and adam/cuda.rs.
#include "prelude.cuh"

// One tensor: contiguous, of `numbers` elements. `weight` may be null. `step` is the number of this step, from 1.
struct AdamEntry {
  const void* gradient;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  void* weight;
  const float* step;
  i64 numbers;
  i64 first_block;
};

// By value, within the 4 KiB that a kernel's parameters may have.
struct AdamTable { AdamEntry entries[60]; };

// base to the power of n, by squaring.
DEVICE double power(double base, int n) {
  double p = 1.0;
  for (; n > 0; n >>= 1, base *= base) {
    if (n & 1) p *= base;
  }
  return p;
}

// `decay` is what a decoupled decay multiplies the parameter by, else the factor of the L2 penalty's gradient.
struct AdamNumbers { float decay, rest1, beta2, rest2, eps, step_size, root; };

template <bool DECOUPLED>
DEVICE void adam_number(const AdamNumbers& c, float g, float& p, float& m, float& v) {
  if constexpr (DECOUPLED) p *= c.decay;
  else g = fmaf(p, c.decay, g);
  m = fmaf(g - m, c.rest1, m);
  v = fmaf(g, c.rest2 * g, v * c.beta2);
  p -= c.step_size * m / (sqrtf(v) * c.root + c.eps);
}

// Each block has CHUNK numbers of one tensor. Nothing is changed where `skip` is given and is not 0. `rate`, if given, replaces `lr`.
template <typename G, typename P, int W, bool DECOUPLED, int THREADS, int CHUNK>
__global__ void __launch_bounds__(THREADS) adam(AdamTable table, int entries, const float* skip, const double* rate, double lr, double beta1, double beta2, float eps, double weight_decay) {
  if (skip && *skip != 0.f) return;
  const AdamEntry e = table.entries[entry_of(table, entries, blockIdx.x)];
  const int step = (int)*e.step;
  if (rate) lr = *rate;
  const float decay = (float)(DECOUPLED ? fma(-lr, weight_decay, 1.0) : weight_decay);
  const AdamNumbers c = {decay, (float)(1.0 - beta1), (float)beta2, (float)(1.0 - beta2), eps,
                         (float)(lr / (1.0 - power(beta1, step))), (float)(1.0 / sqrt(1.0 - power(beta2, step)))};
  const i64 first = ((i64)blockIdx.x - e.first_block) * CHUNK;
  const i64 end = first + CHUNK < e.numbers ? first + CHUNK : e.numbers;
  const G* gradient = (const G*)e.gradient;
  P* weight = (P*)e.weight;
  for (i64 i = first + threadIdx.x * W; i < end; i += THREADS * W) {
    if (i + W <= end) {
      float g[W], p[W], m[W], v[W];
      load<G, W>(gradient + i, g);
      load<float, W>(e.master + i, p);
      load<float, W>(e.exp_avg + i, m);
      load<float, W>(e.exp_avg_sq + i, v);
      UNROLL for (int j = 0; j < W; j++) adam_number<DECOUPLED>(c, g[j], p[j], m[j], v[j]);
      store<float, W>(e.master + i, p);
      store<float, W>(e.exp_avg + i, m);
      store<float, W>(e.exp_avg_sq + i, v);
      if (weight) store<P, W>(weight + i, p);
    } else {
      for (i64 k = i; k < end; k++) {
        adam_number<DECOUPLED>(c, widen(gradient[k]), e.master[k], e.exp_avg[k], e.exp_avg_sq[k]);
        if (weight) weight[k] = round_to<P>(e.master[k]);
      }
    }
  }
}
