//! A part of a product by either [`Method`]. An output in 16 bits is computed by blocks in fp32; for the `gemm` crate, tiles of operands in 16
//! bits are cast to fp32 while they are in the cache.
//!
//! For `to [m, n] = a [m, k]·b [k, n]`:
//!
//! ```text
//! for each block of the output [ROWS, COLUMNS]       in fp32, if the output is in 16 bits; the whole output otherwise
//!     multiply by `packed`, or:
//!     for each ROWS rows and each slab of at most DEPTH of k
//!         cast a [ROWS, DEPTH]
//!         for each tile of at most COLUMNS columns
//!             cast b [DEPTH, COLUMNS], multiply, add
//!     round
//! ```
//!
//! Blocks and casts take memory of the thread, at most 5 MiB, as packed operands do; it does not grow with the operands. An element of a
//! is cast n/COLUMNS times if the output is in 16 bits, one of b m/ROWS times. The slabs depend on k alone, so that the sums do not depend on the
//! division into parts.

use std::cell::RefCell;

use half::{bf16, f16};

use super::{Matrix, Method, STEP, Stored, kernel, piece};
use crate::simd::{self, Element, blocks, half_lines, load, store};

const ROWS: usize = 1024;
const COLUMNS: usize = 512;
const DEPTH: usize = 512;
/// Lines from a cast to the prefetch: lines of a wide matrix lie in pages of their own, which the processor does not foresee.
const AHEAD: usize = 2;

