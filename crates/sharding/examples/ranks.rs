//! Trains a model whose gradients and optimizer state are sharded over ranks (ZeRO-2). A step's four micro-batches are divided among
//! the ranks; the losses are the same with any number of them. Alone, or as ranks on this machine:
//!
//! `cargo run -p sharding --example ranks`
//!
//! `cargo run -p frugal-cli -- launch -n 2 -- target/debug/examples/ranks`
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;

use models::module::trainable;
use models::{DecoderConfig, Llama};
use runtime::collectives::{Group, GroupConfig, Launch, Store};
use sharding::{ShardedOptimizer, ShardingConfig, Stage};
use tch::{Device, Kind};
use training::batches::Synthetic;
use training::observer::Collect;
use training::optimizer::{self, AdamW};
use training::{Trainer, trainer};

/// Trains, and prints the losses on rank 0.
pub fn main() -> Result<(), Box<dyn Error>> {
    let ranks = match Launch::from_environment()? {
        Some(launch) => {
            let store = Store::connect(&launch, GroupConfig::default().timeout)?;
            Group::new(&store, "training", GroupConfig::default())?
        }
        None => Group::alone(),
    };
    runtime::random::seed(1)?; // The same weights on every rank.
    let model = Llama::new(&DecoderConfig::llama(64, 32, 88, 4, 4), (Kind::Float, Device::Cpu))?;
    let parameters = trainable(&model);
    let order = parameters.iter().map(|(name, _)| name.clone()).collect();
    let options = ShardingConfig { stage: Stage::Two, order, ..ShardingConfig::default() };
    let groups = vec![optimizer::Group::new(parameters, 1e-2)];
    let optimizer = ShardedOptimizer::new(AdamW::default(), groups, &ranks, options)?;

    let options = trainer::TrainerConfig { steps: 5, accumulation: 4, ..trainer::TrainerConfig::default() };
    let mut trainer = Trainer::new(Box::new(model), Box::new(optimizer), options)?;
    let records = Collect::default();
    trainer.observers.push(Box::new(records.clone()));
    let mut data = Synthetic {
        seed: 1,
        vocabulary: 64,
        rows: 4,
        length: 16,
        noise: 1,
        batches: None,
        device: Device::Cpu,
        position: 0,
    };
    trainer.run(&mut data, None)?;
    let losses: Vec<f64> = records.take().iter().map(|record| record.loss).collect();
    if ranks.rank() == 0 {
        println!("losses over {} ranks: {losses:?}", ranks.size());
    }
    ranks.barrier("end")?; // Rank 0 keeps the store that the others need until they end.
    if losses[4] < losses[0] { Ok(()) } else { Err("the loss does not fall".into()) }
}
