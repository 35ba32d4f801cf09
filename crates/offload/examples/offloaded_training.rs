//! Trains a model whose layers and optimizer state live in host memory, and the same model without offloading: the losses are the
//! same to the last bit. `cargo run -p offload --example offloaded_training`.
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;

use models::module::trainable;
use models::{DecoderConfig, Llama};
use offload::{HostAdamW, HostAdamWConfig};
use tch::{Device, Kind};
use training::Trainer;
use training::batches::Synthetic;
use training::observer::Collect;
use training::optimizer::{AdamW, DeviceOptimizer, Group, Optimizer};
use training::trainer::TrainerConfig;

/// Trains both, and compares.
pub fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::Cpu; // or Device::Cuda(0)
    let plain = train(device, None)?;
    let offloaded =
        train(device, Some(offload::OffloadConfig { device, ring: 2, ..offload::OffloadConfig::default() }))?;
    println!("losses, with and without offloading: {plain:.4?}");
    if plain == offloaded { Ok(()) } else { Err("the losses differ".into()) }
}

/// Trains five steps and returns their losses.
fn train(device: Device, options: Option<offload::OffloadConfig>) -> Result<Vec<f64>, Box<dyn Error>> {
    runtime::random::seed(1)?;
    let mut model = Llama::new(&DecoderConfig::llama(64, 32, 88, 6, 4), (Kind::Float, device))?;
    let groups = |model: &Llama| vec![Group::new(trainable(model), 1e-2)];
    let optimizer: Box<dyn Optimizer> = match options {
        None => Box::new(DeviceOptimizer::new(AdamW::default(), groups(&model))?),
        Some(options) => {
            let offload = options.install(&mut model)?;
            println!("{} bytes of layers go through {} slots", 6 * offload.layer_bytes(), options.ring);
            Box::new(HostAdamW::new(&offload, groups(&model), AdamW::default(), HostAdamWConfig::default())?)
        }
    };
    let options = TrainerConfig { steps: 5, ..TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), optimizer, options)?;
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    let mut data = Synthetic {
        seed: 1,
        vocabulary: 64,
        rows: 4,
        length: 16,
        noise: 1,
        batches: None,
        device,
        position: 0,
    };
    trainer.run(&mut data, None)?;
    Ok(records.take().iter().map(|record| record.loss).collect())
}
