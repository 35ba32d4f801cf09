//! Rows of families whose blocks differ more: adapters of all experts of a layer, gpt-oss, Qwen3.5.

use decoder::{ClampedSwiglu, Family, LayerType, LinearAttention, Mixture};
use kernels::nf4::Scales;
use models::DecoderConfig;
use offload::Method;
use tch::Kind;
use training::activations::LayerPlan::{
    self, KeepAll, RecomputeAll, RecomputeAttention, RecomputeElementwise, RecomputeMlp,
};

use super::super::{OptimizerPlace, Pass, Row};
use super::{ATTENTION, LAYERS, Shapes, of, offloaded, resident};

/// Every activation plan that keeps something on the device.
const PLANS: [LayerPlan; 5] = [KeepAll, RecomputeElementwise, RecomputeMlp, RecomputeAttention, RecomputeAll];

/// Adapters of all experts alone, of one of their tensors, and beside those of attention.
const EXPERTS: [Pass; 4] = [
    of(&[], &["gate_up_proj", "down_proj"]),
    of(&[], &["gate_up_proj"]),
    of(&[], &["down_proj"]),
    of(&["q", "v"], &["gate_up_proj", "down_proj"]),
];

/// Adapters of linear attention alone, as `frugal finetune` has them by default, and of every projection.
const LINEAR: Pass = of(&["in_proj_qkv", "in_proj_z", "out"], &[]);
const WHOLE: Pass = of(
    &["q", "k", "v", "o", "gate", "up", "down", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out"],
    &[],
);

/// Returns the rows.
pub fn rows_of_families() -> Vec<Row> {
    let Shapes { mixture, few_experts, .. } = Shapes::new();
    let (gpt_oss, qwen35, qwen35_moe) = (gpt_oss(&mixture), qwen35(&mixture), qwen35_moe(&mixture));
    let [both, gate_up, down, beside] = EXPERTS;
    [
        of_plans(&gpt_oss, &Pass::Full, &PLANS),
        of_plans(&qwen35, &Pass::Full, &PLANS),
        of_plans(&qwen35_moe, &Pass::Full, &[KeepAll, RecomputeAll]),
        of_plans(&few_experts, &both, &PLANS),
        of_plans(&in_bf16(&few_experts), &both, &PLANS),
        of_plans(&qwen35, &LINEAR, &PLANS),
        [&gpt_oss, &qwen35, &qwen35_moe].map(inference).to_vec(),
        of_plans(&gpt_oss, &ATTENTION, &[KeepAll, RecomputeElementwise, RecomputeAll]),
        of_plans(&qwen35_moe, &WHOLE, &PLANS),
        of_plans(&in_bf16(&qwen35), &LINEAR, &[KeepAll, RecomputeAll]),
        of_plans(&few_experts, &gate_up, &[KeepAll]),
        of_plans(&few_experts, &down, &[KeepAll]),
        of_plans(&few_experts, &beside, &[KeepAll]),
        of_plans(&gpt_oss, &both, &[KeepAll]),
        of_plans(&in_bf16(&gpt_oss), &both, &[KeepAll]),
        of_plans(&qwen35, &ATTENTION, &[KeepAll]),
        of_plans(&Row { kind: Scales::Nested.kind(), ..few_experts.clone() }, &both, &[KeepAll]),
        vec![few_experts.with_pass(&both).placed(offloaded(Method::Overlap, 2))],
        vec![gpt_oss.placed(offloaded(Method::Overlap, 2)), qwen35.placed(offloaded(Method::Function, 1))],
    ]
    .concat()
}

fn of_plans(row: &Row, pass: &Pass, plans: &[LayerPlan]) -> Vec<Row> {
    let trained =
        |plan: &LayerPlan| row.with_pass(pass).placed(resident(*plan)).with_optimizer(OptimizerPlace::Device);
    plans.iter().map(trained).collect()
}

fn in_bf16(row: &Row) -> Row {
    Row { kind: Kind::BFloat16, ..row.clone() }
}

fn inference(row: &Row) -> Row {
    row.with_pass(&Pass::Inference)
}

/// gpt-oss, whose tokens are given to all experts: windows that are shorter than a row in every other layer, sinks, biases.
fn gpt_oss(mixture: &Row) -> Row {
    let clamped = Some(ClampedSwiglu::default());
    let of_mixture = mixture.config.mixture.clone().map(|mixture| Mixture { clamped, ..mixture });
    let config = DecoderConfig {
        family: Family::GptOss,
        intermediate_size: 96,
        attention_bias: true,
        sliding_window: Some(24),
        layer_types: [LayerType::Sliding, LayerType::Full].repeat(LAYERS / 2),
        mixture: of_mixture,
        ..mixture.config.clone()
    };
    Row { shape: "gpt-oss", config, ..mixture.clone() }
}

/// A Qwen3.5: linear attention in three layers, gated attention in the last one.
fn qwen35(mixture: &Row) -> Row {
    use LayerType::{Full, Linear};
    let linear = LinearAttention { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32, window: 4 };
    let config = DecoderConfig {
        family: Family::Qwen35,
        partial_rotary_factor: 0.25,
        linear_attention: Some(linear),
        layer_types: vec![Linear, Linear, Linear, Full],
        mixture: None,
        ..mixture.config.clone()
    };
    Row { shape: "Qwen3.5", config, ..mixture.clone() }
}

/// The same, whose tokens are given to all experts, and to one more.
fn qwen35_moe(mixture: &Row) -> Row {
    let qwen35 = qwen35(mixture);
    let shared = Some(80);
    let of_mixture = mixture.config.mixture.clone().map(|mixture| Mixture { shared, ..mixture });
    let config = DecoderConfig { family: Family::Qwen35Moe, mixture: of_mixture, ..qwen35.config.clone() };
    Row { shape: "Qwen3.5's mixture", config, ..qwen35 }
}
