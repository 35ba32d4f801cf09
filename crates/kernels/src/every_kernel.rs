//! Whether the CUDA C++ of every operation compiles.

use crate::cuda::{PRELUDE, Source, nvrtc, options};

/// Every source compiles for the oldest and the newest supported architecture; needs NVRTC and no GPU.
#[test]
fn every_kernel_compiles() {
    let nvrtc = match nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(reason) => {
            eprintln!("skipped: {reason}");
            return;
        }
    };
    for capability in [(8, 0), (9, 0)] {
        for (source, expressions) in EXPRESSIONS {
            for expression in expressions {
                let made = nvrtc.compile(source.0, &[PRELUDE], expression, &options(capability));
                assert!(made.unwrap().cubin.len() > 100, "{expression}");
            }
        }
    }
}

const EXPRESSIONS: [(Source, &[&str]); 11] = [
    (
        crate::adam::cuda::SOURCE,
        &["adam<bf16, bf16, 8, true, 128, 1024>", "adam<float, bf16, 1, false, 128, 1024>"],
    ),
    (
        crate::cross_entropy::cuda::SOURCE,
        &[
            "ce_statistics<float, 4, false, false, 512>",
            "ce_statistics<float, 1, true, true, 512>",
            "ce_logits<float, 4, 256>",
            "ce_gradient<float, 4, false, 256>",
            "ce_gradient<float, 1, true, 256>",
            "ce_gradient_narrow<bf16, 8, false, 512>",
            "ce_gradient_narrow<f16, 1, true, 512>",
            "ce_statistics<bf16, 8, true, false, 512>",
            "ce_logits<f16, 8, 256>",
            "ce_gradient<bf16, 8, true, 256>",
        ],
    ),
    (crate::dropout::cuda::SOURCE, &["dropout<bf16, 8, 256>", "dropout<float, 1, 256>"]),
    (
        crate::gradients::cuda::SOURCE,
        &[
            "gradient_squares<bf16, 8, true, 256, 16384>",
            "gradient_squares<float, 1, false, 256, 16384>",
            "gradient_norm<1024>",
            "scale_many<f16, 8, 256, 16384>",
        ],
    ),
    (crate::loss_scale::cuda::SOURCE, &["update_loss_scale"]),
    (
        crate::nf4::cuda::SOURCE,
        &["nf4_dequantize<bf16, 8, true, 256, 4>", "nf4_dequantize<float, 1, false, 256, 4>"],
    ),
    (
        crate::norm::cuda::SOURCE,
        &[
            "norm_forward<bf16, bf16, bf16, 8, 256, 2, 2, false>",
            "norm_forward<f16, float, float, 1, 1024, 4, 0, true>",
            "norm_backward<bf16, bf16, bf16, 8, 512, 1, 3, false, false>",
            "norm_backward<f16, float, float, 1, 1024, 4, 0, true, true>",
            "column_sums<bf16>",
        ],
    ),
    (crate::rope::cuda::SOURCE, &["rotate<bf16, 8>", "rotate<float, 1>"]),
    (crate::gradients::scale::SOURCE, &["scale<bf16, 8, 256>", "scale<float, 1, 256>"]),
    (
        crate::stochastic_rounding::cuda::SOURCE,
        &["stochastic_rounding<bf16, 128, 4096>", "stochastic_rounding<f16, 128, 4096>"],
    ),
    (crate::swiglu::cuda::SOURCE, &["swiglu_forward<bf16, 8, 256>", "swiglu_backward<float, 1, 256>"]),
];
