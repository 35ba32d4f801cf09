//! Exact bytes that a block of Llama keeps between forward and backward. The counts are the whole process's,
//! so no other test may run at the same time.

use models::generation::{CacheShape, KeyValueCache};
use models::module::{Context, Input, LanguageModel, Mlp};
use models::{DecoderConfig, Init, Llama, Swiglu};
use runtime::memory::{live_bytes, track_cpu};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn a_block_keeps_the_documented_tensors() {
    track_cpu().unwrap();
    let live = || live_bytes(Device::Cpu).unwrap();
    let (batch, sequence, hidden, inner, heads, kv_heads) = (2u64, 48u64, 32u64, 56u64, 4u64, 2u64);
    let tokens = batch * sequence;
    let head = hidden / heads;

    let mlp = Swiglu::new(hidden as i64, inner as i64, false, Init::Normal { std: 0.1 }, F32).unwrap();
    let x = Tensor::ones([batch as i64, sequence as i64, hidden as i64], F32).set_requires_grad(true);
    let before = live();
    let y = mlp.forward(&x, &Context::default()).unwrap();
    // H + 3F including the input, which the caller holds here.
    assert_eq!(live() - before, 4 * tokens * (3 * inner + hidden), "gate, up and their product; the output");
    drop(y);
    assert_eq!(live(), before);

    // Adjacent layers differ only in their index.
    let held = |layers: i64| {
        let config = DecoderConfig {
            num_key_value_heads: kv_heads as i64,
            max_position_embeddings: sequence as i64,
            ..DecoderConfig::llama(50, hidden as i64, inner as i64, layers, heads as i64)
        };
        let model = Llama::new(&config, F32).unwrap();
        let ids = Tensor::ones([batch as i64, sequence as i64], (Kind::Int64, Device::Cpu));
        let before = live();
        let hidden = model.hidden(&Input::new(&ids)).unwrap();
        let held = live() - before;
        runtime::autograd::backward(&[&hidden.sum(Kind::Float)]).unwrap();
        held
    };
    let elements = 2 * hidden + 2 * (heads + kv_heads) * head + 3 * inner;
    // Per token one number for each norm, and flash's log-sum-exp of each query.
    let numbers = 2 + heads;
    assert_eq!(held(3) - held(2), 4 * tokens * (elements + numbers));

    // A cache allocates its final size immediately.
    let shape =
        CacheShape { layers: vec![[2, 16]; 3], recurrent: None, kind: Kind::BFloat16, device: Device::Cpu };
    let before = live();
    let cache = KeyValueCache::new(shape.clone(), 4, 100).unwrap();
    assert_eq!((live() - before, shape.bytes_per_token()), (400 * 2 * 3 * 2 * 16 * 2, 2 * 3 * 2 * 16 * 2));
    drop(cache);
}
