//! The formulas of the literature against published figures, manual counts, and what torch saves.

use accounting::Decoder;
use accounting::decoder_flops::{Recomputation, Workload};
use accounting::memory::optimizer::Optimizer;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::model::{Family, Sizes};
use accounting::presets;
use accounting::recompute::{AttentionKernel, Recompute, SwigluLevel};
use accounting::textbook::{OnHost, Step, korthikanti, memory, model_states};

fn step(recipe: Recipe, attention: AttentionKernel, checkpoint: Recompute, work: Workload) -> Step {
    let recomputation = Recomputation { attention, checkpoint, swiglu: SwigluLevel::Eager };
    Step { work, recipe, recomputation, ..Step::default() }
}

/// What a block keeps: the difference of two models.
fn kept(model: &Decoder, step: &Step) -> u64 {
    let deeper = Decoder::new(Sizes { layers: model.layers + 1, ..**model }).unwrap();
    let activations = |model: &Decoder| memory(model, step).unwrap().moments[0].bytes("activations");
    activations(&deeper) - activations(model)
}

/// What torch 2.11 saved on a CPU, summed over distinct storages without parameters and their casts, for
/// 2 × 128 tokens, d = 64: pre-norm blocks of `F.rms_norm`, `scaled_dot_product_attention` (flash) and a SwiGLU
/// of plain operations with f = 176, and one of `LayerNorm`, packed projections and GELU with f = 256. Its `rms_norm` is composed of
/// operations and keeps the input divided by its length too.
#[test]
fn kept_tensors_match_what_torch_saves() {
    let saved = |family: Family, kv_heads, feed_forward, recipe: Recipe| {
        let shape = Sizes {
            family,
            vocabulary: 10,
            context: 128,
            embedding: 64,
            hidden: 64,
            layers: 1,
            heads: 4,
            kv_heads,
            head_dim: 16,
            feed_forward,
            tied: true,
            attention_bias: false,
            mlp_bias: false,
            experts: None,
            linear: None,
            windows: None,
            gemma4: None,
        };
        let work = Workload { batch: 2, sequence: 128 };
        let step = step(recipe, AttentionKernel::Flash, Recompute::None, work);
        let quotients = if family.is_swiglu() { 2 * 256 * 64 * 4 } else { 0 };
        kept(&Decoder::new(shape).unwrap(), &step) + quotients
    };
    assert_eq!(saved(Family::Llama, 4, 176, Recipe::FP32), 1_382_400);
    assert_eq!(saved(Family::Qwen2, 2, 176, Recipe::FP32), 1_316_864);
    assert_eq!(saved(Family::Llama, 4, 176, Recipe::AMP_BF16), 923_648);
    assert_eq!(saved(Family::Gpt2, 4, 256, Recipe::FP32), 1_056_768);
}

/// The same tensors one by one, without what dropout keeps: masks of a byte for two branches and for the probabilities, and the
/// probabilities that it leaves. The paper omits the norms' statistics.
#[test]
fn kept_bytes_match_korthikantis_formula() {
    for name in ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] {
        let model = presets::find(name).unwrap();
        for (batch, sequence) in [(1, 1024), (3, 77), (16, 512)] {
            let work = Workload { batch, sequence };
            let tokens = batch * sequence;
            let masks = 2 * tokens * model.hidden;
            let dropped = 3 * model.heads * tokens * sequence;
            let statistics = 16 * tokens;
            for (checkpoint, dropout) in [
                (Recompute::None, masks + dropped - statistics),
                (Recompute::Selective, masks - statistics),
                (Recompute::Full, 0),
            ] {
                let step = step(Recipe::FP16_MASTER, AttentionKernel::Eager, checkpoint, work);
                let formula = korthikanti(work, model.hidden, model.heads, checkpoint).unwrap();
                assert_eq!(kept(&model, &step) + dropout, formula, "{name} {work:?} {checkpoint:?}");
            }
        }
    }
}

/// Table 3 and section 5 of the paper: for GPT-3 (a = 96, s = 2048, h = 12288) 5as/h is 80, so that the core of
/// attention holds 70 % of the activations; for MT-NLG (a = 128, h = 20480) 64 and 65 %.
#[test]
fn share_of_attention_in_gpt_3_and_mt_nlg() {
    let share = |heads, hidden| {
        let work = Workload { batch: 1, sequence: 2048 };
        let bytes = |choice| korthikanti(work, hidden, heads, choice).unwrap() as f64;
        (100.0 * (1.0 - bytes(Recompute::Selective) / bytes(Recompute::None))).round()
    };
    assert_eq!((share(96, 12288), share(128, 20480)), (70.0, 65.0));
}

