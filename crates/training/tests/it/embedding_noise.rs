//! Noise of embeddings: transformers' distribution, and where there is none.

use std::sync::{Arc, Mutex};

use models::{DecoderConfig, Llama, module};
use serde::Deserialize;
use tch::{Device, Kind, Tensor, kind::FLOAT_CPU};
use training::evaluation;
use training::masked_rows::{Layout, MaskedBatches, MaskedRow};
use training::observer::{Collect, Observer};
use training::optimizer::{AdamW, DeviceOptimizer, Group};
use training::preference::{Objective, Preference};
use training::trainer::{Trainer, TrainerConfig};

/// A case of `data/fixtures/neftune/make_noise.py`: what transformers' hook adds.
#[derive(Deserialize)]
struct Case {
    alpha: f64,
    length: i64,
    width: i64,
    magnitude: f64,
    greatest: f64,
    mean: f64,
    variance: f64,
}

#[test]
fn noise_has_the_distribution_of_transformers() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../../data/fixtures/neftune/noise.json")).unwrap();
    assert_eq!(cases.len(), 3);
    for Case { alpha, length, width, magnitude, greatest, mean, variance } in cases {
        runtime::random::seed(1).unwrap();
        let rows = 1_000_000 / (length * width);
        let x = Tensor::zeros([rows, length, width], FLOAT_CPU);
        let strength = Tensor::full([rows, length], alpha / (length as f64).sqrt(), FLOAT_CPU);
        let noise = models::add_noise(&x, &strength).unwrap().to_kind(Kind::Double);
        let count = noise.numel() as f64;
        let most = noise.abs().max().double_value(&[]);
        assert!(most <= magnitude * (1.0 + 1e-6) && most > 0.9999 * greatest, "{most} {magnitude}");
        // Both are samples: five standard deviations of the difference of two means, and of two variances.
        let own = noise.mean(Kind::Double).double_value(&[]);
        assert!((own - mean).abs() < 5.0 * magnitude * (2.0 / (3.0 * count)).sqrt(), "{own} {mean}");
        let own = noise.var(true).double_value(&[]);
        let deviation = magnitude * magnitude * ((1.0 / 5.0 - 1.0 / 9.0) * 2.0 / count).sqrt();
        assert!((own - variance).abs() < 5.0 * deviation, "{own} {variance}");
        // As in the formula: a uniform number's variance is a third of its bound's square.
        assert!((variance - magnitude * magnitude / 3.0).abs() < 5.0 * deviation);
    }
}

#[test]
fn noise_is_rounded_once_and_has_no_gradient() {
    for kind in [Kind::Double, Kind::BFloat16] {
        runtime::random::seed(1).unwrap();
        let strength = Tensor::from_slice2(&[[2.0f32, 0.0]]);
        let x = Tensor::ones([1, 2, 16], (kind, Device::Cpu)).set_requires_grad(true);
        let noisy = models::add_noise(&x, &strength).unwrap();
        assert_eq!(noisy.kind(), kind);
        assert_eq!(noisy.get(0).get(1), x.get(0).get(1).detach(), "no strength, no noise");
        let most = (noisy.get(0).get(0) - 1.0).abs().max().double_value(&[]);
        assert!(most > 0.1 && most <= 0.5 + 1e-2, "{kind:?}: {most}");
        runtime::autograd::backward(&[&noisy.sum(kind)]).unwrap();
        assert_eq!(x.grad(), Tensor::ones([1, 2, 16], (kind, Device::Cpu)));
    }
}

fn model() -> Llama {
    runtime::random::seed(3).unwrap();
    Llama::new(&DecoderConfig::llama(16, 16, 24, 2, 2), FLOAT_CPU).unwrap()
}

