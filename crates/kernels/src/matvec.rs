//! Products of a few vectors with a stored matrix: each weight is read once, and summed in fp32.
//!
//! If both are in bf16, they are multiplied by the processor's own instructions for pairs of bf16 or for tiles of them where these are used
//! ([`Bf16Instructions`]): the products are exact and the sums in fp32, as without them, in another order, and subnormal numbers are zero.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod results;
pub(super) mod streams;

use std::borrow::Cow;

use pulp::Simd;
use runtime::Result;
use runtime::tensor_memory::address;
use tch::{Device, Kind, Tensor};

use super::operands::{Rows, rows};
use crate::processor::{Bf16Instructions, bf16_instructions};
use crate::simd;

pub(super) use results::Results;
use streams::{Products, STREAMS, Sums, VECTORS};

/// Approximate bytes of weights that one task reads: so many that its start costs little, and so few that every thread gets a task.
const TASK: usize = 256 * 1024;
/// How an element is stored in a word of 32 bits.
#[derive(Clone, Copy)]
enum Stored {
    /// One fp32 in each word.
    Float,
    /// Two bf16 in each word, the first in its lower half.
    Bfloat16,
    /// The same, for vectors in bf16 and an instruction that multiplies pairs.
    Pairs,
}

/// Returns `x·Wᵀ + b` in fp32, or in bf16 for x in bf16; `None` unless the weight is fp32 or bf16, on the CPU, with dense rows of whole
/// 32-bit words.
///
/// `x_md` is a CPU matrix of any dtype that converts to fp32, as wide as `weight_nd`, and the bias `[n]`, which the caller has checked.
pub(crate) fn matvec(x_md: &Tensor, weight_nd: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    // A tensor may be a lazily negated view.
    let x_md = &x_md.f_resolve_neg()?;
    let vectors = x_md.size()[0] as usize;
    let instructions = bf16_instructions().filter(|instructions| match instructions {
        Bf16Instructions::Pairs => true,
        #[cfg(target_arch = "x86_64")]
        Bf16Instructions::Tiles => amx::applies(vectors, weight_nd.size()[0] as usize),
        #[cfg(not(target_arch = "x86_64"))]
        Bf16Instructions::Tiles => false,
    });
    let (stored, per_word) = match weight_nd.kind() {
        Kind::Float => (Stored::Float, 1),
        Kind::BFloat16 if x_md.kind() == Kind::BFloat16 && instructions.is_some() => (Stored::Pairs, 2),
        Kind::BFloat16 => (Stored::Bfloat16, 2),
        _ => return Ok(None),
    };
    let Ok(weight) = rows("matrix-vector product", "weight", weight_nd, (weight_nd.kind(), Device::Cpu))
    else {
        return Ok(None);
    };
    let words = weight.columns / per_word;
    let has_whole_words = weight.columns % per_word == 0
        && (weight.rows < 2 || weight.row_stride % per_word == 0)
        && weight.pointer % size_of::<u32>() == 0;
    if !has_whole_words || words == 0 || weight.rows == 0 {
        return Ok(None);
    }
    let x = words_of(x_md, (stored, per_word), weight.columns)?;
    let x: Vec<&[u32]> = x.chunks_exact(x.len() / vectors.max(1)).collect();
    let results = Results::new([vectors, weight.rows], x_md.kind(), bias)?;
    #[cfg(target_arch = "x86_64")]
    if matches!(stored, Stored::Pairs) && instructions == Some(Bf16Instructions::Tiles) {
        amx::run(weight, words, &x, &results)?;
        return Ok(Some(results.into_tensor()));
    }
    let stride = weight.row_stride / per_word;
    let products = Words { stored, weight, words, stride, x: &x };
    streams::run(&products, &results, TASK / (words * size_of::<u32>()))?;
    Ok(Some(results.into_tensor()))
}

/// A weight in words of 32 bits, and the vectors.
struct Words<'a> {
    stored: Stored,
    weight: Rows,
    words: usize,
    /// Words from a row to the next.
    stride: usize,
    x: &'a [&'a [u32]],
}

