//! Layer norm and RMS norm, forward.

use kernels::norm::{self, Norm, Options};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::launch::{Given, Outcome, Shift, Size, launch_with};
use super::program::{NORM, Program, type_of};
use super::tolerance::{check, close, epsilon, normal};

pub(super) const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

/// Rows, columns, whether threads read 16 bytes at once, threads, packs of a thread, rows that are read ahead.
pub(super) type Shape = (i64, i64, bool, u32, i64, i64);
pub(super) const SHAPES: [Shape; 11] = [
    (3, 1, false, 128, 1, 0),
    (5, 7, false, 128, 1, 0),
    (4, 250, false, 128, 2, 0),
    (7, 96, true, 128, 1, 2),
    (9, 96, true, 32, 1, 3),
    (4, 2496, true, 320, 2, 3),
    (5, 896, true, 128, 2, 2),
    (7, 1600, true, 128, 4, 2),
    (3, 4096, true, 512, 4, 0),
    (5, 4104, true, 512, 4, 2),
    (3, 12_304, true, 1024, 4, 0),
];

/// Bytes of shared memory for the rows of `matrices` of a dtype that are read ahead.
pub(super) fn ring(kind: Kind, (_, _, wide, threads, packs, stages): Shape, matrices: i64) -> usize {
    let row_bytes = i64::from(threads) * packs * width(kind, wide) * kind.elt_size_in_bytes() as i64;
    (stages * matrices * row_bytes) as usize
}

/// Numbers that a thread reads at once.
pub(super) fn width(kind: Kind, wide: bool) -> i64 {
    if wide { 16 / kind.elt_size_in_bytes() as i64 } else { 1 }
}

fn expression(kind: Kind, norm: Norm, (_, _, wide, threads, packs, stages): Shape) -> String {
    let (t, width) = (type_of(kind), width(kind, wide));
    format!("norm_forward<{t}, {t}, {t}, {width}, {threads}, {packs}, {stages}, {}>", norm == Norm::Layer)
}