fn rows() -> Vec<MaskedRow> {
    let row = |number: i64| {
        let tokens: Vec<i64> = (0..4 + number % 4).map(|at| (number * 3 + at * at) % 16).collect();
        let labels = (0..).zip(&tokens).map(|(at, id)| if at < 2 { -100 } else { *id }).collect();
        MaskedRow::new(tokens, labels)
    };
    (0..8).map(row).collect()
}

/// The losses of two steps, and the weights after them.
fn train(noise: f64, preference: Option<Preference>) -> (Vec<f64>, Vec<Tensor>) {
    let model = model();
    let groups = Group::by_dimension(module::trainable(&model), 5e-3, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let options =
        TrainerConfig { steps: 2, accumulation: 2, embedding_noise: noise, ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    let grouping = preference.as_ref().map(|preference| preference.objective.grouping());
    trainer.preference = preference;
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    let layout = Layout { batch: 2, grouping: grouping.unwrap_or_default(), ..Layout::default() };
    trainer.run(&mut MaskedBatches::new(rows(), layout, Device::Cpu).unwrap(), None).unwrap();
    let weights = module::trainable(trainer.model.as_ref()).into_iter();
    (
        records.take().iter().map(|record| record.loss).collect(),
        weights.map(|(_, weight)| weight.copy()).collect(),
    )
}

/// The losses of evaluations.
#[derive(Clone, Default)]
struct Evaluations(Arc<Mutex<Vec<f64>>>);

impl Observer for Evaluations {
    fn on_evaluation(&mut self, evaluation: &evaluation::Evaluation) -> training::Result<()> {
        self.0.lock().unwrap().push(evaluation.loss);
        Ok(())
    }
}

#[test]
fn equal_trainings_have_equal_noise_and_evaluations_have_none() {
    let (plain, noisy) = (train(0.0, None), train(5.0, None));
    assert_eq!(train(5.0, None), noisy);
    assert!(plain.0.iter().zip(&noisy.0).all(|(plain, noisy)| plain != noisy), "{plain:?} {noisy:?}");
    assert_ne!(train(6.0, None).0, noisy.0);
    let model = model();
    let groups = Group::by_dimension(module::trainable(&model), 0.0, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let evaluate = || {
        let layout = Layout { batch: 3, ..Layout::default() }.of_evaluation();
        MaskedBatches::new(rows(), layout, Device::Cpu).unwrap()
    };
    let expected = evaluation::evaluate(&model, &mut evaluate(), 0).unwrap().loss;
    let options = TrainerConfig { embedding_noise: 5.0, ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    let seen = Evaluations::default();
    trainer.observers.push(Box::new(seen.clone()));
    trainer.evaluate(&mut evaluate()).unwrap();
    assert_eq!(*seen.0.lock().unwrap(), [expected]);
}

/// The trained model has noise, and its reference, the same model, has none: the loss is that of two models.
#[test]
fn the_reference_of_a_preference_has_no_noise() {
    let objective = Objective::Dpo { beta: 0.1, label_smoothing: 0.0 };
    let preference = || {
        let switch: training::preference::Switch = Box::new(|| Ok(Box::new(()) as Box<dyn std::any::Any>));
        Some(Preference { objective, switch: Some(switch) })
    };
    let first = |noise: f64| train(noise, preference()).0[0];
    assert!((first(0.0) - 2f64.ln()).abs() < 1e-6);
    assert!((first(5.0) - 2f64.ln()).abs() > 1e-4, "{}", first(5.0));
}

#[test]
fn an_alpha_below_0_is_refused() {
    let model = model();
    let groups = Group::by_dimension(module::trainable(&model), 0.0, 0.0);
    let optimizer = Box::new(DeviceOptimizer::new(AdamW::default(), groups).unwrap());
    let options = TrainerConfig { embedding_noise: f64::NAN, ..TrainerConfig::default() };
    let error = Trainer::new(Box::new(model), optimizer, options).unwrap_err().to_string();
    assert!(error.contains("noise of embeddings with the α NaN; expected 0 or more"), "{error}");
}