impl Products for Words<'_> {
    type Task = ();

    fn task(&self, _: usize, _: usize) {}

    #[inline(always)]
    fn multiply<S: Simd>(&self, simd: S, (): &(), rows: [usize; STREAMS], number: usize, sums: &mut Sums) {
        let mut streams: [&[u32]; STREAMS] = [&[]; STREAMS];
        for (stream, row) in streams.iter_mut().zip(rows) {
            let start = self.weight.pointer + row * self.stride * size_of::<u32>();
            // SAFETY: the row lies in the CPU tensor that `rows` has viewed, which outlives the call; it starts at a multiple of a word and has
            // whole words (checked by `matvec`), and any bits are a u32.
            *stream = unsafe { std::slice::from_raw_parts(start as *const u32, self.words) };
        }
        let x = &self.x[number * VECTORS..self.x.len().min((number + 1) * VECTORS)];
        match x.len() {
            1 => dots::<S, 1>(simd, self.stored, streams, x, sums),
            2 => dots::<S, 2>(simd, self.stored, streams, x, sums),
            _ => dots::<S, VECTORS>(simd, self.stored, streams, x, sums),
        }
    }
}

/// Returns the vectors in words of 32 bits: in fp32, of each vector the first elements of all words of a weight, then the second ones;
/// for [`Stored::Pairs`] as they are.
fn words_of(x_md: &Tensor, (stored, per_word): (Stored, usize), columns: usize) -> Result<Cow<'_, [u32]>> {
    let kind = if matches!(stored, Stored::Pairs) { Kind::BFloat16 } else { Kind::Float };
    if x_md.kind() == kind && !matches!(stored, Stored::Bfloat16) && x_md.is_contiguous() {
        let at = address(x_md)?;
        if at.is_multiple_of(size_of::<u32>()) {
            let words = x_md.numel() * kind.elt_size_in_bytes() / size_of::<u32>();
            // SAFETY: the vectors are contiguous, on the CPU, whole words (checked of the weight, which is as wide), and begin at one; any
            // bits are a u32. The caller keeps the tensor, and nobody writes it meanwhile.
            return Ok(Cow::Borrowed(unsafe { std::slice::from_raw_parts(at as *const u32, words) }));
        }
    }
    let words = x_md.f_to_kind(kind)?.f_contiguous()?.f_view_dtype(Kind::Int)?;
    let mut flat = vec![0i32; words.numel()];
    words.f_copy_data(&mut flat, words.numel())?;
    let bits: Vec<u32> = flat.iter().map(|word| word.cast_unsigned()).collect();
    if matches!(stored, Stored::Pairs) {
        return Ok(Cow::Owned(bits));
    }
    let parts = |x: &[u32]| -> Vec<u32> {
        (0..per_word).flat_map(|part| x.iter().skip(part).step_by(per_word).copied()).collect()
    };
    Ok(Cow::Owned(bits.chunks_exact(columns).flat_map(parts).collect()))
}

/// Multiplies some rows of weights by up to N vectors, each stored as [`words_of`] returns it.
#[inline(always)]
fn dots<S: Simd, const N: usize>(
    simd: S,
    stored: Stored,
    streams: [&[u32]; STREAMS],
    given: &[&[u32]],
    out: &mut Sums,
) {
    // If fewer vectors are left than are multiplied at once, the first one fills the rest.
    let mut x = [given[0]; N];
    for (x, given) in x.iter_mut().zip(given) {
        *x = *given;
    }
    if matches!(stored, Stored::Pairs) {
        return dots_of_pairs(&streams, &x, out);
    }
    // Sums of all streams with four vectors are as many as a processor with 16 registers has.
    if N == VECTORS && S::REGISTER_COUNT < 32 {
        let (streams, out) = (streams.as_chunks::<2>().0, out.as_chunks_mut::<2>().0);
        for (streams, out) in streams.iter().zip(out) {
            dots_of_streams::<S, N, 2>(simd, stored, streams, &x, out);
        }
    } else {
        dots_of_streams::<S, N, STREAMS>(simd, stored, &streams, &x, out);
    }
}

