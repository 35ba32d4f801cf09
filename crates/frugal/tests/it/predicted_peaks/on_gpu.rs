//! Projections that run as on a GPU.

use super::*;

fn pissa_alone(config: &mut LoraConfig) {
    pissa(config);
    alone(config);
}

const ON_GPU: Case = Case { name: "fp32", adapters: Some(alone), length: 100, on_gpu: true, ..ADAPTED };
const BF16_ON_GPU: Case = Case { name: "bf16", kind: Kind::BFloat16, ..ON_GPU };
const CASES_ON_GPU: [Case; 6] = [
    ON_GPU,
    BF16_ON_GPU,
    Case { name: "bf16, recomputed", placement: recompute, ..BF16_ON_GPU },
    Case { name: "bf16, mixed plan", placement: mixed, ..BF16_ON_GPU },
    Case { name: "bf16, dropout", adapters: Some(plain), ..BF16_ON_GPU },
    Case { name: "bf16, PiSSA", adapters: Some(pissa_alone), ..BF16_ON_GPU },
];

/// A narrow MLP, so that the attention's backward decides the peak: q, k and v make one gradient of their input.
#[test]
fn predicted_peaks_of_joint_projections_are_those_of_the_allocator() {
    let narrow = DecoderConfig {
        num_key_value_heads: 2,
        max_position_embeddings: 256,
        ..DecoderConfig::llama(300, 96, 32, 4, 4)
    };
    let wrong = compare("narrow", &narrow, &CASES_ON_GPU, TOLERANCE);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
