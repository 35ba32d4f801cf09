//! Trains an adapter of a frozen model, saves it in PEFT's format, and merges it into another copy of the model:
//! `cargo run -p lora --example adapters`.
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;

use lora::{Adapters, LoraConfig};
use models::module::{Input, LanguageModel, trainable};
use models::{DecoderConfig, Llama};
use runtime::autograd::{backward, set_grad};
use tch::{Device, Kind, Tensor};

/// Trains, saves, loads and merges an adapter.
pub fn main() -> Result<(), Box<dyn Error>> {
    let shape = DecoderConfig::llama(64, 32, 88, 2, 4);
    let base = || {
        runtime::random::seed(1)?;
        Llama::new(&shape, (Kind::Float, Device::Cpu))
    };
    let mut model = base()?;
    let target_modules = Some(["q_proj", "v_proj", "down_proj"].into());
    let config = LoraConfig { r: 4, target_modules, seed: 42, ..LoraConfig::default() };
    let adapters = config.install(&mut model)?;

    let tokens = Tensor::from_slice(&(0..64).map(|n| n * n % 61).collect::<Vec<i64>>()).view([4, 16]);
    let (inputs, labels) = (tokens.narrow(1, 0, 15), tokens.narrow(1, 1, 15).contiguous());
    let mut losses = Vec::new();
    for _ in 0..30 {
        let loss = model.loss(&Input::training(&inputs), &labels)?.mean(labels.numel())?;
        backward(&[&loss])?;
        losses.push(f64::try_from(&loss)?);
        // Any optimizer works: the adapters are ordinary parameters.
        for (_, tensor) in trainable(&model) {
            let _ = tch::no_grad(|| tensor.shallow_clone().f_sub_(&(tensor.grad() * 0.5)))?;
            set_grad(tensor, None)?;
        }
    }

    let folder = std::env::temp_dir().join(format!("lora-example-{}", std::process::id()));
    adapters.save(&folder)?;
    let mut merged = base()?;
    let _ = Adapters::load(&mut merged, &folder)?.merge_and_unload(&mut merged)?;
    std::fs::remove_dir_all(&folder)?;
    let [adapted, merged] =
        [&model as &dyn LanguageModel, &merged].map(|model| model.logits(&Input::new(&inputs)));
    let difference = f64::try_from((adapted? - merged?).abs().max())?;
    println!("loss {:.4} -> {:.4}; merged logits differ by {difference:.1e}", losses[0], losses[29]);
    if losses[29] >= losses[0] || difference >= 1e-4 {
        return Err("the merged model does not match the trained adapter".into());
    }
    Ok(())
}
