//! Matrix products into a given output, with accumulation in fp32.
//!
//! out[m, n] = a[m, k]·b[k, n], or out += a·b. Beyond libtorch's `mm`:
//! - accumulation in fp32 of products of bf16 or fp16 operands, so that a gradient summed over tiles is rounded once;
//! - on the CPU, products of bf16 into fp32 by the processor's own instructions where these are faster
//!   ([`processor::multiplies_into_fp32`]), with bits that depend on k alone;
//! - on the CPU, low-precision products at fp32 speed if the processor's own are slower ([`processor`] decides): tiles of the
//!   operands are cast up while they are in the cache, multiplied in fp32, and rounded once. This allocates nothing either, and
//!   operands and output may have different dtypes;
//! - on the CPU, fp32 products by the `gemm` crate, divided among libtorch's threads here. One thread runs at 0.95–1.03 of MKL's
//!   rate on an Intel Xeon with AVX-512, at up to 1.1 of it on an AMD Zen 4, and at twice it on a Zen 5, where MKL keeps to AVX2. MKL
//!   uses one thread for a product of 512 rows, this two; MKL's bits depend on the number of threads, these do not;
//! - on the CPU with AVX-512, x·Wᵀ of fewer than 1024 rows by kernels of this crate, which transpose the weight 16 × 16 elements at a
//!   time: 0.8–1.1 of MKL's rate at 128 rows on the Intel Xeon, where the `gemm` crate runs at 0.53–0.87.
//!
//! A product whose output has fewer than 32 rows or columns, and whose operands have dense rows or columns, is libtorch's on every
//! processor: MKL is up to twice as fast there. Such results may depend on the number of threads. No fp32 product on the CPU
//! allocates memory.
//!
//! Nothing here is recorded by autograd: the caller is a hand-written function, or needs no gradients.

mod matrix;
mod operators;

use runtime::device::graph::operators_only;
use runtime::ops::{mm_of_rows, mm_out, scale_};
use runtime::profile::{Flops, is_counting, kernel, record_external};
use runtime::tensor_layout::TensorLayout;
use runtime::{Error, Result};
use tch::{Device, Kind, Tensor};

use crate::gemm::gemm_f32;
use crate::gpu;
use crate::operands::{Access, Operands};
use crate::processor;
use crate::quantized::{self, is_quantized_layout};

pub use crate::gemm::MIN_DIMENSION;
pub use matrix::Matrix;
use matrix::rows;

/// Maximum number of vectors of [`matvec`]: from about ten, arithmetic takes as long as reading the weights, unless AMX's tiles multiply.
pub const FEW: i64 = 16;
/// [`matvec`] leaves weights with fewer elements to libtorch, whose call is cheaper.
const SMALL: i64 = 1 << 12;

/// Computes `out = a·b`; with `accumulate`, `out += a·b`.
///
/// Shapes: `out [m, n]`, or contiguous `[…, n]` of m rows, `a [m, k]`, `b [k, n]`, of any strides (`out` row- or column-major), all on one
/// device. `a` and `b` have
/// one dtype; `out` has the same, or is fp32 for bf16 and fp16 operands. On the CPU each of the three may be in fp32, bf16 or fp16: if
/// they differ, products and sums are in fp32. With `k = 0` the product is zero.
///
/// # Errors
/// Shapes, dtypes or devices that do not match; an output that shares memory with an operand; operands that require a
/// gradient while gradients are recorded; a choice of [`processor`] that this machine does not support.
pub fn mm_into<'a, 'b>(
    out: &mut Tensor,
    a: impl Into<Matrix<'a>>,
    b: impl Into<Matrix<'b>>,
    accumulate: bool,
) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    let matrices = Matrices::of(out, a.layout()?, b.layout()?)?;
    multiply(out, a, b, accumulate, &matrices)
}

