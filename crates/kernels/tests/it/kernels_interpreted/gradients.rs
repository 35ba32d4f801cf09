//! Norm, overflow check and scaling of many gradients.

use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Outcome, Shift, launch};
use super::program::{GRADIENTS, Program, type_of};
use super::tolerance::{close, epsilon, normal};

/// Numbers of a block, all of one gradient.
const CHUNK: i64 = 16_384;
/// Bytes of the kernels' table: 160 entries of 3 members of 8 bytes.
const TABLE: usize = 160 * 3 * 8;
const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];
const SIZES: [i64; 6] = [1, 7, 1025, 16_384, 3, 16_391];

/// The table of some gradients, and the number of its blocks.
pub(super) fn table(gradients: &[Tensor], changed: bool) -> (Given<'_>, i64) {
    let (mut members, mut blocks) = (Vec::new(), 0);
    for gradient in gradients {
        let numbers = gradient.size()[0];
        let own = if changed { Given::InOut("gradient", gradient) } else { Given::In("gradient", gradient) };
        members.extend([own, Given::I64(numbers), Given::I64(blocks)]);
        blocks += (numbers + CHUNK - 1) / CHUNK;
    }
    (Given::Structure(members, TABLE), blocks)
}

fn wide(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

fn squares_of(kind: Kind, width: i64, scaled: bool) -> String {
    format!("gradient_squares<{}, {width}, {scaled}, 256, {CHUNK}>", type_of(kind))
}

fn compile() -> Option<Program> {
    let widths = KINDS.into_iter().flat_map(|kind| [1, wide(kind)].map(|width| (kind, width)));
    let expressions_of_width = |(kind, width)| {
        let scale = format!("scale_many<{}, {width}, 256, {CHUNK}>", type_of(kind));
        [squares_of(kind, width, true), squares_of(kind, width, false), scale]
    };
    let expressions: Vec<String> =
        widths.flat_map(expressions_of_width).chain(["gradient_norm<1024>".to_owned()]).collect();
    Program::of(GRADIENTS, &expressions)
}

/// Runs both kernels. The outputs are the gradients, if they are changed, the norm, and the flag.
fn survey(
    program: &Program,
    (kind, width): (Kind, i64),
    gradients: &[Tensor],
    factor: Option<f32>,
) -> (Vec<Tensor>, f64, f64, [Outcome; 2]) {
    let factor = factor.map(|factor| Tensor::from_slice(&[factor]));
    let (table, blocks) = table(gradients, factor.is_some());
    let given = [
        table,
        Given::I32(gradients.len() as i64),
        Given::optional("factor", factor.as_ref()),
        Given::Out("parts", Kind::Double, vec![blocks]),
    ];
    let kernel = program.kernel(&squares_of(kind, width, factor.is_some()));
    // Parts are in double.
    let shift = Shift(if width == 1 { 8 } else { 16 });
    let mut first = launch(kernel, (blocks, 256), &given, shift);
    let parts = first.outputs.pop().unwrap();
    let given = [
        Given::In("parts", &parts),
        Given::I64(blocks),
        Given::Out("norm", Kind::Double, vec![]),
        Given::Out("found", Kind::Float, vec![1]),
    ];
    let second = launch(program.kernel("gradient_norm<1024>"), (1, 1024), &given, Shift(8));
    let (norm, found) = (second.outputs[0].double_value(&[]), second.outputs[1].double_value(&[0]));
    (first.outputs.drain(..).collect(), norm, found, [first, second])
}

fn draw(generator: &mut Generator, kind: Kind) -> Vec<Tensor> {
    SIZES.iter().map(|size| normal(generator, &[*size], kind).to_kind(kind)).collect()
}

fn norm_of(gradients: &[Tensor]) -> f64 {
    let squares = gradients.iter().map(|one| one.to_kind(Kind::Double).square().sum(Kind::Double));
    squares.map(|sum| sum.double_value(&[])).sum::<f64>().sqrt()
}

#[test]
fn norms_are_correct_for_every_dtype_size_and_factor() {
    let Some(program) = compile() else { return };
    let mut generator = Generator::new(11).unwrap();
    for kind in KINDS {
        let gradients = draw(&mut generator, kind);
        for factor in [None, Some(1.0), Some(0.37f32)] {
            let scaled: Vec<Tensor> = gradients
                .iter()
                .map(|one| (one.to_kind(Kind::Float) * f64::from(factor.unwrap_or(1.0))).to_kind(kind))
                .collect();
            let norms = [1, wide(kind)].map(|width| {
                let what = format!("{kind:?}, width {width}, factor {factor:?}");
                let (found, norm, flag, [counted, _]) = survey(&program, (kind, width), &gradients, factor);
                for (found, expected) in found.iter().zip(&scaled) {
                    assert!(found.equal(expected), "{what}: a gradient is not f·g, rounded once");
                }
                assert_eq!((found.len(), flag), (if factor.is_some() { 6 } else { 0 }, 0.0), "{what}");
                let written: i64 = if factor == Some(0.37) {
                    SIZES.iter().sum::<i64>() * kind.elt_size_in_bytes() as i64
                } else {
                    0
                };
                // A factor of 1 costs no write. Each block writes its part.
                assert_eq!(counted.counts.bytes_written as i64, written + 7 * 8, "{what}");
                assert_eq!(counted.counts.wide_requests > 0, width > 1, "{what}");
                if width > 1 {
                    assert!(counted.counts.sector_ratio() <= 1.15, "{what}: {:?}", counted.counts);
                }
                norm
            });
            for norm in norms {
                // Better than a norm in fp32, which errs by as much as each of its roundings.
                let error = (norm / norm_of(&scaled) - 1.0).abs();
                assert!(error <= 0.25 * epsilon(Kind::Float), "{kind:?}, {factor:?}: {error:e}");
            }
        }
    }
}

/// Finite gradients have a finite norm, whether or not their squares are numbers of fp32.
#[test]
fn squares_beyond_fp32_are_added_in_double() {
    let Some(program) = compile() else { return };
    for value in [1e30, 1e-30, 3e38, 1e-44] {
        for width in [1, 4] {
            let gradients = [100, 8, 17].map(|size| Tensor::full([size], value, (Kind::Float, Device::Cpu)));
            let (_, norm, flag, _) = survey(&program, (Kind::Float, width), &gradients, None);
            assert_eq!(flag, 0.0, "{value}");
            assert!((norm / norm_of(&gradients) - 1.0).abs() < 1e-12, "{value}: {norm}");
        }
    }
    let zeros = [Tensor::zeros([9], (Kind::Float, Device::Cpu))];
    let (_, norm, flag, _) = survey(&program, (Kind::Float, 4), &zeros, None);
    assert_eq!((norm, flag), (0.0, 0.0));
}

#[test]
fn an_infinity_or_nan_is_found_at_every_index() {
    let Some(program) = compile() else { return };
    let mut generator = Generator::new(12).unwrap();
    for kind in KINDS {
        for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            for (index, place) in [(0, 0), (3, 16_383), (5, 0), (5, 16_390)] {
                let gradients = draw(&mut generator, kind);
                let _ = gradients[index].get(place).fill_(bad);
                for factor in [None, Some(0.5)] {
                    let (_, norm, flag, _) = survey(&program, (kind, wide(kind)), &gradients, factor);
                    assert_eq!((flag, norm.is_finite()), (1.0, false), "{kind:?} {bad} {index} {place}");
                    assert_eq!(norm.is_nan(), bad.is_nan(), "{kind:?} {bad}");
                }
            }
        }
    }
    // The factor itself may make a gradient overflow, in its own dtype.
    for (kind, factor) in [(Kind::Float, 1e20), (Kind::BFloat16, 1e20), (Kind::Half, 1e4)] {
        let gradients =
            [Tensor::full([9], if kind == Kind::Half { 10.0 } else { 1e30 }, (kind, Device::Cpu))];
        let (found, norm, flag, _) = survey(&program, (kind, wide(kind)), &gradients, Some(factor));
        assert_eq!((flag, norm), (1.0, f64::INFINITY), "{kind:?}");
        assert!(found[0].isinf().all().int64_value(&[]) == 1, "{kind:?}");
    }
}

