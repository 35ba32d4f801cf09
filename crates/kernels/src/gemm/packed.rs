//! A part of a product into fp32 by AVX-512, from operands packed into [words](super::words).
//!
//! For `to [m, n] = a [m, k]·b [k, n]`:
//!
//! ```text
//! for each block of about ROWS rows at most and DEPTH words of k
//!     pack a [ROWS, DEPTH]
//!     for each tile of COLUMNS columns
//!         pack b [DEPTH, COLUMNS]
//!         for each slab of at most SLAB words of k
//!             for each WIDE × NARROW elements of the block's output in this tile
//!                 multiply in registers, add
//! ```
//!
//! Elements are cast to fp32 when they are packed; two operands in bf16 are multiplied in pairs along k by `vdpbf16ps` where the processor
//! does that at more than the rate of fp32, or by [AMX's tiles](super::amx). The wide panels belong to the operand along which the output
//! is dense. Packed operands take at most 4.9 MiB of the thread.
//!
//! Each element is summed in the order of k, in slabs that depend on k alone: the bits do not depend on the other sizes, on the
//! position or on the division into parts. `vdpbf16ps` treats subnormal numbers as zero, and rounds to nearest.
//!
//! Source: Intel's manual of instructions, `VFMADD231PS` and `VDPBF16PS`; the loops are those of Goto and van de Geijn, "Anatomy of
//! High-Performance Matrix Multiplication" (2008).

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use half::{bf16, f16};

use super::words::{Cast, Pair, Word, Words, mask, pack};
use super::{Matrix, STEP, Stored, piece};
use crate::processor::{Bf16Instructions, Simd, bf16_instructions, simd};
use crate::simd::{pairs, prefetch, prefetch_line};

/// Rows or columns of a wide panel: three vectors of fp32.
const WIDE: usize = 48;
/// Rows or columns of a narrow panel: with [`WIDE`], 24 of the 32 registers hold sums.
const NARROW: usize = 8;
const ROWS: usize = 1024;
/// Columns of a tile: four wide panels. Rows of b are read in that many adjacent elements.
const COLUMNS: usize = 192;
const DEPTH: usize = 1024;
/// Words of k that are summed in registers: a wide panel of them and a narrow one are in an L1 cache of 32 KiB.
const SLAB: usize = 128;
const VECTORS: usize = WIDE / STEP;
/// Rows from which on the `gemm` crate, which copies less, is faster.
const MANY: usize = 1024;

thread_local! {
    /// The packed operands a and b.
    static PACKED: RefCell<[Words; 2]> = const { RefCell::new([const { Words::new() }; 2]) };
}

/// Returns whether [`multiply`] is for this product with `m` rows on this processor: for two operands in bf16 where the processor
/// multiplies these, and for few rows and a transposed b, which the `gemm` crate packs element by element. That depends on no number of
/// columns, so a product by columns has the bits of the whole one.
pub(super) fn applies(to: Matrix, a: Matrix, b: Matrix, m: usize) -> bool {
    if simd() != Simd::Avx512 || to.row_stride != 1 && to.column_stride != 1 {
        return false;
    }
    let stored = [to, a, b].map(|matrix| matrix.stored);
    let of_bf16 =
        stored == [Stored::Float, Stored::Bfloat16, Stored::Bfloat16] && bf16_instructions().is_some();
    of_bf16 || to.column_stride == 1 && b.column_stride != 1 && m < MANY
}

/// How the operands are packed and multiplied.
struct Packing {
    /// Elements of k in a word.
    elements: usize,
    pack: [Pack; 2],
    add_products: AddProducts,
}

type Pack = unsafe fn(Matrix, [usize; 2], usize, &mut [u32]);
type AddProducts = unsafe fn(usize, *const u32, *const u32, Sums);