/// [`mm_into`] of matrices that are checked.
fn multiply(
    out: &mut Tensor,
    a: Matrix<'_>,
    b: Matrix<'_>,
    accumulate: bool,
    matrices: &Matrices,
) -> Result<()> {
    let _ = processor::choices()?;
    let [m, n, k] = matrices.dimensions();
    if m * n == 0 {
        return Ok(());
    }
    if k == 0 {
        if !accumulate {
            let _ = out.f_zero_()?;
        }
        return Ok(());
    }
    let are_of_one_operator = matrices.are_of_one_operator();
    if are_of_one_operator && needs_no_view(&matrices.a, &matrices.b) {
        return mm_of_rows(out, (a.tensor, a.is_transposed), (b.tensor, b.is_transposed), accumulate);
    }
    let (a, b) = (&*a.view()?, &*b.view()?);
    // Contiguous, if it is no matrix.
    let mut view = rows(out)?.into_tensor();
    let out = &mut view;
    if are_of_one_operator {
        return mm_out(out, a, b, accumulate);
    }
    let widens = matrices.out.kind() == Kind::Float && matrices.a.kind() != Kind::Float;
    let device = matrices.out.device();
    if device.is_cuda() && widens {
        return operators::mm_widened(out, a, b, accumulate);
    }
    if operators_only() {
        return operators::mm_cast(out, a, b, accumulate);
    }
    // The CPU's libtorch lacks the operator that stands for this product on a GPU.
    let name = match (widens && gpu::is_chosen(device), accumulate) {
        (true, true) => "aten::addmm",
        (true, false) => "aten::mm",
        _ => "runtime::mm",
    };
    in_fp32(name, out, a, b, accumulate, matrices)
}

/// Returns `a·b` in a new tensor of the operands' dtype. See [`mm_into`].
///
/// # Errors
/// As [`mm_into`].
pub fn mm<'a, 'b>(a: impl Into<Matrix<'a>>, b: impl Into<Matrix<'b>>) -> Result<Tensor> {
    let (a, b) = (a.into(), b.into());
    product(a, b, a.layout()?, b.layout()?)
}

/// [`mm`] of matrices of these layouts.
fn product(a: Matrix<'_>, b: Matrix<'_>, left: TensorLayout, right: TensorLayout) -> Result<Tensor> {
    let (Some(&m), Some(&n)) = (left.size().first(), right.size().last()) else {
        return Err(Error::invalid("matrix product", "a scalar is not a matrix"));
    };
    let options = (left.kind(), left.device());
    if is_of_one_operator(&left, &right) {
        let _ = processor::choices()?;
        if !needs_no_view(&left, &right) {
            let (a, b) = (a.view()?, b.view()?);
            return Ok(a.f_mm(&b)?);
        }
        let mut out = Tensor::f_empty([m, n], options)?;
        mm_of_rows(&mut out, (a.tensor, a.is_transposed), (b.tensor, b.is_transposed), false)?;
        return Ok(out);
    }
    let mut out = Tensor::f_empty([m, n], options)?;
    let matrices = Matrices::of(&out, left, right)?;
    multiply(&mut out, a, b, false, &matrices)?;
    Ok(out)
}

/// Returns whether libtorch's product reads these operands without a view of them: on a CPU, where no recording or counter has to see the
/// operators of views.
fn needs_no_view(a: &TensorLayout, b: &TensorLayout) -> bool {
    let device = a.device();
    let is_plain = !a.is_neg() && !b.is_neg();
    is_plain && processor::computes_on(device) && !gpu::is_chosen(device) && !is_counting()
}

/// Returns `factor·a·b` in a new tensor of the operands' dtype: one launch on a GPU, a product and a pass over it on a CPU. See
/// [`mm_into`].
///
/// # Errors
/// As [`mm_into`].
pub fn mm_scaled<'a, 'b>(a: impl Into<Matrix<'a>>, b: impl Into<Matrix<'b>>, factor: f64) -> Result<Tensor> {
    let (a, b) = (a.into(), b.into());
    let (left, right) = (a.layout()?, b.layout()?);
    if factor == 1.0 {
        return product(a, b, left, right);
    }
    if let (&[m, k], &[_, n]) = (left.size(), right.size())
        && gpu::is_chosen(left.device())
        && m * n * k > 0
    {
        let out = Tensor::f_empty([m, n], (left.kind(), left.device()))?;
        Matrices::of(&out, left, right)?;
        operators::mm_scaled(&out, &*a.view()?, &*b.view()?, factor)?;
        return Ok(out);
    }
    let mut product = product(a, b, left, right)?;
    scale_(&mut product, factor)?;
    Ok(product)
}

