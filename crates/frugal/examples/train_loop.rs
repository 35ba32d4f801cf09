//! A training loop of one's own with four techniques: LoRA, the fused loss, layers in host memory, and bf16 products.

use frugal::amp::Autocast;
use frugal::fused_ce::LinearCrossEntropy;
use frugal::lora::LoraConfig;
use frugal::models::module::{Input, LanguageModel, trainable};
use frugal::models::{DecoderConfig, Llama};
use frugal::offload::OffloadConfig;
use frugal::runtime::autograd::backward;
use frugal::training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};
use tch::{Device, Kind, Tensor};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    frugal::runtime::random::seed(1)?;
    let mut model = Llama::new(&DecoderConfig::llama(64, 32, 88, 4, 4), (Kind::Float, Device::Cpu))?;

    // The order: adapters, loss head, offload, precision.
    let adapters = LoraConfig { r: 4, seed: 1, ..LoraConfig::default() }.install(&mut model)?;
    LinearCrossEntropy::default().install(&mut model)?;
    let _offload = OffloadConfig::default().install(&mut model)?;
    let autocast = Autocast::new(Kind::BFloat16)?;

    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(trainable(&model), 1e-2)])?;
    let tokens = Tensor::from_slice(&(0..48).map(|n| n * n % 61).collect::<Vec<i64>>()).view([3, 16]);
    let (inputs, labels) = (tokens.narrow(1, 0, 15), tokens.narrow(1, 1, 15).contiguous());
    let mut losses = Vec::new();
    for step in 0..20 {
        let loss = {
            let _bf16 = autocast.enter();
            model.loss(&Input::training(&inputs), &labels)?.mean(45)?
        };
        backward(&[&loss])?;
        optimizer.step()?;
        optimizer.zero_grad(ZeroGrad::ToNone)?;
        losses.push(loss.double_value(&[]));
        eprintln!("step {step}: loss {:.4}", losses[step]);
    }
    assert!(losses[19] < losses[0]);
    adapters.save(&std::env::temp_dir().join(format!("train-loop-adapter-{}", std::process::id())))?;
    Ok(())
}
