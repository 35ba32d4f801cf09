//! Products with a weight in NF4, compared with products of the same values in a dense matrix.

use kernels::matmul::{FEW, matvec, mm, mm_into};
use kernels::nf4::{self, Scales};
use kernels::quantized;
use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::memory::{Region, track_cpu};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor, kind};

/// Tokens, out, in: whole and partial blocks in a row, one tile and several of them on either side.
const SHAPES: [[i64; 3]; 6] =
    [[40, 96, 128], [33, 130, 192], [64, 77, 66], [48, 5000, 640], [48, 640, 5000], [3, 200, 320]];

fn normal(generator: &mut Generator, shape: &[i64]) -> Tensor {
    generator.normal(shape, kind::FLOAT_CPU).unwrap()
}

fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let of = |x: &Tensor| x.to_kind(Kind::Double).abs().max().double_value(&[]);
    of(&(found.to_kind(Kind::Double) - expected.to_kind(Kind::Double))) / of(expected)
}

#[test]
fn products_and_gradients_have_the_bits_of_the_dense_weight() {
    let mut generator = Generator::new(1).unwrap();
    for scales in [Scales::Float, Scales::Nested] {
        for [tokens, out, inner] in SHAPES {
            let weight = normal(&mut generator, &[out, inner]);
            let stored = nf4::quantize(&weight, scales).unwrap();
            let dense = quantized::dequantize(&stored, Kind::Float).unwrap();
            // A normal value is at most 0.15 of the block's largest from the nearest of the table.
            assert!(error(&dense, &weight) < 0.2, "{}", error(&dense, &weight));

            let x = normal(&mut generator, &[tokens, inner]).set_requires_grad(true);
            let bias = normal(&mut generator, &[out]).set_requires_grad(true);
            let y = quantized::linear(&x, &stored, Some(&bias)).unwrap();
            let upstream = normal(&mut generator, &[tokens, out]);
            backward(&[&(&y * &upstream).sum(Kind::Float)]).unwrap();

            let mut expected = bias.detach().expand([tokens, out], false).contiguous();
            mm_into(&mut expected, &x.detach(), &dense.tr(), true).unwrap();
            let dx = mm(&upstream, &dense).unwrap();
            if tokens >= 32 {
                assert_eq!((y.detach(), x.grad()), (expected, dx), "{tokens} {out} {inner}");
            } else {
                assert!(error(&y, &expected) < 1e-6 && error(&x.grad(), &dx) < 1e-6);
            }
            assert!(
                error(&bias.grad(), &upstream.sum_dim_intlist([0i64].as_slice(), false, Kind::Float)) < 1e-6
            );
        }
    }
}

/// In bf16 the error is that of a product with the weight in bf16.
#[test]
fn operands_in_bf16_are_rounded_once() {
    let mut generator = Generator::new(2).unwrap();
    for [tokens, out, inner] in SHAPES {
        let stored = nf4::quantize(&normal(&mut generator, &[out, inner]), Scales::Nested).unwrap();
        let dense = quantized::dequantize(&stored, Kind::Double).unwrap();
        let x = normal(&mut generator, &[tokens, inner]).to_kind(Kind::BFloat16).set_requires_grad(true);
        let y = quantized::linear(&x, &stored, None).unwrap();
        let upstream = normal(&mut generator, &[tokens, out]).to_kind(Kind::BFloat16);
        backward(&[&(&y * &upstream).sum(Kind::Float)]).unwrap();
        assert_eq!((y.kind(), x.grad().kind()), (Kind::BFloat16, Kind::BFloat16));
        let wide = |x: &Tensor| x.detach().to_kind(Kind::Double);
        for (found, expected) in
            [(y.detach(), wide(&x).matmul(&dense.tr())), (x.grad(), wide(&upstream).matmul(&dense))]
        {
            assert!(error(&found, &expected) < 6e-3, "{}", error(&found, &expected));
        }
    }
}

