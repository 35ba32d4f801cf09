//! Exact bytes that each level keeps between forward and backward. The counts are the whole process's, so no
//! other test may run at the same time.

use runtime::memory::{Region, live_bytes, track_cpu};
use swiglu_ckpt::{CheckpointLevel, GateUpStorage, SwigluConfig, SwigluMlp};
use tch::{Device, Kind, Tensor, kind};

const CPU: Device = Device::Cpu;
const TOKENS: i64 = 1536;
const HIDDEN: i64 = 64;
const FEATURES: i64 = 160;

#[test]
fn each_level_keeps_the_documented_bytes_and_tiles_bound_temporaries() {
    track_cpu().unwrap();
    let tile = 100_000;
    let levels = CheckpointLevel::ALL.map(|level| match level {
        CheckpointLevel::InputOnlyTiled { .. } => CheckpointLevel::InputOnlyTiled { bytes: tile },
        other => other,
    });
    for storage in [GateUpStorage::Separate, GateUpStorage::Fused] {
        for level in levels {
            let config = SwigluConfig { level, storage, ..SwigluConfig::new(HIDDEN, FEATURES) };
            let mlp = SwigluMlp::new(&config).unwrap();
            let live = live_bytes(CPU).unwrap();
            // Only the function holds the input after the caller dropped it.
            let x = Tensor::randn([TOKENS, HIDDEN], kind::FLOAT_CPU).set_requires_grad(true);
            let h = &x * 1.0;
            let region = Region::start(CPU).unwrap();
            let y = mlp.forward(&h).unwrap();
            let forward = region.finish().unwrap();
            drop(h);
            let (x_bytes, y_bytes) = (x.numel() as u64 * 4, y.numel() as u64 * 4);
            let held = live_bytes(CPU).unwrap() - live - x_bytes - y_bytes;
            let expected = level.saved_elements_per_token(HIDDEN as u64, FEATURES as u64) * TOKENS as u64 * 4;
            assert_eq!(held, expected, "{level} {storage:?} holds");

            let weights = (3 * HIDDEN * FEATURES * 4) as u64;
            let region = Region::start(CPU).unwrap();
            runtime::autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
            let backward = region.finish().unwrap();
            if let CheckpointLevel::InputOnlyTiled { bytes } = level {
                assert!(forward.peak_above_start() - y_bytes <= bytes, "{storage:?} forward");
                let temporaries = backward.peak_above_start() - weights - x_bytes;
                // Besides the tile: the scalar loss and its gradient.
                assert!(temporaries <= bytes + 64, "{storage:?} backward: {temporaries}");
            }
            drop(y);
            assert_eq!(
                live_bytes(CPU).unwrap() - live,
                2 * x_bytes + weights,
                "{level} {storage:?}: gradients only"
            );
        }
    }

    // Without recording, only the result is kept.
    let mlp = SwigluMlp::new(&SwigluConfig::new(HIDDEN, FEATURES)).unwrap();
    let x = Tensor::randn([TOKENS, HIDDEN], kind::FLOAT_CPU);
    let live = live_bytes(CPU).unwrap();
    let y = {
        let _no_grad = runtime::autograd::GradMode::off();
        mlp.forward(&x).unwrap()
    };
    assert_eq!(live_bytes(CPU).unwrap() - live, y.numel() as u64 * 4);

    // A frozen MLP propagates gradients, and has none itself.
    for (_, weight) in mlp.parameters() {
        let _ = weight.set_requires_grad(false);
    }
    let x = x.set_requires_grad(true);
    let y = mlp.forward(&x).unwrap();
    let region = Region::start(CPU).unwrap();
    runtime::autograd::backward(&[&y.sum(Kind::Float)]).unwrap();
    drop(y);
    let usage = region.finish().unwrap();
    assert!(x.grad().defined());
    assert!(mlp.parameters().iter().all(|(_, weight)| !weight.grad().defined()));
    assert!(usage.live_after <= usage.live_before + x.numel() as u64 * 4);
}
