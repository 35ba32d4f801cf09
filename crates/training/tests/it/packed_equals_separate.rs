//! A batch of any strategy has the summed loss and the gradients of its documents run one by one.

use std::sync::Arc;

use dataloading::packing::PackingConfig;
use dataloading::{
    BaseDataset, Batch, BatchConfig, BatchSource, Loader, LoaderConfig, PackedConfig, PackedDataset,
    SequencedDataset, StandardDataset,
};
use models::module::{Input, LanguageModel, trainable};
use models::{DecoderConfig, Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig, Llama};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};
use training::accumulation::forward;

const VOCABULARY: u32 = 53;
const LONGEST: usize = 24;

/// Lengths with two of one token, which predict nothing, two that fill a row, and repetitions.
fn documents() -> Vec<Vec<u32>> {
    let lengths = [7, 24, 1, 13, 2, 24, 5, 5, 17, 1, 9, 3, 20, 11];
    let token = |document: usize, at: usize| (document * 31 + at * at * 7 + at * 3) as u32 % VOCABULARY;
    lengths.iter().enumerate().map(|(d, &n)| (0..n).map(|at| token(d, at)).collect()).collect()
}

type Build = fn(Kind) -> models::Result<Box<dyn LanguageModel>>;

const MODELS: [(&str, Build); 3] = [
    ("Gpt2Like", |kind| {
        let config = Gpt2LikeConfig {
            vocab_size: VOCABULARY.into(),
            embedding_dim: 12,
            hidden_dim: 16,
            num_heads: 2,
            ff_dim: 24,
            max_length: LONGEST as i64,
            dropout: 0.0,
            ..Gpt2LikeConfig::default()
        };
        Ok(Box::new(Gpt2Like::new(&config, (kind, Device::Cpu))?))
    }),
    ("Gpt2", |kind| {
        let config = Gpt2Config {
            vocabulary: VOCABULARY.into(),
            max_sequence: LONGEST as i64,
            hidden: 16,
            heads: 2,
            layers: 2,
            dropout: 0.0,
            ..Gpt2Config::small()
        };
        Ok(Box::new(Gpt2::new(&config, (kind, Device::Cpu))?))
    }),
    ("Llama", |kind| {
        let config = DecoderConfig {
            num_key_value_heads: 2,
            max_position_embeddings: LONGEST as i64,
            ..DecoderConfig::llama(VOCABULARY.into(), 16, 40, 2, 4)
        };
        Ok(Box::new(Llama::new(&config, (kind, Device::Cpu))?))
    }),
];

/// The one batch that holds all documents, through a loader with a worker.
fn only_batch(source: impl BatchSource + 'static) -> Batch {
    let mut loader = Loader::new(Arc::new(source), &LoaderConfig::default()).unwrap();
    let batch = loader.next().unwrap().unwrap();
    assert!(loader.next().is_none(), "more than one batch");
    batch
}

fn batches() -> Vec<(&'static str, Batch)> {
    let samples = documents();
    let options =
        BatchConfig { batch_size: samples.len(), max_length: LONGEST, seed: 3, ..Default::default() };
    let plan = PackingConfig { capacity: LONGEST, ..Default::default() };
    let packed = PackedConfig { rows: samples.len(), plan, seed: 3, ..Default::default() };
    vec![
        ("packed", only_batch(PackedDataset::new(samples.clone(), &packed).unwrap())),
        ("sequenced", only_batch(SequencedDataset::new(samples.clone(), &options, None).unwrap())),
        ("base", only_batch(BaseDataset::new(samples.clone(), &options).unwrap())),
        ("standard", only_batch(StandardDataset::new(samples, &options).unwrap())),
    ]
}

/// Gradients since the last call.
fn take_gradients(model: &dyn LanguageModel) -> Vec<(String, Tensor)> {
    let take = |(name, tensor): (String, &Tensor)| {
        let grad = tensor.grad().copy();
        set_grad(tensor, None).unwrap();
        (name, grad)
    };
    trainable(model).into_iter().map(take).collect()
}

/// The summed loss and the gradients of separate documents: no loader, no padding, no packing.
fn one_by_one(model: &dyn LanguageModel) -> (f64, Vec<(String, Tensor)>) {
    let mut sum = 0.0;
    for document in documents().iter().filter(|document| document.len() > 1) {
        let ids: Vec<i64> = document.iter().map(|&id| id.into()).collect();
        let (read, next) = (Tensor::from_slice(&ids[..ids.len() - 1]), Tensor::from_slice(&ids[1..]));
        let loss = model.loss(&Input::new(&read.unsqueeze(0)), &next.unsqueeze(0)).unwrap().sum;
        backward(&[&loss]).unwrap();
        sum += loss.double_value(&[]);
    }
    (sum, take_gradients(model))
}

fn relative(ours: &Tensor, expected: &Tensor) -> f64 {
    let (ours, expected) = (ours.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    (ours - &expected).norm().double_value(&[]) / expected.norm().double_value(&[])
}

fn check(kind: Kind, tolerance: f64) {
    for (name, build) in MODELS {
        runtime::random::seed(11).unwrap();
        let model = build(kind).unwrap();
        let (expected, gradients) = one_by_one(&*model);
        for (strategy, batch) in batches() {
            let targets: usize = documents().iter().map(|document| document.len() - 1).sum();
            assert_eq!(batch.counts.targets, targets, "{strategy}");
            let output = forward(&*model, &batch, true, false).unwrap();
            backward(&[&output.sum]).unwrap();
            let of_loss = (output.sum.double_value(&[]) / expected - 1.0).abs();
            let mut worst = (of_loss, "the loss".to_owned());
            for ((parameter, ours), (_, expected)) in take_gradients(&*model).iter().zip(&gradients) {
                let error = relative(ours, expected);
                if error.is_nan() || error > worst.0 {
                    worst = (error, parameter.clone());
                }
            }
            let used = worst.0 / tolerance * 100.0;
            eprintln!(
                "{name} {kind:?} {strategy}: {:.1e} at {}, {used:.0} % of the tolerance",
                worst.0, worst.1
            );
            assert!(worst.0 <= tolerance, "{name} {kind:?} {strategy}: {worst:?}");
        }
    }
}

#[test]
fn in_single_precision() {
    check(Kind::Float, 1e-5);
}

#[test]
fn in_double_precision() {
    check(Kind::Double, 1e-12);
}

#[test]
fn attention_across_documents_would_be_detected() {
    for (name, build) in MODELS {
        runtime::random::seed(11).unwrap();
        let model = build(Kind::Double).unwrap();
        let (expected, _) = one_by_one(&*model);
        let packed = |batch: &Batch| batch.packing.is_some() && batch.tokens.size()[1] == LONGEST as i64;
        for (strategy, mut batch) in batches().into_iter().filter(|(_, batch)| packed(batch)) {
            batch.packing = None;
            let loss = forward(&*model, &batch, true, false).unwrap().sum.double_value(&[]);
            let difference = (loss / expected - 1.0).abs();
            assert!(difference > 1e-4, "{name} {strategy}: {difference}");
        }
    }
}
