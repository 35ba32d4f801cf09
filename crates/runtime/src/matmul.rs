//! Matrix products into a given output, in the precision that is asked for.
//!
//! out[m, n] = a[m, k]·b[k, n], or out += a·b. What libtorch's own `mm` lacks:
//! - accumulation in fp32 of products of bf16 or fp16 operands, so that a gradient summed over tiles is rounded once;
//! - on the CPU, low-precision products at fp32 speed where the processor is slower with its own
//!   ([`processor`] decides): the operands are cast up, multiplied in fp32, and rounded once;
//! - on the CPU, fp32 products by the `gemm` crate, divided among libtorch's threads here. One thread of it runs at 0.95–1.03
//!   of MKL's rate on an Intel Xeon with AVX-512, and at up to 1.1 of it on an AMD Zen 4. MKL leaves a product of 512 rows to one
//!   thread where this takes two; MKL's bits depend on the number of threads, and these do not.
//!
//! A product whose output has fewer than 32 rows or columns is libtorch's on every processor, where its operands' rows or columns lie
//! dense: MKL is up to twice as fast there. Such results may depend on the number of threads. No fp32 product on the CPU allocates
//! memory.
//!
//! Nothing here is recorded: the caller is a hand-written function, or does not need gradients.

use tch::{Device, Kind, Tensor};

use crate::autograd::GradMode;
use crate::error::{Error, Result};
use crate::processor;
use crate::profile::{Flops, kernel, record_external};
use crate::sys::gemm::{SHORTEST, gemm_f32};
use crate::sys::tensor::memory_range;

/// Vectors that [`matvec`] takes: from some ten on, arithmetic counts as much as the weights' bytes.
pub const FEW: i64 = 16;
/// Weights with fewer elements are left to libtorch by [`matvec`]: its call is cheaper.
const SMALL: i64 = 1 << 18;

/// `out = a·b`; with `accumulate`, `out += a·b`.
///
/// Shapes: `out [m, n]`, `a [m, k]`, `b [k, n]`, of any strides (`out` row- or column-major), all on one device. `a` and
/// `b` have one dtype; `out` has it too, or is fp32 while they are bf16 or fp16. With `k = 0` the product is zero.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit together; an output that shares memory with an operand; operands that
/// require a gradient while gradients are recorded; a choice of [`processor`] that this machine cannot take.
pub fn mm_into(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    check(out, a, b)?;
    let _ = processor::choices()?;
    if out.numel() == 0 {
        return Ok(());
    }
    if a.size()[1] == 0 {
        if !accumulate {
            let _ = out.f_zero_()?;
        }
        return Ok(());
    }
    let kind = a.kind();
    if kind == out.kind() && (kind == compute_kind(out.device(), kind)) {
        return same_kind(out, a, b, accumulate);
    }
    if out.device().is_cuda() && out.kind() == Kind::Float {
        return crate::ops::matmul::mm_widened(out, a, b, accumulate);
    }
    let (a, b) = (a.f_to_kind(Kind::Float)?, b.f_to_kind(Kind::Float)?);
    if out.kind() == Kind::Float {
        return same_kind(out, &a, &b, accumulate);
    }
    let mut product = if accumulate {
        out.f_to_kind(Kind::Float)?
    } else {
        Tensor::f_empty(out.size(), (Kind::Float, out.device()))?
    };
    same_kind(&mut product, &a, &b, accumulate)?;
    out.f_copy_(&product)?;
    Ok(())
}

/// `a·b` in a new tensor of the operands' dtype. See [`mm_into`].
///
/// # Errors
/// As [`mm_into`].
pub fn mm(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (Some(&m), Some(&n)) = (a.size().first(), b.size().last()) else {
        return Err(Error::invalid("matrix product", "a scalar is not a matrix"));
    };
    let mut out = Tensor::f_empty([m, n], (a.kind(), a.device()))?;
    mm_into(&mut out, a, b, false)?;
    Ok(out)
}

/// The dtype in which products of `kind` run on `device` at full speed: `kind` itself, or fp32 for bf16 and fp16 on a
/// processor that is slower with its own instructions ([`processor::multiplies_low_precision`]).
pub fn compute_kind(device: Device, kind: Kind) -> Kind {
    if device == Device::Cpu && !processor::multiplies_low_precision(kind) { Kind::Float } else { kind }
}

