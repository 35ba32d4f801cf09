//! Trains a small network in fp16 with autocast and a dynamic loss scaler: `cargo run -p amp --example mixed_precision`.
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;

use amp::{Autocast, DynamicGradScaler, DynamicScalerConfig};
use kernels::linear::linear;
use runtime::precision;
use tch::{Device, Kind, Tensor};
use training::optimizer::{AdamW, DeviceOptimizer, Group, ZeroGrad};

/// Learns z = sin(3x)·y on random points.
pub fn main() -> Result<(), Box<dyn Error>> {
    let fp32 = (Kind::Float, Device::Cpu);
    tch::manual_seed(1);

    // The parameters stay in fp32.
    let w1 = Tensor::randn([64, 2], fp32).set_requires_grad(true);
    let b1 = Tensor::zeros([64], fp32).set_requires_grad(true);
    let w2 = (Tensor::randn([1, 64], fp32) * 0.1).set_requires_grad(true);
    let named = [("w1", &w1), ("b1", &b1), ("w2", &w2)].map(|(name, w)| (name.to_owned(), w.shallow_clone()));
    let mut optimizer = DeviceOptimizer::new(AdamW::default(), vec![Group::new(named, 1e-2)])?;

    let autocast = Autocast::new(Kind::Half)?;
    let mut scaler = DynamicGradScaler::new(DynamicScalerConfig::default())?;
    let (mut first, mut last) = (f64::NAN, f64::NAN);
    for step in 0..300 {
        let xy = Tensor::rand([256, 2], fp32) * 2.0 - 1.0;
        let z = (xy.select(1, 0) * 3.0).sin() * xy.select(1, 1);

        let loss = {
            let _autocast = autocast.enter();
            let hidden = linear(&xy, &w1, Some(&b1))?.relu(); // fp16
            let output = linear(&hidden, &w2, None)?.squeeze_dim(1); // fp16
            (precision::widened(&output)? - z).square().mean(Kind::Float) // fp32
        };
        optimizer.zero_grad(ZeroGrad::ToNone)?;
        runtime::autograd::backward(&[&scaler.scale(&loss)?])?;
        let stepped = scaler.step("adamw", &mut optimizer)?; // skipped if a gradient overflowed
        scaler.update()?;

        last = f64::try_from(&loss)?;
        if step == 0 {
            first = last;
        }
        if step % 50 == 0 || !stepped {
            println!(
                "step {step}: loss {last:.4}, scale {}, stepped {stepped}",
                scaler.rule().current().scale
            );
        }
    }
    println!("loss {first:.4} -> {last:.4}");
    if last < 0.1 * first { Ok(()) } else { Err("the network did not learn".into()) }
}