/// Computes `out = factor·a·b` for an output of the operands' dtype. See [`mm_scaled`].
///
/// # Errors
/// As [`mm_into`].
pub fn mm_scaled_into(out: &mut Tensor, a: &Tensor, b: &Tensor, factor: f64) -> Result<()> {
    let matrices = Matrices::of(out, TensorLayout::of(a)?, TensorLayout::of(b)?)?;
    let [m, n, k] = matrices.dimensions();
    if factor != 1.0 && gpu::is_chosen(matrices.out.device()) && m * n * k > 0 {
        return operators::mm_scaled(out, a, b, factor);
    }
    multiply(out, a.into(), b.into(), false, &matrices)?;
    if factor != 1.0 {
        scale_(out, factor)?;
    }
    Ok(())
}

/// Returns `a·b` in a new tensor of fp32, f64 for f64: a product of 16 bits is not rounded to them. See [`mm_into`].
///
/// # Errors
/// As [`mm_into`].
pub fn mm_widened(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (left, right) = (TensorLayout::of(a)?, TensorLayout::of(b)?);
    let kind = wide_kind(left.kind());
    if kind == left.kind() {
        return product(a.into(), b.into(), left, right);
    }
    let (Some(&m), Some(&n)) = (left.size().first(), right.size().last()) else {
        return Err(Error::invalid("matrix product", "a scalar is not a matrix"));
    };
    let mut out = Tensor::f_empty([m, n], (kind, left.device()))?;
    let matrices = Matrices::of(&out, left, right)?;
    multiply(&mut out, a.into(), b.into(), false, &matrices)?;
    Ok(out)
}

/// Returns the dtype of sums of products of `kind` that are not rounded to it: fp32, f64 for f64.
pub fn wide_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Returns the dtype in which products of `kind` run on `device` at full speed: `kind` itself, or fp32 for bf16 and
/// fp16 on a processor whose own instructions are slower ([`processor::multiplies_low_precision`]).
pub fn compute_kind(device: Device, kind: Kind) -> Kind {
    let casts = processor::computes_on(device) && !gpu::is_chosen(device);
    if casts && !processor::multiplies_low_precision(kind) { Kind::Float } else { kind }
}

/// Returns whether [`matvec`] may be faster than libtorch's product with this weight.
pub(crate) fn is_matvec(layout: &TensorLayout) -> bool {
    layout.numel() as i64 >= SMALL || is_quantized_layout(layout)
}