/// `x·Wᵀ + b` for a few vectors `x [vectors, in]`, with `weight [out, in]` and `bias [out]`, in `x`'s dtype; `None` where this has
/// nothing to gain over libtorch's product, which the caller then takes.
///
/// A matrix that multiplies one vector is read once and used once, so its bytes are the time: weights are read as they are
/// stored, fp32 or bf16, and the sums are in fp32, rounded once. So weights in bf16 are as fast as their half of the bytes. It
/// is for the CPU, [`FEW`] vectors at most, `x` fp32 or bf16, and weights of a size that counts.
///
/// # Errors
/// Shapes that do not fit; operands that require a gradient while gradients are recorded.
pub fn matvec(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
    let (&[vectors, width], &[out, stored]) = (&x.size()[..], &weight.size()[..]) else {
        return Err(Error::invalid(
            "matrix-vector product",
            format!("x is {:?} and the weight {:?}; expected matrices", x.size(), weight.size()),
        ));
    };
    if width != stored || bias.is_some_and(|bias| bias.size() != [out]) {
        let reason = format!(
            "x is {:?}, the weight {:?}, the bias {:?}; expected [vectors, in], [out, in], [out]",
            x.size(),
            weight.size(),
            bias.map(Tensor::size)
        );
        return Err(Error::invalid("matrix-vector product", reason));
    }
    if GradMode::enabled() && [Some(x), Some(weight), bias].into_iter().flatten().any(Tensor::requires_grad) {
        return Err(Error::invalid(
            "matrix-vector product",
            "an operand requires a gradient, which is not recorded here; use Tensor::linear",
        ));
    }
    let on_cpu = [x, weight].iter().all(|tensor| tensor.device() == Device::Cpu);
    let dtypes = matches!(
        (x.kind(), weight.kind()),
        (Kind::Float | Kind::BFloat16, Kind::BFloat16) | (Kind::Float, Kind::Float)
    );
    if !on_cpu || !dtypes || !(1..=FEW).contains(&vectors) || out * width < SMALL {
        return Ok(None);
    }
    let scope = kernel("runtime::matvec");
    let Some(mut product) = crate::sys::matvec::matvec(x, weight)? else { return Ok(None) };
    if let Some(bias) = bias {
        let _ = product.f_add_(bias)?;
    }
    drop(scope);
    let bytes = weight.numel() * weight.kind().elt_size_in_bytes();
    record_external("runtime::matvec", Flops::from((2 * vectors * out * width) as u64), bytes as u64)?;
    Ok(Some(product.f_to_kind(x.kind())?))
}

fn same_kind(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool) -> Result<()> {
    let (m, n, k) = (out.size()[0], out.size()[1], a.size()[1]);
    let fp32_on_cpu = out.device() == Device::Cpu && out.kind() == Kind::Float;
    if fp32_on_cpu && (m.min(n) >= SHORTEST || ![a, b].into_iter().all(is_dense)) {
        // A tensor may be a view that says "negated" instead of holding the values.
        let (a, b) = (&a.f_resolve_neg()?, &b.f_resolve_neg()?);
        let _scope = kernel("runtime::mm");
        gemm_f32(out, a, b, accumulate, usize::try_from(tch::get_num_threads()).unwrap_or(1))?;
        let flops = u64::try_from(2 * m * n * k).unwrap_or(u64::MAX);
        let elements = m * k + k * n + m * n * if accumulate { 2 } else { 1 };
        return record_external(
            "runtime::mm",
            Flops::from(flops),
            4 * u64::try_from(elements).unwrap_or(u64::MAX / 4),
        );
    }
    if accumulate {
        let _ = out.f_addmm_(a, b)?;
    } else {
        let _ = a.f_mm_out(out, b)?;
    }
    Ok(())
}

/// Whether rows or columns lie dense, so that a BLAS reads them where they are. libtorch copies other operands first, such as
/// the expanded gradient of a sum.
fn is_dense(matrix: &Tensor) -> bool {
    let (&[rows, columns], &[row, column]) = (&matrix.size()[..], &matrix.stride()[..]) else { return false };
    column == 1 && row >= columns.max(1) || row == 1 && column >= rows.max(1)
}

