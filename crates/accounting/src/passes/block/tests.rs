//! Tensors that are left after a block's passes.

use super::*;
use crate::lora::{ExpertTargets, Targets};
use crate::model::{AttentionKind, ExpertSizes, Family, LinearSizes, Sizes};
use crate::passes::PeakTracker;
use crate::presets;

/// Qwen2.5-0.5B, and as a Qwen3 and a Granite.
fn models() -> Vec<Decoder> {
    let qwen2 = presets::find("qwen2.5-0.5b").unwrap();
    let families = [Family::Qwen2, Family::Qwen3, Family::Granite];
    families.map(|family| Decoder::new(Sizes { family, ..*qwen2 }).unwrap()).into()
}

/// Every set of targets, in either dtype, with either norm, with and without a gradient of the input.
#[test]
fn allocations_are_freed_except_listed_tensors() {
    for (model, set) in models().iter().flat_map(|model| (1..1u32 << 7).map(move |set| (model, set))) {
        let one = |which: &Projection| set >> (*which as u32) & 1 == 1;
        let targets = Targets::new(&Projection::ALL.into_iter().filter(one).collect::<Vec<_>>());
        for flags in 0..64u32 {
            let flag = |bit: u32| flags >> bit & 1 == 1;
            let lora = LowRank { targets, dropout: flag(2), on_cpu: !flag(5), ..LowRank::default() };
            let options = BlockOptions {
                tokens: 128,
                rows: 2,
                attention: AttentionKind::Full,
                recipe: match (flag(0), flag(4)) {
                    (_, true) => &Recipe::AMP_BF16,
                    (true, _) => &Recipe::FP32,
                    (false, _) => &Recipe::BF16,
                },
                norm: if flag(1) { NormKernel::Output } else { NormKernel::Fused },
                trained: Trained::Adapters(&lora),
                gradients: false,
                documents: flag(0) && flag(3),
                sequence_ranks: 1,
                widens: flag(0) && flag(4) && !flag(5),
                tile_bytes: crate::memory::quantized::CPU_TILE,
                mlp_tile: None,
                flash_workspace: false,
            };
            let block = Block::new(model, &options).unwrap();
            let input = flag(3);
            let mut kept: u64 = block.kept(input).iter().map(|item| item.bytes).sum();
            if input && !block.keeps_output {
                // The first norm's input is the caller's.
                kept -= block.narrow;
            }
            let mut tracker = PeakTracker::default();
            block.forward(&mut tracker, false, input);
            assert_eq!(tracker.live(), u128::from(block.narrow), "{targets} {flags:b}");
            let mut tracker = PeakTracker::default();
            block.forward(&mut tracker, true, input);
            assert_eq!(tracker.live(), u128::from(kept + block.narrow), "{targets} {flags:b}");
            // The gradient of the output takes the output's place.
            block.backward(&mut tracker, input);
            let left = if input { block.narrow } else { 0 };
            assert_eq!(tracker.live(), u128::from(left), "{targets} {flags:b}");
        }
    }
}

/// On a GPU u is in the base's dtype, and A and B are kept rounded to it; a base in fp32 keeps the same on both.
#[test]
fn a_gpu_keeps_low_rank_products_in_the_dtype_of_the_base() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let bytes = |recipe, on_cpu| {
        let lora =
            LowRank { rank: 8, targets: Targets::new(&[Projection::Query]), on_cpu, ..LowRank::default() };
        let options = BlockOptions {
            tokens: 128,
            rows: 2,
            attention: AttentionKind::Full,
            recipe,
            norm: NormKernel::Output,
            trained: Trained::Adapters(&lora),
            gradients: false,
            documents: false,
            sequence_ranks: 1,
            widens: false,
            tile_bytes: crate::memory::quantized::CPU_TILE,
            mlp_tile: None,
            flash_workspace: false,
        };
        let items = Block::new(&model, &options).unwrap().kept(true);
        let of =
            |name: &str| items.iter().filter(|item| item.name == name).map(|item| item.bytes).sum::<u64>();
        [of("low-rank products"), of("adapters in 16 bits")]
    };
    assert_eq!(bytes(&Recipe::BF16, true), [4 * 128 * 8, 0]);
    assert_eq!(bytes(&Recipe::BF16, false), [2 * 128 * 8, 2 * 8 * (896 + 896)]);
    assert_eq!(bytes(&Recipe::FP32, true), bytes(&Recipe::FP32, false));
}

