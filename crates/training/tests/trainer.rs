//! The loop: overflow leaves a step out, divergence ends it, evaluation leaves the data where it stood.

use std::sync::{Arc, Mutex};

use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::batches::Synthetic;
use training::evaluation::Evaluation;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group};
use training::scaler::GradScaler;
use training::trainer::{Ended, Options};
use training::{Optimizer, Result, Trainer};

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

fn trainer(lr: f64, options: Options) -> (Trainer, Notes) {
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
    let optimizer = Optimizer::new(AdamW::default(), groups).unwrap();
    let mut trainer = Trainer::new(Box::new(model), optimizer, options).unwrap();
    let notes = Notes::default();
    trainer.observers.push(Box::new(notes.clone()));
    (trainer, notes)
}

#[test]
fn a_model_learns_and_is_evaluated() {
    let options = Options { steps: 120, evaluate_every: Some(60), accuracy: true, ..Options::default() };
    let (mut trainer, notes) = trainer(1e-2, options);
    let mut validation = Synthetic { seed: 6, ..data(Some(3)) };
    assert_eq!(trainer.run(&mut data(None), Some(&mut validation)).unwrap(), Ended::Done);
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
fn the_data_may_end_first() {
    let (mut trainer, _) = trainer(1e-3, Options::default());
    assert_eq!(trainer.run(&mut data(Some(4)), None).unwrap(), Ended::OutOfData);
    assert_eq!(trainer.step(), 4);
}

/// Doubles the loss, and says of every third step that it overflowed.
#[derive(Debug, Default)]
struct Third(u64);

impl GradScaler for Third {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss * 2.0)
    }

    fn unscale_(&mut self, grads: &[Tensor]) -> Result<Option<Tensor>> {
        self.0 += 1;
        runtime::ops::foreach::mul_scalar_(grads, 0.5)?;
        Ok(Some(Tensor::from(f32::from(u8::from(self.0.is_multiple_of(3))))))
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

    fn load_state(&mut self, _: &Value) -> Result<()> {
        Ok(())
    }
}

#[test]
fn an_overflow_leaves_the_step_out() {
    let (mut trainer, notes) = trainer(1e-3, Options { steps: 7, clip: Some(0.5), ..Options::default() });
    trainer.scaler = Box::new(Third::default());
    trainer.run(&mut data(None), None).unwrap();
    let skipped: Vec<u64> =
        notes.0.lock().unwrap().0.iter().filter(|record| record.skipped).map(|record| record.step).collect();
    assert_eq!(skipped, [3, 6]);
    let steps = trainer.optimizer.state();
    let (_, step) = steps.iter().find(|(name, _)| name.ends_with(".step")).unwrap();
    assert_eq!(step.int64_value(&[]), 5);
}

#[test]
fn divergence_ends_the_training_with_words() {
    let (mut trainer, _) = trainer(1e4, Options { steps: 200, ..Options::default() });
    let message = trainer.run(&mut data(None), None).unwrap_err().to_string();
    assert!(message.starts_with("training diverged at step "), "{message}");
}