fn check(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    let refuse = |reason: String| Err(Error::invalid("matrix product", reason));
    let (o, l, r) = (out.size(), a.size(), b.size());
    let fits =
        matches!((&o[..], &l[..], &r[..]), (&[m, n], &[m2, k], &[k2, n2]) if m == m2 && n == n2 && k == k2);
    if !fits {
        return refuse(format!("{l:?} times {r:?} into {o:?}; expected [m, k] times [k, n] into [m, n]"));
    }
    if a.device() != out.device() || b.device() != out.device() {
        let devices = (a.device(), b.device(), out.device());
        return refuse(format!(
            "operands on {:?} and {:?}, output on {:?}; move them to one",
            devices.0, devices.1, devices.2
        ));
    }
    let kinds = (a.kind(), b.kind(), out.kind());
    let low = matches!(kinds.0, Kind::BFloat16 | Kind::Half);
    let supported = low || matches!(kinds.0, Kind::Float | Kind::Double);
    if !supported || kinds.0 != kinds.1 || !(kinds.2 == kinds.0 || low && kinds.2 == Kind::Float) {
        return refuse(format!(
            "{:?} times {:?} into {:?}; expected one floating dtype, or Float for products of BFloat16 or Half",
            kinds.0, kinds.1, kinds.2
        ));
    }
    for (name, operand) in [("left", a), ("right", b)] {
        if out.is_sparse() || operand.is_sparse() {
            return refuse("an operand or the output is sparse; make it dense".to_owned());
        }
        let (read, written) = (memory_range(operand)?, memory_range(out)?);
        if read.start < written.end && written.start < read.end {
            return refuse(format!(
                "the output shares memory with the {name} operand; give it memory of its own"
            ));
        }
    }
    if GradMode::enabled() && (a.requires_grad() || b.requires_grad() || out.requires_grad()) {
        return refuse(
            "an operand requires a gradient, which is not recorded here; use Tensor::matmul".to_owned(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both backends, all layouts, against the product in f64.
    #[test]
    fn products_are_right_for_every_layout_dtype_and_backend() {
        tch::manual_seed(1);
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (64, 96, 80), (129, 70, 257)] {
            for (a_transposed, b_transposed) in [(false, false), (true, false), (false, true), (true, true)] {
                for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
                    let make = |rows, columns, transposed: bool| {
                        let tensor = Tensor::randn(
                            if transposed { [columns, rows] } else { [rows, columns] },
                            (Kind::Float, Device::Cpu),
                        )
                        .to_kind(kind);
                        if transposed { tensor.tr() } else { tensor }
                    };
                    let (a, b) = (make(m, k, a_transposed), make(k, n, b_transposed));
                    let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
                    // Of the largest element: half a place of the dtype, and what sums of fp32 lose.
                    let tolerance = exact.abs().max().double_value(&[])
                        * match kind {
                            Kind::Double => 1e-14,
                            Kind::Float => 3e-6,
                            Kind::Half => 5.2e-4,
                            _ => 4.1e-3,
                        };
                    let error = |found: &Tensor, expected: &Tensor| {
                        (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[])
                    };
                    let product = mm(&a, &b).unwrap();
                    assert_eq!(product.kind(), kind);
                    assert!(error(&product, &exact) < tolerance, "{m} {n} {k} {kind:?}");

                    // Into fp32, twice: the sum is as exact as fp32 allows, whatever the operands' dtype.
                    let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
                    let mut sum = Tensor::full([m, n], f64::NAN, (wide, Device::Cpu));
                    mm_into(&mut sum, &a, &b, false).unwrap();
                    mm_into(&mut sum, &a, &b, true).unwrap();
                    assert!(error(&sum, &(exact * 2.0)) < 1e-3, "{m} {n} {k} {kind:?}");
                }
            }
        }
    }

    #[test]
    fn a_window_of_a_larger_output_is_written_and_nothing_else() {
        let whole = Tensor::zeros([64, 200], tch::kind::FLOAT_CPU);
        let (a, b) =
            (Tensor::ones([64, 100], tch::kind::FLOAT_CPU), Tensor::ones([100, 80], tch::kind::FLOAT_CPU));
        mm_into(&mut whole.narrow(1, 60, 80), &a, &b, false).unwrap();
        let expected = Tensor::zeros([64, 200], tch::kind::FLOAT_CPU);
        let _ = expected.narrow(1, 60, 80).fill_(100.0);
        assert_eq!(whole, expected);
    }

    /// The crate's product itself, in shapes that [`mm_into`] leaves to libtorch too.
    #[test]
    fn the_crates_backend_is_right_and_refuses_an_output_whose_elements_coincide() {
        for (m, n, k) in [(1, 1, 5), (1, 70, 33), (70, 1, 33), (130, 65, 40)] {
            let (a, b) =
                (Tensor::randn([m, k], tch::kind::FLOAT_CPU), Tensor::randn([k, n], tch::kind::FLOAT_CPU));
            let mut out = Tensor::full([m, n], f64::NAN, tch::kind::FLOAT_CPU);
            gemm_f32(&mut out, &a, &b, false, 2).unwrap();
            gemm_f32(&mut out, &a, &b, true, 1).unwrap();
            assert!(out.allclose(&(a.matmul(&b) * 2.0), 1e-4, 1e-4, false), "{m} {n} {k}");
        }
        for (m, n) in [(1, 4096), (4096, 1), (64, 64)] {
            let (a, b) =
                (Tensor::ones([m, 64], tch::kind::FLOAT_CPU), Tensor::ones([64, n], tch::kind::FLOAT_CPU));
            let mut out = Tensor::zeros([1, 1], tch::kind::FLOAT_CPU).expand([m, n], false);
            assert!(gemm_f32(&mut out, &a, &b, false, 2).is_err(), "{m} {n}");
        }
    }

    /// Every division of every layout: shapes whose last part is short, long sums, parts that begin anywhere.
    #[test]
    fn products_from_32_rows_and_columns_on_are_the_same_bits_for_any_number_of_threads() {
        let mut random = crate::random::Generator::new(5).unwrap();
        let mut normal = |shape: [i64; 2]| random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap();
        for (m, n, k) in
            [(32, 32, 1), (32, 129, 2), (130, 33, 3000), (65, 1031, 300), (300, 65, 1031), (2100, 40, 7)]
        {
            for transposed in [(false, false), (true, false), (false, true), (true, true)] {
                let a = if transposed.0 { normal([k, m]).tr() } else { normal([m, k]) };
                let b = if transposed.1 { normal([n, k]).tr() } else { normal([k, n]) };
                let mut results = [1, 2, 3, 5, 64].map(|threads| {
                    let mut out = Tensor::zeros([m, n], (Kind::Float, Device::Cpu));
                    gemm_f32(&mut out, &a, &b, false, threads).unwrap();
                    gemm_f32(&mut out, &a, &b, true, threads).unwrap();
                    out
                });
                let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double)) * 2.0;
                let error = (results[0].to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
                assert!(error < 1e-5 * (k as f64), "{m} {n} {k} {transposed:?}: {error}");
                let one = results[0].shallow_clone();
                for (found, threads) in results.iter_mut().zip([1, 2, 3, 5, 64]) {
                    assert!(found.equal(&one), "{m} {n} {k} {transposed:?}: {threads} threads");
                }
            }
        }
    }

    #[test]
    fn a_product_of_expanded_operands_is_right_and_allocates_nothing() {
        crate::memory::track_cpu().unwrap();
        let ones = Tensor::from(2.0f32).expand([28, 64], false);
        let (wide, deep) =
            (Tensor::ones([64, 200], tch::kind::FLOAT_CPU), Tensor::ones([28, 90], tch::kind::FLOAT_CPU));
        for (a, b, expected) in [(ones.shallow_clone(), wide, 128.0), (ones.tr(), deep, 56.0)] {
            let mut out = Tensor::zeros([a.size()[0], b.size()[1]], tch::kind::FLOAT_CPU);
            let region = crate::memory::Region::start(Device::Cpu).unwrap();
            mm_into(&mut out, &a, &b, false).unwrap();
            assert_eq!(region.finish().unwrap().peak_above_start(), 0);
            assert_eq!((out.min().double_value(&[]), out.max().double_value(&[])), (expected, expected));
        }
    }

    #[test]
    fn a_raw_write_counts_as_an_in_place_change() {
        let weight = Tensor::randn([128, 128], tch::kind::FLOAT_CPU);
        let x = Tensor::randn([128, 128], tch::kind::FLOAT_CPU).set_requires_grad(true);
        let y = x.matmul(&weight);
        let (a, b) = (
            Tensor::randn([128, 128], tch::kind::FLOAT_CPU),
            Tensor::randn([128, 128], tch::kind::FLOAT_CPU),
        );
        mm_into(&mut weight.shallow_clone(), &a, &b, false).unwrap();
        let error = crate::autograd::backward(&[&y.sum(Kind::Float)]).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
    }

    /// Every number of vectors, rows that do not divide into streams or tasks, columns that do not fill registers, windows of
    /// larger matrices: against the product in f64 of the very same numbers.
    #[test]
    fn a_few_vectors_by_stored_weights_are_right_to_one_rounding() {
        let mut random = crate::random::Generator::new(3).unwrap();
        let mut normal =
            |shape: [i64; 2], kind| random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(kind);
        for (out, width) in [(4099, 64), (2053, 128), (300, 898), (3, 100_002), (1, 1 << 18)] {
            for (x_kind, kind) in
                [(Kind::Float, Kind::Float), (Kind::BFloat16, Kind::BFloat16), (Kind::Float, Kind::BFloat16)]
            {
                let weight = normal([out, width + 6], kind).narrow(1, 4, width);
                let bias = normal([1, out], kind).view([out]);
                for vectors in [1, 2, 3, 4, 5, FEW] {
                    let x = normal([vectors, width], x_kind);
                    let wide = |t: &Tensor| t.to_kind(Kind::Double);
                    let exact = wide(&x).matmul(&wide(&weight).tr()) + wide(&bias);
                    let found = matvec(&x, &weight, Some(&bias)).unwrap().unwrap();
                    assert_eq!((found.kind(), found.size()), (x_kind, vec![vectors, out]));
                    // One rounding of the result, and those of a sum in fp32 of `width` products of about 1: far below one product.
                    let rounding = if x_kind == Kind::Float { 2f64.powi(-24) } else { 2f64.powi(-8) };
                    // One lane adds up all of a row where a vector has one, and rounds the products.
                    let lanes = if processor::simd() == processor::Simd::Scalar { 4.0 } else { 1.0 };
                    let allowed = exact.abs() * rounding * 1.01 + lanes * width as f64 * 2f64.powi(-23);
                    let share = ((wide(&found) - exact).abs() / allowed).max().double_value(&[]);
                    assert!(share <= 1.0, "{vectors} x {out} x {width} {kind:?}: {share} of what is allowed");
                }
            }
        }
    }

    #[test]
    fn what_has_nothing_to_gain_is_left_to_libtorch() {
        let t = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cpu));
        let large = t([1024, 512], Kind::BFloat16);
        let left = |x: Tensor, weight: &Tensor| matvec(&x, weight, None).unwrap().is_none();
        assert!(!left(t([1, 512], Kind::BFloat16), &large));
        assert!(left(t([FEW + 1, 512], Kind::BFloat16), &large), "many vectors");
        assert!(left(t([1, 512], Kind::BFloat16), &large.narrow(0, 0, 8)), "few weights");
        assert!(left(t([1, 1024], Kind::BFloat16), &large.tr()), "columns that are not dense");
        assert!(left(t([1, 511], Kind::BFloat16), &large.narrow(1, 1, 511)), "half a word");
        assert!(left(t([1, 512], Kind::Half), &large.to_kind(Kind::Half)), "fp16");
    }

    #[test]
    fn misuse_is_refused_by_name() {
        let t = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cpu));
        let float = |m, n| t([m, n], Kind::Float);
        let square = float(128, 128);
        let cases = [
            (
                float(2, 2),
                float(2, 3),
                float(4, 2),
                "[2, 3] times [4, 2] into [2, 2]; expected [m, k] times [k, n] into",
            ),
            (
                float(2, 2),
                t([2, 2], Kind::Int),
                t([2, 2], Kind::Int),
                "Int times Int into Float; expected one floating",
            ),
            (
                t([2, 2], Kind::Half),
                float(2, 2),
                float(2, 2),
                "Float times Float into Half; expected one floating",
            ),
            (
                float(2, 2),
                float(2, 2).set_requires_grad(true),
                float(2, 2),
                "requires a gradient, which is not recorded",
            ),
            (square.shallow_clone(), square.shallow_clone(), float(128, 128), "shares memory"),
        ];
        for (mut out, a, b, message) in cases {
            let error = mm_into(&mut out, &a, &b, false).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
