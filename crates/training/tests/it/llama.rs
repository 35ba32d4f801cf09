//! Llama and Qwen2 train in the `Trainer`.

use std::sync::{Arc, Mutex};

use models::module::trainable;
use models::{DecoderConfig, Llama};
use tch::{Device, Kind};
use training::batches::Synthetic;
use training::observer::{Observer, StepRecord};
use training::optimizer::{AdamW, Group};
use training::trainer::{StopReason, TrainerConfig};
use training::{DeviceOptimizer, Result, Trainer};

#[derive(Clone, Default)]
struct Losses(Arc<Mutex<Vec<f64>>>);

impl Observer for Losses {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.0.lock().unwrap().push(record.loss);
        Ok(())
    }
}

/// Each token has two successors, so that ln 2 = 0.7 nats remain; a model that learns nothing stays at ln 16 = 2.8.
#[test]
fn fp32_and_bf16_training_both_learn() {
    let llama = DecoderConfig { num_key_value_heads: 2, ..DecoderConfig::llama(16, 16, 40, 2, 4) };
    let qwen2 = DecoderConfig { num_key_value_heads: 1, ..DecoderConfig::qwen2(16, 16, 40, 2, 2) };
    for config in [llama, qwen2] {
        let model = Llama::new(&config, (Kind::Float, Device::Cpu)).unwrap();
        let groups = Group::by_dimension(trainable(&model), 1e-2, 0.0);
        let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
        let options = TrainerConfig { steps: 100, ..TrainerConfig::default() };
        let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options).unwrap();
        let losses = Losses::default();
        trainer.observers.push(Box::new(losses.clone()));
        let mut data = Synthetic {
            seed: 5,
            vocabulary: 16,
            rows: 8,
            length: 12,
            noise: 1,
            batches: None,
            device: Device::Cpu,
            position: 0,
        };
        assert_eq!(trainer.run(&mut data, None).unwrap(), StopReason::Completed);
        let losses = losses.0.lock().unwrap();
        let (first, last) = (losses[0], losses[90..].iter().sum::<f64>() / 10.0);
        assert!(first > 2.6 && last < 1.6, "{:?}: {first} to {last}", config.family);
    }
}
