// Rotary embedding of heads; mathematics and contracts are in src/fused/rope.rs. One block for each token.
#include "prelude.cuh"

// x: [batch, sequence, heads, 2·half] with these strides; out the same, with its own. `table` [places, 2, half].
template <typename T, int W>
__global__ void __launch_bounds__(256) rotate(const T* x, i64 x_batch, i64 x_token, i64 x_head, T* out, i64 out_batch, i64 out_token, i64 out_head, const float* table, const i64* positions, int sequence, int heads, int half, i64 places, float sign) {
  const i64 batch = blockIdx.x / sequence, token = blockIdx.x - batch * sequence;
  const i64 place = positions ? positions[blockIdx.x] : token;
  if (place < 0 || place >= places) __trap();
  const float* cosines = table + place * 2 * half;
  const T* from = x + batch * x_batch + token * x_token;
  T* to = out + batch * out_batch + token * out_token;
  const int packs = half / W;
  for (int n = threadIdx.x; n < heads * packs; n += blockDim.x) {
    const int head = n / packs, i = (n - head * packs) * W;
    float a[W], b[W], c[W], s[W];
    load<T, W>(from + head * x_head + i, a);
    load<T, W>(from + head * x_head + half + i, b);
    load<float, W>(cosines + i, c);
    load<float, W>(cosines + half + i, s);
    UNROLL for (int j = 0; j < W; j++) {
      const float turned = s[j] * sign, y = a[j] * c[j] - b[j] * turned;
      b[j] = b[j] * c[j] + a[j] * turned;
      a[j] = y;
    }
    store<T, W>(to + head * out_head + i, a);
    store<T, W>(to + head * out_head + half + i, b);
  }
}
