use super::layout::{buckets, region};
use super::*;
use crate::lora::LowRank;
use crate::presets;

const BF16: Recipe = Recipe { master: Some(Dtype::Fp32), ..Recipe::BF16_MASTER };

#[test]
fn shards_begin_at_blocks_and_may_be_empty() {
    let placed = [10_000, 65, 1].map(|elements| (elements, LayerPosition::Before));
    let region = region(&placed, (Dtype::Fp32, Some(Dtype::Fp32)), ALIGNMENT, None).unwrap();
    assert_eq!(region.elements, 10_048 + 128 + 64);
    let owned: Vec<_> = (0..4).map(|rank| region.owned(rank, 4)).collect();
    assert_eq!(owned, [0..4096, 4096..8192, 8192..10_240, 10_240..10_240]);
    // 48, 63 and 63 elements lie between parameters.
    assert_eq!(owned.iter().map(|range| region.of_parameters(range)).sum::<u64>(), 10_066);
    assert_eq!(region.owned(0, 1), 0..10_240);
}

/// An 8-bit state has 2 bytes for each element of a large parameter and two scales per 256, and 8 bytes for each of a small one.
#[test]
fn eight_bit_state_is_divided_between_blocks() {
    let placed = [10_000, 65, 4096].map(|elements| (elements, LayerPosition::Before));
    let formats = (Dtype::Fp32, Some(Dtype::Fp32));
    let regions = vec![region(&placed, formats, ALIGNMENT, None).unwrap()];
    let layout = Layout { stage: ZeroStage::One, ranks: 2, replicas: 1, regions };
    let layout = layout.aligned(Optimizer::Adam8bit.block_elements()).unwrap();
    let starts: Vec<u64> = layout.regions[0].parameters.iter().map(|one| one.range.start).collect();
    assert_eq!((starts, layout.regions[0].elements), (vec![0, 10_240, 10_496], 14_592));
    let state = |rank| layout.rank_bytes(rank, &Recipe::FP32, Optimizer::Adam8bit, 0).unwrap().optimizer;
    // Shards of 8192: the rest of the first parameter are 8 blocks.
    assert_eq!(state(0), 2 * (8192 + 4 * 32));
    assert_eq!(state(1), 2 * (1808 + 4 * 8) + 8 * 65 + 2 * (4096 + 4 * 16));
    assert_eq!(layout.clone().aligned(1).unwrap(), layout);
}

#[test]
fn buckets_have_whole_parameters() {
    let placed = [100, 1, 50].map(|elements| (elements, LayerPosition::Before));
    let counts = |bytes| -> Vec<u64> {
        let regions = buckets(&placed, (Dtype::Fp32, Some(Dtype::Fp32)), bytes).unwrap();
        regions.iter().map(|region| region.elements).collect()
    };
    assert_eq!(counts(400), [128, 128]);
    assert_eq!(counts(u64::MAX), [256]);
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
        let sent = layout.sent_bytes(1, rounds, 1).unwrap();
        let in_layers = p - 2.0 * 128_256.0 * 4096.0;
        // 32 layers and one slot: 2·3·31 + 1 loads of a layer.
        let loads = (2.0 * 3.0 * 31.0 + 1.0) / 32.0;
        let expected = match stage {
            ZeroStage::Three => 2.0 * f * ((3.0 + loads) * in_layers + 4.0 * (p - in_layers)),
            _ => 2.0 * f * 4.0 * p,
        };
        near(sent, expected);
    }
}

#[test]
fn one_rank_sends_nothing_and_all_send_as_much_as_they_receive() {
    let model = presets::find("gpt2").unwrap();
    let layout = |ranks| Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::Two, ranks).unwrap();
    assert_eq!(layout(1).sent_bytes(0, 5, 0).unwrap(), 0);
    let elements: u64 = layout(3).regions.iter().map(|region| region.elements).sum();
    let sent: u64 = (0..3).map(|rank| layout(3).sent_bytes(rank, 1, 0).unwrap()).sum();
    // Each rank receives the others' gradients of its part, and the others' parts of the weights.
    assert_eq!(sent, 2 * 2 * 4 * elements);
    assert!(Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::One, 0).is_err());
}

#[test]
fn layers_that_stay_in_slots_are_not_gathered_again() {
    let model = presets::find("gpt2").unwrap();
    let layout = Layout::of_decoder(&model, &Recipe::FP32, ZeroStage::Three, 2).unwrap();
    let loads = |layout: &Layout, rounds, slots| -> u64 {
        (0..12).map(|layer| layout.gathers(layer, rounds, slots)).sum()
    };
    assert_eq!(layout.layers(), 12);
    for rounds in 0..4 {
        for slots in [1, 3, 12, 20] {
            let s = u64::min(slots, 12);
            let trained = if rounds > 0 { s } else { 0 };
            assert_eq!(loads(&layout, rounds, slots), 2 * rounds * (12 - s) + trained);
        }
    }
    // Frozen layers that are in slots stay there for the next step.
    let mut frozen = layout.clone();
    frozen.regions.iter_mut().for_each(|region| region.gradients = None);
    assert_eq!(loads(&frozen, 2, 3), 4 * 9);
}

#[test]
fn a_rank_of_stage_3_gathers_the_frozen_base_of_adapters() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let of = |stage| Layout::of_adapters(&model, &LowRank::default(), Dtype::Bf16, stage, 2).unwrap();
    let (layout, adapters) = (of(ZeroStage::Three), 1_081_344);
    let base = model.layers * model.block_parameters().unwrap();
    let near = |found: u64, expected: f64| {
        assert!((found as f64 / expected - 1.0).abs() < 2e-3, "{found}, expected {expected}");
    };
    let rank = |layout: &Layout, rank| layout.rank_bytes(rank, &Recipe::FP32, Optimizer::AdamW, 2).unwrap();
    let over_ranks = |of: &dyn Fn(u64) -> u64| of(0) + of(1);
    let weights = 2.0 * base as f64 + 4.0 * adapters as f64;
    near(over_ranks(&|number| rank(&layout, number).weights), weights);
    near(rank(&layout, 0).slots, 2.0 * weights / 24.0);
    assert_eq!(over_ranks(&|number| rank(&layout, number).optimizer), 8 * adapters);
    // 24 layers and 2 slots: 46 loads. Of two ranks each sends its half.
    let sent = 46.0 / 24.0 * weights + 4.0 * adapters as f64;
    near(over_ranks(&|number| layout.sent_bytes(number, 1, 2).unwrap()), sent);
    // Whole, the base is not sent.
    let whole = of(ZeroStage::Two);
    near(over_ranks(&|number| whole.sent_bytes(number, 1, 0).unwrap()), 8.0 * adapters as f64);
    near(rank(&whole, 0).weights, weights);
}

#[test]
fn what_a_rank_sends_is_what_it_sends_to_each_other_rank() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    for stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        for (ranks, replicas) in [(1, 1), (2, 1), (5, 1), (2, 2), (3, 4)] {
            let layout = Layout::of_decoder(&model, &Recipe::FP32, stage, ranks).unwrap();
            let layout = layout.with_replicas(replicas).unwrap();
            let all = ranks * replicas;
            for rank in 0..all {
                let to = (0..all).filter(|to| *to != rank);
                let sent = to.map(|to| layout.sent_bytes_to(rank, to, 3, 2).unwrap()).sum::<u64>();
                assert_eq!(
                    sent,
                    layout.sent_bytes(rank, 3, 2).unwrap(),
                    "{stage:?}, rank {rank} of {ranks} × {replicas}"
                );
            }
        }
    }
}
