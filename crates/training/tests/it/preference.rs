//! Objectives over preferences: TRL's losses, and a training's sums in every layout of the batches.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use models::module;
use models::{DecoderConfig, Llama};
use serde::Deserialize;
use tch::{Device, Kind, Tensor, kind::FLOAT_CPU};
use training::Batches;
use training::accumulation::fetch;
use training::masked_rows::Arrangement::{self, Packed, Padded, PaddingFree};
use training::masked_rows::{Grouping, Layout, MaskedBatches, MaskedRow};
use training::observer::Collect;
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::preference::{
    LogProbabilities, Objective, Preference, PreferenceSums, Rated, evaluate, log_probabilities_of_rows,
    reference_point,
};
use training::trainer::{Trainer, TrainerConfig};

const ALL: [Objective; 7] = [
    Objective::Dpo { beta: 0.1, label_smoothing: 0.0 },
    Objective::Dpo { beta: 0.3, label_smoothing: 0.2 },
    Objective::Ipo { beta: 0.1 },
    Objective::SimPo { beta: 2.0, gamma: 0.5 },
    Objective::Cpo { beta: 0.1, alpha: 0.7 },
    Objective::Orpo { lambda: 0.1 },
    KTO,
];
const KTO: Objective = Objective::Kto { beta: 0.1, desirable_weight: 1.3, undesirable_weight: 0.7 };

fn pairs() -> Vec<MaskedRow> {
    let row = |prompt: &[i64], answer: &[i64]| {
        let mut labels = vec![-100; prompt.len()];
        labels.extend(answer);
        MaskedRow::new([prompt, answer].concat(), labels)
    };
    let rejected = |prompt: &[i64], answer: &[i64]| MaskedRow { weight: -1.0, ..row(prompt, answer) };
    vec![
        row(&[3, 4, 5], &[6, 7, 0]),
        rejected(&[3, 4, 5], &[8, 0]),
        row(&[9], &[9, 10, 11, 12, 0]),
        rejected(&[9], &[13, 14, 15, 0]),
        row(&[1, 2], &[3, 0]),
        rejected(&[1, 2], &[4, 5, 6, 7, 8, 9, 0]),
        row(&[12, 1, 12, 1], &[2, 0]),
        rejected(&[12, 1, 12, 1], &[3, 0]),
    ]
}

fn model() -> Llama {
    runtime::random::seed(3).unwrap();
    Llama::new(&DecoderConfig::llama(16, 16, 24, 2, 2), FLOAT_CPU).unwrap()
}

fn batches(objective: &Objective, batch: usize, arrangement: Arrangement) -> MaskedBatches {
    let layout =
        Layout { batch, arrangement, grouping: objective.grouping(), epochs: Some(1), ..Layout::default() };
    MaskedBatches::new(pairs(), layout, Device::Cpu).unwrap()
}

/// The log-probabilities of another model, for each row; of rated rows also with another answer.
fn reference(objective: &Objective) -> Arc<[f32]> {
    let rows = if objective.is_rated() { 16 } else { 8 };
    let all: Vec<f32> = (0..rows).map(|row| -6.0 - 1.7 * row as f32 % 5.0).collect();
    all.into()
}

fn examples(objective: &Objective) -> usize {
    if objective.is_rated() { 8 } else { 4 }
}

/// The loss of all examples, the number of correct ones, the rewards, and the gradients, over batches of so many rows.
fn run(objective: Objective, batch: usize, arrangement: Arrangement) -> (f64, i64, Vec<f64>, Vec<Tensor>) {
    let model = model();
    let preference = Preference { objective, switch: None };
    let mut source = batches(&objective, batch, arrangement).with_reference(reference(&objective)).unwrap();
    let step = fetch(&mut source, usize::MAX).unwrap().unwrap();
    assert_eq!(step.examples(), Some(examples(&objective)));
    let divergence: Option<Vec<Tensor>> =
        step.batches.iter().map(|batch| preference.divergence(&model, batch).unwrap()).collect();
    let divergence = divergence.map(|of_batches| Tensor::stack(&of_batches, 0).sum(Kind::Float));
    let point = divergence.map(|sum| reference_point(&sum, examples(&objective)).unwrap());
    assert_eq!(point.is_some(), objective.is_rated());
    let (mut loss, mut correct, mut rewards) = (0.0, 0, vec![0.0, 0.0]);
    for batch in &step.batches {
        let sums: PreferenceSums = preference.forward(&model, batch, point.as_ref()).unwrap();
        let total = sums.total(&objective, &step).unwrap() / step.denominator();
        runtime::autograd::backward(&[&total]).unwrap();
        loss += total.double_value(&[]);
        correct += sums.correct.int64_value(&[]);
        for (sum, own) in
            rewards.iter_mut().zip(Vec::<f64>::try_from(sums.rewards.to_kind(Kind::Double)).unwrap())
        {
            *sum += own;
        }
    }
    let gradients = module::trainable(&model).into_iter().map(|(_, tensor)| tensor.grad()).collect();
    (loss, correct, rewards, gradients)
}

