//! Exact bytes kept between forward and backward under mixed precision: activations and weights of two bytes an element. The counts
//! are the whole process's, so no other test may run at the same time.

use std::sync::Arc;

use runtime::memory::{live_bytes, track_cpu};
use runtime::precision::{self, Policy};
use swiglu_ckpt::{CheckpointLevel, SwigluConfig, SwigluMlp};
use tch::{Device, Kind, Tensor, kind};

#[derive(Debug)]
struct Low(Kind);

impl Policy for Low {
    fn operand(&self, x: &Tensor) -> runtime::Result<Tensor> {
        Ok(x.f_to_kind(self.0)?)
    }
    fn weight(&self, weight: &Tensor) -> runtime::Result<Tensor> {
        Ok(weight.f_to_kind(self.0)?)
    }
}

#[test]
fn saved_tensors_have_the_low_precision_dtype() {
    const TOKENS: u64 = 512;
    const HIDDEN: u64 = 64;
    const FEATURES: u64 = 160;
    track_cpu().unwrap();
    for dtype in [Kind::BFloat16, Kind::Half] {
        for level in CheckpointLevel::ALL {
            let mlp = SwigluMlp::new(&SwigluConfig { level, ..SwigluConfig::new(64, 160) }).unwrap();
            let x = Tensor::ones([512, 64], kind::FLOAT_CPU).set_requires_grad(true);
            let live = live_bytes(Device::Cpu).unwrap();
            let y = {
                let _within = precision::enter(Some(Arc::new(Low(dtype))));
                mlp.forward(&x).unwrap()
            };
            let held = live_bytes(Device::Cpu).unwrap() - live;
            let elements =
                TOKENS * (HIDDEN + level.saved_elements_per_token(HIDDEN, FEATURES)) + 3 * HIDDEN * FEATURES;
            assert_eq!(held, 2 * elements, "{dtype:?} {level}: the output, what is kept, and the weights");
            drop(y);
        }
    }
}
