use super::*;

/// The products behind [`mm_into`].
fn gemm(out: &mut Tensor, a: &Tensor, b: &Tensor, accumulate: bool, threads: usize) -> Result<()> {
    let layouts = [&*out, a, b].map(|tensor| TensorLayout::of(tensor).unwrap());
    gemm_f32(out, layouts.each_ref(), accumulate, threads)
}

/// Both backends, all layouts, against the product in f64.
#[test]
fn products_are_correct_for_every_layout_dtype_and_backend() {
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
                // Relative to the largest element: half a unit in the last place of the dtype, and the rounding of
                // fp32 sums.
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

/// By a pass over the product, and in one operator, as on a GPU.
#[test]
fn a_scaled_product_is_that_of_the_unscaled_one_times_the_factor() {
    let mut generator = runtime::random::Generator::new(4).unwrap();
    for (m, n, k) in [(1, 1, 1), (40, 8, 33), (64, 96, 80), (0, 3, 2), (3, 2, 0)] {
        for kind in [Kind::Float, Kind::Double] {
            let a = generator.normal(&[m, k], (kind, Device::Cpu)).unwrap();
            let b = generator.normal(&[n, k], (kind, Device::Cpu)).unwrap().tr();
            for factor in [1.0, 2.0, -0.3, 0.0] {
                let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double)) * factor;
                let one = Tensor::full([m, n], f64::NAN, (kind, Device::Cpu));
                super::operators::mm_scaled(&one, &a, &b, factor).unwrap();
                for found in [mm_scaled(&a, &b, factor).unwrap(), one] {
                    assert_eq!((found.size(), found.kind()), (vec![m, n], kind));
                    let allowed = if kind == Kind::Double { 1e-13 } else { 1e-5 };
                    let worst = (found.to_kind(Kind::Double) - &exact).abs();
                    let close =
                        worst.numel() == 0 || worst.max().double_value(&[]) <= allowed * (k as f64).sqrt();
                    assert!(close, "{m} {n} {k} {kind:?}, factor {factor}");
                }
            }
        }
    }
    assert!(
        mm_scaled(
            &Tensor::zeros([2, 3], tch::kind::FLOAT_CPU),
            &Tensor::zeros([2, 3], tch::kind::FLOAT_CPU),
            2.0
        )
        .is_err()
    );
}

#[test]
fn only_the_output_view_is_written() {
    let whole = Tensor::zeros([64, 200], tch::kind::FLOAT_CPU);
    let (a, b) =
        (Tensor::ones([64, 100], tch::kind::FLOAT_CPU), Tensor::ones([100, 80], tch::kind::FLOAT_CPU));
    mm_into(&mut whole.narrow(1, 60, 80), &a, &b, false).unwrap();
    let expected = Tensor::zeros([64, 200], tch::kind::FLOAT_CPU);
    let _ = expected.narrow(1, 60, 80).fill_(100.0);
    assert_eq!(whole, expected);
}

/// The products behind [`mm_into`], also in shapes that [`mm_into`] leaves to libtorch.
#[test]
fn the_gemm_backend_is_correct_and_refuses_an_overlapping_output() {
    for (m, n, k) in [(1, 1, 5), (1, 70, 33), (70, 1, 33), (130, 65, 40)] {
        let (a, b) =
            (Tensor::randn([m, k], tch::kind::FLOAT_CPU), Tensor::randn([k, n], tch::kind::FLOAT_CPU));
        let mut out = Tensor::full([m, n], f64::NAN, tch::kind::FLOAT_CPU);
        gemm(&mut out, &a, &b, false, 2).unwrap();
        gemm(&mut out, &a, &b, true, 1).unwrap();
        assert!(out.allclose(&(a.matmul(&b) * 2.0), 1e-4, 1e-4, false), "{m} {n} {k}");
    }
    for (m, n) in [(1, 4096), (4096, 1), (64, 64)] {
        let (a, b) =
            (Tensor::ones([m, 64], tch::kind::FLOAT_CPU), Tensor::ones([64, n], tch::kind::FLOAT_CPU));
        let mut out = Tensor::zeros([1, 1], tch::kind::FLOAT_CPU).expand([m, n], false);
        assert!(gemm(&mut out, &a, &b, false, 2).is_err(), "{m} {n}");
    }
}

