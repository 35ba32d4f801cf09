//! The norms' backward and the sums of its partial gradients.

use kernels::norm::{self, Norm, Options};
use runtime::autograd::{self, Keep};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Shift, launch, launch_with, same};
use super::norm::{KINDS, SHAPES, Shape, ring, width};
use super::program::{NORM, Program, type_of};
use super::tolerance::{check, close, epsilon, normal};

fn expression(kind: Kind, norm: Norm, (_, _, wide, threads, packs, stages): Shape) -> String {
    let (t, width, layer) = (type_of(kind), width(kind, wide), norm == Norm::Layer);
    format!("norm_backward<{t}, {t}, {t}, {width}, {threads}, {packs}, {stages}, {layer}, {layer}>")
}

#[test]
fn norms_are_correct_for_every_dtype_and_width() {
    let all: Vec<_> = KINDS
        .iter()
        .flat_map(|kind| [Norm::Layer, Norm::Rms].map(|norm| (*kind, norm)))
        .flat_map(|(kind, norm)| SHAPES[1..].iter().map(move |shape| (kind, norm, *shape)))
        .collect();
    let mut expressions: Vec<String> =
        all.iter().map(|(kind, norm, shape)| expression(*kind, *norm, *shape)).collect();
    expressions.push("column_sums<float>".into());
    let Some(program) = Program::of(NORM, &expressions) else { return };
    let mut generator = Generator::new(4).unwrap();
    for ((kind, norm, shape), expression) in all.iter().zip(&expressions) {
        let (kind, norm, (rows, columns, wide, threads, packs, _)) = (*kind, *norm, *shape);
        let mut draw = |shape: &[i64]| normal(&mut generator, shape, kind);
        let (x, upstream, added) = (draw(&[rows, columns]), draw(&[rows, columns]), draw(&[rows, columns]));
        let weight = draw(&[columns]);
        for full in [true, false] {
            let what = format!("{expression}, {rows} × {columns}, full {full}");
            let mean = x.mean_dim([1].as_slice(), true, Kind::Double);
            let centered = if norm == Norm::Layer { &x - &mean } else { x.shallow_clone() };
            let rstd = ((&centered * &centered).mean_dim([1].as_slice(), false, Kind::Double) + 1e-5).rsqrt();
            let single = |t: &Tensor| t.to_kind(Kind::Float).reshape([-1]);
            let to = |t: &Tensor| t.to_kind(kind);
            let (mean, rstd) = (single(&mean), single(&rstd));
            let (kept, from, add, weight_there) = (to(&x), to(&upstream), to(&added), to(&weight));
            let blocks = rows.min(2);
            // The sums of the bias gradient that do not fit into registers.
            let block_numbers = i64::from(threads) * packs * width(kind, wide);
            let beside =
                if norm == Norm::Layer && block_numbers > 16_384 { 4 * block_numbers as usize } else { 0 };
            let sums = |name, wanted: bool| {
                if wanted { Given::Out(name, Kind::Float, vec![blocks, columns]) } else { Given::Null }
            };
            let run = |upstream, grad| {
                let given = [
                    Given::In("x", &kept),
                    upstream,
                    Given::optional("added", full.then_some(&add)),
                    Given::optional("weight", full.then_some(&weight_there)),
                    Given::optional("mean", (norm == Norm::Layer).then_some(&mean)),
                    Given::In("rstd", &rstd),
                    grad,
                    sums("of_weight", full),
                    sums("of_bias", norm == Norm::Layer),
                    Given::I32(rows),
                    Given::I32(columns),
                ];
                let size = (blocks, threads, ring(kind, *shape, 2) + beside);
                launch_with(program.kernel(expression), size, &given, Shift::default())
            };
            let outcome = run(Given::In("upstream", &from), Given::Out("grad", kind, vec![rows, columns]));
            // In place of the upstream gradient, whose next rows are prefetched; and for the parameters' gradients only.
            let in_place = run(Given::InOut("upstream", &from), Given::Again("upstream"));
            same(&what, &outcome.outputs, &in_place.outputs);
            let without = run(Given::In("upstream", &from), Given::Null);
            same(&what, &outcome.outputs[1..], &without.outputs);
            let [x_gradient, weight_gradient, bias_gradient] =
                by_processor(norm, &x, full.then_some(&weight), &upstream, Kind::Double);
            let x_gradient = if full { &x_gradient + &added } else { x_gradient };
            let tolerance = 4.0 * epsilon(kind) + 4e-6;
            for outputs in [&outcome.outputs, &outcome.perturbed] {
                close(&what, &outputs[0], &x_gradient, tolerance);
                let partial = &outputs[1..];
                let mut expected = Vec::new();
                if full {
                    expected.push(&weight_gradient);
                }
                if norm == Norm::Layer {
                    expected.push(&bias_gradient);
                }
                for (partial, expected) in partial.iter().zip(expected) {
                    let summed = launch(
                        program.kernel("column_sums<float>"),
                        ((columns + 31) / 32, 256),
                        &[
                            Given::In("partial", partial),
                            Given::Out("sums", Kind::Float, vec![columns]),
                            Given::Null,
                            Given::Null,
                            Given::I32(blocks),
                            Given::I32(columns),
                        ],
                        Shift::default(),
                    );
                    check(&what, &summed, &[expected], 1e-5);
                    assert_eq!(summed.counts.bank_conflicts, 0);
                }
            }
            if !full && norm == Norm::Rms {
                let [same, ..] = by_processor(norm, &x, None, &upstream, kind);
                close(&format!("{what}, against the processor's"), &outcome.outputs[0], &same, tolerance);
            }
            if columns > 12_000 {
                assert!(outcome.counts.sector_ratio() <= 1.25, "{what}: {:?}", outcome.counts);
                assert_eq!(outcome.counts.bank_conflicts, 0, "{what}");
            }
            if wide && packs == 1 {
                // The partial sums are of fp32: where a thread has eight, each half of them touches all sectors.
                assert!(outcome.counts.sector_ratio() <= 1.4, "{what}: {:?}", outcome.counts);
            }
        }
    }
}