#[test]
fn a_few_vectors_are_multiplied_without_a_tile() {
    let mut generator = Generator::new(3).unwrap();
    for scales in [Scales::Float, Scales::Nested] {
        for [out, inner] in [[130, 64], [97, 192], [513, 1088], [64, 4864]] {
            let stored = nf4::quantize(&normal(&mut generator, &[out, inner]), scales).unwrap();
            let dense = quantized::dequantize(&stored, Kind::Double).unwrap();
            for vectors in [1, 2, 3, 4, 5, 9, FEW] {
                let x = normal(&mut generator, &[vectors, inner]);
                let bias = normal(&mut generator, &[out]);
                let found = matvec(&x, &stored, Some(&bias)).unwrap().unwrap();
                let expected = x.to_kind(Kind::Double).matmul(&dense.tr()) + bias.to_kind(Kind::Double);
                assert_eq!((found.kind(), found.size()), (Kind::Float, vec![vectors, out]));
                assert!(
                    error(&found, &expected) < 2e-6,
                    "{vectors} {out} {inner}: {}",
                    error(&found, &expected)
                );
                let again = matvec(&x, &stored, Some(&bias)).unwrap().unwrap();
                assert_eq!(again, found);
                // In bf16 the result is rounded, and on some processors the 16 values are.
                let x = x.to_kind(Kind::BFloat16);
                let found = matvec(&x, &stored, None).unwrap().unwrap();
                let expected = x.to_kind(Kind::Double).matmul(&dense.tr());
                assert_eq!((found.kind(), found.size()), (Kind::BFloat16, vec![vectors, out]));
                assert!(error(&found, &expected) < 6e-3, "{}", error(&found, &expected));
            }
        }
    }
    let stored = nf4::quantize(&normal(&mut generator, &[8, 66]), Scales::Float).unwrap();
    assert!(
        quantized::matvec(&normal(&mut generator, &[1, 66]), &stored).unwrap().is_none(),
        "blocks cross rows"
    );
}

#[test]
fn derivatives_match_finite_differences() {
    let mut generator = Generator::new(4).unwrap();
    let stored = nf4::quantize(&normal(&mut generator, &[7, 10]), Scales::Nested).unwrap();
    let inputs = [[2, 3, 10].as_slice(), &[7]]
        .map(|shape| generator.normal(shape, kind::DOUBLE_CPU).unwrap().set_requires_grad(true));
    let report = gradcheck(
        |inputs| Ok(vec![quantized::linear(&inputs[0], &stored, Some(&inputs[1]))?]),
        &inputs.each_ref(),
        GradcheckConfig::default(),
    )
    .unwrap();
    assert_eq!(report.compared, 2 * 3 * 7 * (2 * 3 * 10 + 7), "{report}");
}

/// Beside its result a product has one tile: [`quantized::tile_bytes`] of a matrix that is five times as large.
#[test]
fn a_product_takes_the_memory_of_a_tile() {
    track_cpu().unwrap();
    let (tokens, out, inner) = (33i64, 4096i64, 2560i64);
    let stored = nf4::quantize(&Tensor::ones([out, inner], kind::FLOAT_CPU), Scales::Nested).unwrap();
    assert!(4 * out * inner >= 5 * quantized::tile_bytes(Device::Cpu));
    let x = Tensor::ones([tokens, inner], kind::FLOAT_CPU).set_requires_grad(true);
    let region = Region::start(Device::Cpu).unwrap();
    let y = quantized::linear(&x, &stored, None).unwrap();
    let forward = region.finish().unwrap().peak_above_start();
    let upstream = Tensor::ones_like(&y);
    let region = Region::start(Device::Cpu).unwrap();
    runtime::autograd::backward_with(&[&y], &[Some(&upstream)], runtime::autograd::Keep::default()).unwrap();
    let backward = region.finish().unwrap().peak_above_start();
    let most = |result: i64| (4 * tokens * result + quantized::tile_bytes(Device::Cpu)) as u64;
    assert!(forward <= most(out) && backward <= most(inner), "{forward} {backward}");
    assert!((forward.min(backward) as i64) > quantized::tile_bytes(Device::Cpu) / 2);
}

