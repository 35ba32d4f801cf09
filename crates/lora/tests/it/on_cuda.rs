//! Adapted layers on a GPU compared with the same layers on the CPU in f64. Prints that it is skipped without a GPU.

use lora::{LoraLinear, LoraLinearConfig};
use models::Linear;
use models::module::{Context, Projection, parameters};
use runtime::autograd::backward;
use runtime::random::{Generator, RandomState};
use tch::{Device, Kind, Tensor};

/// Output and gradients of x, A, B and, for DoRA, the magnitudes; in f64 on the CPU.
fn outcome(dora: bool, (dropout, bias): (f64, bool), (kind, device): (Kind, Device)) -> Vec<Tensor> {
    let mut generator = Generator::new(3).unwrap();
    // Numbers that bf16 represents, so that each dtype computes with the same ones.
    let mut drawn = |shape: &[i64]| {
        let drawn = generator.normal(shape, (Kind::Float, Device::Cpu)).unwrap();
        drawn.to_kind(Kind::BFloat16).to_kind(kind).to_device(device)
    };
    let base = Linear { weight: drawn(&[40, 24]), bias: bias.then(|| drawn(&[40])) };
    let options = LoraLinearConfig { r: 4, alpha: 6.0, dropout, dora, ..LoraLinearConfig::default() };
    let layer = LoraLinear::new(base, &options).unwrap();
    let mut leaves = vec![drawn(&[3, 50, 24]).set_requires_grad(true)];
    let upstream = drawn(&[3, 50, 40]);
    for (name, tensor) in parameters(&layer).into_iter().filter(|(name, _)| name.starts_with("lora_")) {
        if !name.starts_with("lora_magnitude") {
            let _no_grad = tch::no_grad_guard();
            tensor.shallow_clone().copy_(&(drawn(&tensor.size()) * 0.25));
        }
        leaves.push(tensor.shallow_clone());
    }
    let training = Context { training: true, ..Context::default() };
    let y = layer.forward(&leaves[0], &training).unwrap();
    backward(&[&(&y * upstream).sum(Kind::Float)]).unwrap();
    let results = std::iter::once(y.detach()).chain(leaves.iter().map(Tensor::grad));
    results.map(|tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Double)).collect()
}

#[test]
fn a_layer_on_cuda_matches_the_cpu() {
    if runtime::device::cuda_count().unwrap() == 0 {
        eprintln!("skipped: no CUDA device");
        return;
    }
    let device = runtime::device::select("cuda").unwrap();
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5), (Kind::BFloat16, 1e-2)] {
        for dora in [false, true] {
            for case in [(0.0, true), (0.0, false), (0.4, true)] {
                let state = RandomState::capture(Device::Cpu).unwrap();
                let expected = outcome(dora, case, (Kind::Double, Device::Cpu));
                let _replay = state.replay().unwrap();
                let found = outcome(dora, case, (kind, device));
                assert_eq!(found.len(), if dora { 5 } else { 4 });
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let scale = expected.abs().max().double_value(&[]);
                    let error = (found - expected).abs().max().double_value(&[]);
                    assert!(
                        error <= tolerance * scale,
                        "{kind:?}, DoRA {dora}, {case:?}, {index}: {error} of {scale}"
                    );
                }
            }
        }
    }
}
