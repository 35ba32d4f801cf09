use super::*;
use crate::presets;

const BF16: Recipe = Recipe { master: Some(Dtype::Fp32), ..Recipe::BF16_MASTER };

#[test]
fn shards_begin_at_blocks_and_may_be_empty() {
    let region = Region::new(&[10_000, 65, 1], true, false).unwrap();
    assert_eq!(region.elements, 10_048 + 128 + 64);
    let owned: Vec<_> = (0..4).map(|rank| region.owned(rank, 4)).collect();
    assert_eq!(owned, [0..4096, 4096..8192, 8192..10_240, 10_240..10_240]);
    // 48, 63 and 63 elements lie between parameters.
    assert_eq!(owned.iter().map(|range| region.of_parameters(range)).sum::<u64>(), 10_066);
    assert_eq!(region.owned(0, 1), 0..10_240);
}

#[test]
fn buckets_have_whole_parameters() {
    let layout = |bytes| Layout::buckets(&[100, 1, 50], Dtype::Fp32, bytes, ZeroStage::Two, 2).unwrap();
    let counts =
        |layout: Layout| -> Vec<u64> { layout.regions.iter().map(|region| region.elements).collect() };
    assert_eq!(counts(layout(400)), [128, 128]);
    assert_eq!(counts(layout(u64::MAX)), [256]);
    assert!(Layout::buckets(&[1], Dtype::Fp32, 1, ZeroStage::Three, 2).is_err());
}

/// The table of ZeRO's stages, of a model whose regions divide evenly but for padding.
#[test]
fn states_and_sent_bytes_follow_the_formulas() {
    let model = presets::find("llama-3-8b").unwrap();
    let p = model.parameters().unwrap() as f64;
    let near = |found: u64, expected: f64| {
        assert!((found as f64 / expected - 1.0).abs() < 1e-3, "{found}, expected {expected}");
    };
    for (stage, weights, rounds) in
        [(ZeroStage::One, 1.0, 3), (ZeroStage::Two, 1.0, 3), (ZeroStage::Three, 0.25, 3)]
    {
        let layout = Layout::of_decoder(&model, &BF16, stage, 4).unwrap();
        let rank = layout.rank_bytes(0, &BF16, Optimizer::AdamW, 0).unwrap();
        // Embedding and head stay whole in stage 3.
        let outside = if stage == ZeroStage::Three { 0.75 * 2.0 * 128_256.0 * 4096.0 } else { 0.0 };
        near(rank.weights, 2.0 * (weights * p + outside));
        near(rank.states().unwrap(), 4.0 * p);
        let f = 0.75;
        let sent = layout.sent_bytes(1, &BF16, rounds).unwrap();
        let in_layers = p - 2.0 * 128_256.0 * 4096.0;
        let expected = match stage {
            ZeroStage::Three => 2.0 * f * (9.0 * in_layers + 4.0 * (p - in_layers)),
            _ => 2.0 * f * 4.0 * p,
        };
        near(sent, expected);
    }
}

#[test]
fn one_rank_sends_nothing_and_all_send_as_much_as_they_receive() {
    let model = presets::find("gpt2").unwrap();
    let layout = |ranks| Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::Two, ranks).unwrap();
    assert_eq!(layout(1).sent_bytes(0, &Recipe::FP32, 5).unwrap(), 0);
    let elements: u64 = layout(3).regions.iter().map(|region| region.elements).sum();
    let sent: u64 = (0..3).map(|rank| layout(3).sent_bytes(rank, &Recipe::FP32, 1).unwrap()).sum();
    // Each rank receives the others' gradients of its part, and the others' parts of the weights.
    assert_eq!(sent, 2 * 2 * 4 * elements);
    assert!(Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::One, 0).is_err());
}
