// h = SiLU(g)·u and its derivatives; mathematics and contracts are in swiglu.rs.
#include "prelude.cuh"

DEVICE float sigmoid(float v) { return 1.f / (1.f + exp_fast(-v)); }

// `blocks` blocks for each row of `features`; strides in numbers.
template <typename T, int W, int THREADS>
__global__ void __launch_bounds__(THREADS) swiglu_forward(const T* gate, i64 gate_stride, const T* up, i64 up_stride, T* silu, i64 silu_stride, T* product, i64 product_stride, int features, int blocks) {
  const i64 row = blockIdx.x / blocks;
  const int i = ((int)(blockIdx.x - row * blocks) * THREADS + threadIdx.x) * W;
  if (i >= features) return;
  float g[W], u[W];
  load<T, W>(gate + row * gate_stride + i, g);
  load<T, W>(up + row * up_stride + i, u);
  UNROLL for (int j = 0; j < W; j++) g[j] *= sigmoid(g[j]);
  if (silu) store<T, W>(silu + row * silu_stride + i, g);
  UNROLL for (int j = 0; j < W; j++) g[j] *= u[j];
  store<T, W>(product + row * product_stride + i, g);
}

// The gradients of gate and up, and the product again; each where it is wanted, and each may lie in the place of an input.
template <typename T, int W, int THREADS>
__global__ void __launch_bounds__(THREADS) swiglu_backward(const T* gate, i64 gate_stride, const T* up, i64 up_stride, const T* grad, i64 grad_stride, T* of_gate, i64 of_gate_stride, T* of_up, i64 of_up_stride, T* product, i64 product_stride, int features, int blocks) {
  const i64 row = blockIdx.x / blocks;
  const int i = ((int)(blockIdx.x - row * blocks) * THREADS + threadIdx.x) * W;
  if (i >= features) return;
  float g[W], u[W], d[W];
  load<T, W>(gate + row * gate_stride + i, g);
  load<T, W>(up + row * up_stride + i, u);
  load<T, W>(grad + row * grad_stride + i, d);
  UNROLL for (int j = 0; j < W; j++) {
    const float s = sigmoid(g[j]), a = g[j] * s;
    g[j] = d[j] * u[j] * (s + a * (1.f - s));
    const float slope = d[j] * a;
    d[j] = a * u[j];
    u[j] = slope;
  }
  if (of_gate) store<T, W>(of_gate + row * of_gate_stride + i, g);
  if (of_up) store<T, W>(of_up + row * of_up_stride + i, u);
  if (product) store<T, W>(product + row * product_stride + i, d);
}