/// [`dots`] of words in fp32 or of two bf16.
#[inline(always)]
fn dots_of_streams<S: Simd, const N: usize, const M: usize>(
    simd: S,
    stored: Stored,
    streams: &[&[u32]; M],
    x: &[&[u32]; N],
    out: &mut [[f32; VECTORS]; M],
) {
    let sums = match stored {
        Stored::Float => add::<S, N, M>(simd, streams, x),
        Stored::Bfloat16 | Stored::Pairs => {
            let words = streams[0].len();
            let mut halves = [(x[0], x[0]); N];
            for vector in 0..N {
                halves[vector] = x[vector].split_at(words);
            }
            add_halves::<S, N, M>(simd, streams, &halves)
        }
    };
    for stream in 0..M {
        for vector in 0..N {
            out[stream][vector] = simd.reduce_sum_f32s(sums[stream][vector]);
        }
    }
}

/// Sums of products of pairs of bf16, 16 words at a time.
#[cfg(target_arch = "x86_64")]
fn dots_of_pairs<const N: usize>(streams: &[&[u32]; STREAMS], x: &[&[u32]; N], out: &mut Sums) {
    use std::arch::x86_64::*;

    use super::simd::{PREFETCHED, pairs, prefetch_line};

    /// Adds the products of 16 words from `at` on, or of those of `mask`.
    // SAFETY: its caller makes sure of the processor's instructions, and that the words of the mask are there.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    unsafe fn add<const N: usize>(
        sums: &mut [[__m512; N]; STREAMS],
        (streams, x): (&[&[u32]; STREAMS], &[&[u32]; N]),
        at: usize,
        mask: u16,
    ) {
        let mut loaded = [pairs(_mm512_setzero_si512()); N];
        for vector in 0..N {
            // SAFETY: lanes beyond the last word are masked; vectors have as many words as streams.
            let words = unsafe { _mm512_maskz_loadu_epi32(mask, x[vector].as_ptr().add(at).cast()) };
            loaded[vector] = pairs(words);
        }
        for stream in 0..STREAMS {
            let from = streams[stream].as_ptr().wrapping_add(at);
            prefetch_line(from.addr() + PREFETCHED);
            // SAFETY: likewise.
            let words = unsafe { _mm512_maskz_loadu_epi32(mask, from.cast()) };
            for vector in 0..N {
                let sum = &mut sums[stream][vector];
                *sum = _mm512_dpbf16_ps(*sum, pairs(words), loaded[vector]);
            }
        }
    }

    // SAFETY: its caller makes sure of the processor's instructions.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn sums<const N: usize>(streams: &[&[u32]; STREAMS], x: &[&[u32]; N], out: &mut Sums) {
        let words = streams[0].len();
        let vectorized = words / 16 * 16;
        let mut sums = [[_mm512_setzero_ps(); N]; STREAMS];
        for at in (0..vectorized).step_by(16) {
            // SAFETY: all 16 words are there.
            unsafe { add(&mut sums, (streams, x), at, u16::MAX) };
        }
        if vectorized < words {
            // SAFETY: the words of the mask are there.
            unsafe { add(&mut sums, (streams, x), vectorized, u16::MAX >> (16 - (words - vectorized))) };
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = _mm512_reduce_add_ps(sum);
            }
        }
    }

    // SAFETY: `Stored::Pairs` gets here only where the processor has the instructions: `matvec` gives tiles away before.
    unsafe { sums(streams, x, out) }
}

/// Nothing multiplies pairs of bf16 there.
#[cfg(not(target_arch = "x86_64"))]
fn dots_of_pairs<const N: usize>(_: &[&[u32]; STREAMS], _: &[&[u32]; N], _: &mut Sums) {
    unreachable!("pairs of bf16 are chosen on x86-64 alone")
}