impl Packing {
    fn for_operands(operands: [Matrix; 2]) -> Self {
        let stored = operands.map(|operand| operand.stored);
        if stored == [Stored::Bfloat16; 2] && bf16_instructions() == Some(Bf16Instructions::Pairs) {
            return Self { elements: Pair::ELEMENTS, pack: [pack::<Pair>; 2], add_products: add_pairs };
        }
        let pack: [Pack; 2] = stored.map(|stored| match stored {
            Stored::Float => pack::<Cast<f32>> as Pack,
            Stored::Bfloat16 => pack::<Cast<bf16>>,
            Stored::Half => pack::<Cast<f16>>,
        });
        Self { elements: 1, pack, add_products: add_floats }
    }

    /// # Safety
    /// As [`multiply`]; the processor has the instructions.
    unsafe fn multiply(&self, to: Matrix, a: Matrix, b: Matrix, [m, n, k]: [usize; 3], accumulate: bool) {
        // Lanes are along the dense dimension of the output.
        let widths = if to.row_stride == 1 { [WIDE, NARROW] } else { [NARROW, WIDE] };
        let blocks = m.div_ceil(ROWS);
        PACKED.with_borrow_mut(|[packed_a, packed_b]| {
            for rows in (0..blocks).map(|block| piece(m, blocks, block)) {
                for depth in ranges(k, DEPTH * self.elements) {
                    // SAFETY: windows within the operands' sizes, by this function's contract; the packed operands are this thread's own.
                    unsafe {
                        let block = a.from(rows.start, depth.start);
                        let left = self.pack(0, block, [rows.len(), depth.len()], widths[0], packed_a);
                        for columns in ranges(n, COLUMNS) {
                            let tile = b.from(depth.start, columns.start).transposed();
                            let right = self.pack(1, tile, [columns.len(), depth.len()], widths[1], packed_b);
                            let tile = Tile {
                                to: to.from(rows.start, columns.start),
                                size: [rows.len(), columns.len()],
                                packed: [left, right],
                                words: depth.len().div_ceil(self.elements),
                                add: accumulate || depth.start > 0,
                            };
                            tile.multiply(self.add_products);
                        }
                    }
                }
            }
        });
    }

    /// Packs an operand `[lines, depth]`: slabs of k, and in each the panels of all lines.
    ///
    /// # Safety
    /// The elements lie in memory that lives; the processor has AVX-512.
    unsafe fn pack(
        &self,
        operand: usize,
        from: Matrix,
        [lines, depth]: [usize; 2],
        width: usize,
        packed: &mut Words,
    ) -> *const u32 {
        let height = lines.next_multiple_of(width);
        let packed = packed.words(height * depth.div_ceil(self.elements));
        let slabs = ranges(depth, SLAB * self.elements);
        for (slab, packed) in slabs.zip(packed.chunks_mut(height * SLAB)) {
            // SAFETY: by this function's contract.
            unsafe { self.pack[operand](from.from(0, slab.start), [lines, slab.len()], width, packed) };
        }
        packed.as_ptr()
    }
}

/// Computes `to = a·b`, or `to += a·b`, on this thread: `[m, n]`, `[m, k]` and `[k, n]`.
///
/// # Safety
/// As [`multiply`](super::multiply), with operands of any dtype and a `to` for which [`applies`] is true.
pub(super) unsafe fn multiply(to: Matrix, a: Matrix, b: Matrix, [m, n, k]: [usize; 3], accumulate: bool) {
    let of_bf16 = [a, b].iter().all(|operand| operand.stored == Stored::Bfloat16);
    if of_bf16 && bf16_instructions() == Some(Bf16Instructions::Tiles) {
        // SAFETY: by this function's contract.
        return unsafe { super::amx::multiply(to, a, b, [m, n, k], accumulate) };
    }
    // SAFETY: by this function's contract.
    unsafe { Packing::for_operands([a, b]).multiply(to, a, b, [m, n, k], accumulate) };
}

/// `0..length` in ranges of `step`.
fn ranges(length: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(step).map(move |start| start..(start + step).min(length))
}