/// A tiled MLP, alone or with all weights trained, whether one tile suffices or not.
#[test]
fn a_tiled_mlp_leaves_what_it_keeps() {
    for (model, flags) in models().iter().flat_map(|model| (0..32u32).map(move |flags| (model, flags))) {
        let flag = |bit: u32| flags >> bit & 1 == 1;
        let options = BlockOptions {
            tokens: 4096,
            rows: 2,
            attention: AttentionKind::Full,
            recipe: if flag(0) { &Recipe::FP32 } else { &Recipe::BF16 },
            norm: if flag(1) { NormKernel::Output } else { NormKernel::Fused },
            trained: Trained::Everything,
            gradients: flag(2),
            documents: false,
            sequence_ranks: 1,
            widens: flag(3),
            tile_bytes: 0,
            flash_workspace: false,
            mlp_tile: Some(if flag(4) { 4 << 20 } else { u64::MAX }),
        };
        let block = Block::new(model, &options).unwrap();
        let whole = Block::new(model, &BlockOptions { mlp_tile: None, ..options }).unwrap();
        let kept = |block: &Block| block.kept(true).iter().map(|item| item.bytes).sum::<u64>();
        // Gate, up and their product.
        assert_eq!(kept(&whole) - kept(&block), 3 * whole.wide, "{flags:b}");
        let peaks = [&block, &whole].map(|block| {
            let input = if block.keeps_output { 0 } else { block.narrow };
            let mut tracker = PeakTracker::default();
            block.forward(&mut tracker, true, true);
            assert_eq!(tracker.live(), u128::from(kept(block) - input + block.narrow), "{flags:b}");
            block.backward(&mut tracker, true);
            (tracker.live(), tracker.peak().unwrap())
        });
        assert_eq!(peaks[0].0, peaks[1].0, "{flags:b}: gradients");
        // Without casts and sums in fp32, tiles take less.
        if flag(0) && flag(4) {
            assert!(peaks[0].1 < peaks[1].1, "{flags:b}: {peaks:?}");
        }
    }
}

/// A mixture behind adapters of the attention, or with all weights trained.
#[test]
fn a_mixture_of_experts_leaves_what_it_keeps() {
    let qwen3 = presets::find("qwen3-0.6b").unwrap();
    let experts = ExpertSizes {
        layers: qwen3.layers,
        count: 32,
        per_token: 4,
        feed_forward: 384,
        shared: 0,
        biases: false,
    };
    let sizes = Sizes { family: Family::Qwen3Moe, experts: Some(experts), ..*qwen3 };
    let model = Decoder::new(sizes).unwrap();
    let lora = LowRank { on_cpu: true, ..LowRank::default() };
    for (flags, recipe) in (0..16u32).flat_map(|flags| {
        [Recipe::FP32, Recipe::BF16, Recipe::AMP_BF16, Recipe::NF4].map(|recipe| (flags, recipe))
    }) {
        let flag = |bit: u32| flags >> bit & 1 == 1;
        if flag(0) && recipe.is_quantized() {
            continue;
        }
        let options = BlockOptions {
            tokens: 128,
            rows: 2,
            attention: AttentionKind::Full,
            recipe: &recipe,
            norm: if flag(1) { NormKernel::Output } else { NormKernel::Fused },
            trained: if flag(0) { Trained::Everything } else { Trained::Adapters(&lora) },
            gradients: false,
            documents: flag(2),
            sequence_ranks: 1,
            widens: flag(3),
            tile_bytes: crate::memory::quantized::CPU_TILE,
            mlp_tile: None,
            flash_workspace: false,
        };
        let block = Block::new(&model, &options).unwrap();
        let mut kept: u64 = block.kept(true).iter().map(|item| item.bytes).sum();
        if !block.keeps_output {
            kept -= block.narrow;
        }
        let mut tracker = PeakTracker::default();
        block.forward(&mut tracker, false, true);
        assert_eq!(tracker.live(), u128::from(block.narrow), "{flags:b}, {recipe:?}");
        let mut tracker = PeakTracker::default();
        block.forward(&mut tracker, true, true);
        assert_eq!(tracker.live(), u128::from(kept + block.narrow), "{flags:b}, {recipe:?}");
        block.backward(&mut tracker, true);
        assert_eq!(tracker.live(), u128::from(block.narrow), "{flags:b}, {recipe:?}");
    }
}

