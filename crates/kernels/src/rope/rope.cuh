// Rotary embedding of heads; mathematics and contracts are in rope.rs. One block for each token.
#include "prelude.cuh"

// x: [batch, sequence, heads, 2·half] with these strides; out the same, with its own.
template <typename T> struct Heads {
  const T* x;
  i64 x_batch, x_token, x_head;
  T* out;
  i64 out_batch, out_token, out_head;
  i64 heads;
};

// Queries and keys of the same tokens; either may have no heads. `table` [places, 2, half].
template <typename T, int W>
__global__ void __launch_bounds__(256) rotate(Heads<T> q, Heads<T> k, const float* table, const i64* positions, int sequence, int half, i64 places, float sign) {
  const i64 batch = blockIdx.x / sequence, token = blockIdx.x - batch * sequence;
  const i64 place = positions ? positions[blockIdx.x] : token;
  if (place < 0 || place >= places) __trap();
  const float* cosines = table + place * 2 * half;
  const int packs = half / W, of_q = (int)q.heads, heads = of_q + (int)k.heads;
  for (int n = threadIdx.x; n < heads * packs; n += blockDim.x) {
    const int number = n / packs, i = (n - number * packs) * W;
    const bool is_q = number < of_q;
    const int head = is_q ? number : number - of_q;
    const T* from = is_q ? q.x + batch * q.x_batch + token * q.x_token + head * q.x_head
                         : k.x + batch * k.x_batch + token * k.x_token + head * k.x_head;
    T* to = is_q ? q.out + batch * q.out_batch + token * q.out_token + head * q.out_head
                 : k.out + batch * k.out_batch + token * k.out_token + head * k.out_head;
    float a[W], b[W], c[W], s[W];
    load<T, W>(from + i, a);
    load<T, W>(from + half + i, b);
    load<float, W>(cosines + i, c);
    load<float, W>(cosines + half + i, s);
    UNROLL for (int j = 0; j < W; j++) {
      const float turned = s[j] * sign, y = a[j] * c[j] - b[j] * turned;
      b[j] = b[j] * c[j] + a[j] * turned;
      a[j] = y;
    }
    store<T, W>(to + i, a);
    store<T, W>(to + half + i, b);
  }
}