thread_local! {
    /// The casts of a and of b.
    static CASTS: RefCell<[Vec<f32>; 2]> = const { RefCell::new([const { Vec::new() }; 2]) };
    /// A block of the output.
    static BLOCK: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes `to = a·b`, or `to += a·b`, on this thread: `[m, n]`, `[m, k]` and `[k, n]`.
///
/// # Safety
/// As [`multiply`](super::multiply), with operands and an output of any dtype.
pub(super) unsafe fn multiply(
    method: Method,
    to: Matrix,
    a: Matrix,
    b: Matrix,
    [m, n, k]: [usize; 3],
    accumulate: bool,
) {
    if to.stored == Stored::Float {
        // SAFETY: by this function's contract.
        return unsafe { into_fp32(method, to, a, b, [m, n, k], accumulate) };
    }
    BLOCK.with_borrow_mut(|memory| {
        let [row_blocks, column_blocks] = [m.div_ceil(ROWS), n.div_ceil(COLUMNS)];
        for rows in (0..row_blocks).map(|block| piece(m, row_blocks, block)) {
            for columns in (0..column_blocks).map(|block| piece(n, column_blocks, block)) {
                let size = [rows.len(), columns.len()];
                let (a, b) = (a.from(rows.start, 0), b.from(0, columns.start));
                let to = to.from(rows.start, columns.start);
                let block = room(to, size, memory);
                // SAFETY: windows within the sizes, by this function's contract; the block is this thread's own.
                unsafe {
                    if accumulate {
                        widen(to, block, size);
                    }
                    into_fp32(method, block, a, b, [size[0], size[1], k], accumulate);
                    round(block, to, size);
                }
            }
        }
    });
}

/// [`multiply`] into fp32.
///
/// # Safety
/// As [`multiply`].
unsafe fn into_fp32(
    method: Method,
    to: Matrix,
    a: Matrix,
    b: Matrix,
    [m, n, k]: [usize; 3],
    accumulate: bool,
) {
    match method {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: by this function's contract.
        Method::Packed => return unsafe { super::packed::multiply(to, a, b, [m, n, k], accumulate) },
        Method::Crate => {}
    }
    if [a, b].iter().all(|matrix| matrix.stored == Stored::Float) {
        // SAFETY: by this function's contract.
        return unsafe { super::multiply(kernel(), to, a, b, [m, n, k], accumulate) };
    }
    CASTS.with_borrow_mut(|[cast_a, cast_b]| {
        let [row_blocks, depths, tiles] = [m.div_ceil(ROWS), k.div_ceil(DEPTH), n.div_ceil(COLUMNS)];
        for rows in (0..row_blocks).map(|block| piece(m, row_blocks, block)) {
            for slab in 0..depths {
                // Not in steps: the kernels divide k in this way.
                let length = k.div_ceil(depths);
                let depth = (slab * length).min(k)..((slab + 1) * length).min(k);
                // SAFETY: windows within the sizes, by this function's contract; the casts are this thread's own.
                unsafe {
                    let a = fp32(a.from(rows.start, depth.start), [rows.len(), depth.len()], cast_a);
                    for columns in (0..tiles).map(|tile| piece(n, tiles, tile)) {
                        let b =
                            fp32(b.from(depth.start, columns.start), [depth.len(), columns.len()], cast_b);
                        let to = to.from(rows.start, columns.start);
                        let sizes = [rows.len(), columns.len(), depth.len()];
                        super::multiply(kernel(), to, a, b, sizes, accumulate || slab > 0);
                    }
                }
            }
        }
    });
}

/// Returns a matrix in fp32 with the layout of `like`, in memory that is made as large as needed.
fn room(like: Matrix, [rows, columns]: [usize; 2], memory: &mut Vec<f32>) -> Matrix {
    let by_columns = like.column_stride.abs() > like.row_stride.abs();
    let (lines, length) = if by_columns { (columns, rows) } else { (rows, columns) };
    // An odd number of cache lines, so that the lines begin in different sets of the cache.
    let stride = (length.div_ceil(STEP) | 1) * STEP;
    if memory.len() < lines * stride {
        memory.resize(lines * stride, 0.0);
    }
    let stride = stride as isize;
    let (row_stride, column_stride) = if by_columns { (1, stride) } else { (stride, 1) };
    Matrix { at: memory.as_mut_ptr() as usize, stored: Stored::Float, row_stride, column_stride }
}

/// Returns the matrix in fp32: itself, or a cast of it.
///
/// # Safety
/// Its elements lie in memory that lives.
unsafe fn fp32(matrix: Matrix, size: [usize; 2], memory: &mut Vec<f32>) -> Matrix {
    if matrix.stored == Stored::Float {
        return matrix;
    }
    let cast = room(matrix, size, memory);
    // SAFETY: by this function's contract; the cast has memory of its own.
    unsafe { widen(matrix, cast, size) };
    cast
}

/// Casts a matrix to fp32.
///
/// # Safety
/// The elements of both lie in memory that lives; those of `to` are distinct, and nothing else uses them meanwhile.
unsafe fn widen(from: Matrix, to: Matrix, size: [usize; 2]) {
    // SAFETY: by this function's contract; the types are those of the elements.
    unsafe {
        match from.stored {
            Stored::Float => convert::<f32, f32>(from, to, size, copy),
            Stored::Bfloat16 => convert::<bf16, f32>(from, to, size, copy),
            Stored::Half => convert::<f16, f32>(from, to, size, half_lines::widen),
        }
    }
}

/// Rounds a matrix in fp32.
///
/// # Safety
/// As [`widen`].
unsafe fn round(from: Matrix, to: Matrix, size: [usize; 2]) {
    // SAFETY: by this function's contract; the types are those of the elements.
    unsafe {
        match to.stored {
            Stored::Float => convert::<f32, f32>(from, to, size, copy),
            Stored::Bfloat16 => convert::<f32, bf16>(from, to, size, copy),
            Stored::Half => convert::<f32, f16>(from, to, size, half_lines::round),
        }
    }
}

/// Converts a matrix line by line, by `line` if both are dense.
///
/// # Safety
/// As [`widen`], for elements of these types.
unsafe fn convert<F: Element<Compute = f32>, T: Element<Compute = f32>>(
    from: Matrix,
    to: Matrix,
    [rows, columns]: [usize; 2],
    line: unsafe fn(*const F, *mut T, usize),
) {
    // Lines are dense in fp32, and almost always in the other matrix.
    let wide = if from.stored == Stored::Float { from } else { to };
    let (from, to, lines, length) = if wide.column_stride == 1 {
        (from, to, rows, columns)
    } else {
        (from.transposed(), to.transposed(), columns, rows)
    };
    let dense = from.column_stride == 1 && to.column_stride == 1;
    for number in 0..lines {
        let (source, target) = (from.from(number, 0).at as *const F, to.from(number, 0).at as *mut T);
        // SAFETY: by this function's contract the line's elements exist in both.
        unsafe {
            if dense {
                simd::prefetch(from.from(number + AHEAD, 0).at, length * size_of::<F>());
                line(source, target, length);
                continue;
            }
            for at in 0..length as isize {
                let value = source.offset(at * from.column_stride).read().widen();
                target.offset(at * to.column_stride).write(T::round(value));
            }
        }
    }
}

/// # Safety
/// `length` elements lie at `from` and at `to`, and nothing else uses those at `to` meanwhile.
unsafe fn copy<F: Element<Compute = f32>, T: Element<Compute = f32>>(
    from: *const F,
    to: *mut T,
    length: usize,
) {
    simd::arch().dispatch(
        #[inline(always)]
        || {
            blocks!(64, 0, length, |at, N| {
                // SAFETY: by this function's contract.
                unsafe { store::<T, N>(to.add(at), &load::<F, N>(from.add(at))) };
            });
        },
    );
}
