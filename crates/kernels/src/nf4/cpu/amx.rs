//! Products of vectors in bf16 by AMX's tiles.
//!
//! ```text
//! for each 32 rows of the weight
//!     for each two blocks of columns
//!         dequantize [32, 128] to bf16, in the L1 cache
//!         multiply by tiles: 16 rows and 32 columns of the weight, and all vectors
//! ```
//!
//! A scale times the table is rounded to bf16, sixteen values for a block, and codes are looked up there: the elements are those of a weight
//! that is dequantized to bf16. An element of the result is summed 32 columns at a time, whatever the other vectors and rows are: of two
//! blocks first the columns whose codes are the lowest four bits of each 16, then those of the next four.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;
use runtime::Result;

use super::{BLOCK, BYTES, Packed};
use crate::amx::TILE;
use crate::gemm::words::Words;
use crate::matvec::Results;
use crate::matvec::amx::{GROUP, Sums, VECTORS, WORDS, for_groups};
use crate::nf4::TABLE;

/// Codes in 16 bits. A lookup takes one of each 16 bits.
const PARTS: usize = 4;
/// Columns of two blocks.
const COLUMNS: usize = 2 * BLOCK;
/// Two blocks of a group of rows, in bf16: for each part, each row's 32 elements.
#[repr(C, align(64))]
struct Dequantized([[[u32; TILE]; GROUP]; PARTS]);

/// Returns whether [`run`] is for that many vectors and rows on this processor. One vector is faster in fp32: dequantizing takes longer.
pub(super) fn applies(vectors: usize, rows: usize) -> bool {
    (2..=VECTORS).contains(&vectors) && rows >= GROUP && is_x86_feature_detected!("avx512bf16")
}

/// Computes the products of all rows with vectors of `inner` elements.
pub(super) fn run(packed: &Packed<'_>, x: &[bf16], inner: usize, results: &Results) -> Result<()> {
    let mut memory = Words::new();
    let products = Products { packed, x: tiles_of(x, inner, &mut memory), blocks: inner / BLOCK };
    for_groups(results, |start, _| {
        // SAFETY: the processor has the instructions, and the tiles are configured.
        unsafe { products.multiply_group(start) }
    })
}

/// Vectors in tiles of pairs, `[pairs of blocks, parts, 16 words, 16 vectors]`, zeros beyond them: a word has the elements of two 16 bits of
/// codes that follow each other, of the same part. Of each byte the high four bits are the first element.
fn tiles_of<'a>(x: &[bf16], inner: usize, memory: &'a mut Words) -> &'a [u32] {
    let tiles = memory.words(inner.div_ceil(COLUMNS) * PARTS * WORDS);
    tiles.fill(0);
    for (vector, x) in x.chunks_exact(inner).enumerate() {
        for (blocks, columns) in x.chunks(COLUMNS).enumerate() {
            for (word, eight) in columns.chunks_exact(2 * PARTS).enumerate() {
                for part in 0..PARTS {
                    let [low, high] =
                        [eight[part ^ 1], eight[PARTS + (part ^ 1)]].map(|one| u32::from(one.to_bits()));
                    tiles[((blocks * PARTS + part) * TILE + word) * TILE + vector] = low | high << 16;
                }
            }
        }
    }
    tiles
}

struct Products<'a> {
    packed: &'a Packed<'a>,
    x: &'a [u32],
    /// Blocks of a row.
    blocks: usize,
}

