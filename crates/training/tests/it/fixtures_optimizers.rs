//! The seven optimizers compared with recorded steps of PyTorch's, for every implementation.

use std::path::PathBuf;

use safetensors::SafeTensors;
use tch::{Kind, Tensor};
use training::optimizer::{
    AdaGrad, Adam, AdamW, DeviceOptimizer, Group, Implementation, Momentum, Nesterov, RmsProp, Rule, Sgd,
};

/// The hyperparameters of the recorded steps.
const LR: f64 = 0.05;
const WEIGHT_DECAY: f64 = 0.1;
const TOLERANCE: f64 = 1e-6;

fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures");
    std::env::var_os("FRUGAL_FIXTURES").map_or_else(|| own.into(), PathBuf::from)
}

fn rules() -> Vec<(&'static str, f64, Box<dyn Rule>)> {
    vec![
        ("sgd", 0.0, Box::new(Sgd)),
        ("momentum", 0.0, Box::new(Momentum { momentum: 0.9 })),
        ("nesterov", 0.0, Box::new(Nesterov { momentum: 0.9 })),
        ("adagrad", 0.0, Box::new(AdaGrad::default())),
        ("rmsprop", 0.0, Box::new(RmsProp::default())),
        ("adam", 0.0, Box::new(Adam::default())),
        ("adamw", WEIGHT_DECAY, Box::new(AdamW::default())),
    ]
}

#[test]
fn fixtures_optimizers_match_pytorch() {
    let path = folder().join("optimizers.safetensors");
    let bytes = std::fs::read(&path).unwrap_or_else(|cause| panic!("{}: {cause}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| {
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), safetensors::Dtype::F32, "{name}");
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        Tensor::from_data_size(view.data(), &shape, Kind::Float)
    };
    let (start, grads) = (read("param"), read("grads"));
    for implementation in [Implementation::ForLoop, Implementation::Foreach, Implementation::Fused] {
        for (name, weight_decay, rule) in rules() {
            let trace = read(name);
            assert_eq!(trace.size(), grads.size(), "{name}");
            let parameter = start.copy().set_requires_grad(true);
            let group =
                Group { weight_decay, ..Group::new(vec![("p".into(), parameter.shallow_clone())], LR) };
            let optimizer = DeviceOptimizer::boxed(rule, vec![group]).unwrap();
            let mut optimizer = optimizer.with_implementation(implementation);
            let mut used: f64 = 0.0;
            for step in 0..grads.size()[0] {
                runtime::autograd::set_grad(&parameter, Some(&grads.get(step))).unwrap();
                optimizer.step().unwrap();
                let difference = (parameter.detach() - trace.get(step)).abs().max().double_value(&[]);
                assert!(
                    difference <= TOLERANCE,
                    "{name} {implementation:?} step {step}: off by {difference:.2e}"
                );
                used = used.max(difference / TOLERANCE);
            }
            eprintln!("{name} {implementation:?}: {:.0} % of the tolerance of {TOLERANCE:.0e}", used * 100.0);
        }
    }
}
