//! SwiGLU's elementwise part, forward and backward.

use kernels::swiglu;
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Shift, launch, same};
use super::program::{Program, SWIGLU, type_of};
use super::tolerance::{check, close, epsilon, normal};

const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

fn wide(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

/// The destination of an output of the backward.
#[derive(Clone, Copy, PartialEq)]
enum At {
    Separate,
    /// In the input's memory: gate's gradient in gate, up's in up, the product in the gradient.
    Input,
    Nowhere,
}

/// The arguments of the backward. The outputs of a launch are the requested ones of gate's gradient, up's gradient and the product.
fn backward_arguments(inputs: [&Tensor; 3], at: [At; 3], blocks: i64) -> Vec<Given<'_>> {
    let (rows, features) = (inputs[0].size()[0], inputs[0].size()[1]);
    let mut all = Vec::new();
    for ((name, input), at) in ["gate", "up", "grad"].into_iter().zip(inputs).zip(at) {
        all.push(if at == At::Input { Given::InOut(name, input) } else { Given::In(name, input) });
        all.push(Given::I64(features));
    }
    for ((name, place), at) in [("of_gate", "gate"), ("of_up", "up"), ("product", "grad")].into_iter().zip(at)
    {
        all.extend(match at {
            At::Separate => [Given::Out(name, inputs[0].kind(), vec![rows, features]), Given::I64(features)],
            At::Input => [Given::Again(place), Given::I64(features)],
            At::Nowhere => [Given::Null, Given::I64(0)],
        });
    }
    all.extend([Given::I32(features), Given::I32(blocks)]);
    all
}

#[test]
fn kernels_are_correct_for_every_dtype_odd_sizes_and_strides() {
    let expressions: Vec<String> = KINDS
        .iter()
        .flat_map(|kind| [1, wide(*kind)].map(|width| (type_of(*kind), width)))
        .flat_map(|(kind, width)| {
            ["forward", "backward"].map(|name| format!("swiglu_{name}<{kind}, {width}, 256>"))
        })
        .collect();
    let Some(program) = Program::of(SWIGLU, &expressions) else { return };
    let mut generator = Generator::new(3).unwrap();
    for kind in KINDS {
        // With a row stride: views of one matrix [gate | up].
        for (tokens, features, width) in
            [(1, 1, 1), (3, 5, 1), (2, 301, 1), (3, 96, wide(kind)), (2, 2600, wide(kind))]
        {
            let [gate, up, upstream] = [3.0, 1.0, 1.0].map(|size| {
                (normal(&mut generator, &[tokens, features], kind) * size).to_kind(kind).to_kind(Kind::Double)
            });
            let blocks = (features + 256 * width - 1) / (256 * width);
            let grid = (tokens * blocks, 256);
            let (in_kind, t) = (|t: &Tensor| t.to_kind(kind), type_of(kind));
            let shift = Shift(if width == 1 { kind.elt_size_in_bytes() } else { 32 });
            let what = format!("{kind:?}, {tokens} × {features}");
            let (g, u, d) = (in_kind(&gate), in_kind(&up), in_kind(&upstream));
            let forward = launch(
                program.kernel(&format!("swiglu_forward<{t}, {width}, 256>")),
                grid,
                &[
                    Given::In("gate", &g),
                    Given::I64(features),
                    Given::In("up", &u),
                    Given::I64(features),
                    Given::Out("silu", kind, vec![tokens, features]),
                    Given::I64(features),
                    Given::Out("product", kind, vec![tokens, features]),
                    Given::I64(features),
                    Given::I32(features),
                    Given::I32(blocks),
                ],
                shift,
            );
            let silu = gate.silu();
            check(&what, &forward, &[&silu, &(&silu * &up)], 2.0 * epsilon(kind) + 1e-6);
            let backward = |at: [At; 3]| {
                let kernel = program.kernel(&format!("swiglu_backward<{t}, {width}, 256>"));
                launch(kernel, grid, &backward_arguments([&g, &u, &d], at, blocks), shift)
            };
            let (separate, in_place) = (backward([At::Separate; 3]), backward([At::Input; 3]));
            same(&what, &separate.outputs, &in_place.outputs);
            // Each output alone, and the product with gradients in the inputs' memory.
            for only in 0..3 {
                let alone: [At; 3] =
                    std::array::from_fn(|index| if index == only { At::Separate } else { At::Nowhere });
                same(&what, &separate.outputs[only..=only], &backward(alone).outputs);
            }
            let mixed = backward([At::Input, At::Input, At::Separate]);
            same(&what, &separate.outputs, &mixed.outputs);
            let backward = separate;
            // The CPU's pass: in f64 it is the oracle; in the same dtype it must be as accurate.
            let by_processor = |kind: Kind| {
                let own = |t: &Tensor| t.to_kind(kind).copy();
                swiglu::backward(own(&gate), own(&up), None, own(&upstream)).unwrap()
            };
            let swiglu::Gradients { gate: gate_gradient, up: up_gradient, product } =
                by_processor(Kind::Double);
            check(&what, &backward, &[&gate_gradient, &up_gradient, &product], 2.0 * epsilon(kind) + 1e-6);
            let swiglu::Gradients { gate: gate_gradient, up: up_gradient, product } = by_processor(kind);
            for (found, expected) in backward.outputs.iter().zip([&gate_gradient, &up_gradient, &product]) {
                close(
                    &format!("{what}, against the processor's"),
                    found,
                    expected,
                    2.0 * epsilon(kind) + 1e-6,
                );
            }
            if width > 1 {
                for counts in [&forward.counts, &backward.counts] {
                    assert!(counts.sector_ratio() <= 1.15, "{what}: {counts:?}");
                    assert_eq!(counts.wide_requests, counts.global_requests, "{what}");
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_propagate_elementwise() {
    let Some(program) = Program::of(SWIGLU, &["swiglu_forward<float, 4, 256>".into()]) else { return };
    let gate =
        Tensor::from_slice(&[1.0, f64::NAN, f64::NEG_INFINITY, f64::INFINITY, -100.0, -20_000.0, 0.0, 2.0]);
    let up = Tensor::from_slice(&[f64::NAN, 1.0, 1.0, 1.0, 1.0, 1.0, f64::INFINITY, f64::NEG_INFINITY]);
    let (g, u) = (gate.to_kind(Kind::Float), up.to_kind(Kind::Float));
    let given = [
        Given::In("gate", &g),
        Given::I64(8),
        Given::In("up", &u),
        Given::I64(8),
        Given::Null,
        Given::I64(0),
        Given::Out("product", Kind::Float, vec![8]),
        Given::I64(8),
        Given::I32(8),
        Given::I32(1),
    ];
    let kernel = program.kernel("swiglu_forward<float, 4, 256>");
    let outcome = launch(kernel, (1, 256), &given, Shift::default());
    // As libtorch in fp32: −∞ · σ(−∞) is NaN.
    let silu = &g / (1.0 + (-&g).exp());
    check("special numbers", &outcome, &[&(silu * &u)], 1e-6);
    assert_eq!(outcome.outputs[0].device(), Device::Cpu);
}