impl Products<'_> {
    /// # Safety
    /// The processor has AVX-512 F, BW and BF16, and the tiles are configured.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn multiply_group(&self, first: usize) -> Sums {
        let mut scales = vec![0f32; GROUP * self.blocks];
        self.packed.scales(first * self.blocks, &mut scales);
        let mut sums = [[0f32; VECTORS]; GROUP];
        // A tile that was just stored is loaded late, so it is multiplied after the next ones are dequantized.
        let mut values = [const { Dequantized([[[0; TILE]; GROUP]; PARTS]) }; 2];
        let mut stored: Option<&[u32]> = None;
        for (number, x) in self.x.chunks_exact(PARTS * WORDS).enumerate() {
            let blocks = 2 * number..self.blocks.min(2 * number + 2);
            // SAFETY: by this function's contract.
            unsafe {
                self.dequantize(first, blocks, &scales, &mut values[number % 2]);
                if let Some(before) = stored.replace(x) {
                    add_products(&values[1 - number % 2], before, &mut sums);
                }
            }
        }
        if let Some(last) = stored {
            // SAFETY: by this function's contract.
            unsafe { add_products(&values[(self.blocks.div_ceil(2) - 1) % 2], last, &mut sums) };
        }
        sums
    }

    /// Dequantizes one or two blocks of each row, and prefetches as much of the rows behind the group, in the order of memory.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW and BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn dequantize(
        &self,
        first: usize,
        blocks: Range<usize>,
        scales: &[f32],
        values: &mut Dequantized,
    ) {
        let ahead = (first + GROUP) * self.blocks * BYTES + blocks.start * BYTES * GROUP;
        let mask = if blocks.len() == 2 { u16::MAX } else { 0x00ff };
        let code = _mm512_set1_epi16(0x000f);
        // A lookup reads five bits of an index: the upper half of a register looks up in the table of the second block.
        let second = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(0x0010));
        // SAFETY: the table has 16 values.
        let table = unsafe { _mm512_loadu_ps(TABLE.as_ptr()) };
        for row in 0..GROUP {
            let scales = &scales[row * self.blocks..][blocks.clone()];
            let scaled = |scale: f32| _mm512_mul_ps(table, _mm512_set1_ps(scale));
            let both = _mm512_cvtne2ps_pbh(scaled(scales.get(1).copied().unwrap_or(0.0)), scaled(scales[0]));
            // SAFETY: both are 512 bits without invalid values.
            let both: __m512i = unsafe { std::mem::transmute(both) };
            let codes = &self.packed.codes[((first + row) * self.blocks + blocks.start) * BYTES..];
            let codes = &codes[..blocks.len() * BYTES];
            let next = self.packed.codes.as_ptr().wrapping_add(ahead + row * COLUMNS / 2);
            // SAFETY: the words of the mask are these codes, and each store writes a row of 64 bytes. A prefetch may have any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(next.cast());
                let mut codes = _mm512_maskz_loadu_epi32(mask, codes.as_ptr().cast());
                for part in &mut values.0 {
                    let index = _mm512_ternarylogic_epi32::<0xea>(codes, code, second);
                    let looked_up = _mm512_permutexvar_epi16(index, both);
                    _mm512_store_si512(part[row].as_mut_ptr().cast(), looked_up);
                    codes = _mm512_srli_epi16::<4>(codes);
                }
            }
        }
    }
}

/// Adds the products of dequantized rows and the tiles of the vectors for the same columns.
///
/// # Safety
/// The tiles are configured.
unsafe fn add_products(values: &Dequantized, x: &[u32], sums: &mut Sums) {
    // SAFETY: the instructions read as many tiles of both as there are parts, and read and write the sums; they write the registers that are
    // named.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {row}*1]",
            "tileloadd tmm1, [{sums} + {row}*1 + 1024]",
            "2:",
            "tileloadd tmm4, [{x} + {row}*1]",
            "tileloadd tmm2, [{values} + {row}*1]",
            "tdpbf16ps tmm0, tmm2, tmm4",
            "tileloadd tmm3, [{values} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm3, tmm4",
            "add {x}, 1024",
            "add {values}, 2048",
            "dec {parts}",
            "jnz 2b",
            "tilestored [{sums} + {row}*1], tmm0",
            "tilestored [{sums} + {row}*1 + 1024], tmm1",
            parts = inout(reg) PARTS => _,
            x = inout(reg) x.as_ptr() => _,
            values = inout(reg) values.0.as_ptr() => _,
            row = in(reg) TILE * size_of::<u32>(),
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::nf4::{self, Scales};

    /// Against the product in f64 with the weight that is dequantized to bf16: odd numbers of blocks, last groups that overlap, one or all
    /// vectors, results that do not depend on the other vectors.
    #[test]
    fn products_are_those_of_the_weight_in_bf16() {
        if !crate::amx::is_there() || !applies(VECTORS, GROUP) {
            eprintln!("skipped: this processor has no AMX tiles, or not AVX-512's conversion to bf16");
            return;
        }
        let mut random = runtime::random::Generator::new(4).unwrap();
        let mut normal = |shape: [i64; 2]| random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap();
        for scales in [Scales::Float, Scales::Nested] {
            for [rows, inner] in [[32, 64], [97, 192], [513, 1088], [64, 4864]] {
                let stored = nf4::quantize(&normal([rows, inner]), scales).unwrap();
                let wide = nf4::dequantize(&stored, Kind::BFloat16).unwrap().to_kind(Kind::Double);
                let x = normal([VECTORS as i64, inner]).to_kind(Kind::BFloat16);
                let flat = Vec::<f32>::try_from(x.to_kind(Kind::Float).flatten(0, 1)).unwrap();
                let flat: Vec<bf16> = flat.into_iter().map(bf16::from_f32).collect();
                let product = |vectors: usize| {
                    let results = Results::new([vectors, rows as usize], Kind::Float, None).unwrap();
                    let x = &flat[..vectors * inner as usize];
                    run(&super::super::packed(&stored).unwrap(), x, inner as usize, &results).unwrap();
                    results.into_tensor()
                };
                let all = product(VECTORS);
                let exact = x.to_kind(Kind::Double).matmul(&wide.tr());
                let apart = (&all - &exact).abs().max().double_value(&[]);
                assert!(
                    apart < 2e-6 * exact.abs().max().double_value(&[]),
                    "{rows} {inner} {scales:?}: {apart}"
                );
                for vectors in [1, 5] {
                    assert_eq!(
                        product(vectors),
                        all.narrow(0, 0, vectors as i64),
                        "{rows} {inner} {vectors}"
                    );
                }
            }
        }
    }
}