/// Computes `x·Wᵀ + b` for a few vectors `x [vectors, in]`, with `weight [out, in]` and `bias [out]`, in `x`'s dtype; `None` if
/// libtorch's product is as fast.
///
/// A matrix that multiplies one vector is read once, so reading it takes all the time: weights are read in their stored dtype, fp32
/// or bf16, and summed in fp32, rounded once. So weights in bf16 take half the time, and those in NF4 ([`quantized`]) an eighth. It is for the CPU,
/// at most [`FEW`] vectors, `x` in fp32 or bf16, and weights of 4,096 elements or more.
///
/// # Errors
/// Shapes that do not match; operands that require a gradient while gradients are recorded.
pub fn matvec(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    let layouts = (TensorLayout::of(x)?, TensorLayout::of(weight)?, bias.map(TensorLayout::of).transpose()?);
    let (of_x, of_weight, of_bias) = (&layouts.0, &layouts.1, layouts.2.as_ref());
    let is_quantized = is_quantized_layout(of_weight);
    let stored = match of_weight.size() {
        &[out, width] if !is_quantized => Some([out, width]),
        _ => quantized::matrix_shape(weight),
    };
    let (&[vectors, width], Some([out, stored])) = (of_x.size(), stored) else {
        return Err(Error::invalid(
            "matrix-vector product",
            format!("x is {:?} and the weight {:?}; expected matrices", of_x.size(), of_weight.size()),
        ));
    };
    if width != stored || of_bias.is_some_and(|bias| bias.size() != [out]) {
        let reason = format!(
            "x is {:?}, the weight {:?}, the bias {:?}; expected [vectors, in], [out, in], [out]",
            of_x.size(),
            [out, stored],
            bias.map(Tensor::size)
        );
        return Err(Error::invalid("matrix-vector product", reason));
    }
    let all = || [Some(of_x), Some(of_weight), of_bias].into_iter().flatten();
    if all().any(TensorLayout::is_recorded) {
        return Err(Error::invalid(
            "matrix-vector product",
            "an operand requires a gradient, which is not recorded here; use Tensor::linear",
        ));
    }
    if is_quantized {
        let kind = of_x.kind();
        let Some(product) = quantized::few_vectors(x, weight, bias, kind)? else { return Ok(None) };
        return Ok(Some(product.f_to_kind(kind)?));
    }
    let on_cpu = all().all(|one| one.device() == Device::Cpu);
    let dtypes = matches!(
        (of_x.kind(), of_weight.kind()),
        (Kind::Float | Kind::BFloat16, Kind::BFloat16) | (Kind::Float, Kind::Float)
    );
    if !on_cpu || operators_only() || !dtypes || !(1..=FEW).contains(&vectors) || out * width < SMALL {
        return Ok(None);
    }
    let scope = kernel("runtime::matvec", [x, weight]);
    let Some(product) = crate::matvec::matvec(x, weight, bias)? else { return Ok(None) };
    drop(scope);
    let flops = Flops::from((2 * vectors * out * width) as u64);
    record_external("runtime::matvec", flops, of_weight.bytes() as u64)?;
    Ok(Some(product))
}

