//! Matrix products in fp32 by the `gemm` crates, on the memory of tensors and on libtorch's own threads.
//!
//! The crate's own thread pool would compete with libtorch's threads, which spin for a while after each operator; between
//! piecewise casts of a weight, that took a quarter of the time. So the output is divided here, and each part is one
//! thread's product. Every part packs the shared operand again, at about the cost of forty multiply-adds per
//! element; parts are so large that this is a few percent.
//!
//! Operands in bf16 and fp16 are cast tile by tile within a part ([`tiles`]). Two operands in bf16 are multiplied by the processor's own
//! instructions (`packed`) where these are faster. `packed` also multiplies x·Wᵀ of few rows in fp32, because the crate packs a transposed
//! operand element by element.

#[cfg(target_arch = "x86_64")]
mod amx;
mod narrower;
#[cfg(target_arch = "x86_64")]
mod packed;
mod tiles;
#[cfg(target_arch = "x86_64")]
pub(super) mod words;

use gemm_common::Parallelism;
use runtime::parallel;
use runtime::tensor_layout::TensorLayout;
use runtime::tensor_memory::bump_version;
use runtime::{Error, Result};
use tch::{Kind, Tensor};

use crate::processor::{Simd, simd};

/// Approximate maximum of a part's rows or columns.
const PART: usize = 2048;
/// Minimum of a part's rows or columns, plus [`STEP`]: an output whose longer side is below twice this is one part.
const LEAST: usize = 96;
/// Parts begin at multiples of this, so that only the last one has partial vectors.
const STEP: usize = 16;

/// How elements are stored.
#[derive(Clone, Copy, PartialEq)]
enum Stored {
    Float,
    Bfloat16,
    Half,
}

impl Stored {
    fn bytes(self) -> isize {
        if self == Self::Float { 4 } else { 2 }
    }
}

/// A matrix in memory, with its strides in elements.
#[derive(Clone, Copy)]
struct Matrix {
    at: usize,
    stored: Stored,
    row_stride: isize,
    column_stride: isize,
}

impl Matrix {
    fn new(tensor: &TensorLayout) -> Result<Self> {
        let stored = match tensor.kind() {
            Kind::Float => Stored::Float,
            Kind::BFloat16 => Stored::Bfloat16,
            Kind::Half => Stored::Half,
            kind => {
                return Err(Error::invalid("matrix product", format!("{kind:?} is not multiplied in fp32")));
            }
        };
        let stride = tensor.stride();
        let (row_stride, column_stride) = (stride[0] as isize, stride[1] as isize);
        Ok(Self { at: tensor.range()?.start, stored, row_stride, column_stride })
    }

