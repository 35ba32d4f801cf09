// What every kernel stands on. NVRTC compiles these texts; no header of CUDA's is included.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

DEVICE float infinity() { return __int_as_float(0x7f800000); }

// One number, to fp32 and rounded back to nearest.
DEVICE float widen(float v) { return v; }
DEVICE float widen(bf16 v) { return __uint_as_float((u32)v.bits << 16); }
DEVICE float widen(f16 v) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.bits)); return r; }
template <typename T> DEVICE T round_to(float v);
template <> DEVICE float round_to<float>(float v) { return v; }
template <> DEVICE bf16 round_to<bf16>(float v) { bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v)); return r; }
template <> DEVICE f16 round_to<f16>(float v) { f16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v)); return r; }

// Sixteen bytes of global memory. In PTX, since the compiler splits a structure's load into words.
struct Words { u32 w[4]; };
DEVICE Words read16(const void* p) {
  Words v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
DEVICE void write16(void* p, Words v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "l"(__cvta_generic_to_global(p)), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}

// Sixteen bytes of shared memory, at an address of its own space; and their copy from global memory, which goes on by itself
// until its group is waited for.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE Words read_shared16(u32 p) {
  Words v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "r"(p) : "memory");
  return v;
}
DEVICE void copy_async16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(__cvta_generic_to_global(global)) : "memory");
}
// Ends a group of copies; and waits until at most N groups of this thread are on their way.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }

template <typename T> struct Lanes;
template <> struct Lanes<float> {
  static DEVICE void unpack(const Words& v, float* f) { UNROLL for (int i = 0; i < 4; i++) f[i] = __uint_as_float(v.w[i]); }
  static DEVICE Words pack(const float* f) { Words v; UNROLL for (int i = 0; i < 4; i++) v.w[i] = __float_as_uint(f[i]); return v; }
};
template <> struct Lanes<bf16> {
  static DEVICE void unpack(const Words& v, float* f) {
    UNROLL for (int i = 0; i < 4; i++) {
      f[2 * i] = __uint_as_float(v.w[i] << 16);
      f[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
    }
  }
  static DEVICE Words pack(const float* f) {
    Words v;
    UNROLL for (int i = 0; i < 4; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
    return v;
  }
};
template <> struct Lanes<f16> {
  static DEVICE void unpack(const Words& v, float* f) {
    UNROLL for (int i = 0; i < 4; i++) {
      f[2 * i] = widen(f16{(u16)v.w[i]});
      f[2 * i + 1] = widen(f16{(u16)(v.w[i] >> 16)});
    }
  }
  static DEVICE Words pack(const float* f) {
    Words v;
    UNROLL for (int i = 0; i < 4; i++) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
    return v;
  }
};

// W numbers that lie one behind the other: one number, or such that fill words of 16 bytes, at an address that they divide.
template <typename T, int W> DEVICE void load(const T* p, float* f) {
  if constexpr (W == 1) {
    f[0] = widen(*p);
  } else {
    constexpr int L = 16 / sizeof(T);
    UNROLL for (int i = 0; i < W; i += L) Lanes<T>::unpack(read16(p + i), f + i);
  }
}
template <typename T, int W> DEVICE void store(T* p, const float* f) {
  if constexpr (W == 1) {
    *p = round_to<T>(f[0]);
  } else {
    constexpr int L = 16 / sizeof(T);
    UNROLL for (int i = 0; i < W; i += L) write16(p + i, Lanes<T>::pack(f + i));
  }
}

// As store, and f becomes what is stored: the same numbers, rounded to T.
template <typename T, int W> DEVICE void store_rounded(T* p, float* f) {
  if constexpr (W == 1) {
    const T rounded = round_to<T>(f[0]);
    *p = rounded;
    f[0] = widen(rounded);
  } else {
    constexpr int L = 16 / sizeof(T);
    UNROLL for (int i = 0; i < W; i += L) {
      const Words words = Lanes<T>::pack(f + i);
      write16(p + i, words);
      Lanes<T>::unpack(words, f + i);
    }
  }
}

// W numbers as they lie in memory, read ahead of their use.
template <typename T, int W> struct Raw {
  static constexpr int L = 16 / sizeof(T), N = W == 1 ? 1 : W / L;
  Words words[N];
  DEVICE void read(const T* p) {
    if constexpr (W == 1) {
      words[0].w[0] = __float_as_uint(widen(*p));
    } else {
      UNROLL for (int i = 0; i < N; i++) words[i] = read16(p + i * L);
    }
  }
  DEVICE void unpack(float* f) const {
    if constexpr (W == 1) {
      f[0] = __uint_as_float(words[0].w[0]);
    } else {
      UNROLL for (int i = 0; i < N; i++) Lanes<T>::unpack(words[i], f + i * L);
    }
  }
};

// eᵛ, within 2 units in the last place of 2^(v·log₂e).
DEVICE float exp_fast(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v * 1.4426950408889634f)); return r; }
// The larger one; NaN where one is.
DEVICE float max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }

template <typename F> DEVICE F warp_sum(F v) {
  UNROLL for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
DEVICE float warp_max(float v) {
  UNROLL for (int o = 16; o; o >>= 1) v = max_nan(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
// Over the block, in an order that THREADS alone decides; every thread has it. `part` has THREADS / 32 numbers for this call alone.
template <int THREADS, typename F> DEVICE F block_sum(F v, F* part) {
  v = warp_sum(v);
  if constexpr (THREADS == 32) return v;
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_sum((threadIdx.x & 31) < THREADS / 32 ? part[threadIdx.x & 31] : F(0));
}
template <int THREADS> DEVICE float block_max(float v, float* part) {
  v = warp_max(v);
  if constexpr (THREADS == 32) return v;
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_max((threadIdx.x & 31) < THREADS / 32 ? part[threadIdx.x & 31] : -infinity());
}

// The entry of a table of tensors that has the block: the last whose `first_block` is not beyond it.
template <typename Table> DEVICE int entry_of(const Table& table, int entries, i64 block) {
  int low = 0;
  for (int high = entries - 1; low < high;) {
    const int middle = (low + high + 1) / 2;
    if (table.entries[middle].first_block <= block) low = middle;
    else high = middle - 1;
  }
  return low;
}
