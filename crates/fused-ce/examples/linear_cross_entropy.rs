//! Hidden states, an output projection and targets to a loss and its gradients, compared with libtorch's `cross_entropy`:
//! `cargo run -p fused-ce --example linear_cross_entropy`.
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;

use fused_ce::{Chunk, LinearCrossEntropy};
use runtime::autograd::backward;
use tch::{Device, Kind, Reduction, Tensor};

/// Letters: b batch, t sequence, d hidden, v vocabulary.
pub fn main() -> Result<(), Box<dyn Error>> {
    let fp32 = (Kind::Float, Device::Cpu);
    tch::manual_seed(1);
    let (b, t, d, v) = (2, 256, 64, 5000);
    let x_btd = Tensor::randn([b, t, d], fp32);
    let w_vd = Tensor::randn([v, d], fp32) * 0.1;
    let targets_bt = Tensor::randint(v, [b, t], (Kind::Int64, Device::Cpu));
    let _ = targets_bt.narrow(1, 0, 32).fill_(-100); // the prompt has no labels

    // libtorch: all logits, [b·t, v], in memory.
    let leaves = || [&x_btd, &w_vd].map(|tensor| tensor.copy().set_requires_grad(true));
    let [x, w] = leaves();
    let logits = x.matmul(&w.tr()).view([b * t, v]);
    let expected =
        logits.cross_entropy_loss(&targets_bt.view([b * t]), None::<Tensor>, Reduction::Mean, -100, 0.0);
    backward(&[&expected])?;
    let expected_grads = [x.grad(), w.grad()];

    // Here: the logits of 64 tokens at a time.
    let [x, w] = leaves();
    let options = LinearCrossEntropy { chunk: Some(Chunk::Tokens(64)), ..LinearCrossEntropy::default() };
    let loss = options.loss(&x, &w, &targets_bt)?;
    backward(&[&loss])?;

    println!("loss: {:.6}, libtorch {:.6}", f64::try_from(&loss)?, f64::try_from(&expected)?);
    println!("logits in memory: {} KiB, libtorch {} KiB", 64 * v * 4 / 1024, b * t * v * 4 / 1024);
    for (name, found, expected) in [("x", x.grad(), &expected_grads[0]), ("W", w.grad(), &expected_grads[1])]
    {
        let error = f64::try_from((&found - expected).abs().max() / expected.abs().max())?;
        println!("gradient of {name}: relative difference {error:.1e}");
        if error > 1e-4 {
            return Err(format!("the gradient of {name} differs").into());
        }
    }
    Ok(())
}
