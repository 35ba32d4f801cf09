//! Dequantization of NF4, with the bits of the CPU's pass.

use std::ops::Range;

use kernels::nf4::{Scales, Sections, TABLE, nested_map, quantize, sections};
use kernels::quantized::dequantize;
use runtime::random::Generator;
use tch::{Kind, Tensor};

use super::launch::{Given, Shift, launch, same};
use super::program::{NF4, Program, type_of};
use super::tolerance::normal;

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];
/// Bytes of the kernel's tables, 16 and 256 numbers.
const TABLES: usize = (16 + 256) * 4;
/// Packs of a block.
const PACKS: i64 = 4 * 256;

fn wide(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

fn expression(kind: Kind, width: i64, scales: Scales) -> String {
    let nested = scales == Scales::Nested;
    format!("nf4_dequantize<{}, {width}, {nested}, 256, 4>", type_of(kind))
}

/// The arguments for a window of rows and columns of a matrix.
pub(super) fn arguments(
    parts: &Sections,
    (kind, width): (Kind, i64),
    [_, inner]: [i64; 2],
    [rows, columns]: [Range<i64>; 2],
) -> Vec<Given<'_>> {
    let values: Vec<f32> = TABLE.iter().chain(nested_map()).copied().collect();
    let pair = |pair: &[f32]| i64::from(pair[1].to_bits()) << 32 | i64::from(pair[0].to_bits());
    let tables = values.chunks(2).map(|two| Given::I64(pair(two))).collect();
    let (height, length) = (rows.end - rows.start, columns.end - columns.start);
    let (factors, mean) = match &parts.nested {
        Some((factors, mean)) => (Given::In("factors", factors), Given::In("mean", mean)),
        None => (Given::Null, Given::Null),
    };
    vec![
        Given::Structure(tables, TABLES),
        Given::In("codes", &parts.codes),
        Given::In("absmax", &parts.absmax),
        factors,
        mean,
        Given::I64(rows.start * inner + columns.start),
        Given::I64(inner),
        Given::I32(length / width),
        Given::I32(height * (length / width)),
        Given::Out("out", kind, vec![height, length]),
        Given::I64(length),
    ]
}

#[test]
fn windows_have_the_bits_of_the_cpu_for_every_dtype_and_storage_of_scales() {
    let both = [Scales::Nested, Scales::Float];
    let mut expressions = Vec::new();
    for kind in KINDS {
        for scales in both {
            expressions.extend([1, wide(kind)].map(|width| expression(kind, width, scales)));
        }
    }
    let Some(program) = Program::of(NF4, &expressions) else { return };
    let mut generator = Generator::new(14).unwrap();
    for scales in both {
        // More than the 256 blocks of one factor; an inner size that splits blocks among rows; an odd row of bytes.
        for shape in [[70, 256], [9, 328], [37, 22], [1, 2]] {
            let weight = normal(&mut generator, &shape, Kind::Float);
            let stored = quantize(&weight, scales).unwrap();
            let parts = sections(&stored).unwrap();
            let [height, inner] = shape;
            let windows =
                [[0..height, 0..inner], [height / 2..height, 8..inner - 8], [1..height, 1..inner / 2]];
            for kind in KINDS {
                let whole = dequantize(&stored, kind).unwrap();
                for [rows, columns] in windows.clone() {
                    let (count, length) = (rows.end - rows.start, columns.end - columns.start);
                    if count < 1 || length < 1 {
                        continue;
                    }
                    let wide = wide(kind);
                    let aligned = [inner, columns.start, length].iter().all(|number| number % wide == 0);
                    let expected = whole.narrow(0, rows.start, count).narrow(1, columns.start, length);
                    for width in if aligned { vec![1, wide] } else { vec![1] } {
                        let window = [rows.clone(), columns.clone()];
                        let what = format!("{kind:?}, {scales:?}, {shape:?}, {window:?}, width {width}");
                        let given = arguments(&parts, (kind, width), shape, window);
                        let packs = count * length / width;
                        let grid = ((packs + PACKS - 1) / PACKS, 256);
                        let shift = Shift(if width == 1 { 4 } else { 16 });
                        let kernel = program.kernel(&expression(kind, width, scales));
                        let outcome = launch(kernel, grid, &given, shift);
                        same(&what, &outcome.outputs, &[expected.contiguous()]);
                        if width > 1 && length == inner && height > 1 {
                            assert!(outcome.counts.sector_ratio() <= 1.15, "{what}: {:?}", outcome.counts);
                        }
                    }
                }
            }
        }
    }
}

/// A scale that is not finite makes its own block NaN or infinite.
#[test]
fn special_scales_affect_their_own_block_only() {
    let Some(program) = Program::of(NF4, &[expression(Kind::Float, 4, Scales::Float)]) else { return };
    let stored =
        quantize(&normal(&mut Generator::new(15).unwrap(), &[3, 64], Kind::Float), Scales::Float).unwrap();
    let parts = sections(&stored).unwrap();
    let _ = parts.absmax.view_dtype(Kind::Float).narrow(0, 1, 1).fill_(f64::NAN);
    let given = arguments(&parts, (Kind::Float, 4), [3, 64], [0..3, 0..64]);
    let kernel = program.kernel(&expression(Kind::Float, 4, Scales::Float));
    let found = launch(kernel, (1, 256), &given, Shift(16)).outputs.remove(0);
    let rows = |t: &Tensor| Vec::<bool>::try_from(t.isnan().all_dim(1, false)).unwrap();
    assert_eq!(rows(&found), [false, true, false]);
    assert!(found.allclose(&dequantize(&stored, Kind::Float).unwrap(), 0.0, 0.0, true));
}