/// Llama-3-8B in bf16 with a flash kernel, counted manually per token: 4 norm and projection inputs of d, Q and the
/// output of d, K and V of d/4, a log-sum-exp per head, two statistics, and 4 f.
#[test]
fn kept_bytes_of_llama_3_8b_match_a_manual_count() {
    let model = presets::find("llama-3-8b").unwrap();
    let (d, f) = (4096, 14336);
    let fixed = 2 * (4 * d + 2 * d + 2 * d / 4) + 4 * 32 + 2 * 4;
    for level in SwigluLevel::ALL {
        let work = Workload { batch: 2, sequence: 512 };
        let mut step = step(Recipe::BF16, AttentionKernel::Flash, Recompute::None, work);
        step.recomputation.swiglu = level;
        let wide = 2 * level.kept_feed_forward_tensors() * f;
        assert_eq!(kept(&model, &step), 1024 * (fixed + wide), "{level:?}");
    }
}

#[test]
fn autocast_keeps_the_residual_stream_and_the_softmax_in_fp32() {
    let model = presets::find("gpt2").unwrap();
    let work = Workload { batch: 1, sequence: 64 };
    let bytes = |recipe| kept(&model, &step(recipe, AttentionKernel::Eager, Recompute::None, work));
    let extra = 2 * 2 * 64 * 768 + 4 * 12 * 64 * 64;
    assert_eq!(bytes(Recipe::AMP_FP16), bytes(Recipe::FP16_MASTER) + extra);
}

/// Figure 1 of the ZeRO paper: 7.5e9 parameters, K = 12, 64 devices: 120, 31.4, 16.6 and 1.9 GB.
#[test]
fn figure_1_of_the_zero_paper() {
    let model = presets::find("llama-3-8b").unwrap();
    let parameters = model.parameters().unwrap() as f64;
    let gigabytes = ZeroStage::ALL.map(|stage| {
        let step = Step { recipe: Recipe::FP16_MASTER, stage, devices: 64, ..Step::default() };
        let bytes = model_states(&model, &step).unwrap().total().unwrap() as f64;
        (bytes / parameters * 7.5e9 / 1e8).round() / 10.0
    });
    assert_eq!(gigabytes, [120.0, 31.4, 16.6, 1.9]);
}

#[test]
fn shares_are_divided_once() {
    let model = presets::find("llama-3-8b").unwrap();
    let n = model.parameters().unwrap();
    let total = |stage, devices| {
        model_states(&model, &Step { stage, devices, ..Step::default() }).unwrap().total().unwrap()
    };
    // The count is a multiple of 8, so the shares are exact.
    assert_eq!(n % 8, 0);
    assert_eq!(total(ZeroStage::Zero, 8), 16 * n);
    assert_eq!(total(ZeroStage::One, 8), 4 * n + 12 * n / 8);
    assert_eq!(total(ZeroStage::Two, 8), 2 * n + 14 * n / 8);
    assert_eq!(total(ZeroStage::Three, 8), 2 * n);
    assert!(ZeroStage::ALL.iter().all(|stage| total(*stage, 1) == 16 * n));
}

#[test]
fn temporaries_of_an_optimizers_step() {
    let model = presets::find("gpt2").unwrap();
    let temporaries = |optimizer, fused_optimizer, devices| {
        let step = Step { optimizer, fused_optimizer, stage: ZeroStage::One, devices, ..Step::default() };
        memory(&model, &step).unwrap().moments[4].bytes("temporaries")
    };
    assert_eq!(temporaries(Optimizer::AdamW, true, 1), 0);
    assert_eq!(temporaries(Optimizer::AdamW, false, 1), 4 * 124_439_808);
    assert_eq!(temporaries(Optimizer::AdamW, false, 8), 4 * 15_554_976);
    assert_eq!(temporaries(Optimizer::Sgd, false, 1), 0);
    let host = OnHost { optimizer: true, ..OnHost::default() };
    let on_host = memory(&model, &Step { host, ..Step::default() }).unwrap();
    assert_eq!((on_host.largest("optimizer state"), on_host.host_bytes), (0, 12 * 124_439_808));
}