/// Sums of products of fp32. Without closures, which would not be compiled for the chosen vector instructions; whole vectors apart
/// from the rest, which pulp loads by a call.
#[inline(always)]
fn add<S: Simd, const N: usize, const M: usize>(
    simd: S,
    streams: &[&[u32]; M],
    x: &[&[u32]; N],
) -> [[S::f32s; N]; M] {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    let words = streams[0].len();
    let vectors = words / S::F32_LANES;
    let (mut stream_vectors, mut x_vectors) =
        ([S::as_simd_u32s(streams[0]).0; M], [S::as_simd_u32s(x[0]).0; N]);
    for stream in 0..M {
        stream_vectors[stream] = &S::as_simd_u32s(streams[stream]).0[..vectors];
    }
    for vector in 0..N {
        x_vectors[vector] = &S::as_simd_u32s(x[vector]).0[..vectors];
    }
    for at in 0..vectors {
        for stream in 0..M {
            simd::prefetch_line((&raw const stream_vectors[stream][at]).addr() + simd::PREFETCHED);
            let weight = simd.transmute_f32s_u32s(stream_vectors[stream][at]);
            for vector in 0..N {
                let x = simd.transmute_f32s_u32s(x_vectors[vector][at]);
                sums[stream][vector] = simd.mul_add_e_f32s(weight, x, sums[stream][vector]);
            }
        }
    }
    if vectors * S::F32_LANES < words {
        let rest = vectors * S::F32_LANES..words;
        for stream in 0..M {
            let weight = simd.transmute_f32s_u32s(simd.partial_load_u32s(&streams[stream][rest.clone()]));
            for vector in 0..N {
                let x = simd.transmute_f32s_u32s(simd.partial_load_u32s(&x[vector][rest.clone()]));
                sums[stream][vector] = simd.mul_add_e_f32s(weight, x, sums[stream][vector]);
            }
        }
    }
    sums
}

/// As [`add`], for words of two bf16, and of each vector the elements of their first and of their second halves: a bf16 is the upper half of
/// the fp32 of the same value.
#[inline(always)]
fn add_halves<S: Simd, const N: usize, const M: usize>(
    simd: S,
    streams: &[&[u32]; M],
    x: &[(&[u32], &[u32]); N],
) -> [[S::f32s; N]; M] {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    let words = streams[0].len();
    let vectors = words / S::F32_LANES;
    let mut stream_vectors = [S::as_simd_u32s(streams[0]).0; M];
    let (mut first, mut second) = ([S::as_simd_u32s(x[0].0).0; N], [S::as_simd_u32s(x[0].1).0; N]);
    for stream in 0..M {
        stream_vectors[stream] = &S::as_simd_u32s(streams[stream]).0[..vectors];
    }
    for vector in 0..N {
        first[vector] = &S::as_simd_u32s(x[vector].0).0[..vectors];
        second[vector] = &S::as_simd_u32s(x[vector].1).0[..vectors];
    }
    let (mut low, mut high) = ([simd.splat_f32s(0.0); M], [simd.splat_f32s(0.0); M]);
    for at in 0..vectors {
        for stream in 0..M {
            simd::prefetch_line((&raw const stream_vectors[stream][at]).addr() + simd::PREFETCHED);
            (low[stream], high[stream]) = both(simd, stream_vectors[stream][at]);
        }
        for vector in 0..N {
            let first = simd.transmute_f32s_u32s(first[vector][at]);
            let second = simd.transmute_f32s_u32s(second[vector][at]);
            for stream in 0..M {
                let sum = simd.mul_add_e_f32s(low[stream], first, sums[stream][vector]);
                sums[stream][vector] = simd.mul_add_e_f32s(high[stream], second, sum);
            }
        }
    }
    if vectors * S::F32_LANES < words {
        let rest = vectors * S::F32_LANES..words;
        for stream in 0..M {
            let (low, high) = both(simd, simd.partial_load_u32s(&streams[stream][rest.clone()]));
            for vector in 0..N {
                let first = simd.partial_load_u32s(&x[vector].0[rest.clone()]);
                let second = simd.partial_load_u32s(&x[vector].1[rest.clone()]);
                let sum = simd.mul_add_e_f32s(low, simd.transmute_f32s_u32s(first), sums[stream][vector]);
                sums[stream][vector] = simd.mul_add_e_f32s(high, simd.transmute_f32s_u32s(second), sum);
            }
        }
    }
    sums
}

/// Returns the first and the second bf16 of each word in fp32.
#[inline(always)]
fn both<S: Simd>(simd: S, pairs: S::u32s) -> (S::f32s, S::f32s) {
    let low = simd.wrapping_dyn_shl_u32s(pairs, simd.splat_u32s(16));
    let high = simd.and_u32s(pairs, simd.splat_u32s(0xffff_0000));
    (simd.transmute_f32s_u32s(low), simd.transmute_f32s_u32s(high))
}
