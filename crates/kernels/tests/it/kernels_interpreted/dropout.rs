//! Dropout by the hash of a seed.

use kernels::dropout::Mask;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Shift, launch};
use super::program::{DROPOUT, Program, type_of};
use super::tolerance::normal;

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

fn wide(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

/// The kernel's argument for a rate: p·2³², rounded down.
fn threshold(rate: f64) -> i64 {
    (rate * 4_294_967_296.0) as i64
}

/// Bit by bit what the CPU computes, with x and without, for aligned and odd sizes, and more elements than one pass of the grid.
#[test]
fn dropout_has_the_bits_of_the_cpu() {
    let expressions: Vec<String> = KINDS
        .into_iter()
        .flat_map(|kind| [1, wide(kind)].map(|width| format!("dropout<{}, {width}, 256>", type_of(kind))))
        .collect();
    let Some(program) = Program::of(DROPOUT, &expressions) else { return };
    let mut generator = Generator::new(1).unwrap();
    let masks = [(0.0, 7), (0.3, u64::MAX), (0.5, 1 << 63), (0.9, 0x0123_4567_89ab_cdef)];
    for kind in KINDS {
        for (numbers, aligned) in [(1, false), (777, false), (2048, true), (8200, true)] {
            for (rate, seed) in masks {
                let mask = Mask { rate, seed };
                let x = normal(&mut generator, &[numbers], kind).to_kind(kind);
                let _ = x.narrow(0, numbers / 2, 1).fill_(f64::INFINITY);
                let width = if aligned { wide(kind) } else { 1 };
                let kernel = program.kernel(&format!("dropout<{}, {width}, 256>", type_of(kind)));
                let shift = Shift(if aligned { 16 } else { kind.elt_size_in_bytes() });
                for factor in [1.0, mask.scale()] {
                    for with_x in [true, false] {
                        let given = [
                            Given::optional("x", with_x.then_some(&x)),
                            Given::Out("out", kind, vec![numbers]),
                            Given::I64(numbers),
                            Given::I64(seed.cast_signed()),
                            Given::I64(threshold(rate)),
                            Given::F32(factor),
                        ];
                        let outcome = launch(kernel, (2, 256), &given, shift);
                        let ones = Tensor::ones([numbers], (kind, Device::Cpu));
                        let expected = mask.apply(if with_x { &x } else { &ones }, factor).unwrap();
                        let what = format!("{kind:?}, {numbers}, {mask:?}, {factor}, {with_x}");
                        let found = &outcome.outputs[0];
                        let same = found.eq_tensor(&expected).logical_or(&expected.isnan());
                        assert_eq!(same.all().int64_value(&[]), 1, "{what}");
                        assert!(found.isnan().equal(&expected.isnan()), "{what}");
                        if width > 1 {
                            assert!(outcome.counts.sector_ratio() <= 1.15, "{what}: {:?}", outcome.counts);
                        }
                    }
                }
            }
        }
    }
}
