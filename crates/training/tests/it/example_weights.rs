//! An example of weight w is w examples, in every layout of the batches and for every objective.

use std::sync::Arc;

use models::distillation::DistillationConfig;
use models::module::trainable;
use models::{DecoderConfig, Llama};
use runtime::autograd::set_grad;
use tch::{Device, Kind, Tensor};
use training::accumulation::{fetch, forward};
use training::distillation::Distillation;
use training::masked_rows::Arrangement::{self, Packed, Padded, PaddingFree};
use training::masked_rows::{Grouping, Layout, MaskedBatches, MaskedRow, MaskedRows};
use training::preference::{Objective, Preference};
use training::{Batches, evaluation, preference};

const WEIGHTS: [f32; 6] = [2.0, 1.0, 3.0, 0.0, 1.0, 2.0];

fn model() -> Llama {
    runtime::random::seed(2).unwrap();
    Llama::new(&DecoderConfig::llama(23, 16, 24, 2, 2), (Kind::Double, Device::Cpu)).unwrap()
}

/// Examples of 1 or 2 rows, of several lengths.
fn examples(rows: i64) -> Vec<Vec<MaskedRow>> {
    let row = |number: i64, part: i64| {
        let prompt: Vec<i64> = (0..1 + number % 3).map(|at| (number * 5 + at) % 23).collect();
        let answer: Vec<i64> = (0..2 + (number + part) % 4).map(|at| (number + 7 * part + at) % 23).collect();
        let labels = [vec![-100; prompt.len()], answer.clone()].concat();
        MaskedRow::new([prompt, answer].concat(), labels)
    };
    (0..6).map(|number| (0..rows).map(|part| row(number, part)).collect()).collect()
}

/// The rows, each with `factor` times its weight.
fn weighted(rows: i64, factor: f32) -> Vec<MaskedRow> {
    let with = |(example, weight): (Vec<MaskedRow>, f32)| {
        example.into_iter().map(move |row| MaskedRow { weight: factor * weight, ..row })
    };
    examples(rows).into_iter().zip(WEIGHTS).flat_map(with).collect()
}

/// The rows, each as many times as its weight says.
fn repeated(rows: i64) -> Vec<MaskedRow> {
    let times = |(example, weight): (Vec<MaskedRow>, f32)| vec![example; weight as usize].concat();
    examples(rows).into_iter().zip(WEIGHTS).flat_map(times).collect()
}

fn gradients(model: &Llama) -> Vec<Tensor> {
    let taken = trainable(model).into_iter().map(|(_, tensor)| {
        let gradient = tensor.grad().copy();
        set_grad(tensor, None).unwrap();
        gradient
    });
    taken.collect()
}

fn assert_close(what: &str, own: &(f64, Vec<Tensor>), expected: &(f64, Vec<Tensor>), bound: f64) {
    assert!((own.0 - expected.0).abs() < bound * expected.0.abs(), "{what}: {} and {}", own.0, expected.0);
    for (own, expected) in own.1.iter().zip(&expected.1) {
        let error = ((own - expected).norm() / expected.norm().clamp_min(1e-9)).double_value(&[]);
        assert!(error < bound, "{what}: {error:e}");
    }
}

/// The loss and the gradients of a step over all rows.
fn step(rows: Vec<MaskedRow>, layout: Layout, at_a_time: Option<usize>) -> (f64, Vec<Tensor>) {
    let model = model();
    let mut source = MaskedBatches::new(rows, layout, Device::Cpu).unwrap();
    let mut micro = fetch(&mut source, usize::MAX).unwrap().unwrap();
    if let Some(rows) = at_a_time {
        micro = micro.split(rows).unwrap();
    }
    let denominator = micro.denominator();
    let mut loss = 0.0;
    for batch in &micro.batches {
        let mean = forward(&model, batch, true, false).unwrap().sum / denominator;
        runtime::autograd::backward(&[&mean]).unwrap();
        loss += mean.double_value(&[]);
    }
    (loss, gradients(&model))
}