#[test]
fn losses_and_gradients_do_not_depend_on_the_layout() {
    for objective in ALL {
        let (loss, correct, rewards, gradients) = run(objective, 4, Padded);
        for (batch, arrangement) in [
            (1, Padded),
            (3, Padded),
            (1, PaddingFree),
            (3, PaddingFree),
            (1, Packed(15)),
            (4, Packed(20)),
            (1, Packed(64)),
        ] {
            let other = run(objective, batch, arrangement);
            assert!(
                (other.0 - loss).abs() < 1e-5,
                "{objective:?} {batch} {arrangement:?}: {} {loss}",
                other.0
            );
            assert_eq!(other.1, correct);
            for (own, other) in rewards.iter().zip(&other.2) {
                assert!((own - other).abs() < 1e-4, "{objective:?} {batch} {arrangement:?}");
            }
            for (own, other) in gradients.iter().zip(&other.3) {
                let error = (own - other).abs().max().double_value(&[]);
                assert!(error < 1e-5, "{objective:?} {batch} {arrangement:?}: {error:e}");
            }
        }
    }
}

#[test]
fn an_evaluation_is_the_loss_of_all_examples() {
    for objective in ALL {
        let (loss, correct, ..) = run(objective, 4, Padded);
        for batch in [1, 3] {
            let mut source =
                batches(&objective, batch, Padded).with_reference(reference(&objective)).unwrap();
            let preference = Preference { objective, switch: None };
            let found = evaluate(&preference, &model(), &mut source, 7, None).unwrap();
            assert!((found.loss - loss).abs() < 1e-5, "{objective:?}: {} {loss}", found.loss);
            let all = examples(&objective);
            assert_eq!(
                (found.targets, found.accuracy, found.step),
                (all as u64, correct as f64 / all as f64, 7)
            );
        }
    }
}

/// Without a change of the model the losses against it are known: ln 2, 1/4β² of IPO, and half of the mean weight of KTO.
#[test]
fn against_itself_a_model_has_the_known_losses() {
    let off: Arc<AtomicBool> = Arc::default();
    for (objective, expected) in [(ALL[0], 2f64.ln()), (ALL[1], 2f64.ln()), (ALL[2], 25.0), (KTO, 0.5)] {
        let own = off.clone();
        let switch: training::preference::Switch = Box::new(move || {
            own.store(true, Ordering::Relaxed);
            Ok(Box::new(()) as Box<dyn Any>)
        });
        let preference = Preference { objective, switch: Some(switch) };
        let mut source = batches(&objective, 4, Padded);
        let found = evaluate(&preference, &model(), &mut source, 0, None).unwrap();
        assert!((found.loss - expected).abs() < 1e-5, "{objective:?}: {}", found.loss);
        assert!(off.swap(false, Ordering::Relaxed));
        // The same, computed before.
        let all = log_probabilities_of_rows(&model(), &batches(&objective, 2, Padded), None).unwrap();
        let preference = Preference { objective, switch: None };
        let mut source = batches(&objective, 4, Padded).with_reference(all).unwrap();
        let found = evaluate(&preference, &model(), &mut source, 0, None).unwrap();
        assert!((found.loss - expected).abs() < 1e-5, "{objective:?}: {}", found.loss);
    }
}

