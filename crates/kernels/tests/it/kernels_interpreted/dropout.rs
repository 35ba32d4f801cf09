//! Dropout by the hash of a seed.

use kernels::dropout::{Mask, Seed};
use runtime::random::{Generator, StepSeeds};
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
                let mask = Mask { rate, seed: Seed::Host(seed) };
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
                            Given::Null,
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

/// A graph repeats the arguments of its launches: with the same ones, the mask is that of the step whose base is on the device.
#[test]
fn the_base_of_a_step_is_read_from_the_device() {
    let Some(program) = Program::of(DROPOUT, &["dropout<float, 4, 256>".to_owned()]) else { return };
    let (numbers, rate) = (2048, 0.3);
    let mut masks = Vec::new();
    for base in [5u64, 0xfedc_ba98_7654_3210] {
        let tensor = Tensor::from_slice(&[base.cast_signed()]);
        // The second call of the step.
        let mask = {
            let _step = StepSeeds::enter(base, None);
            let _first = Mask::draw(rate).unwrap();
            Mask::draw(rate).unwrap()
        };
        let given = [
            Given::Null,
            Given::Out("out", Kind::Float, vec![numbers]),
            Given::I64(numbers),
            Given::In("base", &tensor),
            Given::I64(1),
            Given::I64(threshold(rate)),
            Given::F32(1.0),
        ];
        let outcome = launch(program.kernel("dropout<float, 4, 256>"), (2, 256), &given, Shift(16));
        let expected = mask.keep(&[numbers], (Kind::Float, Device::Cpu)).unwrap();
        assert!(outcome.outputs[0].equal(&expected), "base {base}");
        masks.push(expected);
    }
    assert_ne!(masks[0], masks[1]);
}
