//! `x *= s`.

use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Shift, launch};
use super::program::{Program, SCALE, type_of};
use super::tolerance::{check, epsilon, normal};

#[test]
fn scaling_is_correct_for_every_dtype_odd_sizes_and_factors() {
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    let wide = |kind: Kind| 16 / kind.elt_size_in_bytes() as i64;
    let expressions: Vec<String> = kinds
        .iter()
        .flat_map(|kind| [1, wide(*kind)].map(|width| format!("scale<{}, {width}, 256>", type_of(*kind))))
        .collect();
    let Some(program) = Program::of(SCALE, &expressions) else { return };
    let mut generator = Generator::new(1).unwrap();
    for kind in kinds {
        for (numbers, shift) in [(1, true), (777, true), (2048, false), (4104, false)] {
            for factor in [1.0, 0.37, f64::NAN, f64::INFINITY] {
                let x = normal(&mut generator, &[numbers], kind);
                let number = Tensor::full([1], factor, (Kind::Float, Device::Cpu));
                let width = if shift { 1 } else { wide(kind) };
                let at = Shift(if shift { kind.elt_size_in_bytes() } else { 16 });
                let kernel = program.kernel(&format!("scale<{}, {width}, 256>", type_of(kind)));
                let given =
                    [Given::InOut("x", &x.to_kind(kind)), Given::I64(numbers), Given::In("factor", &number)];
                // The factor is fp32, and aligned for fp32.
                let at = if width == 1 { Shift(at.0.max(4)) } else { at };
                let outcome = launch(kernel, (2, 256), &given, at);
                let expected = &x * number.to_kind(Kind::Double);
                let what = format!("{kind:?}, {numbers} numbers × {factor}");
                check(&what, &outcome, &[&expected], epsilon(kind));
                if factor == 1.0 {
                    assert_eq!(outcome.counts.bytes_written, 0, "{what}: a factor of 1 costs no pass");
                } else if width > 1 {
                    assert!(outcome.counts.sector_ratio() <= 1.15, "{what}: {:?}", outcome.counts);
                }
            }
        }
    }
}
