//! The rotary embedding.

use runtime::fused::rope::{Frequencies, RotaryTable};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Shift, launch, try_launch};
use super::program::{Program, ROPE, type_of};
use super::tolerance::{check, close, epsilon, normal};

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

fn wide(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

fn expressions() -> Vec<String> {
    KINDS
        .iter()
        .flat_map(|kind| [1, wide(*kind)].map(|width| format!("rotate<{}, {width}>", type_of(*kind))))
        .collect()
}

#[test]
fn rotations_are_correct_for_every_dtype_in_place_and_with_positions() {
    let Some(program) = Program::of(ROPE, &expressions()) else { return };
    let mut generator = Generator::new(2).unwrap();
    for kind in KINDS {
        for (batch, sequence, heads, head, width) in
            [(2, 5, 3, 6, 1), (1, 7, 14, 64, wide(kind)), (2, 3, 4, 128, wide(kind)), (1, 2, 1, 2, 1)]
        {
            let x = normal(&mut generator, &[batch, sequence, heads, head], kind);
            let max_positions = 300;
            let table = RotaryTable::new(head, max_positions, &Frequencies::default(), Device::Cpu).unwrap();
            let values = table.values(max_positions).unwrap().contiguous();
            let positions = Tensor::randint(max_positions, [batch, sequence], (Kind::Int64, Device::Cpu));
            for positions in [None, Some(&positions)] {
                let given = x.to_kind(kind);
                let threads = (heads * head / 2 / width).clamp(1, 256) as u32;
                let strides = || [sequence * heads * head, heads * head, head].map(Given::I64);
                let [x0, x1, x2] = strides();
                let [y0, y1, y2] = strides();
                let outcome = launch(
                    program.kernel(&format!("rotate<{}, {width}>", type_of(kind))),
                    (batch * sequence, threads.next_multiple_of(32)),
                    &[
                        Given::In("x", &given),
                        x0,
                        x1,
                        x2,
                        Given::Out("out", kind, vec![batch, sequence, heads, head]),
                        y0,
                        y1,
                        y2,
                        Given::In("table", &values),
                        Given::optional("positions", positions),
                        Given::I32(sequence),
                        Given::I32(heads),
                        Given::I32(head / 2),
                        Given::I64(max_positions),
                        Given::F32(1.0),
                    ],
                    Shift::default(),
                );
                let rotated = |kind: Kind| {
                    let x = x.to_kind(kind);
                    table.rotate(&x, &x, positions).unwrap().0
                };
                let what = format!("{kind:?}, {batch} × {sequence} × {heads} × {head}");
                check(&what, &outcome, &[&rotated(Kind::Double)], 4.0 * epsilon(kind));
                close(&what, &outcome.outputs[0], &rotated(kind), 4.0 * epsilon(kind));
                if width > 1 {
                    // The table is fp32: a thread with eight numbers reads half a sector twice.
                    assert!(outcome.counts.sector_ratio() <= 1.25, "{what}: {:?}", outcome.counts);
                }
            }
        }
    }
}

#[test]
fn a_position_beyond_the_table_traps() {
    let Some(program) = Program::of(ROPE, &expressions()) else { return };
    let options = (Kind::Float, Device::Cpu);
    let (x, table) = (Tensor::ones([1, 2, 1, 4], options), Tensor::ones([3, 2, 2], options));
    let positions = Tensor::from_slice(&[0i64, 3]);
    let mut given = vec![Given::InOut("x", &x), Given::I64(8), Given::I64(4), Given::I64(4)];
    given.extend([
        Given::Out("out", Kind::Float, vec![1, 2, 1, 4]),
        Given::I64(8),
        Given::I64(4),
        Given::I64(4),
    ]);
    given.extend([Given::In("table", &table), Given::In("positions", &positions)]);
    given.extend([Given::I32(2), Given::I32(1), Given::I32(2), Given::I64(3), Given::F32(1.0)]);
    let kernel = program.kernel("rotate<float, 1>");
    let error =
        try_launch(kernel, ptx::Launch::new(2, 32), &given, Shift::default()).unwrap_err().to_string();
    assert!(error.ends_with("block 1, thread 0: the kernel traps"), "{error}");
}
