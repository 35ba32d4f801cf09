//! The product of two blocks in the cache.

use pulp::{Simd, WithSimd};

use crate::simd::Real;

/// `to [rows, columns] = a·b`, or `to += a·b`, with `a [rows, depth]` of any strides and `b [depth, columns]` of dense rows.
///
/// An element is summed over the depth in order, with one rounding each where the processor multiplies and adds in one: its bits depend on
/// the operands alone.
#[derive(Clone, Copy)]
pub(super) struct Product<R> {
    pub(super) to: *mut R,
    pub(super) to_stride: usize,
    pub(super) a: *const R,
    /// Strides of a row and of a step in depth.
    pub(super) a_strides: [usize; 2],
    pub(super) b: *const R,
    pub(super) b_stride: usize,
    pub(super) rows: usize,
    pub(super) depth: usize,
    /// A multiple of the widest vector's elements.
    pub(super) columns: usize,
    pub(super) add: bool,
}

/// Rows and vectors of a tile of the output, which is in registers while it is summed.
const ROWS: usize = 4;
const WIDE: usize = 4;
const NARROW: usize = 2;

impl<R: Real> Product<R> {
    /// # Safety
    /// The elements of all three lie in memory that lives; the output's overlap neither operand, and nothing else uses them meanwhile.
    #[inline(always)]
    pub(super) unsafe fn compute<S: Simd>(self, simd: S) {
        simd.vectorize(Checked(self));
    }

    /// # Safety
    /// As [`Product::compute`].
    #[inline(always)]
    unsafe fn tiles<S: Simd, const VECTORS: usize>(&self, simd: S, column: usize) {
        let mut row = 0;
        // SAFETY: by this function's contract; the tiles lie within the output.
        unsafe {
            while row + ROWS <= self.rows {
                self.tile::<S, ROWS, VECTORS>(simd, row, column);
                row += ROWS;
            }
            if row + 2 <= self.rows {
                self.tile::<S, 2, VECTORS>(simd, row, column);
                row += 2;
            }
            if row < self.rows {
                self.tile::<S, 1, VECTORS>(simd, row, column);
            }
        }
    }

    /// # Safety
    /// As [`Product::compute`]; the tile lies within the output.
    #[inline(always)]
    unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
        &self,
        simd: S,
        row: usize,
        column: usize,
    ) {
        let lanes = size_of::<R::Vector<S>>() / size_of::<R>();
        let [a_row, a_step] = self.a_strides;
        // SAFETY: the tile, its rows of a and its columns of b lie in memory that lives, by this function's contract; a vector may lie at any
        // multiple of its elements' size.
        unsafe {
            let to = self.to.add(row * self.to_stride + column);
            let to = |row: usize, vector: usize| {
                to.add(row * self.to_stride + vector * lanes).cast::<R::Vector<S>>()
            };
            let mut sums = [[R::splat(simd, R::ZERO); VECTORS]; ROWS];
            if self.add {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        *sum = to(row, vector).read_unaligned();
                    }
                }
            }
            let (mut a, mut b) = (self.a.add(row * a_row), self.b.add(column));
            for _ in 0..self.depth {
                let vectors: [R::Vector<S>; VECTORS] = std::array::from_fn(
                    #[inline(always)]
                    |vector| b.add(vector * lanes).cast::<R::Vector<S>>().read_unaligned(),
                );
                for (row, sums) in sums.iter_mut().enumerate() {
                    let factor = R::splat(simd, *a.add(row * a_row));
                    for (sum, vector) in sums.iter_mut().zip(vectors) {
                        *sum = R::mul_add(simd, factor, vector, *sum);
                    }
                }
                a = a.add(a_step);
                b = b.add(self.b_stride);
            }
            for (row, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    to(row, vector).write_unaligned(*sum);
                }
            }
        }
    }
}

/// A product whose contract is kept.
struct Checked<R>(Product<R>);

impl<R: Real> WithSimd for Checked<R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self(product) = self;
        let lanes = size_of::<R::Vector<S>>() / size_of::<R>();
        // Vectors of 64 bytes come with 32 registers, others with 16.
        let most = if size_of::<R::Vector<S>>() == 64 { WIDE } else { NARROW };
        let mut column = 0;
        while column < product.columns {
            let vectors = ((product.columns - column) / lanes).min(most);
            // SAFETY: whoever makes a `Checked` keeps the contract of `Product::compute`.
            unsafe {
                match vectors {
                    WIDE.. => product.tiles::<S, WIDE>(simd, column),
                    NARROW.. => product.tiles::<S, NARROW>(simd, column),
                    _ => product.tiles::<S, 1>(simd, column),
                }
            }
            column += lanes
                * if vectors >= WIDE {
                    WIDE
                } else if vectors >= NARROW {
                    NARROW
                } else {
                    1
                };
        }
    }
}
