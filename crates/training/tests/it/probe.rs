//! A probe of a step measures what the training computes, and leaves no trace, also if it fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use runtime::precision::Policy;
use runtime::random::RandomState;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::batches::{Batches, Synthetic};
use training::optimizer::{AdamW, Group};
use training::probe::StepProbe;
use training::trainer::TrainerConfig;
use training::{DeviceOptimizer, Result, Trainer};

/// Counts how often it is entered.
#[derive(Debug, Default)]
struct Counted(AtomicU64);

impl Policy for Counted {
    fn entered(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Data whose tokens the model does not have.
struct Unknown(Synthetic);

impl Batches for Unknown {
    fn next(&mut self) -> Result<Option<dataloading::Batch>> {
        let mut batch = self.0.next()?;
        if let Some(batch) = &mut batch {
            batch.tokens =
                Tensor::f_randint(16, batch.tokens.size(), (Kind::Int64, Device::Cpu)).unwrap() + 1000;
        }
        Ok(batch)
    }

    fn state(&self) -> Value {
        self.0.state()
    }

    fn resume(&mut self, state: &Value) -> Result<()> {
        self.0.resume(state)
    }
}

fn trainer() -> Trainer {
    let config = Gpt2LikeConfig {
        vocab_size: 16,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 12,
        ..Gpt2LikeConfig::default()
    };
    let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let groups = Group::by_dimension(trainable(&model), 1e-3, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    Trainer::new(Box::new(model), Box::new(optimizer), TrainerConfig::default()).unwrap()
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

#[test]
fn it_computes_in_the_precision_of_the_training() {
    let mut trainer = trainer();
    let policy = Arc::new(Counted::default());
    trainer.precision = Some(policy.clone());
    assert!(StepProbe::run(&mut trainer, &mut data()).unwrap().is_some());
    assert_eq!(policy.0.load(Ordering::Relaxed), 1);
    assert!(runtime::precision::current().is_none());
}

#[test]
fn a_failed_probe_puts_back_position_generators_and_gradients() {
    let mut trainer = trainer();
    let mut data = Unknown(data());
    let before = RandomState::capture_all().unwrap();
    for (_, weight) in trainable(trainer.model.as_ref()) {
        runtime::autograd::set_grad(weight, Some(&weight.zeros_like())).unwrap();
    }
    assert!(StepProbe::run(&mut trainer, &mut data).is_err());
    assert_eq!(data.0.position, 0);
    assert!(RandomState::capture_all().unwrap() == before, "the generators are where they were");
    for (name, weight) in trainable(trainer.model.as_ref()) {
        assert!(!weight.grad().defined(), "{name}");
    }
}
