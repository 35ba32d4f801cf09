//! An observer that fails ends the training with its error, and loses nothing: no record, no step.

use std::sync::{Arc, Mutex};

use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use tch::{Device, Kind};
use training::batches::Synthetic;
use training::checkpoint::Checkpoints;
use training::observer::{Collect, Observer, StepRecord};
use training::optimizer::{AdamW, Group};
use training::trainer::{StopReason, TrainerConfig};
use training::{DeviceOptimizer, Result, Trainer};

/// Fails once, at one step, like a disk that is full for a moment.
#[derive(Clone)]
struct FailsAt {
    step: u64,
    steps: Arc<Mutex<Vec<u64>>>,
}

impl Observer for FailsAt {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.steps.lock().unwrap().push(record.step);
        if record.step == self.step {
            return Err(runtime::Error::invalid("observer", "no space left").into());
        }
        Ok(())
    }
}

fn data() -> Synthetic {
    Synthetic {
        seed: 5,
        vocabulary: 16,
        rows: 4,
        length: 12,
        noise: 1,
        batches: None,
        device: Device::Cpu,
        position: 0,
    }
}

fn trainer(options: TrainerConfig) -> Trainer {
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
    let groups = Group::by_dimension(trainable(&model), 1e-3, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap()
}

#[test]
fn every_record_reaches_every_observer() {
    // All six losses are read at once.
    let mut trainer = trainer(TrainerConfig { steps: 6, log_every: 6, ..TrainerConfig::default() });
    let (fails, after) = (FailsAt { step: 2, steps: Arc::default() }, Collect::default());
    trainer.observers.push(Box::new(fails.clone()));
    trainer.observers.push(Box::new(after.clone()));
    let mut data = data();
    let error = trainer.run(&mut data, None).unwrap_err().to_string();
    assert!(error.contains("no space left"), "{error}");
    let steps: Vec<u64> = after.take().iter().map(|record| record.step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
    assert_eq!(*fails.steps.lock().unwrap(), [1, 2, 3, 4, 5, 6]);
    // The training goes on, and nothing is reported twice.
    trainer.options.steps = 8;
    assert_eq!(trainer.run(&mut data, None).unwrap(), StopReason::Completed);
    assert_eq!(*fails.steps.lock().unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn the_steps_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = trainer(TrainerConfig { steps: 9, log_every: 3, ..TrainerConfig::default() });
    first.checkpoints = Some(Checkpoints::open(folder.path(), 1).unwrap());
    first.observers.push(Box::new(FailsAt { step: 5, steps: Arc::default() }));
    assert!(first.run(&mut data(), None).is_err());
    assert_eq!(first.saved(), Some(6));
    drop(first);
    let mut resumed = trainer(TrainerConfig { steps: 9, log_every: 3, ..TrainerConfig::default() });
    resumed.checkpoints = Some(Checkpoints::open(folder.path(), 1).unwrap());
    let mut data = data();
    assert_eq!(resumed.resume(&mut data).unwrap(), Some(6));
    assert_eq!(resumed.run(&mut data, None).unwrap(), StopReason::Completed);
}
