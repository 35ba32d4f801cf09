use super::*;
use crate::lora::Targets;
use crate::memory::logits::Loss;
use crate::offload::{self, Method, OptimizerPlace, Rates, Setup, Start, simulate};
use crate::presets;
use crate::recompute::SwigluLevel;
use crate::textbook;

const RATES: Rates = Rates { load: 25e9, store: 25e9, host_optimizer: 2e9, device_optimizer: 35e9 };

/// A layer has 233.06 million parameters, all of them 13.05 GB, embedding and head 2.18 GB; with 1 GB of activations and a
/// ring of three, 10 GB leave room for 11 resident layers.
#[test]
fn qwen_7b_fits_10_gb() {
    let model = presets::find("qwen2.5-7b").unwrap();
    let costs = inference(&model, Workload { batch: 1, sequence: 1024 }, &Choices::default()).unwrap();
    let slot = costs.layers[0].slot_bytes;
    assert_eq!(slot / 10_000, 46_611);
    assert_eq!(costs.layer_bytes().unwrap() / 10_000_000, 1305);
    assert_eq!(costs.fixed.weight_bytes / 10_000_000, 217);
    let working = WorkingMemory { constant_bytes: 1_000_000_000, ..WorkingMemory::default() };
    let costs = StepCosts { working, ..costs };
    let peak = |resident| {
        let resident = offload::interleaved(28, resident);
        let method = Method::Overlap { ring: 3 };
        let setup = Setup { method, resident, optimizer: OptimizerPlace::Host };
        simulate(&costs, &RATES, &setup, Start::Warm).unwrap().device.total
    };
    assert!(peak(11) <= 10_000_000_000 && peak(12) > 10_000_000_000);
}

/// 1.9 tokens per second with everything streamed over 25 GB/s, 1.65 times that with 11 resident layers.
#[test]
fn generation_is_bound_by_the_link() {
    let model = presets::find("qwen2.5-7b").unwrap();
    let costs = inference(&model, Workload { batch: 1, sequence: 1 }, &Choices::default()).unwrap();
    let seconds = |resident| {
        let resident = offload::interleaved(28, resident);
        // One slot to prefetch, and none that could keep a layer.
        let setup = Setup { method: Method::Overlap { ring: 2 }, resident, optimizer: OptimizerPlace::Host };
        simulate(&costs, &RATES, &setup, Start::Warm).unwrap().seconds
    };
    let rates = [1.0 / seconds(0), seconds(0) / seconds(11)];
    assert!((rates[0] - 1.9).abs() < 0.05 && (rates[1] - 1.65).abs() < 0.05, "{rates:?}");
    // All of 15.2 GB but the embedding's rows, at 1 TB/s.
    let all = seconds(28);
    assert!((all - (13.05e9 + 1.09e9) / 1e12).abs() < 1e-4, "{all}");
}

/// All-resident training compared with [`textbook`], which assumes a framework's kernels and that a block's gradients exist
/// from the beginning: with recomputation it is the larger one, at the backward of the first block.
#[test]
fn a_resident_step_matches_the_textbook() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let choices = Choices {
        loss: Loss::LinearCrossEntropy { tokens: 64, whole: 0 },
        norm: NormKernel::Fused,
        ..Choices::default()
    };
    for (recompute, sequence) in [(true, 256), (false, 2048)] {
        let work = Workload { batch: 2, sequence };
        let costs = training(&model, work, &choices).unwrap();
        let method = Method::Resident { recompute };
        let setup = Setup { method, resident: vec![], optimizer: OptimizerPlace::Device };
        let step = simulate(&costs, &RATES, &setup, Start::Warm).unwrap();
        let checkpoint = if recompute { Recompute::Full } else { Recompute::None };
        let on_paper = textbook::Step {
            work,
            recipe: choices.recipe,
            optimizer: choices.optimizer,
            // Two projections and their product.
            recomputation: Recomputation {
                checkpoint,
                swiglu: SwigluLevel::SaveAll,
                ..Recomputation::default()
            },
            loss: choices.loss,
            fused_optimizer: true,
            ..textbook::Step::default()
        };
        let wanted = textbook::memory(&model, &on_paper).unwrap();
        let ratio = step.device.total as f64 / wanted.peak().total as f64;
        assert!((0.95..=1.005).contains(&ratio), "{ratio}: {:?} of {:?}", step.device, wanted.peak());
    }
}