    fn transposed(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// Returns the part that begins at this row and column.
    fn from(self, row: usize, column: usize) -> Self {
        let elements = row as isize * self.row_stride + column as isize * self.column_stride;
        Self { at: self.at.wrapping_add_signed(elements * self.stored.bytes()), ..self }
    }
}

/// Computes `out = a·b`, or `out += a·b`, for CPU matrices in fp32, bf16 or fp16, each of any strides; `matrices` are the layouts of out,
/// a and b. Products and sums are in fp32; an output in 16 bits is rounded once. The caller checks shapes, layouts, and that the output shares no memory with an operand.
///
/// The bits do not depend on `threads` if the output has at least [`MIN_DIMENSION`] rows and columns: each element is summed over k in
/// blocks whose length depends on k and the processor, on whether a row-major output has fewer than 1024 rows and a transposed b, and on
/// whether it is larger than 64 × 64.
/// Parts are longer than 64, and so is an output that is one part for some numbers of threads but not for others. The crate's other
/// paths are for outputs of at most 256 elements, and for single rows and columns, which are no parts of such an output.
pub(crate) fn gemm_f32(
    out: &mut Tensor,
    matrices: [&TensorLayout; 3],
    accumulate: bool,
    threads: usize,
) -> Result<()> {
    let [product, a, b] = matrices;
    let (m, n, k) = (product.size()[0] as usize, product.size()[1] as usize, a.size()[1] as usize);
    let (to, left, right) = (Matrix::new(product)?, Matrix::new(a)?, Matrix::new(b)?);
    // No two elements of the output share memory: it has dense rows or dense columns, also as a window of a larger matrix.
    let (row, column) = (to.row_stride, to.column_stride);
    let apart = match (m, n) {
        (_, 1) => m == 1 || row >= 1,
        (1, _) => column >= 1,
        _ => (column == 1 && row >= n as isize) || (row == 1 && column >= m as isize),
    };
    if !apart {
        let reason = format!("the output's strides {:?} are neither row- nor column-major", product.stride());
        return Err(Error::invalid("matrix product", reason));
    }
    // For the whole product, not for its parts.
    let method = Method::choose(to, left, right, m);
    // The larger dimension is divided, so that the parts share the smaller operand. It is made that of the columns.
    let (to, short, long) =
        if n >= m { (to, left, right) } else { (to.transposed(), right.transposed(), left.transposed()) };
    let (rows, columns) = (m.min(n), m.max(n));
    let parts = (columns / PART).max(threads).min(columns / LEAST).max(1);
    let work = |part: usize| {
        let columns = piece(columns, parts, part);
        let (to, long) = (to.from(0, columns.start), long.from(0, columns.start));
        let sizes = [rows, columns.len(), k];
        // SAFETY: the caller checked that all three are CPU matrices of shapes [m, n], [m, k] and [k, n], so that every
        // element reached by these sizes and strides lies in its tensor, and in this part of it; the output's elements are
        // distinct (dense rows or columns, checked above), overlap neither operand (checked by the caller) and belong to
        // this part only; `out` is borrowed mutably until all parts are done.
        unsafe { tiles::multiply(method, to, short, long, sizes, accumulate) };
    };
    if threads > 1 {
        parallel::for_each(parts, work)?;
    } else {
        (0..parts).for_each(work);
    }
    bump_version(out)
}

/// The implementation of a product.
#[derive(Clone, Copy)]
enum Method {
    /// The `gemm` crate, after casts.
    Crate,
    /// `packed`.
    #[cfg(target_arch = "x86_64")]
    Packed,
}

impl Method {
    fn choose(to: Matrix, a: Matrix, b: Matrix, rows: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if packed::applies(to, a, b, rows) {
            return Self::Packed;
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (to, a, b, rows);
        Self::Crate
    }
}

/// Returns the range of one of `parts` parts of about equal length.
fn piece(length: usize, parts: usize, part: usize) -> std::ops::Range<usize> {
    let boundary = |part: usize| if part == parts { length } else { length * part / parts / STEP * STEP };
    boundary(part)..boundary(part + 1)
}

/// Computes `to = a·b`, or `to += a·b`, on this thread: `[m, n]`, `[m, k]` and `[k, n]` in fp32.
///
/// # Safety
/// Every element lies in memory that lives; the output's are distinct, overlap neither operand, and nothing else uses them meanwhile.
unsafe fn multiply(
    kernel: Kernel,
    to: Matrix,
    a: Matrix,
    b: Matrix,
    [m, n, k]: [usize; 3],
    accumulate: bool,
) {
    // The kernels write column-major: a row-major output is computed as the product of the transposed operands, transposed.
    let (to, a, b, m, n) = if to.column_stride.abs() < to.row_stride.abs() {
        (to.transposed(), b.transposed(), a.transposed(), n, m)
    } else {
        (to, a, b, m, n)
    };
    // SAFETY: by this function's contract; the processor has the kernel's instructions.
    unsafe {
        kernel(
            m,
            n,
            k,
            to.at as *mut f32,
            to.column_stride,
            to.row_stride,
            accumulate,
            a.at as *const f32,
            a.column_stride,
            a.row_stride,
            b.at as *const f32,
            b.column_stride,
            b.row_stride,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Minimum rows and columns of an output whose bits do not depend on the number of threads.
pub const MIN_DIMENSION: i64 = 32;

type Kernel = unsafe fn(
    usize,
    usize,
    usize,
    *mut f32,
    isize,
    isize,
    bool,
    *const f32,
    isize,
    isize,
    *const f32,
    isize,
    isize,
    f32,
    f32,
    bool,
    bool,
    bool,
    Parallelism,
);

/// The crate itself chooses the processor's widest instructions; a narrower choice is built here from the crate's parts.
fn kernel() -> Kernel {
    match simd() {
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 if Simd::Avx512.is_there() => narrower::avx2,
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        Simd::Scalar => narrower::scalar,
        _ => gemm_f32::gemm::f32::get_gemm_fn(),
    }
}
