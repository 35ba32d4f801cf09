//! A step that failed is computed again to the same bits, and a checkpoint that was loaded in part is not trained on.

use models::module::trainable;
use models::{Gpt2Like, Gpt2LikeConfig};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use training::batches::{Batches, Synthetic};
use training::checkpoint::Checkpoints;
use training::optimizer::{AdamW, Group};
use training::scaler::{GradScaler, UnscaleResult};
use training::trainer::TrainerConfig;
use training::{DeviceOptimizer, Error, Result, Trainer};

/// Batches whose tokens are drawn from libtorch's default generator, as an augmentation is.
struct Drawn(Synthetic);

impl Batches for Drawn {
    fn next(&mut self) -> Result<Option<dataloading::Batch>> {
        let mut batch = self.0.next()?;
        if let Some(batch) = &mut batch {
            batch.tokens = Tensor::f_randint(16, batch.tokens.size(), (Kind::Int64, Device::Cpu)).unwrap();
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

/// Fails at one call, before any weight is updated.
#[derive(Debug, Default)]
struct FailsAt {
    calls: u64,
    at: u64,
}

impl GradScaler for FailsAt {
    fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(loss.shallow_clone())
    }

    fn unscale_(&mut self, _: &[Tensor], _: bool) -> Result<UnscaleResult> {
        self.calls += 1;
        if self.calls == self.at {
            return Err(runtime::Error::invalid("scaler", "out of luck").into());
        }
        Ok(UnscaleResult::default())
    }

    fn update(&mut self, _: bool) -> Result<()> {
        Ok(())
    }

    fn current(&self) -> f64 {
        1.0
    }

    fn state(&self) -> Value {
        Value::Null
    }

    fn load_state(&mut self, _: &Value) -> Result<()> {
        Ok(())
    }
}

fn trainer(steps: u64) -> Trainer {
    let config = Gpt2LikeConfig {
        vocab_size: 16,
        embedding_dim: 16,
        hidden_dim: 16,
        num_heads: 2,
        ff_dim: 32,
        max_length: 12,
        dropout: 0.2,
        ..Gpt2LikeConfig::default()
    };
    tch::manual_seed(3);
    let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let groups = Group::by_dimension(trainable(&model), 1e-2, 0.0);
    let optimizer = DeviceOptimizer::new(AdamW::default(), groups).unwrap();
    Trainer::new(Box::new(model), Box::new(optimizer), TrainerConfig { steps, ..TrainerConfig::default() })
        .unwrap()
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

fn weights(trainer: &Trainer) -> Vec<Tensor> {
    trainable(trainer.model.as_ref()).into_iter().map(|(_, weight)| weight.detach().copy()).collect()
}

#[test]
fn data_that_draws_from_the_default_generator_is_drawn_again() {
    let run = |at: u64| {
        let mut trainer = trainer(4);
        trainer.scaler = Box::new(FailsAt { calls: 0, at });
        tch::manual_seed(7);
        let mut data = Drawn(data());
        if at > 0 {
            assert!(trainer.run(&mut data, None).is_err());
            assert_eq!((trainer.step(), data.0.position), (at - 1, at - 1));
        }
        trainer.run(&mut data, None).unwrap();
        weights(&trainer)
    };
    let expected = run(0);
    for at in [1, 3] {
        assert_eq!(run(at), expected, "failed at step {at}");
    }
}

#[test]
fn a_checkpoint_that_was_loaded_in_part_is_not_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let open = |steps| {
        let mut trainer = trainer(steps);
        trainer.checkpoints = Some(Checkpoints::open(folder.path(), 2).unwrap());
        trainer
    };
    open(2).run(&mut data(), None).unwrap();
    let mut trainer = open(4);
    // A weight that cannot be written: its elements share one element's memory.
    let all = trainable(trainer.model.as_ref());
    let (_, last) = &all[all.len() - 1];
    let own = last.detach();
    let size = last.size();
    let shared = Tensor::zeros([1], (Kind::Float, Device::Cpu)).expand(&size, false);
    tch::no_grad(|| last.shallow_clone().set_data(&shared));
    let mut data = data();
    let error = trainer.resume(&mut data).unwrap_err();
    assert!(matches!(error, Error::Interrupted { step: 2, .. }), "{error}");
    let error = trainer.run(&mut data, None).unwrap_err().to_string();
    assert!(error.contains("resume from a checkpoint"), "{error}");
    // When the weight can be written, the checkpoint is whole.
    let all = trainable(trainer.model.as_ref());
    tch::no_grad(|| all[all.len() - 1].1.shallow_clone().set_data(&own));
    assert_eq!(trainer.resume(&mut data).unwrap(), Some(2));
    trainer.run(&mut data, None).unwrap();
    assert_eq!(trainer.step(), 4);
}
