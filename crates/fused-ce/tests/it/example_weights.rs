//! Weights of examples in both heads, against plain PyTorch (`data/fixtures/example_weights/make_losses.py`).

use fused_ce::{Chunk, LinearCrossEntropy, LinearCrossEntropyHead};
use models::distillation::{DistillationConfig, DistilledLoss, OutputProjection, Teacher};
use models::module::{Context, LogitTransform, LossHead};
use models::{Linear, ProjectionHead};
use serde::Deserialize;
use tch::{Kind, Tensor};

#[derive(Deserialize)]
struct Fixture {
    hidden: Vec<Vec<Vec<f64>>>,
    weight: Vec<Vec<f64>>,
    labels: Vec<Vec<i64>>,
    weights: Vec<f64>,
    denominator: f64,
    loss: f64,
    hidden_gradient: Vec<Vec<Vec<f64>>>,
    weight_gradient: Vec<Vec<f64>>,
}

#[test]
fn losses_and_gradients_are_those_of_pytorch() {
    let text = include_str!("../../../../data/fixtures/example_weights/losses.json");
    let fixture: Fixture = serde_json::from_str(text).unwrap();
    let (rows, length) = (fixture.labels.len() as i64, fixture.labels[0].len() as i64);
    let labels = Tensor::from_slice2(&fixture.labels);
    let hidden_size = fixture.weight[0].len() as i64;
    let flat = |values: &[Vec<Vec<f64>>]| Tensor::from_slice(&values.concat().concat());
    let weights = Tensor::from_slice(&fixture.weights).to_kind(Kind::Float);
    let weights = weights.view([rows, 1]).expand([rows, length], false).contiguous();
    for kind in [Kind::Double, Kind::Float] {
        let tolerance = if kind == Kind::Double { 1e-12 } else { 1e-6 };
        for fused in [None, Some(2), Some(100)] {
            let hidden = flat(&fixture.hidden).view([rows, length, hidden_size]).to_kind(kind);
            let hidden = hidden.set_requires_grad(true);
            let weight = Tensor::from_slice2(&fixture.weight).to_kind(kind).set_requires_grad(true);
            let head: Box<dyn LossHead> = match fused {
                None => Box::new(ProjectionHead::new(Linear { weight: weight.shallow_clone(), bias: None })),
                Some(tokens) => {
                    let chunk = Some(Chunk::Tokens(tokens));
                    let options = LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() };
                    Box::new(LinearCrossEntropyHead::new(weight.shallow_clone(), None, options).unwrap())
                }
            };
            let context = Context { accuracy: true, label_weights: Some(&weights), ..Context::default() };
            let output = head.loss(&hidden, &labels, &context).unwrap();
            let loss = output.sum / fixture.denominator;
            runtime::autograd::backward(&[&loss]).unwrap();
            let error = |own: &Tensor, expected: Tensor| {
                (own.to_kind(Kind::Double).view([-1]) - expected.view([-1])).abs().max().double_value(&[])
            };
            let errors = [
                (loss.double_value(&[]) - fixture.loss).abs(),
                error(&hidden.grad(), flat(&fixture.hidden_gradient)),
                error(&weight.grad(), Tensor::from_slice2(&fixture.weight_gradient)),
            ];
            assert!(errors.iter().all(|error| *error < tolerance), "{kind:?} {fused:?}: {errors:?}");
            // The weights of tokens are no part of a token's own loss.
            let plain = head.token_losses(&hidden, &labels, &context).unwrap();
            assert!(plain.get(3).sum(Kind::Double).double_value(&[]) > 1.0);
        }
    }
}

/// The loss of weighted rows is the sum of those of each row alone, times its weight.
#[test]
fn weights_count_in_the_divergence_from_a_teacher() {
    let text = include_str!("../../../../data/fixtures/example_weights/losses.json");
    let fixture: Fixture = serde_json::from_str(text).unwrap();
    let (rows, length) = (fixture.labels.len() as i64, fixture.labels[0].len() as i64);
    let labels = Tensor::from_slice2(&fixture.labels);
    let hidden = Tensor::from_slice(&fixture.hidden.concat().concat()).view([rows, length, -1]);
    let weight = Tensor::from_slice2(&fixture.weight);
    let of_teacher = ((&hidden * 3.0).sin(), (&weight * 5.0).cos());
    let projection = OutputProjection {
        weight: &of_teacher.1,
        bias: None,
        transform: LogitTransform::default(),
        token_rows: None,
    };
    let weights = Tensor::from_slice(&fixture.weights).view([rows, 1]).expand([rows, length], false);
    let weights = weights.to_kind(Kind::Float).contiguous();
    let config = DistillationConfig { label_weight: 0.3, ..DistillationConfig::default() };
    let loss = |head: &dyn LossHead, from: i64, count: i64, weights: Option<&Tensor>| {
        let (hidden, of_teacher) = (hidden.narrow(0, from, count), of_teacher.0.narrow(0, from, count));
        let teacher = Teacher::Hidden { hidden_btd: &of_teacher, projection };
        let context = Context { label_weights: weights, ..Context::default() };
        let labels = labels.narrow(0, from, count);
        head.distilled_loss(&hidden, &labels, (&teacher, &config), &context).unwrap()
    };
    let plain = ProjectionHead::new(Linear { weight: weight.shallow_clone(), bias: None });
    let chunk = Some(Chunk::Tokens(2));
    let options = LinearCrossEntropy { chunk, ..LinearCrossEntropy::default() };
    let fused = LinearCrossEntropyHead::new(weight.shallow_clone(), None, options).unwrap();
    let mut expected = [0.0; 3];
    for (row, factor) in (0..rows).zip(&fixture.weights) {
        let DistilledLoss { sum, divergence, cross_entropy, .. } = loss(&plain, row, 1, None);
        let parts = [sum, divergence, cross_entropy].map(|part| factor * part.double_value(&[]));
        expected.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
    }
    for head in [&plain as &dyn LossHead, &fused] {
        let DistilledLoss { sum, divergence, cross_entropy, .. } = loss(head, 0, rows, Some(&weights));
        let parts = [sum, divergence, cross_entropy].map(|part| part.double_value(&[]));
        for (part, expected) in parts.iter().zip(expected) {
            assert!((part - expected).abs() < 1e-6 * expected.abs(), "{parts:?} and {expected:?}");
        }
    }
}