#[test]
fn adapter_bytes_match_a_manual_count() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let choices = Choices { recipe: Recipe::BF16, ..Choices::default() };
    let work = Workload { batch: 2, sequence: 256 };
    let costs = adapters(&model, &LowRank::default(), work, None, &choices).unwrap();
    let layer = costs.layers[0];
    assert_eq!(layer.trainable * 24, 1_081_344);
    assert_eq!(layer.state_bytes, 8 * layer.trainable);
    // Every tensor is a multiple of 64 numbers.
    assert_eq!(layer.gradient_bytes, 4 * layer.trainable);
    assert_eq!(layer.slot_bytes - layer.trainable_bytes, 2 * model.block_parameters().unwrap());
    assert_eq!(costs.fixed.gradient_bytes, 0);
    // 4·P·T with recomputation, plus attention and adapters; the first layer's is a little less.
    let ratio = layer.backward_seconds / layer.forward_seconds;
    assert!((1.95..2.15).contains(&ratio), "{ratio}");
    assert!(inference(&presets::find("gpt2").unwrap(), work, &choices).is_err());
}

#[test]
fn adapters_that_are_not_modelled_are_refused_by_name() {
    let message = |model: &str, lora: LowRank, labelled| {
        let (model, work) = (presets::find(model).unwrap(), Workload { batch: 1, sequence: 1024 });
        adapters(&model, &lora, work, labelled, &Choices::default()).unwrap_err().to_string()
    };
    let qwen = "qwen2.5-0.5b";
    let lora = LowRank::default();
    assert!(message("gpt2", lora, None).starts_with("gpt2 has no projections q, k, v, o"));
    assert!(message(qwen, LowRank { rank: 0, ..lora }, None).contains("rank of the adapters is 0"));
    assert!(message(qwen, LowRank { targets: Targets::NONE, ..lora }, None).contains("no projection"));
    assert!(message(qwen, lora, Some(1025)).contains("1025 labelled tokens"));
}

/// Qwen2.5-0.5B in bf16, q, k, v and o with rank 8, counted manually per token of a block: two norms' outputs, queries and
/// output of 896, keys and values of 128, gate and up of 4864 in 2 bytes; a log-sum-exp for each of 14 heads, two statistics
/// and four u of 8 in 4 bytes; on a GPU u has 2 bytes, and A and B of each projection are kept in 2 bytes.
#[test]
fn kept_bytes_of_adapters_match_a_manual_count() {
    let model = presets::find("qwen2.5-0.5b").unwrap();
    let choices = Choices { recipe: Recipe::BF16, norm: NormKernel::Output, ..Choices::default() };
    let work = Workload { batch: 2, sequence: 256 };
    let token = 2 * (2 * 896 + 2 * 896 + 2 * 128 + 2 * 4864) + 4 * (14 + 2);
    let factors = 2 * 8 * (4 * 896 + 2 * (896 + 128));
    for (on_cpu, block) in [(true, 512 * (token + 4 * 4 * 8)), (false, 512 * (token + 2 * 4 * 8) + factors)] {
        let lora = LowRank { on_cpu, ..LowRank::default() };
        let costs = adapters(&model, &lora, work, None, &choices).unwrap();
        assert_eq!(costs.working.kept.unwrap().bytes, block);
        let kept = kept_tensors(&model, Some(&lora), work, &choices).unwrap();
        assert_eq!(total(&kept).unwrap(), block);
        // Tokens and labels, and the rotary table.
        assert_eq!(costs.working.constant_bytes, 512 * 16 + 32768 * 64 * 4);
    }
}