#[test]
fn a_weight_is_a_number_of_rows() {
    let one = Layout { batch: 100, epochs: Some(1), ..Layout::default() };
    let expected = step(repeated(1), one, None);
    for (batch, arrangement, at_a_time) in [
        (100, Padded, None),
        (2, Padded, None),
        (3, PaddingFree, None),
        (1, Packed(12), None),
        (2, Packed(20), Some(1)),
        (4, Padded, Some(3)),
        (4, PaddingFree, Some(3)),
    ] {
        let layout = Layout { batch, arrangement, ..one };
        let what = format!("{batch} {arrangement:?} {at_a_time:?}");
        assert_close(&what, &step(weighted(1, 1.0), layout, at_a_time), &expected, 1e-12);
        // A factor of all weights changes nothing; weights are in fp32.
        assert_close(&what, &step(weighted(1, 0.3), layout, at_a_time), &expected, 1e-6);
    }
    let without =
        step(weighted(1, 1.0).into_iter().map(|row| MaskedRow { weight: 1.0, ..row }).collect(), one, None);
    assert!((without.0 - expected.0).abs() > 1e-4, "weights change nothing");
}

#[test]
fn a_weight_is_a_number_of_taught_rows() {
    let run = |rows: Vec<MaskedRow>, batch: usize| {
        let student = model();
        let teacher =
            Llama::new(&DecoderConfig::llama(23, 12, 20, 1, 2), (Kind::Double, Device::Cpu)).unwrap();
        let config = DistillationConfig { label_weight: 0.3, ..DistillationConfig::default() };
        let distillation = Distillation::new(Box::new(teacher), config).unwrap();
        let layout = Layout { batch, epochs: Some(1), ..Layout::default() };
        let mut source = MaskedBatches::new(rows, layout, Device::Cpu).unwrap();
        let micro = fetch(&mut source, usize::MAX).unwrap().unwrap();
        let mut sum = 0.0;
        for batch in &micro.batches {
            let loss = distillation.forward(&student, batch, (true, false), (None, None)).unwrap();
            let mean = loss.sum / micro.denominator();
            runtime::autograd::backward(&[&mean]).unwrap();
            sum += mean.double_value(&[]);
        }
        (sum, gradients(&student))
    };
    let expected = run(repeated(1), 100);
    for batch in [100, 2] {
        assert_close(&format!("{batch}"), &run(weighted(1, 1.0), batch), &expected, 1e-12);
    }
}

#[test]
fn an_evaluation_is_the_weighted_mean() {
    for (batch, arrangement) in [(2, Padded), (2, PaddingFree), (1, Packed(12))] {
        let layout = Layout { batch, arrangement, ..Layout::default() }.of_evaluation();
        let evaluate = |rows| {
            let mut source = MaskedBatches::new(rows, layout, Device::Cpu).unwrap();
            evaluation::evaluate(&model(), &mut source, 0).unwrap()
        };
        let (own, expected) = (evaluate(weighted(1, 1.0)), evaluate(repeated(1)));
        assert!((own.loss - expected.loss).abs() < 1e-12, "{} and {}", own.loss, expected.loss);
        let labels = |rows: Vec<MaskedRow>| {
            let all = rows.iter().flat_map(|row| &row.labels[1..]);
            all.filter(|label| **label >= 0).count() as u64
        };
        let learned = weighted(1, 1.0).into_iter().filter(|row| row.weight > 0.0).collect();
        assert_eq!((own.targets, expected.targets), (labels(learned), labels(repeated(1))));
    }
}

const OBJECTIVES: [Objective; 6] = [
    Objective::Dpo { beta: 0.3, label_smoothing: 0.2 },
    Objective::Ipo { beta: 0.1 },
    Objective::SimPo { beta: 2.0, gamma: 0.5 },
    Objective::Cpo { beta: 0.1, alpha: 0.7 },
    Objective::Orpo { lambda: 0.1 },
    Objective::Kto { beta: 0.1, desirable_weight: 1.3, undesirable_weight: 0.7 },
];

