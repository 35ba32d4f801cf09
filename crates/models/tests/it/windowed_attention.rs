//! Attention within a sliding window, with its own scale, a cap and sinks: every implementation against the explicit one.

use models::attention::{AttentionConfig, AttentionPath, Documents, attention};
use runtime::memory::Region;
use tch::{Device, Kind, Tensor};

fn random(shape: [i64; 4]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

fn run(qkv: &[Tensor; 3], documents: Option<&Documents>, options: &AttentionConfig<'_>) -> Vec<Tensor> {
    let [q, k, v] = qkv;
    let output = attention(q, k, v, documents, options).unwrap();
    let weights = Tensor::arange(output.numel() as i64, (Kind::Double, Device::Cpu)).sin().view_as(&output);
    let loss = (&output * weights).sum(Kind::Double);
    let inputs: Vec<&Tensor> = [q, k, v].into_iter().chain(options.sinks).collect();
    let found = runtime::autograd::grad(&[&loss], &[None], &inputs, Default::default()).unwrap();
    std::iter::once(output.detach()).chain(found.into_iter().map(Option::unwrap)).collect()
}

/// Rows long enough for several chunks, windows below and above a chunk's length.
#[test]
fn windows_scales_caps_and_sinks_agree_in_every_path() {
    let packed = Documents::new(&[&[140usize, 3, 57], &[64, 65, 71]], Device::Cpu).unwrap();
    let qkv = [random([2, 200, 4, 4]), random([2, 200, 2, 4]), random([2, 200, 2, 4])];
    let sinks = Tensor::from_slice(&[0.3f64, -2.0, 1.5, 4.0]).set_requires_grad(true);
    for (documents, window, scale, softcap, has_sinks) in [
        (None, None, Some(0.9), None, false),
        (None, Some(1), None, None, false),
        (None, Some(70), Some(0.9), None, true),
        (None, Some(199), None, None, false),
        (None, Some(1000), Some(0.9), Some(1.5), false),
        (None, Some(20), Some(0.9), Some(1.5), true),
        (None, None, None, None, true),
        (Some(&packed), Some(2), Some(0.9), None, true),
        (Some(&packed), Some(70), None, None, false),
        (Some(&packed), Some(65), Some(0.9), Some(1.5), false),
        (Some(&packed), None, None, Some(0.2), false),
        (Some(&packed), None, None, None, true),
    ] {
        let sinks = has_sinks.then_some(&sinks);
        let options = |path| AttentionConfig { path, dropout: 0.0, scale, window, softcap, sinks };
        let oracle = run(&qkv, documents, &options(AttentionPath::Explicit));
        for path in [AttentionPath::DenseMask, AttentionPath::Fused] {
            for (found, expected) in run(&qkv, documents, &options(path)).iter().zip(&oracle) {
                let distance = (found - expected).abs().max().double_value(&[]);
                assert!(distance < 1e-12, "{path:?} {window:?} {scale:?} {softcap:?}: {distance}");
            }
        }
    }
}

/// The oracle itself: which pairs a query sees, by the gradient of its output.
#[test]
fn a_token_sees_its_window_and_nothing_else() {
    let documents = Documents::new(&[&[6usize, 4]], Device::Cpu).unwrap();
    for path in [AttentionPath::Explicit, AttentionPath::DenseMask, AttentionPath::Fused] {
        let x = random([1, 10, 1, 4]);
        let options = AttentionConfig { path, window: Some(3), ..AttentionConfig::default() };
        let output = attention(&x, &x, &x, Some(&documents), &options).unwrap();
        for query in 0..10i64 {
            let sum = output.select(1, query).sum(Kind::Double);
            let gradient = runtime::autograd::grad(
                &[&sum],
                &[None],
                &[&x],
                runtime::autograd::Keep { graph: true, derivative: false },
            );
            let gradient = gradient.unwrap().remove(0).unwrap();
            for key in 0..10i64 {
                let seen = gradient.select(1, key).abs().max().double_value(&[]) > 0.0;
                let expected = key <= query && query - key < 3 && (key < 6) == (query < 6);
                assert_eq!(seen, expected, "{path:?}: query {query}, key {key}");
            }
        }
    }
}

#[test]
fn a_window_allocates_nothing_of_all_pairs() {
    let x = Tensor::randn([1, 4096, 1, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let options = AttentionConfig { window: Some(64), ..AttentionConfig::default() };
    let region = Region::start(Device::Cpu).unwrap();
    let output = attention(&x, &x, &x, None, &options).unwrap();
    runtime::autograd::backward(&[&output.sum(Kind::Float)]).unwrap();
    let peak = region.finish().unwrap().peak_above_start();
    // A byte for each pair, as masks have, would be 16 MiB.
    assert!(peak < 4 << 20, "{peak}");
}

#[test]
fn invalid_options_are_refused_by_name() {
    let x = random([1, 3, 1, 4]);
    let error = |options: AttentionConfig| attention(&x, &x, &x, None, &options).unwrap_err().to_string();
    let none = AttentionConfig::default();
    for (options, expected) in [
        (
            AttentionConfig { window: Some(0), ..none },
            "the window is 0 tokens; expected at least 1, the token itself",
        ),
        (AttentionConfig { scale: Some(0.0), ..none }, "the scale is 0; expected a finite number above 0"),
        (
            AttentionConfig { softcap: Some(f64::NAN), ..none },
            "the soft cap is NaN; expected a finite number above 0",
        ),
        (AttentionConfig { dropout: 1.0, ..none }, "dropout is 1; expected a probability in [0, 1)"),
    ] {
        assert_eq!(error(options), format!("attention: {expected}"));
    }
}