#[test]
fn many_tensors_are_scaled_for_every_dtype_and_factor() {
    let Some(program) = compile() else { return };
    let mut generator = Generator::new(13).unwrap();
    for kind in KINDS {
        for width in [1, wide(kind)] {
            for factor in [1.0, 0.37, f32::NAN] {
                let gradients = draw(&mut generator, kind);
                let number = Tensor::from_slice(&[factor]);
                let (table, blocks) = table(&gradients, true);
                let given = [table, Given::I32(6), Given::In("factor", &number)];
                let kernel = program.kernel(&format!("scale_many<{}, {width}, 256, {CHUNK}>", type_of(kind)));
                let outcome = launch(kernel, (blocks, 256), &given, Shift(if width == 1 { 4 } else { 16 }));
                for (found, before) in outcome.outputs.iter().zip(&gradients) {
                    let expected = before.to_kind(Kind::Double) * f64::from(factor);
                    close(&format!("{kind:?} × {factor}"), found, &expected, epsilon(kind));
                }
                let counts = outcome.counts;
                assert_eq!(counts.bytes_written == 0, factor == 1.0, "{kind:?}: a factor of 1 costs no pass");
                assert!(width == 1 || counts.sector_ratio() <= 1.15, "{kind:?} × {factor}: {counts:?}");
            }
        }
    }
}
