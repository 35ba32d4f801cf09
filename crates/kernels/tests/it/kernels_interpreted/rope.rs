//! The rotary embedding.

use kernels::rope::RotaryTable;
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

/// Bytes of the kernel's structure for a tensor and its place.
const HEADS: usize = 9 * 8;

/// A contiguous tensor and its place of the same strides.
pub(super) fn turn<'a>(x: Given<'a>, out: Given<'a>, tensor: &Tensor) -> Given<'a> {
    let stride = tensor.stride();
    let strides = || [stride[0], stride[1], stride[2]].map(Given::I64);
    let mut members = vec![x];
    members.extend(strides());
    members.push(out);
    members.extend(strides());
    members.push(Given::I64(tensor.size()[2]));
    Given::Structure(members, HEADS)
}

/// A tensor without heads.
pub(super) fn none() -> Given<'static> {
    Given::Structure(Vec::new(), HEADS)
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
            // Keys of fewer heads, or none.
            let kv_heads = heads / 2;
            let y = normal(&mut generator, &[batch, sequence, kv_heads, head], kind);
            let max_positions = 300;
            let table = RotaryTable::new(head, max_positions, 1e4, Device::Cpu).unwrap();
            let values = table.values(max_positions).unwrap().contiguous();
            let positions = Tensor::randint(max_positions, [batch, sequence], (Kind::Int64, Device::Cpu));
            for positions in [None, Some(&positions)] {
                let (q, k) = (x.to_kind(kind), y.to_kind(kind));
                let threads = ((heads + kv_heads) * head / 2 / width).clamp(1, 256) as u32;
                let out = |heads| Given::Out("out", kind, vec![batch, sequence, heads, head]);
                let outcome = launch(
                    program.kernel(&format!("rotate<{}, {width}>", type_of(kind))),
                    (batch * sequence, threads.next_multiple_of(32)),
                    &[
                        turn(Given::In("q", &q), out(heads), &q),
                        if kv_heads > 0 { turn(Given::In("k", &k), out(kv_heads), &k) } else { none() },
                        Given::In("table", &values),
                        Given::optional("positions", positions),
                        Given::I32(sequence),
                        Given::I32(head / 2),
                        Given::I64(max_positions),
                        Given::F32(1.0),
                    ],
                    Shift::default(),
                );
                let rotated = |kind: Kind| {
                    let (q, k) = table.rotate(&x.to_kind(kind), &y.to_kind(kind), positions).unwrap();
                    if kv_heads > 0 { vec![q, k] } else { vec![q] }
                };
                let what = format!("{kind:?}, {batch} × {sequence} × {heads} × {head}");
                let expected = rotated(Kind::Double);
                check(&what, &outcome, &expected.iter().collect::<Vec<_>>(), 4.0 * epsilon(kind));
                for (found, expected) in outcome.outputs.iter().zip(rotated(kind)) {
                    close(&what, found, &expected, 4.0 * epsilon(kind));
                }
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
    let out = Given::Out("out", Kind::Float, vec![1, 2, 1, 4]);
    let mut given = vec![turn(Given::In("x", &x), out, &x), none()];
    given.extend([Given::In("table", &table), Given::In("positions", &positions)]);
    given.extend([Given::I32(2), Given::I32(2), Given::I64(3), Given::F32(1.0)]);
    let kernel = program.kernel("rotate<float, 1>");
    let error =
        try_launch(kernel, ptx::Launch::new(2, 32), &given, Shift::default()).unwrap_err().to_string();
    assert!(error.ends_with("block 1, thread 0: the kernel traps"), "{error}");
}