/// A tile of the output, and the packed operands.
struct Tile {
    to: Matrix,
    size: [usize; 2],
    packed: [*const u32; 2],
    /// Words of k.
    words: usize,
    /// Whether to add to the output.
    add: bool,
}

impl Tile {
    /// # Safety
    /// The tile's elements live, and nothing else uses them meanwhile; the packed operands are those of its size; the processor has the
    /// instructions.
    unsafe fn multiply(&self, add_products: AddProducts) {
        let [rows, columns] = self.size;
        let [a, b] = self.packed;
        // From here on the output's row stride is 1.
        let (to, size, [wide, narrow]) = if self.to.row_stride == 1 {
            (self.to, [rows, columns], [a, b])
        } else {
            (self.to.transposed(), [columns, rows], [b, a])
        };
        let heights = [size[0].next_multiple_of(WIDE), size[1].next_multiple_of(NARROW)];
        for slab in ranges(self.words, SLAB) {
            for lanes in ranges(size[0], WIDE) {
                for lines in ranges(size[1], NARROW) {
                    let sums = Sums {
                        at: to.from(lanes.start, lines.start).at as *mut f32,
                        stride: to.column_stride,
                        lanes: lanes.len(),
                        lines: lines.len(),
                        add: self.add || slab.start > 0,
                    };
                    // SAFETY: by this function's contract.
                    unsafe {
                        let wide = wide.add(heights[0] * slab.start + lanes.start * slab.len());
                        let narrow = narrow.add(heights[1] * slab.start + lines.start * slab.len());
                        add_products(slab.len(), wide, narrow, sums);
                    }
                }
            }
        }
    }
}

/// Where sums go: `lines` lines of `lanes` adjacent elements.
struct Sums {
    at: *mut f32,
    /// Elements from one line to the next.
    stride: isize,
    lanes: usize,
    lines: usize,
    /// Whether to add to the output.
    add: bool,
}

impl Sums {
    fn line(&self, line: usize) -> *mut f32 {
        self.at.wrapping_offset(line as isize * self.stride)
    }

    fn prefetch(&self) {
        for line in 0..self.lines {
            prefetch(self.line(line).addr(), WIDE * size_of::<f32>());
        }
    }

    /// # Safety
    /// The elements live, and nothing else uses them meanwhile.
    #[target_feature(enable = "avx512f")]
    unsafe fn store(&self, total: [[__m512; VECTORS]; NARROW]) {
        for (line, total) in total.into_iter().enumerate().take(self.lines) {
            for (vector, total) in total.into_iter().enumerate() {
                let lanes = self.lanes.saturating_sub(vector * STEP);
                let mask = mask(lanes);
                let at = self.line(line).wrapping_add(vector * STEP);
                // SAFETY: by this function's contract, for the lanes of the mask.
                unsafe {
                    let before = if self.add { _mm512_maskz_loadu_ps(mask, at) } else { _mm512_setzero_ps() };
                    _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(before, total));
                }
            }
        }
    }
}

macro_rules! add_products {
    ($name:ident, $features:literal, $multiply_add:expr) => {
        /// Adds the products of `words` words for [`WIDE`] lanes and [`NARROW`] lines.
        ///
        /// # Safety
        /// `wide` and `narrow` have `words` times that many words; the elements of `sums` live, and nothing else uses them meanwhile; the
        /// processor has the instructions.
        #[target_feature(enable = $features)]
        unsafe fn $name(words: usize, wide: *const u32, narrow: *const u32, sums: Sums) {
            let multiply_add = $multiply_add;
            let mut total = [[_mm512_setzero_ps(); VECTORS]; NARROW];
            sums.prefetch();
            // The next panel lies behind this one.
            let next = narrow.wrapping_add(words * NARROW);
            for word in 0..words {
                prefetch_line(next.wrapping_add(word * NARROW).addr());
                // SAFETY: by this function's contract.
                let lanes: [__m512i; VECTORS] = std::array::from_fn(|vector| unsafe {
                    _mm512_loadu_si512(wide.add(word * WIDE + vector * STEP).cast())
                });
                for (line, total) in total.iter_mut().enumerate() {
                    // SAFETY: by this function's contract.
                    let value = unsafe { narrow.add(word * NARROW + line).read() };
                    let value = _mm512_set1_epi32(value.cast_signed());
                    for (total, lanes) in total.iter_mut().zip(lanes) {
                        *total = multiply_add(*total, lanes, value);
                    }
                }
            }
            // SAFETY: by this function's contract.
            unsafe { sums.store(total) };
        }
    };
}