#[test]
fn a_training_learns_the_order_of_pairs() {
    for objective in ALL {
        let model = model();
        let groups = Group::by_dimension(module::trainable(&model), 5e-3, 0.0);
        let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
        let options =
            TrainerConfig { steps: 30, accumulation: 2, clip: Some(1.0), ..TrainerConfig::default() };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        trainer.preference = Some(Preference { objective, switch: None });
        let records = Collect::default();
        trainer.observers.push(Box::new(records.clone()));
        let layout =
            Layout { batch: 2, grouping: objective.grouping(), shuffle: Some(1), ..Layout::default() };
        let source = MaskedBatches::new(pairs(), layout, Device::Cpu).unwrap();
        trainer.run(&mut source.with_reference(reference(&objective)).unwrap(), None).unwrap();
        let records = records.take();
        let (first, last) = (&records[0], records.last().unwrap());
        // KTO's loss is bounded.
        let (most, least) = if objective.is_rated() { (0.9, 0.75) } else { (0.7, 1.0) };
        assert!(last.loss < most * first.loss, "{objective:?}: {} to {}", first.loss, last.loss);
        assert!(last.accuracy.unwrap() >= least, "{objective:?}: {last:?}");
        let [chosen, rejected] = last.rewards.unwrap();
        assert!(chosen > rejected, "{objective:?}");
    }
}