/// Rows in bf16 that are multiplied in fp32 take no memory beside a tile of 384 rows. The bits are those of one product.
#[test]
fn operands_in_bf16_take_no_memory_beside_the_tile() {
    track_cpu().unwrap();
    let mut generator = Generator::new(6).unwrap();
    let (tokens, out, inner) = (900i64, 640i64, 5000i64);
    let stored = nf4::quantize(&normal(&mut generator, &[out, inner]), Scales::Nested).unwrap();
    let x = normal(&mut generator, &[tokens, inner]).to_kind(Kind::BFloat16);
    let mut y = Tensor::zeros([tokens, out], kind::FLOAT_CPU);
    let region = Region::start(Device::Cpu).unwrap();
    quantized::mm_into(&mut y, &x, &stored, false).unwrap();
    assert_eq!(region.finish().unwrap().peak_above_start(), 4 * (384 * inner) as u64);
    let dense = quantized::dequantize(&stored, Kind::Float).unwrap();
    let mut expected = Tensor::zeros_like(&y);
    mm_into(&mut expected, &x, &dense.tr(), false).unwrap();
    assert_eq!(y, expected);
}

#[test]
fn what_cannot_be_stored_or_multiplied_is_refused_by_name() {
    let message = |result: runtime::Result<Tensor>| result.unwrap_err().to_string();
    let ones = |shape: &[i64]| Tensor::ones(shape, kind::FLOAT_CPU);
    let infinite = ones(&[4, 64]) / 0.0;
    assert!(
        message(nf4::quantize(&infinite, Scales::Nested)).contains("a value which is not finite in fp32")
    );
    assert!(message(nf4::quantize(&ones(&[4, 3]), Scales::Nested)).contains("an even number of columns"));
    assert!(message(nf4::quantize(&ones(&[4]), Scales::Nested)).contains("expected [out, in]"));
    let whole = Tensor::ones([4, 4], (Kind::Int, Device::Cpu));
    assert!(message(nf4::quantize(&whole, Scales::Nested)).contains("in Int; expected a floating dtype"));
    let stored = nf4::quantize(&ones(&[4, 64]), Scales::Nested).unwrap();
    assert!(
        message(quantized::linear(&ones(&[2, 63]), &stored, None))
            .contains("x is [2, 63] for a weight with 64 columns")
    );
    let mut wrong = ones(&[2, 5]);
    let error = quantized::mm_into(&mut wrong, &ones(&[2, 64]), &stored, false).unwrap_err().to_string();
    assert!(error.contains("[2, 64] times a weight [4, 64] into [2, 5]"), "{error}");
    assert!(message(quantized::dequantize(&ones(&[2, 5]), Kind::Float)).contains("which is not quantized"));
    assert!(
        message(quantized::dequantize_rows(&stored, 3..5, Kind::Float))
            .contains("rows 3..5 of a weight [4, 64]")
    );
}

/// The mean of scales near the largest fp32 number does not overflow; what does is refused.
#[test]
fn weights_near_the_largest_number_stay_finite_or_are_refused() {
    for scales in [Scales::Float, Scales::Nested] {
        let weight = Tensor::full([256, 128], 3e38, kind::FLOAT_CPU);
        let found = quantized::dequantize(&nf4::quantize(&weight, scales).unwrap(), Kind::Float).unwrap();
        assert!(found.equal(&weight), "{scales:?}: {found}");
    }
    // Scales of 3.4e38 and of 0 are 1.7e38 from their mean, and such a distance is rounded up.
    let rows = [Tensor::full([4, 64], 3.4e38, kind::FLOAT_CPU), Tensor::zeros([4, 64], kind::FLOAT_CPU)];
    match nf4::quantize(&Tensor::cat(&rows, 0), Scales::Nested) {
        Ok(stored) => {
            let found = quantized::dequantize(&stored, Kind::Float).unwrap();
            assert!(bool::try_from(found.isfinite().all()).unwrap(), "{found}");
        }
        Err(error) => assert!(error.to_string().contains("overflow fp32"), "{error}"),
    }
}
