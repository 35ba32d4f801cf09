//! Dequantization of NF4, and products with such weights.

use kernels::nf4;
use kernels::quantized;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::{close, cuda, epsilon, normal};

/// The bits of the CPU's weights, and products with them from tiles of rows and of columns.
#[test]
fn nf4_matches_the_cpu() {
    let Some(device) = cuda() else { return };
    let mut generator = Generator::new(11).unwrap();
    for scales in [nf4::Scales::Nested, nf4::Scales::Float] {
        for shape in [[1, 2], [37, 22], [9, 330], [700, 4864], [4096, 2112]] {
            let stored = nf4::quantize(&normal(&mut generator, &shape, Kind::Float), scales).unwrap();
            let there = stored.to_device(device);
            for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
                for rows in [0..shape[0], shape[0] / 2..shape[0]] {
                    let expected = quantized::dequantize_rows(&stored, rows.clone(), kind).unwrap();
                    let found = quantized::dequantize_rows(&there, rows, kind).unwrap();
                    assert!(found.to_device(Device::Cpu).equal(&expected), "{kind:?}, {shape:?}, {scales:?}");
                }
                let dense = quantized::dequantize(&stored, Kind::Double).unwrap();
                let x = normal(&mut generator, &[5, shape[1]], kind);
                let g = normal(&mut generator, &[5, shape[0]], kind);
                let on = |t: &Tensor| t.to_kind(kind).to_device(device);
                for accumulate in [false, true] {
                    let (mut y, mut dx) = (on(&g), on(&x));
                    quantized::mm_into(&mut y, &on(&x), &there, accumulate).unwrap();
                    quantized::mm_transposed_into(&mut dx, &on(&g), &there, accumulate).unwrap();
                    let before = |t: &Tensor| if accumulate { t.copy() } else { t.zeros_like() };
                    let tolerance = if kind == Kind::Float { 2e-3 } else { 8.0 * epsilon(kind) };
                    let what = format!("{kind:?}, {shape:?}, accumulate {accumulate}");
                    close(&what, &y, &(x.matmul(&dense.tr()) + before(&g)), tolerance);
                    close(&what, &dx, &(g.matmul(&dense) + before(&x)), tolerance);
                }
            }
        }
    }
}