add_products!(add_pairs, "avx512f,avx512bf16", |total, lanes, word| _mm512_dpbf16_ps(
    total,
    pairs(lanes),
    pairs(word)
));
add_products!(add_floats, "avx512f", |total, lanes, word| _mm512_fmadd_ps(
    _mm512_castsi512_ps(lanes),
    _mm512_castsi512_ps(word),
    total
));

#[cfg(test)]
mod tests {
    use runtime::tensor_layout::TensorLayout;
    use tch::{Device, Kind, Tensor};

    use super::*;

    /// Pairs and cast words, also on a processor that multiplies bf16 otherwise: several blocks, tiles and slabs, odd sizes, every layout.
    #[test]
    fn packed_products_are_correct_and_depend_on_neither_position_nor_layout() {
        let avx512 = Simd::Avx512.is_there();
        let is_there = [avx512, avx512 && is_x86_feature_detected!("avx512bf16")];
        let casts: [Pack; 2] = [pack::<Cast<bf16>>; 2];
        let packings = [
            Packing { elements: 1, pack: casts, add_products: add_floats },
            Packing { elements: Pair::ELEMENTS, pack: [pack::<Pair>; 2], add_products: add_pairs },
        ];
        let mut random = runtime::random::Generator::new(8).unwrap();
        let mut normal = |shape: [i64; 2]| {
            random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(Kind::BFloat16)
        };
        for ((packing, name), is_there) in packings.iter().zip(["casts", "pairs"]).zip(is_there) {
            if !is_there {
                eprintln!("skipped: this processor has no instructions for {name}");
                continue;
            }
            for k in [1, 259, 2600] {
                let (a, b) = (normal([1100, k]), normal([k, 250]));
                let product = |a: &Tensor, b: &Tensor, by_rows: bool| {
                    let size = if by_rows { [a.size()[0], b.size()[1]] } else { [b.size()[1], a.size()[0]] };
                    let out = Tensor::full(size, 1.0, (Kind::Float, Device::Cpu));
                    let out = if by_rows { out } else { out.tr() };
                    let [to, left, right] =
                        [&out, a, b].map(|tensor| Matrix::new(&TensorLayout::of(tensor).unwrap()).unwrap());
                    let sizes = [out.size()[0], out.size()[1], a.size()[1]].map(|size| size as usize);
                    // SAFETY: CPU matrices of these sizes; the output is new, and the processor has the instructions.
                    unsafe { packing.multiply(to, left, right, sizes, true) };
                    out
                };
                let whole = product(&a, &b, true);
                let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double)) + 1.0;
                let error = (whole.to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
                assert!(error < 3e-7 * (k as f64), "{name} {k}: {error}");
                let by_columns = |matrix: &Tensor| matrix.tr().contiguous().tr();
                for by_rows in [true, false] {
                    assert_eq!(product(&by_columns(&a), &b, by_rows), whole, "{name} {k}");
                    assert_eq!(product(&a, &by_columns(&b), by_rows), whole, "{name} {k}");
                    let window = product(&a.narrow(0, 77, 35), &b.narrow(1, 13, 53), by_rows);
                    assert_eq!(window, whole.narrow(0, 77, 35).narrow(1, 13, 53), "{name} {k}");
                }
            }
        }
    }
}
