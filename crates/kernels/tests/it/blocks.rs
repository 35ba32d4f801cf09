//! Products with a weight in GGUF's blocks, compared with products of the same values in a dense matrix.

use kernels::matmul::{FEW, matvec, mm, mm_into};
use kernels::quantized::blocks::{BlockType, from_bytes};
use kernels::quantized::{self, matrix_shape};
use runtime::autograd::backward;
use runtime::random::Generator;
use tch::{Kind, Tensor, kind};

/// Tokens, out, in: rows of whole and partial chunks of 256, one tile and several of them on either side.
const SHAPES: [[i64; 3]; 5] =
    [[40, 96, 256], [33, 130, 1280], [48, 5000, 768], [48, 768, 5120], [3, 200, 256]];

fn normal(generator: &mut Generator, shape: &[i64]) -> Tensor {
    generator.normal(shape, kind::FLOAT_CPU).unwrap()
}

fn error(found: &Tensor, expected: &Tensor) -> f64 {
    let most = |x: &Tensor| x.to_kind(Kind::Double).abs().max().double_value(&[]);
    most(&(found.to_kind(Kind::Double) - expected.to_kind(Kind::Double))) / most(expected)
}

/// Any bytes are blocks: those of the factors get small exponents, so that values are finite.
fn blocks(generator: &mut Generator, stored: BlockType, [out, inner]: [i64; 2]) -> Tensor {
    let size = stored.tensor_shape([out, inner]).unwrap();
    let bytes = (generator.normal(&size, kind::FLOAT_CPU).unwrap() * 1000.0).remainder(256.0);
    let bytes = bytes.to_kind(Kind::Uint8);
    let places: &[i64] = match stored {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[1, 3],
        BlockType::Q2K => &[81, 83],
        BlockType::Q3K => &[109],
        BlockType::Q6K => &[209],
        _ => &[1],
    };
    for place in places {
        // The sign, exponents of 2⁻⁹ to 2⁻⁶, and two bits of the significand.
        let high = bytes.select(2, *place);
        high.shallow_clone().copy_(&(high.remainder(16) + 0x18));
    }
    let bytes: Vec<u8> = Vec::try_from(bytes.view([-1])).unwrap();
    from_bytes(stored, [out, inner], &bytes).unwrap()
}

#[test]
fn products_and_gradients_have_the_bits_of_the_dense_weight() {
    let mut generator = Generator::new(1).unwrap();
    for stored in BlockType::ALL {
        for [tokens, out, inner] in SHAPES {
            // Rows that are no whole chunks.
            let inner = if stored.values() == 32 { inner + 32 } else { inner };
            let weight = blocks(&mut generator, stored, [out, inner]);
            assert_eq!((BlockType::of(&weight), matrix_shape(&weight)), (Some(stored), Some([out, inner])));
            let dense = quantized::dequantize(&weight, Kind::Float).unwrap();
            let x = normal(&mut generator, &[tokens, inner]).set_requires_grad(true);
            let bias = normal(&mut generator, &[out]);
            let y = quantized::linear(&x, &weight, Some(&bias)).unwrap();
            let upstream = normal(&mut generator, &[tokens, out]);
            backward(&[&(&y * &upstream).sum(Kind::Float)]).unwrap();

            let mut expected = bias.expand([tokens, out], false).contiguous();
            mm_into(&mut expected, &x.detach(), &dense.tr(), true).unwrap();
            let dx = mm(&upstream, &dense).unwrap();
            if tokens >= 32 {
                assert_eq!(
                    (y.detach(), x.grad()),
                    (expected, dx),
                    "{} {tokens} {out} {inner}",
                    stored.name()
                );
            } else {
                assert!(error(&y, &expected) < 1e-6 && error(&x.grad(), &dx) < 1e-6);
            }

            let half = quantized::dequantize_rows(&weight, 5..9, Kind::BFloat16).unwrap();
            assert_eq!(half, dense.narrow(0, 5, 4).to_kind(Kind::BFloat16));
            // Rows are selected and permuted like those of any tensor.
            let rows = Tensor::from_slice(&[7i64, 0, 7, 42]);
            let selected = quantized::dequantize(&weight.index_select(0, &rows), Kind::Float).unwrap();
            assert_eq!(selected, dense.index_select(0, &rows));
        }
    }
}

#[test]
fn a_few_vectors_are_multiplied_without_a_tile() {
    let mut generator = Generator::new(3).unwrap();
    for stored in BlockType::ALL {
        for shape in [[130, 512], [97, 1024], [64, 4864]] {
            let weight = blocks(&mut generator, stored, shape);
            let dense = quantized::dequantize(&weight, Kind::Double).unwrap();
            let bias = normal(&mut generator, &[shape[0]]);
            for vectors in [1, 2, 3, 4, 7, FEW] {
                for (kind, tolerance) in [(Kind::Float, 2e-6), (Kind::BFloat16, 6e-3)] {
                    let x = normal(&mut generator, &[vectors, shape[1]]).to_kind(kind);
                    let found = matvec(&x, &weight, Some(&bias)).unwrap().expect("few vectors");
                    let expected = x.to_kind(Kind::Double).matmul(&dense.tr()) + &bias;
                    assert_eq!(found.kind(), kind);
                    let error = error(&found, &expected);
                    assert!(error < tolerance, "{} {kind:?}: {error}", stored.name());
                    assert_eq!(matvec(&x, &weight, Some(&bias)).unwrap(), Some(found));
                }
            }
            let many = normal(&mut generator, &[FEW + 1, shape[1]]);
            assert!(matvec(&many, &weight, None).unwrap().is_none());
        }
    }
}

/// What is not finite stays so, and does not spread to other rows or vectors.
#[test]
fn an_infinite_number_makes_its_own_results_not_finite() {
    let mut generator = Generator::new(4).unwrap();
    let weight = blocks(&mut generator, BlockType::Q4K, [64, 512]);
    let x = normal(&mut generator, &[2, 512]).to_kind(Kind::BFloat16);
    let _ = x.get(1).get(300).fill_(f64::INFINITY);
    let y = matvec(&x, &weight, None).unwrap().unwrap();
    assert!(bool::try_from(y.get(0).isfinite().all()).unwrap());
    assert!(!bool::try_from(y.get(1).isfinite().any()).unwrap());
}

#[test]
fn what_is_no_matrix_of_blocks_is_refused_by_name() {
    let error = from_bytes(BlockType::Q4K, [2, 128], &[0; 288]).unwrap_err().to_string();
    assert!(error.contains("a matrix [2, 128] in q4_K; expected rows of whole blocks of 256"), "{error}");
    let error = from_bytes(BlockType::Q8_0, [2, 64], &[0; 135]).unwrap_err().to_string();
    assert!(error.contains("135 bytes for a matrix [2, 64] in q8_0; expected 136"), "{error}");
    let other = Tensor::zeros([4, 2, 19], (Kind::Uint8, tch::Device::Cpu));
    assert_eq!((BlockType::of(&other), matrix_shape(&other)), (None, None));
    let error = quantized::dequantize(&other, Kind::Float).unwrap_err().to_string();
    assert!(error.contains("of shape [4, 2, 19], which is not quantized"), "{error}");
}