/// Experts with adapters, gated and linear attention, and an expert for every token, whatever learns of them and whether the input has a gradient.
#[test]
fn blocks_of_other_families_leave_what_they_keep() {
    let qwen3 = presets::find("qwen3-0.6b").unwrap();
    let experts = |shared| ExpertSizes {
        layers: qwen3.layers,
        count: 32,
        per_token: 4,
        feed_forward: 384,
        shared,
        biases: false,
    };
    let linear = LinearSizes { layers: 21, key_heads: 4, value_heads: 8, key: 64, value: 64, window: 4 };
    let sized = |family, experts, linear| Decoder::new(Sizes { family, experts, linear, ..*qwen3 }).unwrap();
    let models = [
        sized(Family::Qwen3Moe, Some(experts(0)), None),
        sized(Family::Qwen35, None, Some(linear)),
        sized(Family::Qwen35Moe, Some(experts(256)), Some(linear)),
    ];
    let all: Vec<LowRank> = (0..1u32 << 7)
        .map(|set| {
            let flag = |bit: u32| set >> bit & 1 == 1;
            let chosen = [
                (flag(0), Projection::Query),
                (flag(1), Projection::Output),
                (flag(2), Projection::LinearQkv),
                (flag(3), Projection::LinearOutput),
                (flag(4), Projection::Down),
            ];
            let targets: Vec<_> = chosen.into_iter().filter(|(has, _)| *has).map(|(_, one)| one).collect();
            LowRank {
                targets: Targets::new(&targets),
                experts: ExpertTargets { gate_up: flag(5), down: flag(6) },
                on_cpu: true,
                ..LowRank::default()
            }
        })
        .collect();
    for (model, kind) in models
        .iter()
        .flat_map(|model| model.attention_kinds().into_iter().map(move |(kind, _)| (model, kind)))
    {
        let trained = all.iter().map(Trained::Adapters).chain([Trained::Everything]);
        for (trained, flags) in trained.flat_map(|trained| (0..16u32).map(move |flags| (trained, flags))) {
            let flag = |bit: u32| flags >> bit & 1 == 1;
            let options = BlockOptions {
                tokens: 96,
                rows: 2,
                attention: kind,
                recipe: if flag(0) { &Recipe::FP32 } else { &Recipe::BF16 },
                norm: if flag(1) { NormKernel::Output } else { NormKernel::Fused },
                trained,
                gradients: false,
                documents: flag(2),
                sequence_ranks: 1,
                widens: false,
                tile_bytes: crate::memory::quantized::CPU_TILE,
                mlp_tile: None,
                flash_workspace: false,
            };
            let what = format!("{:?}, {kind:?}, {trained:?}, {flags:b}", model.family);
            let block = Block::new(model, &options).unwrap();
            let input = flag(3);
            let mut kept: u64 = block.kept(input).iter().map(|item| item.bytes).sum();
            if input && !block.keeps_output {
                kept -= block.narrow;
            }
            let mut tracker = PeakTracker::default();
            block.forward(&mut tracker, false, input);
            assert_eq!(tracker.live(), u128::from(block.narrow), "{what}");
            let mut tracker = PeakTracker::default();
            block.forward(&mut tracker, true, input);
            assert_eq!(tracker.live(), u128::from(kept + block.narrow), "{what}");
            if block.records(input) {
                block.backward(&mut tracker, input);
                let left = if input { block.narrow } else { 0 };
                assert_eq!(tracker.live(), u128::from(left), "{what}");
            }
        }
    }
}

/// The gradients of q, k and v live until the end of one function, which makes one gradient of their input and not three.
#[test]
fn joint_projections_make_one_gradient_of_their_input() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let backward = |on_cpu: bool| {
        let lora = LowRank { on_cpu, ..LowRank::default() };
        let options = BlockOptions {
            tokens: 4096,
            rows: 2,
            attention: AttentionKind::Full,
            recipe: &Recipe::FP32,
            norm: NormKernel::Output,
            trained: Trained::Adapters(&lora),
            gradients: false,
            documents: false,
            sequence_ranks: 1,
            widens: false,
            tile_bytes: 0,
            mlp_tile: None,
            flash_workspace: false,
        };
        let block = Block::new(&model, &options).unwrap();
        let mut tracker = PeakTracker::default();
        // What attention's backward frees before it, then what the projections keep.
        let low = [Projection::Query, Projection::Key, Projection::Value]
            .map(|which| block.projection(which).low + block.projection(which).factors);
        tracker.make(low.iter().sum::<u64>() + block.query + 2 * block.key);
        let gradients =
            [(Projection::Value, block.key), (Projection::Key, block.key), (Projection::Query, block.query)];
        block.project_norm_back(&mut tracker, &gradients, true);
        assert_eq!(tracker.live(), u128::from(block.narrow));
        (tracker.peak().unwrap(), block.narrow, block.query + 2 * block.key, low.iter().sum::<u64>())
    };
    let ((separate, narrow, ..), (joint, _, results, low)) = (backward(true), backward(false));
    let du = 3 * 4 * 4096 * 8;
    assert_eq!(joint, results + low + du + narrow);
    // The sum of two gradients is a third tensor.
    assert!(separate > 3 * narrow && joint < separate, "{joint} {separate}");
}