/// [`mm_into`] on the CPU in fp32, as an operator called `name`, with operands and an output each in fp32, bf16 or fp16.
fn in_fp32(
    name: &str,
    out: &mut Tensor,
    a: &Tensor,
    b: &Tensor,
    accumulate: bool,
    matrices: &Matrices,
) -> Result<()> {
    if matrices.a.is_neg() || matrices.b.is_neg() {
        let (a, b) = (&a.f_resolve_neg()?, &b.f_resolve_neg()?);
        let (left, right) = (TensorLayout::of(a)?, TensorLayout::of(b)?);
        return in_fp32(
            name,
            out,
            a,
            b,
            accumulate,
            &Matrices { out: matrices.out.clone(), a: left, b: right },
        );
    }
    let _scope = kernel(name, [a, b]);
    let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
    gemm_f32(out, [&matrices.out, &matrices.a, &matrices.b], accumulate, threads)?;
    if !is_counting() {
        return Ok(());
    }
    let [m, n, k] = matrices.dimensions();
    let flops = u64::try_from(2 * m * n * k).unwrap_or(u64::MAX);
    let written = matrices.out.bytes() * if accumulate { 2 } else { 1 };
    let bytes = matrices.a.bytes() + matrices.b.bytes() + written;
    record_external(name, Flops::from(flops), u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// The layouts of the matrices of one product.
struct Matrices {
    out: TensorLayout,
    a: TensorLayout,
    b: TensorLayout,
}

impl Matrices {
    /// Describes the matrices of a product into `out`, and checks them.
    fn of(out: &Tensor, a: TensorLayout, b: TensorLayout) -> Result<Self> {
        let out = TensorLayout::of(out)?;
        let matrices = Self { out: out.clone().rows().unwrap_or(out), a, b };
        matrices.check()?;
        Ok(matrices)
    }

    /// Refuses matrices that [`mm_into`] cannot multiply.
    fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::invalid("matrix product", reason));
        let Self { out, a, b } = self;
        let (o, l, r) = (out.size(), a.size(), b.size());
        let fits = matches!((o, l, r), (&[m, n], &[m2, k], &[k2, n2]) if m == m2 && n == n2 && k == k2);
        if !fits {
            return refuse(format!("{l:?} times {r:?} into {o:?}; expected [m, k] times [k, n] into [m, n]"));
        }
        if a.device() != out.device() || b.device() != out.device() {
            return refuse(format!(
                "operands on {:?} and {:?}, output on {:?}; move them to one",
                a.device(),
                b.device(),
                out.device()
            ));
        }
        let kinds = (a.kind(), b.kind(), out.kind());
        let low = |kind| matches!(kind, Kind::BFloat16 | Kind::Half);
        let one_kind = kinds.0 == kinds.1 && (kinds.2 == kinds.0 || low(kinds.0) && kinds.2 == Kind::Float);
        let supported = low(kinds.0) || matches!(kinds.0, Kind::Float | Kind::Double);
        let mixes = [kinds.0, kinds.1, kinds.2].into_iter().all(|kind| kind == Kind::Float || low(kind));
        if !(supported && one_kind || mixes && out.device() == Device::Cpu && !gpu::is_chosen(out.device())) {
            return refuse(format!(
                "{:?} times {:?} into {:?}; expected one floating dtype, or Float for products of BFloat16 or Half, or on the \
                 CPU each of these three",
                kinds.0, kinds.1, kinds.2
            ));
        }
        if out.is_neg() {
            return refuse("the output is a lazily negated view; give it memory of its own".to_owned());
        }
        if [out, a, b].into_iter().any(|matrix| !matrix.is_strided()) {
            return refuse("an operand or the output is sparse; make it dense".to_owned());
        }
        let mut operands = Operands::new("matrix product", out.device());
        operands.unchecked(Access::Read, "a", a)?;
        operands.unchecked(Access::Read, "b", b)?;
        operands.unchecked(Access::Write, "out", out)?;
        operands.check()?;
        if [out, a, b].into_iter().any(TensorLayout::is_recorded) {
            return refuse(
                "an operand requires a gradient, which is not recorded here; use Tensor::matmul".to_owned(),
            );
        }
        Ok(())
    }

    /// Returns whether libtorch's operator computes the product in the matrices' own dtype.
    fn are_of_one_operator(&self) -> bool {
        let kinds = [&self.out, &self.a, &self.b].map(TensorLayout::kind);
        let one_kind = kinds[0] == kinds[1] && kinds[0] == kinds[2];
        one_kind && kinds[0] == compute_kind(self.out.device(), kinds[0]) && !self.need_fp32_gemm()
    }

    /// Returns m, n and k of `[m, k]` times `[k, n]`.
    fn dimensions(&self) -> [i64; 3] {
        [self.out.size()[0], self.out.size()[1], self.a.size()[1]]
    }

    /// Returns whether this crate's own product serves matrices in fp32 better than libtorch's: not for small ones.
    fn need_fp32_gemm(&self) -> bool {
        let [m, n, _] = self.dimensions();
        let fp32_on_cpu = processor::computes_on(self.out.device()) && self.out.kind() == Kind::Float;
        fp32_on_cpu && (m.min(n) >= MIN_DIMENSION || !(is_dense(&self.a) && is_dense(&self.b)))
    }
}

/// Returns whether libtorch's operator computes the product of these matrices, which [`mm_into`] takes, into an output of their dtype.
fn is_of_one_operator(a: &TensorLayout, b: &TensorLayout) -> bool {
    let (&[m, k], &[k2, n]) = (a.size(), b.size()) else { return false };
    let (device, kind) = (a.device(), a.kind());
    let floating = matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half);
    let alike = k == k2 && (b.device(), b.kind()) == (device, kind);
    let plain = [a, b].into_iter().all(|matrix| matrix.is_strided() && !matrix.is_recorded());
    let in_fp32 = device == Device::Cpu
        && kind == Kind::Float
        && (m.min(n) >= MIN_DIMENSION || !(is_dense(a) && is_dense(b)));
    floating && alike && plain && m * n * k > 0 && kind == compute_kind(device, kind) && !in_fp32
}

/// Returns whether rows or columns are dense, so that a BLAS reads them directly. libtorch copies other operands first, such as the
/// expanded gradient of a sum.
fn is_dense(matrix: &TensorLayout) -> bool {
    let (&[rows, columns], &[row, column]) = (matrix.size(), matrix.stride()) else { return false };
    column == 1 && row >= columns.max(1) || row == 1 && column >= rows.max(1)
}

#[cfg(test)]
mod tests;
