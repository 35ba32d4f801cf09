//! Shows what each checkpoint level of a SwiGLU MLP holds between forward and backward, and that its gradients are the same bits:
//! `cargo run -p swiglu-ckpt --example levels`.
#![allow(clippy::print_stdout, unreachable_pub)]

use std::error::Error;

use runtime::autograd::backward;
use runtime::memory::live_bytes;
use swiglu_ckpt::{CheckpointLevel, SwigluConfig, SwigluMlp};
use tch::{Device, Kind, Tensor};

/// Goes through the levels.
pub fn main() -> Result<(), Box<dyn Error>> {
    runtime::memory::track_cpu()?;
    let (tokens, hidden, feed_forward) = (256, 64, 172);
    let levels = [
        CheckpointLevel::SaveAll,
        CheckpointLevel::SaveGateUp,
        CheckpointLevel::SaveOne,
        CheckpointLevel::InputOnly,
    ];
    let (mut held, mut gradients): (Vec<u64>, Vec<Tensor>) = (Vec::new(), Vec::new());
    for level in levels {
        runtime::random::seed(1)?;
        let mlp = SwigluMlp::new(&SwigluConfig { level, ..SwigluConfig::new(hidden, feed_forward) })?;
        let x = Tensor::randn([tokens, hidden], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let before = live_bytes(Device::Cpu)?;
        let y = mlp.forward(&x)?;
        held.push(live_bytes(Device::Cpu)? - before);
        backward(&[&y.square().sum(Kind::Float)])?;
        gradients.push(x.grad());
        println!("{level}: {} KiB held for backward, the output included", held[held.len() - 1] / 1024);
    }
    let same = gradients.iter().all(|gradient| *gradient == gradients[0]);
    let less = held.is_sorted_by(|more, less| more > less);
    if same && less { Ok(()) } else { Err("a level computes something else, or saves nothing".into()) }
}
