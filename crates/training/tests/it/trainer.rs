//! The loop: overflow skips a step, divergence ends the training, evaluation does not move the data's position.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use dataloading::{Batch, Counts, IGNORE_INDEX};
use models::module::{tensors, trainable};
use models::state_dict::state_dict;
use models::{Gpt2Like, Gpt2LikeConfig};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::batches::{Batches, Synthetic};
use training::checkpoint::{Checkpoints, overwrite};
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group, Sgd};
use training::scaler::{GradScaler, UnscaleResult};
use training::trainer::{StopReason, TrainerConfig};
use training::{DeviceOptimizer, Result, Trainer};

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<(Vec<StepRecord>, Vec<Evaluation>)>>);

impl Observer for Notes {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.0.lock().unwrap().0.push(record.clone());
        Ok(())
    }

    fn on_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.0.lock().unwrap().1.push(*evaluation);
        Ok(())
    }
}

fn data(batches: Option<u64>) -> Synthetic {
    Synthetic {
        seed: 5,
        vocabulary: 16,
        rows: 8,
        length: 12,
        noise: 1,
        batches,
        device: Device::Cpu,
        position: 0,
    }
}

fn trainer(lr: f64, options: TrainerConfig) -> (Trainer, Notes) {
    let config = Gpt2LikeConfig {
        vocab_size: 16,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 12,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let groups = Group::by_dimension(trainable(&model), lr, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
    let notes = Notes::default();
    trainer.observers.push(Box::new(notes.clone()));
    (trainer, notes)
}

#[test]
fn a_model_learns_and_is_evaluated() {
    let options =
        TrainerConfig { steps: 120, evaluate_every: Some(60), accuracy: true, ..TrainerConfig::default() };
    let (mut trainer, notes) = trainer(1e-2, options);
    let mut validation = Synthetic { seed: 6, ..data(Some(3)) };
    assert_eq!(trainer.run(&mut data(None), Some(&mut validation)).unwrap(), StopReason::Completed);
    assert_eq!(validation.position, 0);
    let notes = notes.0.lock().unwrap();
    assert_eq!(notes.0.iter().map(|record| record.step).collect::<Vec<_>>(), (1..=120).collect::<Vec<_>>());
    assert_eq!(notes.1.iter().map(|evaluation| evaluation.step).collect::<Vec<_>>(), [60, 120]);
    let last = notes.1[1];
    assert!(last.loss < 1.3 && last.accuracy > 0.3, "{last:?}");
    assert_eq!(last.perplexity, last.loss.exp());
    assert!(notes.0.iter().all(|record| record.accuracy.is_some() && record.gradient_norm.is_none()));
}

#[test]
fn training_ends_with_its_data() {
    let (mut trainer, _) = trainer(1e-3, TrainerConfig::default());
    assert_eq!(trainer.run(&mut data(Some(4)), None).unwrap(), StopReason::OutOfData);
    assert_eq!(trainer.step(), 4);
}

/// Doubles the loss, and reports every third step as overflowed.
#[derive(Debug, Default)]
struct Third(u64);

impl GradScaler for Third {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss * 2.0)
    }

    fn unscale_(&mut self, grads: &[Tensor], _: bool) -> Result<UnscaleResult> {
        self.0 += 1;
        runtime::ops::foreach::mul_scalar_(grads, 0.5)?;
        let found_inf = Tensor::from(f32::from(u8::from(self.0.is_multiple_of(3))));
        Ok(UnscaleResult { found_inf: Some(found_inf), norm: None })
    }

    fn update(&mut self, overflow: bool) -> Result<()> {
        assert_eq!(overflow, self.0.is_multiple_of(3));
        Ok(())
    }

    fn current(&self) -> f64 {
        2.0
    }

    fn state(&self) -> Value {
        self.0.into()
    }

    fn load_state(&mut self, state: &Value) -> Result<()> {
        self.0 = state.as_u64().unwrap();
        Ok(())
    }
}

#[test]
fn an_overflow_skips_the_step() {
    let (mut trainer, notes) =
        trainer(1e-3, TrainerConfig { steps: 7, clip: Some(0.5), ..TrainerConfig::default() });
    trainer.scaler = Box::new(Third::default());
    trainer.run(&mut data(None), None).unwrap();
    let skipped: Vec<u64> =
        notes.0.lock().unwrap().0.iter().filter(|record| record.skipped).map(|record| record.step).collect();
    assert_eq!(skipped, [3, 6]);
    let steps = trainer.optimizer.state().unwrap();
    let (_, step) = steps.iter().find(|(name, _)| name.ends_with(".step")).unwrap();
    assert_eq!(step.int64_value(&[]), 5);
}

