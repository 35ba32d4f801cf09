//! Stochastic rounding of many tensors.

use kernels::stochastic_rounding::{Rounding, StepNumber, Stream, round};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Shift, launch};
use super::program::{Program, STOCHASTIC_ROUNDING, type_of};
use super::tolerance::normal;

/// Numbers of a block, all of one tensor.
const CHUNK: i64 = 4096;
/// Bytes of the kernel's table: 60 entries of 8 members of 8 bytes.
const TABLE: usize = 60 * 8 * 8;
/// The step of tensors whose step the host does not know.
const COUNTED: u64 = 12;
/// Elements, the index of the first, and the step where the host knows it.
const CASES: [(i64, u64, Option<u64>); 5] =
    [(1, 0, Some(1)), (4099, 0, None), (130, 1, Some(5)), (4097, 6, Some(1 << 33)), (3, 3, None)];

fn expression(kind: Kind) -> String {
    format!("stochastic_rounding<{}, 128, {CHUNK}>", type_of(kind))
}

/// Bit by bit what the CPU computes: for tensors of several blocks, parts that begin anywhere, and steps that only the device knows.
#[test]
fn stochastic_rounding_has_the_bits_of_the_cpu() {
    let kinds = [Kind::BFloat16, Kind::Half];
    let Some(program) = Program::of(STOCHASTIC_ROUNDING, &kinds.map(expression)) else { return };
    let mut generator = Generator::new(9).unwrap();
    let counted = Tensor::from_slice(&[COUNTED as f32]);
    for kind in kinds {
        let sources = CASES.map(|(numbers, ..)| {
            let x = normal(&mut generator, &[numbers], Kind::Float).to_kind(Kind::Float);
            for (at, special) in (0..numbers).zip([1e-6, 65503.99, f64::INFINITY, 7e4, 3.39e38, f64::NAN]) {
                let _ = x.narrow(0, at, 1).fill_(special);
            }
            x
        });
        let (mut members, mut expected, mut blocks) = (Vec::new(), Vec::new(), 0);
        for (source, (numbers, first, step)) in sources.iter().zip(CASES) {
            let stream = Stream::new(7, "w").from_element(first);
            members.extend([
                Given::In("source", source),
                Given::Out("target", kind, vec![numbers]),
                Given::I64(stream.key().cast_signed()),
                Given::I64(first.cast_signed()),
                Given::I64(step.map_or(0, u64::cast_signed)),
                step.map_or(Given::In("step", &counted), |_| Given::Null),
                Given::I64(numbers),
                Given::I64(blocks),
            ]);
            blocks += (numbers + CHUNK - 1) / CHUNK;
            let target = Tensor::zeros([numbers], (kind, Device::Cpu));
            let step = StepNumber::Host(step.unwrap_or(COUNTED));
            round(&[Rounding { source, target: &target, stream, step }]).unwrap();
            expected.push(target);
        }
        let given = [Given::Structure(members, TABLE), Given::I32(CASES.len() as i64)];
        let outcome = launch(program.kernel(&expression(kind)), (blocks, 128), &given, Shift(4));
        for (found, expected) in outcome.outputs.iter().zip(&expected) {
            let same = found.eq_tensor(expected).logical_or(&found.isnan().logical_and(&expected.isnan()));
            assert_eq!(same.all().int64_value(&[]), 1, "{kind:?}, {} numbers", expected.numel());
        }
    }
}
