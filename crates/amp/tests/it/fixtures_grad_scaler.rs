//! PyTorch's `GradScaler` on sequences of overflows: the scale and the tracker after every step, to the bit.

use std::path::PathBuf;

use amp::{DynamicGradScaler, DynamicScalerConfig};
use serde::Deserialize;
use tch::{Kind, Tensor};
use training::optimizer::{DeviceOptimizer, Group, Sgd};

#[derive(Deserialize)]
struct Case {
    config: Config,
    overflow: Vec<u8>,
    scale_and_tracker: Vec<(f64, u32)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    init_scale: Option<f64>,
    growth_factor: Option<f64>,
    backoff_factor: Option<f64>,
    growth_interval: Option<u32>,
}

impl Config {
    fn options(&self) -> DynamicScalerConfig {
        let default = DynamicScalerConfig::default();
        DynamicScalerConfig {
            init_scale: self.init_scale.map_or(default.init_scale, |scale| scale as f32),
            growth_factor: self.growth_factor.unwrap_or(default.growth_factor),
            backoff_factor: self.backoff_factor.unwrap_or(default.backoff_factor),
            growth_interval: self.growth_interval.unwrap_or(default.growth_interval),
            ..default
        }
    }
}

fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures");
    std::env::var_os("FRUGAL_FIXTURES").map_or_else(|| own.into(), PathBuf::from)
}

#[test]
fn fixtures_scale_and_tracker_match_pytorch_bit_for_bit() {
    let path = folder().join("grad_scaler.json");
    let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(!cases.is_empty());
    for (index, case) in cases.iter().enumerate() {
        assert_eq!(case.overflow.len(), case.scale_and_tracker.len());
        let w = Tensor::from_slice(&[1.0f32, 1.0]).set_requires_grad(true);
        let group = Group::new(vec![("w".into(), w.shallow_clone())], 0.0);
        let mut sgd = DeviceOptimizer::new(Sgd, vec![group]).unwrap();
        let mut scaler = DynamicGradScaler::new(case.config.options()).unwrap();
        for (step, (&overflow, &(scale, tracker))) in
            case.overflow.iter().zip(&case.scale_and_tracker).enumerate()
        {
            // The gradient is set directly, independent of the scale: infinite or finite.
            let gradient = if overflow != 0 { f32::INFINITY } else { 1.0 };
            runtime::autograd::set_grad(&w, Some(&Tensor::from_slice(&[gradient, gradient]))).unwrap();
            let taken = scaler.step("sgd", &mut sgd).unwrap();
            assert_eq!(taken, overflow == 0, "case {index}, step {step}");
            assert_eq!(scaler.update().unwrap(), overflow != 0);
            let now = scaler.rule().current();
            assert_eq!(
                (f64::from(now.scale), now.growth_tracker),
                (scale, tracker),
                "case {index}, step {step}"
            );
            // A scaler restored from its state continues the sequence.
            if step % 7 == 3 {
                let state = scaler.state().to_string();
                scaler = DynamicGradScaler::new(DynamicScalerConfig::default()).unwrap();
                scaler.load_state(&serde_json::from_str(&state).unwrap()).unwrap();
            }
        }
        assert_eq!(Vec::<f32>::try_from(w.to_kind(Kind::Float)).unwrap(), [1.0, 1.0]);
    }
}