#[test]
fn a_weight_is_a_number_of_pairs_or_rated_answers() {
    for objective in OBJECTIVES {
        let is_rated = objective.is_rated();
        let rated = |rows: Vec<MaskedRow>| -> Vec<MaskedRow> {
            let sign =
                |row: MaskedRow| if is_rated && row.tokens.len().is_multiple_of(2) { -1.0 } else { 1.0 };
            rows.into_iter().map(|row| MaskedRow { weight: row.weight * sign(row.clone()), ..row }).collect()
        };
        let of_example = if is_rated { 1 } else { 2 };
        let run = |rows: Vec<MaskedRow>, batch: usize, arrangement: Arrangement| {
            let model = model();
            let layout = Layout {
                batch,
                arrangement,
                grouping: objective.grouping(),
                epochs: Some(1),
                ..Layout::default()
            };
            let source = MaskedBatches::new(rated(rows.clone()), layout, Device::Cpu).unwrap();
            // The reference's log-probability of a row is a function of its tokens; that of a mismatched one counts in z₀ alone, which is given.
            let of_row = |row: &MaskedRow| -6.0 - row.tokens.iter().sum::<i64>() as f32 % 5.0;
            let known: Arc<[f32]> = rows
                .iter()
                .filter(|row| row.weight != 0.0)
                .flat_map(|row| std::iter::repeat_n(of_row(row), if is_rated { 2 } else { 1 }))
                .collect();
            let mut source = source.with_reference(known).unwrap();
            let micro = fetch(&mut source, usize::MAX).unwrap().unwrap();
            let (preference, point) = (Preference { objective, switch: None }, Tensor::from(0.7f32));
            let mut loss = 0.0;
            for batch in &micro.batches {
                let sums = preference.forward(&model, batch, Some(&point)).unwrap();
                let mean = sums.total(&objective, &micro).unwrap() / micro.denominator();
                runtime::autograd::backward(&[&mean]).unwrap();
                loss += mean.double_value(&[]);
            }
            let mut again = source.in_row_order();
            let evaluated = preference::evaluate(&preference, &model, &mut again, 0, None).unwrap();
            (loss, gradients(&model), evaluated.loss)
        };
        let expected = run(repeated(of_example), 100, Padded);
        for (batch, arrangement) in
            [(100, Padded), (2, Padded), (2, PaddingFree), (1, Packed(20)), (3, Packed(40))]
        {
            let own = run(weighted(of_example, 1.0), batch, arrangement);
            let what = format!("{objective:?} {batch} {arrangement:?}");
            // Losses of sequences are in fp32.
            assert_close(
                &what,
                &(own.0, own.1),
                &(expected.0, expected.1.iter().map(Tensor::copy).collect()),
                1e-5,
            );
            if !is_rated {
                assert!(
                    (own.2 - expected.2).abs() < 1e-5 * expected.2.abs(),
                    "{what}: {} {}",
                    own.2,
                    expected.2
                );
                assert!((own.2 - own.0).abs() < 1e-5 * own.0.abs(), "{what}: {} {}", own.2, own.0);
            }
        }
    }
}

#[test]
fn weights_belong_to_the_data() {
    let layout = Layout { shuffle: Some(1), ..Layout::default() };
    let of = |factor| MaskedBatches::new(weighted(1, factor), layout, Device::Cpu).unwrap();
    let error = of(0.5).resume(&of(1.0).state()).unwrap_err().to_string();
    assert!(error.contains("over other rows"), "{error}");
    of(0.5).resume(&of(0.5).state()).unwrap();
    assert_eq!(of(1.0).examples(), 5);
    let pairs = Layout { grouping: Grouping::Pairs { learn_prompts: false }, ..layout };
    assert_eq!(MaskedBatches::new(weighted(2, 1.0), pairs, Device::Cpu).unwrap().examples(), 5);
    let infinite = MaskedRow { weight: f32::INFINITY, ..weighted(1, 1.0)[0].clone() };
    let error = MaskedRows::of(&[infinite]).unwrap_err().to_string();
    assert!(error.contains("has the weight inf"), "{error}");
}