struct Inputs {
    x: Tensor,
    residual: Option<Tensor>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

/// Returns y, and with a residual the sum, in a dtype on the CPU.
fn by_processor(norm: Norm, inputs: &Inputs, kind: Kind) -> Vec<Tensor> {
    let to = |t: &Tensor| t.to_kind(kind);
    let (x, weight, bias) = (to(&inputs.x), inputs.weight.as_ref().map(to), inputs.bias.as_ref().map(to));
    let options = Options::default();
    match (&inputs.residual, norm) {
        (Some(residual), _) => {
            let (y, sum) =
                norm::add_norm(norm, &x, &to(residual), weight.as_ref(), bias.as_ref(), options).unwrap();
            vec![sum, y]
        }
        (None, Norm::Layer) => vec![norm::layer_norm(&x, weight.as_ref(), bias.as_ref(), options).unwrap()],
        (None, Norm::Rms) => vec![norm::rms_norm(&x, weight.as_ref(), options).unwrap()],
    }
}

/// Outputs: the sum (with a residual), y, the means of a layer norm, 1/σ.
fn run(program: &Program, expression: &str, norm: Norm, inputs: &Inputs, kind: Kind, size: Size) -> Outcome {
    let to = |t: &Tensor| t.to_kind(kind);
    let (rows, columns) = (inputs.x.size()[0], inputs.x.size()[1]);
    let (x, residual) = (to(&inputs.x), inputs.residual.as_ref().map(to));
    let (weight, bias) = (inputs.weight.as_ref().map(to), inputs.bias.as_ref().map(to));
    let output = |name, wanted: bool, kind, size: Vec<i64>| {
        if wanted { Given::Out(name, kind, size) } else { Given::Null }
    };
    let given = [
        Given::In("x", &x),
        Given::optional("residual", residual.as_ref()),
        output("sum", residual.is_some(), kind, vec![rows, columns]),
        Given::optional("weight", weight.as_ref()),
        Given::optional("bias", bias.as_ref()),
        Given::Out("y", kind, vec![rows, columns]),
        output("mean", norm == Norm::Layer, Kind::Float, vec![rows]),
        Given::Out("rstd", Kind::Float, vec![rows]),
        Given::I32(rows),
        Given::I32(columns),
        Given::F32(1e-5),
    ];
    launch_with(program.kernel(expression), size, &given, Shift::default())
}

#[test]
fn norms_are_correct_for_every_dtype_and_width() {
    let all: Vec<_> = KINDS
        .iter()
        .flat_map(|kind| [Norm::Layer, Norm::Rms].map(|norm| (*kind, norm)))
        .flat_map(|(kind, norm)| SHAPES.map(|shape| (kind, norm, shape)))
        .collect();
    let expressions: Vec<String> =
        all.iter().map(|(kind, norm, shape)| expression(*kind, *norm, *shape)).collect();
    let Some(program) = Program::of(NORM, &expressions) else { return };
    let mut generator = Generator::new(1).unwrap();
    for ((kind, norm, shape), expression) in all.iter().zip(&expressions) {
        let (kind, norm, (rows, columns, wide, threads, packs, _)) = (*kind, *norm, *shape);
        for full in [false, true] {
            let mut draw = |shape: &[i64]| normal(&mut generator, shape, kind);
            let inputs = Inputs {
                x: draw(&[rows, columns]),
                residual: full.then(|| draw(&[rows, columns])),
                weight: (full || wide).then(|| draw(&[columns])),
                bias: (full && norm == Norm::Layer).then(|| draw(&[columns])),
            };
            let what = format!("{expression}, {rows} × {columns}, full {full}");
            // Fewer blocks than rows, so that a block has several.
            let outcome = run(
                &program,
                expression,
                norm,
                &inputs,
                kind,
                (rows.min(2), threads, ring(kind, *shape, if full { 2 } else { 1 })),
            );
            let x = inputs.residual.as_ref().map_or(inputs.x.shallow_clone(), |residual| {
                (&inputs.x + residual).to_kind(kind).to_kind(Kind::Double)
            });
            let mean = x.mean_dim([1].as_slice(), true, Kind::Double);
            let centered = if norm == Norm::Layer { &x - &mean } else { x.shallow_clone() };
            let rstd = ((&centered * &centered).mean_dim([1].as_slice(), false, Kind::Double) + 1e-5).rsqrt();
            let mut expected = by_processor(norm, &inputs, Kind::Double);
            let in_same_dtype = by_processor(norm, &inputs, kind);
            // The CPU's sum in f64 is not rounded to the dtype.
            if full {
                expected[0] = x;
                let rounded = Inputs { x: expected[0].shallow_clone(), residual: None, ..inputs };
                expected[1] = by_processor(norm, &rounded, Kind::Double).remove(0);
            }
            if norm == Norm::Layer {
                expected.push(mean.reshape([-1]));
            }
            expected.push(rstd);
            let tolerance = 4.0 * epsilon(kind) + 2e-6;
            // A layer norm of a single number is only rounding error.
            if columns > 1 || norm == Norm::Rms {
                check(&what, &outcome, &expected.iter().collect::<Vec<_>>(), tolerance);
                for (found, expected) in outcome.outputs.iter().zip(&in_same_dtype) {
                    close(&format!("{what}, against the processor's"), found, expected, tolerance);
                }
            }
            if wide && packs == 1 {
                assert!(outcome.counts.sector_ratio() <= 1.15, "{what}: {:?}", outcome.counts);
            }
            assert_eq!(outcome.counts.bank_conflicts, 0, "{what}");
        }
    }
}

/// A row with a NaN is NaN; an infinite number makes its own row NaN or zero, and no other.
#[test]
fn special_numbers_affect_their_own_row_only() {
    let expression = expression(Kind::BFloat16, Norm::Rms, (4, 96, true, 128, 1, 0));
    let Some(program) = Program::of(NORM, std::slice::from_ref(&expression)) else { return };
    let x = Tensor::ones([4, 96], (Kind::Double, Device::Cpu));
    let _ = x.get(1).narrow(0, 95, 1).fill_(f64::NAN);
    let _ = x.get(2).narrow(0, 0, 1).fill_(f64::NEG_INFINITY);
    let inputs = Inputs { x: x.shallow_clone(), residual: None, weight: None, bias: None };
    let outcome = run(&program, &expression, Norm::Rms, &inputs, Kind::BFloat16, (2, 128, 0));
    let y = &outcome.outputs[0];
    assert_eq!(y.get(0).isfinite().all().int64_value(&[]), 1);
    assert_eq!(y.get(1).isnan().all().int64_value(&[]), 1);
    assert_eq!(y.get(2).isnan().sum(Kind::Int64).int64_value(&[]), 1, "∞ · 0");
    assert_eq!(y.get(3).isfinite().all().int64_value(&[]), 1);
}
