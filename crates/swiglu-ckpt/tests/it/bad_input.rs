//! Error messages of invalid calls.

use swiglu_ckpt::{CheckpointLevel, GateUpStorage, SwigluConfig, SwigluMlp, swiglu};
use tch::{Device, Kind, Tensor};

fn t(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::zeros(shape, (kind, Device::Cpu))
}

fn float(shape: &[i64]) -> Tensor {
    t(shape, Kind::Float)
}

#[test]
fn wrong_tensors_are_named() {
    let all = CheckpointLevel::SaveAll;
    let good = || [float(&[2, 4]), float(&[4, 6]), float(&[4, 6]), float(&[6, 4])];
    let cases: Vec<(usize, Tensor, CheckpointLevel, &str)> = vec![
        (0, float(&[]), all, "swiglu: `x` has shape []; expected [..., hidden]: at least one dimension"),
        (
            0,
            float(&[2, 5]),
            all,
            "swiglu: `down` has shape [6, 4]; expected [intermediate, 5], because the last dimension of `x` is 5",
        ),
        (
            1,
            float(&[6, 4]),
            all,
            "swiglu: `gate` has shape [6, 4]; expected [4, 6], because `x` has 4 features and `down` is [6, 4]",
        ),
        (
            2,
            float(&[4]),
            all,
            "swiglu: `up` has shape [4]; expected [4, 6], because `x` has 4 features and `down` is [6, 4]",
        ),
        (
            3,
            float(&[6, 4, 1]),
            all,
            "swiglu: `down` has shape [6, 4, 1]; expected [intermediate, hidden]: two dimensions",
        ),
        (
            0,
            t(&[2, 4], Kind::Int64),
            all,
            "swiglu: `x` is Int64; expected Float, Double, BFloat16 or Half; convert it with `to_kind`",
        ),
        (
            2,
            t(&[4, 6], Kind::BFloat16),
            all,
            "swiglu: `up` is BFloat16; expected Float as `x`; convert it with `to_kind`",
        ),
        (
            0,
            float(&[2, 4]),
            CheckpointLevel::InputOnlyTiled { bytes: 71 },
            "swiglu: a tile of 71 bytes is below the 72 bytes that one token's temporaries take; give at least that, or \
             use the level `input-only`",
        ),
    ];
    for (index, wrong, level, message) in cases {
        let mut arguments = good();
        arguments[index] = wrong;
        let [x, w, v, u] = &arguments;
        assert_eq!(swiglu(x, w, v, u, level).unwrap_err().to_string(), message);
    }
    let [x, w, v, u] = good();
    let y = swiglu(&x, &w, &v, &u, CheckpointLevel::InputOnlyTiled { bytes: 72 }).unwrap();
    assert_eq!(y.size(), [2, 4]);
}

#[test]
fn invalid_modules_are_refused_at_construction() {
    let nan = float(&[4, 6]);
    let _ = nan.narrow(0, 1, 1).fill_(f64::NAN);
    let level = CheckpointLevel::InputOnly;
    let message = |result: swiglu_ckpt::Result<SwigluMlp>| result.unwrap_err().to_string();
    assert_eq!(
        message(SwigluMlp::from_weights(float(&[4, 6]), nan, float(&[6, 4]), level)),
        "swiglu: `up` has 6 values that are not finite; load or initialise it again"
    );
    assert_eq!(
        message(SwigluMlp::from_fused_weights(float(&[4, 6]), float(&[6, 4]), level)),
        "swiglu: `gate_up` has shape [4, 6]; expected [4, 12], because `x` has 4 features and `down` is [6, 4]"
    );
    assert_eq!(message(SwigluMlp::new(&SwigluConfig::new(0, 4))), "swiglu: hidden is 0; expected at least 1");
    let config = SwigluConfig { kind: Kind::Int, storage: GateUpStorage::Fused, ..SwigluConfig::new(4, 4) };
    assert_eq!(
        message(SwigluMlp::new(&config)),
        "swiglu: `weights` is Int; expected Float, Double, BFloat16 or Half; convert it with `to_kind`"
    );
}
