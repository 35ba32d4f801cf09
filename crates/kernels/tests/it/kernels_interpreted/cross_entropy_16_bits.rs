//! The passes over tiles of logits in bf16 and fp16.
//!
//! Logits and gradients are those in f64, rounded once. The statistics are those of the stored logits, so that they are as exact as those
//! of a tile in fp32.

use kernels::cross_entropy::{
    Coefficients, Cpu, LogitsPass, Statistics, Targets, TileInputs, Transform, Wanted,
};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

use super::cross_entropy::{Case, expressions, listed};
use super::program::{CROSS_ENTROPY, Program};
use super::tolerance::{close, normal, rounded};

/// Of the largest number, for what is computed in fp32.
const TOLERANCE: f64 = 2e-5;

#[test]
fn every_option_of_the_passes_over_16_bits_is_correct() {
    let mut generator = Generator::new(5).unwrap();
    for kind in [Kind::BFloat16, Kind::Half] {
        let Some(program) = Program::of(CROSS_ENTROPY, &expressions(kind)) else { return };
        for (columns, stride) in [(1, 1), (7, 8), (16, 16), (509, 509), (2061, 2064), (8203, 8208)] {
            for (transformed, dense, plain) in [
                (false, false, true),
                (true, false, true),
                (false, true, true),
                (true, true, false),
                (true, false, false),
            ] {
                // More than one block of a row: both kernels of a gradient.
                if columns < 8192 || plain != dense {
                    passes(&mut generator, &program, kind, [columns, stride], [transformed, dense, plain]);
                }
            }
        }
    }
}

fn passes(
    generator: &mut Generator,
    program: &Program,
    kind: Kind,
    [columns, stride]: [i64; 2],
    [transformed, dense, plain]: [bool; 3],
) {
    let what = format!(
        "{kind:?}, {columns} of {stride} columns, transformed {transformed}, dense {dense}, plain {plain}"
    );
    let (rows, first) = (3, 3);
    let single = |t: &Tensor| t.to_kind(Kind::Float);
    let wide = |t: &Tensor| t.to_kind(Kind::Double);
    let tiles = [4.0, 2.5].map(|size| (normal(generator, &[rows, columns], kind) * size).to_kind(kind));
    let bias = transformed.then(|| normal(generator, &[columns], Kind::Float));
    let weights = (!plain).then(|| normal(generator, &[columns], Kind::Float).abs());
    let labels = Tensor::randint_low(-2, columns + 2, [rows], (Kind::Int64, Device::Cpu));
    let distributions = single(&normal(generator, &[rows, columns], Kind::Float).softmax(-1, Kind::Double));
    let numbers = normal(generator, &[3, rows], Kind::Float);
    let (scale, softcap) = if transformed { (0.7, Some(5.0)) } else { (1.0, None) };
    if columns > 4 && !transformed {
        let _ = tiles[0].get(1).narrow(0, 2, 1).fill_(f64::NEG_INFINITY);
    }
    let asked = if plain { Wanted::default() } else { Wanted { total: true, moment: true, best: true } };
    let begin = |kind| Statistics::new(rows, dense, asked, (kind, Device::Cpu)).unwrap();

    let (bias_f32, weights_f32) = (bias.as_ref().map(single), weights.as_ref().map(single));
    let mut case = Case {
        transform: Transform { bias: bias_f32.as_ref(), scale, softcap },
        targets: if dense { Targets::Dense(&distributions) } else { Targets::Columns(&labels) },
        weights: weights_f32.as_ref(),
        plain,
        kind,
        width: if stride % 8 == 0 { 8 } else { 1 },
        stride,
        first,
    };
    let one = case.statistics(program, &tiles[0], &listed(begin(Kind::Float)));
    case.first += columns;
    let two = case.statistics(program, &tiles[1], &one.outputs[1..]);

    // The logits: those in f64, rounded once.
    let transform = Transform { bias: bias.as_ref(), scale, softcap };
    let exact = tiles.each_ref().map(|tile| {
        let mut logits = wide(tile).copy();
        Cpu.logits(&mut logits, transform).unwrap();
        logits
    });
    for (which, found, exact) in [
        ("exact", &one.outputs[0], &exact[0]),
        ("approximate", &one.perturbed[0], &exact[0]),
        ("second", &two.outputs[0], &exact[1]),
    ] {
        rounded(&format!("{what}: logits, {which}"), found, exact, if transformed { TOLERANCE } else { 0.0 });
    }
    if transformed {
        let alone = case.logits(program, &tiles[1]);
        assert!(alone.outputs[0].equal(&two.outputs[0]), "{what}: recomputed logits are other ones");
    }

    // The statistics: those of the stored logits, in f64.
    let (weights_f64, dense_f64) = (weights.as_ref().map(wide), wide(&distributions));
    let targets = if dense { Targets::Dense(&dense_f64) } else { Targets::Columns(&labels) };
    let inputs = TileInputs { first, transform, targets, class_weights: weights_f64.as_ref() };
    let stored_statistics = |second: &Tensor| {
        let mut known = begin(Kind::Double);
        for (first, stored) in [(first, &one.outputs[0]), (first + columns, second)] {
            let mut stored = wide(stored).copy();
            let unchanged = TileInputs { first, transform: Transform::default(), ..inputs };
            Cpu.statistics(&mut stored, unchanged, &mut known).unwrap();
        }
        listed(known)
    };
    for (which, outputs) in [("exact", &two.outputs), ("approximate", &two.perturbed)] {
        for (index, known) in stored_statistics(&outputs[0]).iter().enumerate() {
            close(&format!("{what}: statistic {index}, {which}"), &outputs[index + 1], known, TOLERANCE);
        }
    }

    // The gradient of the first tile, with the statistics of both.
    let maximum = stored_statistics(&two.outputs[0]).swap_remove(0);
    let constant = (!plain).then(|| numbers.get(2));
    let coefficients = Coefficients {
        maximum: &maximum,
        powers: &numbers.get(0),
        target: &numbers.get(1),
        constant: constant.as_ref(),
    };
    let mut gradient = wide(&one.outputs[0]).copy();
    Cpu.gradient(&mut gradient, inputs, coefficients).unwrap();
    let numbers =
        [single(&maximum), single(&numbers.get(0)), single(&numbers.get(1)), single(&numbers.get(2))];
    let found = case.gradient(program, &one.outputs[0], &numbers, None);
    rounded(&format!("{what}: gradient"), &found.outputs[0], &gradient, TOLERANCE);
    rounded(&format!("{what}: gradient, approximate"), &found.perturbed[0], &gradient, TOLERANCE);
    if columns > 8000 {
        // Eight numbers of fp32 for each thread, as of the bias, are read in two halves; distributions whose rows are not aligned, one
        // at a time.
        let most = if dense { [2.8, 3.0] } else { [if transformed { 1.6 } else { 1.1 }, 1.1] };
        for (counts, most) in [&one.counts, &found.counts].into_iter().zip(most) {
            assert!(counts.sector_ratio() <= most, "{what}: {counts:?}");
            assert_eq!(counts.bank_conflicts, 0, "{what}");
        }
    }
}