/// Every division of every layout: shapes whose last part is short, long sums, parts at any offset.
#[test]
fn products_from_32_rows_and_columns_do_not_depend_on_threads() {
    let mut random = runtime::random::Generator::new(5).unwrap();
    let mut normal = |shape: [i64; 2]| random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap();
    for (m, n, k) in
        [(32, 32, 1), (32, 129, 2), (130, 33, 3000), (65, 1031, 300), (300, 65, 1031), (2100, 40, 7)]
    {
        for transposed in [(false, false), (true, false), (false, true), (true, true)] {
            let a = if transposed.0 { normal([k, m]).tr() } else { normal([m, k]) };
            let b = if transposed.1 { normal([n, k]).tr() } else { normal([k, n]) };
            let mut results = [1, 2, 3, 5, 64].map(|threads| {
                let mut out = Tensor::zeros([m, n], (Kind::Float, Device::Cpu));
                gemm(&mut out, &a, &b, false, threads).unwrap();
                gemm(&mut out, &a, &b, true, threads).unwrap();
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

/// Operands and outputs in 16 bits, and beside others in fp32: every layout, several blocks, slabs and tiles, windows of larger matrices.
#[test]
fn products_of_16_bits_are_rounded_once_on_any_number_of_threads_and_allocate_nothing() {
    use Kind::{BFloat16, Float, Half};
    runtime::memory::track_cpu().unwrap();
    let mut random = runtime::random::Generator::new(6).unwrap();
    let mut normal = |[rows, columns]: [i64; 2], transposed: bool, kind: Kind| {
        let shape = if transposed { [columns, rows + 3] } else { [rows, columns + 3] };
        let whole = random.normal(&shape, (Float, Device::Cpu)).unwrap().to_kind(kind);
        if transposed { whole.tr().narrow(0, 2, rows) } else { whole.narrow(1, 2, columns) }
    };
    let layouts = [(false, false, false), (true, false, true), (false, true, false), (true, true, true)];
    for (m, n, k) in [(32, 129, 2), (130, 33, 4127), (1100, 1031, 31), (300, 600, 700)] {
        for kinds in [(Half, Half, Half), (BFloat16, BFloat16, Float), (Float, Half, BFloat16)] {
            for (first, second, third) in layouts {
                let (a, b) = (normal([m, k], first, kinds.0), normal([k, n], second, kinds.1));
                let start = normal([m, n], third, kinds.2);
                let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double);
                let exact = wide(&a).matmul(&wide(&b));
                let results = [1, 2, 3, 64].map(|threads| {
                    let mut out = start.copy();
                    let region = runtime::memory::Region::start(Device::Cpu).unwrap();
                    gemm(&mut out, &a, &b, true, threads).unwrap();
                    assert_eq!(region.finish().unwrap().peak_above_start(), 0);
                    let sum = out.copy();
                    gemm(&mut out, &a, &b, false, threads).unwrap();
                    (sum, out)
                });
                let rounding = match kinds.2 {
                    Float => 0.0,
                    Half => 2f64.powi(-11),
                    _ => 2f64.powi(-8),
                };
                for (found, expected) in [(&results[0].0, &exact + wide(&start)), (&results[0].1, exact)] {
                    let allowed = expected.abs() * rounding * 1.001 + 1e-6 * (k as f64);
                    let share = ((wide(found) - &expected).abs() / allowed).max().double_value(&[]);
                    assert!(share <= 1.0, "{m} {n} {k} {kinds:?}: {share} of what is allowed");
                }
                for (found, threads) in results.iter().zip([1, 2, 3, 64]) {
                    assert!(*found == results[0], "{m} {n} {k} {kinds:?}: {threads} threads");
                }
            }
        }
    }
}

#[test]
fn a_product_of_expanded_operands_is_correct_and_allocates_nothing() {
    runtime::memory::track_cpu().unwrap();
    let ones = Tensor::from(2.0f32).expand([28, 64], false);
    let (wide, deep) =
        (Tensor::ones([64, 200], tch::kind::FLOAT_CPU), Tensor::ones([28, 90], tch::kind::FLOAT_CPU));
    for (a, b, expected) in [(ones.shallow_clone(), wide, 128.0), (ones.tr(), deep, 56.0)] {
        let mut out = Tensor::zeros([a.size()[0], b.size()[1]], tch::kind::FLOAT_CPU);
        let region = runtime::memory::Region::start(Device::Cpu).unwrap();
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
    let (a, b) =
        (Tensor::randn([128, 128], tch::kind::FLOAT_CPU), Tensor::randn([128, 128], tch::kind::FLOAT_CPU));
    mm_into(&mut weight.shallow_clone(), &a, &b, false).unwrap();
    let error = runtime::autograd::backward(&[&y.sum(Kind::Float)]).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

/// Every number of vectors, rows that do not divide into streams or tasks, columns that do not fill registers, windows of
/// larger matrices: against the product in f64 of the very same numbers.
#[test]
fn matvec_is_correct_to_one_rounding() {
    let mut random = runtime::random::Generator::new(3).unwrap();
    let mut normal =
        |shape: [i64; 2], kind| random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(kind);
    for (out, width) in [(4099, 64), (2053, 128), (300, 898), (3, 100_002), (1, 1 << 18)] {
        for (x_kind, kind) in
            [(Kind::Float, Kind::Float), (Kind::BFloat16, Kind::BFloat16), (Kind::Float, Kind::BFloat16)]
        {
            // What lies around a window is no number.
            let whole = normal([out, width + 6], kind);
            for (first, columns) in [(0, 4), (width + 4, 2)] {
                let _ = whole.narrow(1, first, columns).fill_(f64::NAN);
            }
            let weight = whole.narrow(1, 4, width);
            let bias = normal([1, out], kind).view([out]);
            for vectors in [1, 2, 3, 4, 5, FEW] {
                let x = normal([vectors, width], x_kind);
                let wide = |t: &Tensor| t.to_kind(Kind::Double);
                let exact = wide(&x).matmul(&wide(&weight).tr()) + wide(&bias);
                let found = matvec(&x, &weight, Some(&bias)).unwrap().unwrap();
                assert_eq!((found.kind(), found.size()), (x_kind, vec![vectors, out]));
                // One rounding of the result, and those of an fp32 sum of `width` products of about 1.
                let rounding = if x_kind == Kind::Float { 2f64.powi(-24) } else { 2f64.powi(-8) };
                // Scalar code has one lane, which sums a whole row and rounds the products.
                let lanes = if processor::simd() == processor::Simd::Scalar { 4.0 } else { 1.0 };
                let allowed = exact.abs() * rounding * 1.01 + lanes * width as f64 * 2f64.powi(-23);
                let share = ((wide(&found) - exact).abs() / allowed).max().double_value(&[]);
                assert!(share <= 1.0, "{vectors} x {out} x {width} {kind:?}: {share} of what is allowed");
            }
        }
    }
}

#[test]
fn matvec_reads_a_lazily_negated_vector() {
    let normal = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let (x, weight) = (normal([3, 128]), normal([64, 128]));
    let stored = crate::nf4::quantize(&weight, crate::nf4::Scales::Float).unwrap();
    for x_kind in [Kind::Float, Kind::BFloat16] {
        let x = x.to_kind(x_kind);
        for weight in [weight.to_kind(x_kind), stored.shallow_clone()] {
            let found = matvec(&x.internal_neg_view(), &weight, None).unwrap().unwrap();
            assert_eq!(
                found,
                matvec(&-&x, &weight, None).unwrap().unwrap(),
                "{x_kind:?}, {:?}",
                weight.kind()
            );
        }
    }
}

#[test]
fn matvec_leaves_unsuitable_products_to_libtorch() {
    let t = |shape: [i64; 2], kind| Tensor::zeros(shape, (kind, Device::Cpu));
    let large = t([1024, 512], Kind::BFloat16);
    let left = |x: Tensor, weight: &Tensor| matvec(&x, weight, None).unwrap().is_none();
    assert!(!left(t([1, 512], Kind::BFloat16), &large));
    assert!(left(t([FEW + 1, 512], Kind::BFloat16), &large), "many vectors");
    assert!(left(t([1, 512], Kind::BFloat16), &large.narrow(0, 0, 4)), "few weights");
    assert!(left(t([1, 1024], Kind::BFloat16), &large.tr()), "columns that are not dense");
    assert!(left(t([1, 511], Kind::BFloat16), &large.narrow(1, 1, 511)), "half a word");
    assert!(left(t([1, 512], Kind::Half), &large.to_kind(Kind::Half)), "fp16");
}

#[test]
fn misuse_is_refused_with_the_tensors_name() {
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
            t([2, 2], Kind::Double),
            float(2, 2),
            t([2, 2], Kind::Half),
            "Float times Half into Double; expected one floating",
        ),
        (
            float(2, 2),
            float(2, 2).set_requires_grad(true),
            float(2, 2),
            "requires a gradient, which is not recorded",
        ),
        (square.shallow_clone(), square.shallow_clone(), float(128, 128), "`out` overlaps `a` in memory"),
    ];
    for (mut out, a, b, message) in cases {
        let error = mm_into(&mut out, &a, &b, false).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

/// Products of bf16 into fp32 by the processor's instructions for pairs or tiles: an element is the sum over k of its row and column,
/// wherever it is and whatever the layouts are, also of operands that are dense in neither direction.
#[test]
fn products_of_bf16_into_fp32_depend_on_neither_position_nor_layout() {
    if !processor::multiplies_into_fp32(Kind::BFloat16) {
        eprintln!("skipped: this processor, or the choice, has no products of bf16 into fp32");
        return;
    }
    let mut random = runtime::random::Generator::new(7).unwrap();
    let mut normal =
        |shape: [i64; 2]| random.normal(&shape, (Kind::Float, Device::Cpu)).unwrap().to_kind(Kind::BFloat16);
    for k in [1, 515, 2600] {
        let (a, b) = (normal([1100, k]), normal([k, 150]));
        let product = |a: &Tensor, b: &Tensor| {
            let mut out = Tensor::full([a.size()[0], b.size()[1]], f64::NAN, (Kind::Float, Device::Cpu));
            gemm(&mut out, a, b, false, 2).unwrap();
            out
        };
        let whole = product(&a, &b);
        let exact = a.to_kind(Kind::Double).matmul(&b.to_kind(Kind::Double));
        let error = (whole.to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
        assert!(error < 2e-7 * (k as f64), "{k}: {error}");
        let by_columns = |matrix: &Tensor| matrix.tr().contiguous().tr();
        let apart = |matrix: &Tensor| {
            let [rows, columns] = [matrix.size()[0], matrix.size()[1]];
            let room = Tensor::zeros([rows, columns, 3], (Kind::BFloat16, Device::Cpu)).select(2, 1);
            room.shallow_clone().copy_(matrix);
            room
        };
        assert_eq!(product(&by_columns(&a), &b), whole, "{k}");
        assert_eq!(product(&a, &by_columns(&b)), whole, "{k}");
        assert_eq!(product(&apart(&a), &apart(&b)), whole, "{k}");
        assert_eq!(product(&b.tr(), &a.tr()), whole.tr(), "{k}");
        let window = product(&a.narrow(0, 77, 33), &b.narrow(1, 13, 49));
        assert_eq!(window, whole.narrow(0, 77, 33).narrow(1, 13, 49), "{k}");
    }
}

/// Products of rows and of transposed operands, for which no view is made, have the bits of products of views.
#[test]
fn products_without_views_have_the_bits_of_those_with_views() {
    tch::manual_seed(2);
    for kind in [Kind::Float, Kind::Double] {
        for (batch, tokens, k, n) in
            [(1, 1, 1, 1), (1, 1, 7, 3), (2, 3, 1, 5), (2, 8, 64, 8), (1, 16, 300, 96), (3, 1, 5, 1)]
        {
            let x = Tensor::randn([batch, tokens, k], (kind, Device::Cpu));
            let weight = Tensor::randn([n, k], (kind, Device::Cpu));
            let grad = Tensor::randn([batch, tokens, n], (kind, Device::Cpu));
            let window = Tensor::randn([n, k + 3], (kind, Device::Cpu)).narrow(1, 2, k);
            let (flat, flat_grad) = (x.reshape([-1, k]), grad.reshape([-1, n]));
            let (rows, of_grad) = (Matrix::rows(&x), Matrix::rows(&grad));
            for weight in [&weight, &window] {
                let mut y = grad.copy();
                mm_into(&mut y, rows, Matrix::from(weight).transposed(), true).unwrap();
                let expected = flat_grad.copy().addmm_(&flat, &weight.tr());
                assert_eq!(y, expected.reshape([batch, tokens, n]));
                mm_into(&mut y, rows, Matrix::from(weight).transposed(), false).unwrap();
                assert_eq!(y, flat.mm(&weight.tr()).reshape([batch, tokens, n]));
                assert_eq!(mm(of_grad, weight).unwrap(), flat_grad.mm(weight));
            }
            // Libtorch multiplies small matrices alone.
            let with_views = |a: &Tensor, b: &Tensor| match n.min(k) < MIN_DIMENSION {
                true => a.mm(b),
                false => mm(a, b).unwrap(),
            };
            assert_eq!(mm(of_grad.transposed(), rows).unwrap(), with_views(&flat_grad.tr(), &flat));
            assert_eq!(mm(rows.transposed(), of_grad).unwrap(), with_views(&flat.tr(), &flat_grad));
            assert_eq!(
                mm_scaled(rows, Matrix::from(&weight).transposed(), 0.7).unwrap(),
                flat.mm(&weight.tr()) * 0.7
            );
        }
    }
    let x = Tensor::ones([2, 3, 4], (Kind::Float, Device::Cpu)).transpose(0, 1);
    let error =
        mm(Matrix::rows(&x), &Tensor::ones([4, 5], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
    assert_eq!(error, "matrix product: the rows of a tensor [3, 2, 4] are not contiguous");
}