#[test]
fn pairs_stay_together() {
    let dpo = ALL[0];
    // Three pairs of at most 9, 10 and 9 positions, in rows of 20.
    let mut packed = batches(&dpo, 1, Packed(20));
    let mut seen = 0;
    while let Some(batch) = packed.next().unwrap() {
        let sequences = batch.sequences.unwrap();
        assert_eq!(sequences.count() % 2, 0);
        seen += sequences.examples();
    }
    assert_eq!(seen, 4);
    // ORPO learns the prompts of chosen rows.
    let mut orpo = batches(&ALL[5], 4, Padded);
    let batch = orpo.next().unwrap().unwrap();
    assert_eq!(batch.counts.targets, 5 + 2 + 5 + 4 + 3 + 7 + 5 + 2);
    assert_eq!(batch.sequences.unwrap().chosen_targets, 5 + 5 + 3 + 5);
    // A pair with a row that has nothing to learn is left out as a whole.
    let mut rows = pairs();
    rows[3].labels.fill(-100);
    let layout = Layout { batch: 8, grouping: dpo.grouping(), epochs: Some(1), ..Layout::default() };
    let batch = MaskedBatches::new(rows, layout, Device::Cpu).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.sequences.unwrap().examples(), 3);
    let odd = pairs()[..3].to_vec();
    let refused = MaskedBatches::new(odd, layout, Device::Cpu).unwrap_err().to_string();
    assert!(refused.contains("3 rows in groups of 2"), "{refused}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let preference = Preference { objective: ALL[0], switch: None };
    let layout = Layout { batch: 2, ..Layout::default() };
    assert_eq!(layout.grouping, Grouping::Rows);
    let plain = MaskedBatches::new(pairs(), layout, Device::Cpu).unwrap().next().unwrap().unwrap();
    let refused = preference.forward(&model(), &plain, None).unwrap_err().to_string();
    assert!(refused.contains("the batch has no sequences"), "{refused}");
    let batch = batches(&ALL[0], 2, Padded).next().unwrap().unwrap();
    let refused = preference.forward(&model(), &batch, None).unwrap_err().to_string();
    assert!(refused.contains("there is none: no adapters"), "{refused}");
    let batch =
        batches(&ALL[0], 2, Padded).with_reference(reference(&ALL[0])).unwrap().next().unwrap().unwrap();
    let rated = Preference { objective: KTO, switch: None };
    for refused in [rated.forward(&model(), &batch, None).err(), rated.divergence(&model(), &batch).err()] {
        let refused = refused.unwrap().to_string();
        assert!(refused.contains("the batch has no ratings"), "{refused}");
    }
    for (objective, expected) in [
        (Objective::Dpo { beta: 0.0, label_smoothing: 0.0 }, "beta is 0"),
        (Objective::Dpo { beta: 0.1, label_smoothing: 0.5 }, "label_smoothing is 0.5"),
        (Objective::SimPo { beta: 1.0, gamma: -1.0 }, "gamma is -1"),
        (Objective::Cpo { beta: 1.0, alpha: f64::NAN }, "alpha is NaN"),
        (
            Objective::Kto { beta: 1.0, desirable_weight: 1.0, undesirable_weight: -1.0 },
            "undesirable_weight is -1",
        ),
    ] {
        let refused = objective.check().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

/// A fixture of `data/fixtures/preference/make_losses.py`: TRL's losses of given log-probabilities.
#[derive(Deserialize)]
struct Case {
    objective: String,
    beta: f64,
    extra: f64,
    losses: Vec<f64>,
    /// ∂ Σ losses / ∂ S.
    gradients: Vec<f64>,
    rewards: Vec<f64>,
}

#[derive(Deserialize)]
struct Fixture {
    sums: Vec<f32>,
    lengths: Vec<f32>,
    reference: Vec<f32>,
    reference_point: f32,
    cases: Vec<Case>,
}

#[test]
fn losses_are_those_of_trl() {
    let text = include_str!("../../../../data/fixtures/preference/losses.json");
    let fixture: Fixture = serde_json::from_str(text).unwrap();
    let numbers = |values: &[f32]| Tensor::from_slice(values);
    let (lengths, reference) = (numbers(&fixture.lengths), numbers(&fixture.reference));
    let signs = numbers(&[1.0, -1.0].repeat(4));
    let point = Tensor::from(fixture.reference_point);
    assert_eq!(fixture.cases.len(), 7);
    for case in &fixture.cases {
        let objective = match &*case.objective {
            "dpo" => Objective::Dpo { beta: case.beta, label_smoothing: case.extra },
            "ipo" => Objective::Ipo { beta: case.beta },
            "simpo" => Objective::SimPo { beta: case.beta, gamma: case.extra },
            "cpo" => Objective::Cpo { beta: case.beta, alpha: 1.0 },
            "orpo" => Objective::Orpo { lambda: case.beta },
            "kto" => Objective::Kto {
                beta: case.beta,
                desirable_weight: case.extra,
                undesirable_weight: 2.0 - case.extra,
            },
            other => panic!("{other}"),
        };
        let sums = numbers(&fixture.sums).set_requires_grad(true);
        let given = LogProbabilities {
            sums: &sums,
            lengths: &lengths,
            reference: Some(&reference),
            ratings: Some(Rated { signs: &signs, reference_point: &point }),
        };
        let mut losses = objective.losses(&given).unwrap();
        runtime::autograd::backward(&[&losses.sum(Kind::Float)]).unwrap();
        let rewards = objective.rewards(&given).unwrap();
        if objective.is_rated() {
            // The fixture has the sums of two.
            losses = losses.view([4, 2]).sum_dim_intlist([1].as_slice(), false, Kind::Float);
        }
        for (what, own, expected) in [
            ("losses", &losses.detach(), &case.losses),
            ("gradients", &sums.grad(), &case.gradients),
            ("rewards", &rewards, &case.rewards),
        ] {
            let own = Vec::<f64>::try_from(own.to_kind(Kind::Double)).unwrap();
            assert_eq!(own.len(), expected.len());
            for (own, expected) in own.iter().zip(expected) {
                let error = (own - expected).abs() / expected.abs().max(1.0);
                assert!(error < 1e-5, "{} of {objective:?}: {own} {expected}", what);
            }
        }
    }
}

/// The mismatched rows of a batch: tokens without padding, and the labels.
fn mismatched(batch: &dataloading::Batch) -> Vec<(Vec<i64>, Vec<i64>)> {
    let rows = &batch.sequences.as_ref().unwrap().ratings.as_ref().unwrap().mismatched;
    let (count, length) = rows.tokens.size2().unwrap();
    let row = |number: i64| {
        let padding = rows.padding.get(number as usize).copied().unwrap_or(0);
        let of = |tensor: &Tensor| {
            Vec::<i64>::try_from(tensor.select(0, number).narrow(0, 0, length - padding)).unwrap()
        };
        (of(&rows.tokens), of(&rows.labels))
    };
    (0..count).map(row).collect()
}

#[test]
fn prompts_are_mismatched_with_the_same_answers_in_every_layout() {
    let mut all = Vec::new();
    for batch in [1, 3, 8] {
        let (mut source, mut of_rows) = (batches(&KTO, batch, Padded), Vec::new());
        while let Some(batch) = source.next().unwrap() {
            of_rows.extend(mismatched(&batch));
        }
        all.push(of_rows);
    }
    assert!(all.iter().all(|rows| rows.len() == 8 && *rows == all[0]));
    // 4 rows further than each, or the next with another prompt. The last token of a row is only predicted.
    let expected = [(4, 0), (5, 1), (6, 2), (7, 3), (0, 4), (1, 5), (2, 6), (3, 7)];
    let rows = pairs();
    for ((other, own), (tokens, labels)) in expected.into_iter().zip(&all[0]) {
        let (prompt, answer) = (rows[own].prompt(), &rows[other].tokens[rows[other].prompt().len()..]);
        let whole = [prompt, answer].concat();
        // The longest row has 9 tokens.
        let whole = &whole[..whole.len().min(9)];
        assert_eq!(*tokens, whole[..whole.len() - 1], "{own}");
        let learned: Vec<i64> = labels.iter().copied().filter(|label| *label >= 0).collect();
        assert_eq!(learned, whole[prompt.len()..], "{own}");
    }
    // Of an order in which all neighbours have one prompt, too.
    let same: Vec<MaskedRow> =
        (0..20).flat_map(|_| pairs()[..2].to_vec()).chain(pairs()[6..].to_vec()).collect();
    let layout = Layout { batch: 42, grouping: KTO.grouping(), epochs: Some(1), ..Layout::default() };
    let batch = MaskedBatches::new(same.clone(), layout, Device::Cpu).unwrap().next().unwrap().unwrap();
    for (row, (_, labels)) in same.iter().zip(mismatched(&batch)) {
        let learned: Vec<i64> = labels.into_iter().filter(|label| *label >= 0).collect();
        let is_of = |other: &MaskedRow| {
            other.prompt() != row.prompt() && other.tokens[other.prompt().len()..].starts_with(&learned)
        };
        assert!(!learned.is_empty() && same.iter().any(is_of), "{row:?} {learned:?}");
    }
}

/// A step's loss has one z₀, whatever its micro-batches: each has more answers of one kind than the step.
#[test]
fn a_step_has_one_reference_point() {
    let run = |batch: usize, accumulation: u64, arrangement: Arrangement| {
        let model = model();
        let groups = Group::by_dimension(module::trainable(&model), 5e-3, 0.0);
        let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
        let options =
            TrainerConfig { steps: 6, accumulation: accumulation as usize, ..TrainerConfig::default() };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        trainer.preference = Some(Preference { objective: KTO, switch: None });
        let records = Collect::default();
        trainer.observers.push(Box::new(records.clone()));
        let layout = Layout { batch, arrangement, grouping: KTO.grouping(), ..Layout::default() };
        let source = MaskedBatches::new(pairs(), layout, Device::Cpu).unwrap();
        // Less probable than by the model, so that z₀ is above 0.
        let low = reference(&KTO).iter().map(|value| 3.0 * value).collect();
        trainer.run(&mut source.with_reference(low).unwrap(), None).unwrap();
        records.take()
    };
    let whole = run(8, 1, Padded);
    assert!(whole.iter().any(|step| step.reference_point.unwrap() > 0.0), "{whole:?}");
    for other in [run(1, 8, Padded), run(2, 4, Padded), run(2, 4, PaddingFree), run(1, 1, Packed(64))] {
        for (own, step) in other.iter().zip(&whole) {
            let close = |own: f64, whole: f64| (own - whole).abs() < 1e-5 * whole.abs().max(1.0);
            assert!(close(own.loss, step.loss) && own.accuracy == step.accuracy, "{own:?} {step:?}");
            assert!(close(own.reference_point.unwrap(), step.reference_point.unwrap()), "{own:?} {step:?}");
            let (own, whole) = (own.rewards.unwrap(), step.rewards.unwrap());
            assert!(own.iter().zip(whole).all(|(own, whole)| close(*own, whole)), "{own:?} {whole:?}");
        }
    }
}