#[test]
fn a_scaler_resumes_its_state() {
    let whole = {
        let (mut trainer, _) = trainer(1e-2, TrainerConfig { steps: 7, ..TrainerConfig::default() });
        trainer.scaler = Box::new(Third::default());
        let start = state_dict(trainer.model.as_ref());
        let start: Vec<_> = start.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect();
        trainer.run(&mut data(None), None).unwrap();
        (start, trainer)
    };
    let folder = tempfile::tempdir().unwrap();
    {
        let (mut trainer, _) = trainer(1e-2, TrainerConfig { steps: 4, ..TrainerConfig::default() });
        let model = tensors(trainer.model.as_ref()).into_iter().map(|named| (named.name, named.tensor));
        overwrite(model, &whole.0, "the start").unwrap();
        trainer.scaler = Box::new(Third::default());
        trainer.checkpoints = Some(Checkpoints::open(folder.path(), 1).unwrap());
        trainer.run(&mut data(None), None).unwrap();
    }
    let (mut trainer, notes) = trainer(1e-2, TrainerConfig { steps: 7, ..TrainerConfig::default() });
    trainer.scaler = Box::new(Third::default());
    trainer.checkpoints = Some(Checkpoints::open(folder.path(), 1).unwrap());
    let mut data = data(None);
    assert_eq!(trainer.resume(&mut data).unwrap(), Some(4));
    trainer.run(&mut data, None).unwrap();
    let skipped: Vec<u64> =
        notes.0.lock().unwrap().0.iter().filter(|record| record.skipped).map(|record| record.step).collect();
    assert_eq!(skipped, [6], "a scaler from the start would leave out step 7");
    assert_eq!(state_dict(trainer.model.as_ref()), state_dict(whole.1.model.as_ref()));
}

/// Batches from a list.
struct List(VecDeque<Batch>);

impl Batches for List {
    fn next(&mut self) -> Result<Option<Batch>> {
        Ok(self.0.pop_front())
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn resume(&mut self, _: &Value) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_step_of_unequal_micro_batches_equals_the_whole_batch() {
    let whole = data(None).next().unwrap().unwrap();
    let part = |start: i64, rows: i64| {
        let [tokens, labels] =
            [&whole.tokens, &whole.labels].map(|tensor| tensor.narrow(0, start, rows).contiguous());
        let targets = labels.not_equal(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]) as usize;
        Batch {
            tokens,
            labels,
            packing: None,
            padding: Vec::new(),
            sequences: None,
            taught: None,
            weights: None,
            counts: Counts { targets, ..Counts::default() },
        }
    };
    let parts = [part(0, 1), part(1, 5), part(6, 2)];
    assert!(parts.iter().map(|part| part.counts.targets).collect::<BTreeSet<_>>().len() > 1);
    assert_eq!(parts.iter().map(|part| part.counts.targets).sum::<usize>(), whole.counts.targets);
    let config = Gpt2LikeConfig {
        vocab_size: 16,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 12,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    let start = Gpt2Like::new(&config, (Kind::Double, Device::Cpu)).unwrap();
    let step = |batches: Vec<Batch>| {
        let model = Gpt2Like::new(&config, (Kind::Double, Device::Cpu)).unwrap();
        let targets = tensors(&model).into_iter().map(|named| (named.name, named.tensor));
        overwrite(targets, &state_dict(&start), "the start").unwrap();
        // The step of plain SGD is the gradient itself.
        let optimizer = DeviceOptimizer::new(Sgd, Group::by_dimension(trainable(&model), 1.0, 0.0)).unwrap();
        let options = TrainerConfig {
            steps: 1,
            accumulation: batches.len(),
            accuracy: true,
            ..TrainerConfig::default()
        };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        let notes = Notes::default();
        trainer.observers.push(Box::new(notes.clone()));
        assert_eq!(trainer.run(&mut List(batches.into()), None).unwrap(), StopReason::Completed);
        let record = notes.0.lock().unwrap().0[0].clone();
        (state_dict(trainer.model.as_ref()), record)
    };
    let (expected, of_whole) = step(vec![part(0, 8)]);
    let (have, of_parts) = step(parts.into());
    let moved = |a: &[(String, Tensor)], b: &[(String, Tensor)]| {
        a.iter().zip(b).map(|(a, b)| (&a.1 - &b.1).abs().max().double_value(&[])).fold(0.0, f64::max)
    };
    assert!(moved(&expected, &state_dict(&start)) > 1e-2, "the step moves the weights");
    let distance = moved(&have, &expected);
    assert!(distance <= 1e-12, "{distance}");
    assert_eq!(of_parts.targets, of_whole.targets);
    assert!((of_parts.loss - of_whole.loss).abs() <= 1e-12);
    assert_eq!(of_parts.accuracy, of_whole.accuracy);
}

#[test]
fn divergence_ends_the_training_with_an_error() {
    let (mut trainer, _) = trainer(1e4, TrainerConfig { steps: 200, ..TrainerConfig::default() });
    let message = trainer.run(&mut data(None), None).unwrap_err().to_string();
    assert!(message.starts_with("training diverged at step "), "{message}");
}
