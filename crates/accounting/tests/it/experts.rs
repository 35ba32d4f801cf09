//! Predictions for mixtures of experts: streamed through a cache, and by the rows of their tokens.

use accounting::decoder_flops::Workload;
use accounting::experts::{StreamedExperts, cache_bytes, pass_bytes, slot_bytes};
use accounting::lora::LowRank;
use accounting::memory::recipe::Recipe;
use accounting::model::{Decoder, ExpertSizes, Family, Sizes};
use accounting::offload::sizes::{self, Choices};
use accounting::presets;

/// Qwen3-30B-A3B.
fn qwen3_30b() -> Decoder {
    let qwen3 = presets::find("qwen3-0.6b").unwrap();
    let experts =
        ExpertSizes { layers: 48, count: 128, per_token: 8, feed_forward: 768, shared: 0, biases: false };
    let sizes = Sizes {
        family: Family::Qwen3Moe,
        embedding: 2048,
        hidden: 2048,
        layers: 48,
        heads: 32,
        kv_heads: 4,
        feed_forward: 6144,
        tied: false,
        experts: Some(experts),
        ..*qwen3
    };
    Decoder::new(sizes).unwrap()
}

#[test]
fn streamed_experts_leave_the_layers_and_take_a_cache() {
    let model = qwen3_30b();
    let work = Workload { batch: 1, sequence: 512 };
    let costs = |choices: &Choices| {
        sizes::adapters(&model, &LowRank { on_cpu: true, ..LowRank::default() }, work, None, choices).unwrap()
    };
    let choices = Choices { recipe: Recipe::BF16, ..Choices::default() };
    let (cache, rate) = (4 << 30, 3e9);
    let streamed = Choices { experts: Some(StreamedExperts { cache, rate }), ..choices };
    let (whole, streamed) = (costs(&choices), costs(&streamed));
    let one = 3 * 2048 * 768 * 2;
    assert_eq!(slot_bytes(&model, &Recipe::BF16).unwrap(), one);
    let slots = cache_bytes(&model, &Recipe::BF16, cache).unwrap();
    assert_eq!(slots, cache / one * one);
    assert_eq!(whole.layers[0].slot_bytes - streamed.layers[0].slot_bytes, 128 * one);
    assert_eq!(streamed.working.constant_bytes - whole.working.constant_bytes, slots);
    assert_eq!(streamed.working.backward_bytes, whole.working.backward_bytes);
    // 512 tokens reach every expert; a pass reads what the cache does not have, and takes at least that long.
    let read = pass_bytes(&model, &Recipe::BF16, work, cache).unwrap();
    assert!((read as f64 / (48 * 128 * one - cache) as f64 - 1.0).abs() < 1e-6, "{read}");
    let seconds: f64 = streamed.layers.iter().map(|layer| layer.forward_seconds).sum();
    assert!(seconds >= read as f64 / rate * 0.999);
}

#[test]
fn what_cannot_be_streamed_is_refused() {
    let model = qwen3_30b();
    let message = |result: Result<u64, accounting::Error>| result.unwrap_err().to_string();
    let dense = presets::find("qwen3-0.6b").unwrap();
    assert!(message(slot_bytes(&dense, &Recipe::BF16)).contains("qwen3 has no mixture of experts"));
    let error = message(cache_bytes(&model, &Recipe::BF16, 10_000_000));
    assert!(
        error.contains("holds 1 experts of 9437184 bytes") && error.contains("give at least 18874368"),
        "{error}"
    );
    let streamed = Some(StreamedExperts { cache: 1 << 30, rate: 1e9 });
    let choices = Choices { recipe: Recipe::BF16, experts: streamed, ..Choices::default() };
    let error =
        sizes::training(&model, Workload { batch: 1, sequence: 8 }, &choices).unwrap_err().to_string();
    assert!(error.contains("streamed experts are frozen"), "{error}");
}

/// A generated token reads 8 of 128 experts of each layer, so it is faster than its weights' bytes.
#[test]
fn a_token_reads_the_experts_that_it_is_given_to() {
    let model = qwen3_30b();
    let choices = Choices { recipe: Recipe::BF16, ..Choices::default() };
    let seconds = |tokens: u64| -> f64 {
        let costs = sizes::inference(&model, Workload { batch: 1, sequence: tokens }, &choices).unwrap();
        costs.layers.iter().map(|layer| layer.forward_seconds).sum()
    };
    // At 1 TB/s: all weights but those of idle experts.
    let active = (model.active_parameters().unwrap() - 2 * model.vocabulary * 2048) as f64 * 2.0 / 1e12;
    assert!((seconds(1) / active - 1.0).abs() < 0.01, "{} {active}", seconds(1));
    assert!(seconds(64) > 8.0 * seconds(1));
}