/// Gradients of x, weight and bias on the CPU.
fn by_processor(
    norm: Norm,
    x: &Tensor,
    weight: Option<&Tensor>,
    upstream: &Tensor,
    kind: Kind,
) -> [Tensor; 3] {
    let leaf = |t: &Tensor| t.to_kind(kind).copy().set_requires_grad(true);
    let columns = x.size()[1];
    let ones = Tensor::ones([columns], (kind, Device::Cpu));
    let (x, bias) = (leaf(x), leaf(&(&ones * 0.0)));
    let weight = leaf(weight.unwrap_or(&ones));
    let options = Options::default();
    let (y, inputs) = match norm {
        Norm::Layer => {
            (norm::layer_norm(&x, Some(&weight), Some(&bias), options).unwrap(), vec![&x, &weight, &bias])
        }
        Norm::Rms => (norm::rms_norm(&x, Some(&weight), options).unwrap(), vec![&x, &weight]),
    };
    let mut grads =
        autograd::grad(&[&y], &[Some(&upstream.to_kind(kind))], &inputs, Keep::default()).unwrap();
    grads.resize_with(3, || None);
    let mut grads = grads.into_iter().map(|grad| grad.unwrap_or_else(Tensor::new));
    std::array::from_fn(|_| grads.next().unwrap())
}

#[test]
fn column_sums_of_one_and_two_matrices_are_correct() {
    let expressions = ["float", "bf16", "f16"].map(|kind| format!("column_sums<{kind}>"));
    let Some(program) = Program::of(NORM, &expressions) else { return };
    let mut generator = Generator::new(5).unwrap();
    for (rows, columns) in [(1, 1), (7, 33), (100, 32), (67, 130)] {
        for (kind, expression) in KINDS.into_iter().zip(&expressions) {
            let exact = [0, 1].map(|_| normal(&mut generator, &[rows, columns], Kind::Float));
            let partial = exact.each_ref().map(|exact| exact.to_kind(Kind::Float));
            let expected = exact.map(|exact| exact.sum_dim_intlist([0].as_slice(), false, Kind::Double));
            for count in [1, 2] {
                let blocks = (columns + 31) / 32 * count as i64;
                let mut given =
                    vec![Given::In("first", &partial[0]), Given::Out("of_first", kind, vec![columns])];
                given.extend(if count == 2 {
                    [Given::In("second", &partial[1]), Given::Out("of_second", kind, vec![columns])]
                } else {
                    [Given::Null, Given::Null]
                });
                given.extend([Given::I32(rows), Given::I32(columns)]);
                let outcome = launch(program.kernel(expression), (blocks, 256), &given, Shift::default());
                let expected: Vec<&Tensor> = expected.iter().take(count).collect();
                let what = format!("{kind:?}, {count} of {rows} × {columns}");
                check(
                    &what,
                    &outcome,
                    &expected,
                    1e-6 + if kind == Kind::Float { 0.0 } else { epsilon(kind) },
                );
            }
        }
    }
}
